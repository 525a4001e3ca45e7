"""What each protocol's fields do here, apart from those that are honoured.

Honoured fields are read where they work (options.py, tools.py, structured.py, api/). The
others stand here: hints that a server may ignore without changing what an answer says, and things
that this server does not do, which are refused unless their value asks for nothing. What stands
nowhere is unknown, and refused as well. docs/api.md prints this table; a test compares.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from router.reading.fields import Fields

_TEXT = (str,)
_FLAG = (bool,)
_OBJECT = (dict,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """What a client calls the fields that have other names elsewhere: errors say what it sent."""

    prompt: str = "prompt"
    max_tokens: str = "max_tokens"
    stop: str = "stop"


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """`ignored`: the types that a hint may have. `refused`: the values that ask for nothing."""

    title: str
    ignored: Mapping[str, tuple[type, ...]]
    refused: Mapping[str, tuple[Any, ...]]

    def read(self, fields: Fields) -> None:
        """Raises InvalidRequest or UnsupportedParameter."""
        for name, kinds in self.ignored.items():
            fields.ignored(name, kinds)
        for name, neutral in self.refused.items():
            fields.unsupported(name, neutral)


_HINTS: dict[str, tuple[type, ...]] = {
    "metadata": _OBJECT,
    "prompt_cache_key": _TEXT,
    "prompt_cache_retention": _TEXT,
    "safety_identifier": _TEXT,
    "service_tier": _TEXT,
    "user": _TEXT,
}
_SAMPLING: dict[str, tuple[Any, ...]] = {
    "add_special_tokens": (),
    "allowed_token_ids": ([],),
    "early_stopping": (False,),
    "guided_decoding_backend": ("auto",),
    "guided_whitespace_pattern": (),
    "kv_transfer_params": ({},),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "typical_p": (1, 1.0),
    "use_beam_search": (False,),
}
_OF_COMPLETIONS: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (False,),
    "n": (1,),
    "prompt_logprobs": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
}
"""What answers of the younger protocols have no place for."""

COMPLETIONS = Protocol(
    title="`/v1/completions`",
    ignored=_HINTS | {"store": _FLAG},
    refused=_SAMPLING | {"suffix": ("",)},
)
CHAT = Protocol(
    title="`/v1/chat/completions`",
    ignored=_HINTS
    | {"cache_control": _OBJECT, "store": _FLAG, "thread": (str, dict), "verbosity": _TEXT},
    refused=_SAMPLING
    | {
        "audio": (),
        "chat_template": (),
        "documents": ([],),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "include_reasoning": (True,),
        "modalities": (["text"],),
        "prediction": (),
        "web_search_options": (),
    },
)
RESPONSES = Protocol(
    title="`/v1/responses`",
    ignored=_HINTS | {"max_tool_calls": (int,), "store": _FLAG},
    refused=_OF_COMPLETIONS
    | {
        "background": (False,),
        "context_management": ([],),
        "conversation": (),
        "max_completion_tokens": (),
        "max_tokens": (),
        "messages": (),
        "previous_response_id": (),
        "prompt": (),
        "response_format": (),
        "top_logprobs": (0,),
    },
)
MESSAGES = Protocol(
    title="`/v1/messages`",
    ignored={"cache_control": _OBJECT, "inference_geo": _TEXT, "service_tier": _TEXT},
    refused=_OF_COMPLETIONS
    | {
        "container": (),
        "max_completion_tokens": (),
        "mcp_servers": ([],),
        "response_format": (),
        "stop": (),
        "stream_options": (),
        "top_logprobs": (0,),
    },
)
PROTOCOLS = (COMPLETIONS, CHAT, RESPONSES, MESSAGES)


def table() -> str:
    """As docs/api.md prints it."""
    lines = [
        "| endpoint | accepted without effect | refused, unless the value asks for nothing |",
        "|---|---|---|",
    ]
    for protocol in PROTOCOLS:
        ignored, refused = (
            ", ".join(f"`{name}`" for name in sorted(names))
            for names in (protocol.ignored, protocol.refused)
        )
        lines.append(f"| {protocol.title} | {ignored} | {refused} |")
    return "\n".join(lines)
