"""Chats to prompt text by the model's own Jinja template, as transformers renders it, in a sandbox.

A template comes with the model directory (`chat_template.jinja`, `chat_template.json` or
`tokenizer_config.json`, in this order) or from a file the operator names. Whatever it raises is the
client's to know: InvalidRequest.
"""

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from common.errors import ConfigError, InvalidRequest

Message = dict[str, Any]


class Verbatim(str):
    """A text that `tojson` writes as it is: JSON that ends early, say."""

    __slots__ = ()


class ChatTemplate:
    """`source` None: the model has no template, and every chat is refused with `why_missing`."""

    def __init__(
        self,
        source: str | None,
        *,
        special_tokens: Mapping[str, str],
        why_missing: str = "the model has no chat template; use /v1/completions",
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self.source = source or ""
        self._special_tokens = special_tokens
        self._template: jinja2.Template | None = None
        self._why_missing = why_missing
        if source is not None:
            try:
                self._template = _environment(now).from_string(source)
            except jinja2.TemplateError as error:
                self._why_missing = f"the model's chat template is broken: {error}"
        self.takes_parts = self._template is not None and self._renders_parts()

    def render(self, messages: list[Message], variables: Mapping[str, Any]) -> str:
        """`variables` may have any names. Raises InvalidRequest with the template's own words."""
        if self._template is None:
            raise InvalidRequest(self._why_missing, param="messages")
        try:
            return self._template.render(
                {"tools": None, "documents": None}
                | dict(self._special_tokens)
                | dict(variables)
                | {"messages": messages}
            )
        except jinja2.TemplateError as error:
            raise InvalidRequest(f"chat template: {error}", param="messages") from None
        except Exception as error:  # whatever a template does to values it did not expect
            reason = f"{type(error).__name__}: {error}"[:300]
            raise InvalidRequest(
                f"the chat template cannot render these messages: {reason}", param="messages"
            ) from None

    def shows_tools(self) -> bool:
        """Whether the model gets to read what tools there are."""
        name = "a7c2e1"
        function = {"name": name, "description": name, "parameters": {"type": "object"}}
        tools = [{"type": "function", "function": function}]
        try:
            text = self.render(
                [{"role": "user", "content": "a"}], {"tools": tools, "add_generation_prompt": True}
            )
        except InvalidRequest:
            return False
        return name in text

    def _renders_parts(self) -> bool:
        """Whether content given as a list of parts comes out as its text (and not as its Python
        form).
        """
        marker = "a7c2e1"
        parts = [{"type": "text", "text": marker}]
        try:
            text = self.render(
                [{"role": "user", "content": parts}], {"add_generation_prompt": True}
            )
        except InvalidRequest:
            return False
        return marker in text and f"'{marker}'" not in text and f'"{marker}"' not in text


def load_chat_template(directory: Path, override: Path | None = None) -> ChatTemplate:
    """Raises ConfigError when a file that should hold a template cannot be read."""
    config = _read_json(directory / "tokenizer_config.json")
    special_tokens = _special_tokens(config, _read_json(directory / "special_tokens_map.json"))
    if override is not None:
        return ChatTemplate(_read_text(override), special_tokens=special_tokens)
    beside = directory / "chat_template.jinja"
    if beside.exists():
        return ChatTemplate(_read_text(beside), special_tokens=special_tokens)
    found = _read_json(directory / "chat_template.json").get("chat_template")
    found = config.get("chat_template") if found is None else found
    if isinstance(found, list):
        named = {}
        for entry in found:
            texts = (
                [entry.get(key) for key in ("name", "template")] if isinstance(entry, dict) else []
            )
            if not texts or not all(isinstance(text, str) for text in texts):
                raise ConfigError(
                    f"{directory}: chat_template: an entry of the list has no name and template"
                )
            named[entry["name"]] = entry["template"]
        if "default" not in named:
            return ChatTemplate(
                None,
                special_tokens=special_tokens,
                why_missing="the model has chat templates "
                f"{', '.join(sorted(named))} but none named default",
            )
        found = named["default"]
    if found is not None and not isinstance(found, str):
        raise ConfigError(f"{directory}: chat_template is no text but {type(found).__name__}")
    return ChatTemplate(found, special_tokens=special_tokens)


def _environment(now: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: now().strftime(form)
    return environment


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training; here its body is simply
    rendered.
    """

    tags = {"generation"}  # noqa: RUF012 - jinja's interface

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if isinstance(value, Verbatim):
        return str(value)
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _special_tokens(*configs: Mapping[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for config in configs:
        for name in (
            "bos_token",
            "eos_token",
            "unk_token",
            "sep_token",
            "pad_token",
            "cls_token",
            "mask_token",
        ):
            value = config.get(name)
            if isinstance(value, dict):
                value = value.get("content")
            if isinstance(value, str):
                found.setdefault(name, value)
    return found


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the chat template {path}: {error}") from None


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    except RecursionError:
        raise ConfigError(f"cannot read {path}: it is nested too deeply") from None
    return content if isinstance(content, dict) else {}
