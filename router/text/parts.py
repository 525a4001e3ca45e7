"""What an assistant's text is made of as it streams: reasoning, content, tool calls.

    text pieces -> Splitter -> Content | Reasoning | CallBegun | CallArguments

One `Splitter` follows one output; joined, the parts are the same for every way of cutting the text.
Only what may become a marker is held back. What looks like a tool call and is none is content. The
splitters: reasoning.py, calls.py, whole_calls.py; parsers.py has them by name.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


Part = Content | Reasoning | CallBegun | CallArguments


class Splitter(Protocol):
    def push(self, text: str) -> list[Part]: ...

    def flush(self) -> list[Part]:
        """The output has ended."""
        ...


MakeSplitter = Callable[[], Splitter]


class PlainSplitter:
    """All of it is content."""

    def push(self, text: str) -> list[Part]:
        return [Content(text)] if text else []

    def flush(self) -> list[Part]:
        return []


def parsed_arguments(text: str) -> dict[str, Any] | None:
    """A call's arguments; None when they were cut off or are none."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
