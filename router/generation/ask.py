"""A request that has been read, in nobody's protocol.

fields --reader of the protocol--> Ask --service.begin--> Generation --format--> the answer
"""

from dataclasses import dataclass
from typing import Any

from common.errors import InvalidRequest
from router.admission.keys import Key
from router.generation.options import Options
from router.reading.fields import Fields
from router.text.chat_template import Message

DEFAULT_COMPLETION_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """Messages as templates expect them, and the template's other variables."""

    messages: list[Message]
    variables: dict[str, Any]
    add_generation_prompt: bool = True
    continues: bool = False
    """The answer goes on with the last message."""


@dataclass(frozen=True, slots=True)
class Texts:
    texts: list[str]


@dataclass(frozen=True, slots=True)
class TokenIds:
    """All of them the model's."""

    prompts: list[list[int]]


Prompt = Chat | Texts | TokenIds


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    prompt: Prompt
    options: Options
    default_max_tokens: int | None = None
    """None: as many as there is room for."""
    continued: str = ""
    """The last message's words, where the answer is to repeat them (a chat's `echo`)."""

    def texts(self, num_prompts: int) -> list[str | None]:
        """The prompts as the client wrote them, where it did and nothing is cut off."""
        if isinstance(self.prompt, Texts) and self.options.keeps_last is None:
            return list(self.prompt.texts)
        return [None] * num_prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who asks, since when, and for how long. `peer` says who, where there is no key."""

    arrived_at: float
    key: Key | None = None
    peer: str = ""
    timeout_s: float | None = None

    @property
    def client(self) -> str:
        return self.peer if self.key is None else self.key.client


def template_variables(fields: Fields) -> dict[str, Any]:
    """A chat's own words to the template. Raises InvalidRequest."""
    variables = fields.object("chat_template_kwargs") or {}
    for name in ("messages", "add_generation_prompt"):
        if name in variables:
            raise InvalidRequest(
                f"chat_template_kwargs must not hold {name}", param=f"chat_template_kwargs.{name}"
            )
    return variables
