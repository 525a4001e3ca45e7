"""What all formats of answers have in common.

A `Format` writes one answer as bytes, whole or as the events of a stream; each protocol has its own
(they look alike and are not the same).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from router.generation.generation import Generation, Usage
from router.generation.options import Options
from router.text.detokenizer import TokenTexts
from router.text.parts import (
    CallArguments,
    CallBegun,
    Content,
    MakeSplitter,
    Part,
    Reasoning,
)
from router.text.text_output import Piece


class Format(Protocol):
    def first_events(self, num_choices: int) -> bytes: ...

    def events(self, piece: Piece) -> bytes: ...

    def last_events(self, usage: Usage) -> bytes: ...

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> bytes: ...


class Unstreamed:
    """Of a format that has no events."""

    def first_events(self, num_choices: int) -> bytes:
        raise AssertionError("this answer is never streamed")

    def events(self, piece: Piece) -> bytes:
        raise AssertionError("this answer is never streamed")

    def last_events(self, usage: Usage) -> bytes:
        raise AssertionError("this answer is never streamed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answering:
    """What a format must know of the call it answers."""

    call_id: str
    model: str
    created: int
    texts: TokenTexts
    options: Options
    generation: Generation
    splitter: MakeSplitter | None
    """None: all text is content."""
    new_call_id: Callable[[], str]


@dataclass(slots=True)
class Call:
    call_id: str
    name: str
    arguments: str = ""


class Message:
    """An answer put together from its parts."""

    def __init__(self, new_call_id: Callable[[], str]) -> None:
        self._new_call_id = new_call_id
        self.content = ""
        self.reasoning = ""
        self.calls: list[Call] = []

    def add(self, parts: Sequence[Part]) -> None:
        for part in parts:
            match part:
                case Content(text):
                    self.content += text
                case Reasoning(text):
                    self.reasoning += text
                case CallBegun(_, name):
                    self.calls.append(Call(self._new_call_id(), name))
                case CallArguments(_, text):
                    self.calls[-1].arguments += text


def message_of(answering: Answering, text: str) -> Message:
    message = Message(answering.new_call_id)
    if answering.splitter is None:
        message.content = text
    else:
        splitter = answering.splitter()
        message.add(splitter.push(text))
        message.add(splitter.flush())
    return message
