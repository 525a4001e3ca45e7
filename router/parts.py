"""An assistant's text as it streams, taken apart: reasoning, content, tool calls.

    text pieces -> Splitter -> Content | Reasoning | CallBegun | CallArguments

One `Splitter` follows one output; joined, the parts are the same for every way of cutting the text.
Only what may become a marker is held back. What looks like a tool call and is none is content.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

MAX_HEAD_CHARS = 4096
"""A call whose name has not come by then is read as a whole."""


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


class Until:
    """Text up to a marker that may come in pieces."""

    def __init__(self, marker: str) -> None:
        self._marker = marker
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """What is certainly before the marker, and what follows it once it has come."""
        seen = self._held + text
        at = seen.find(self._marker)
        if at >= 0:
            self._held = ""
            return seen[:at], seen[at + len(self._marker) :]
        num_held = min(len(seen), len(self._marker) - 1)
        while not self._marker.startswith(seen[len(seen) - num_held :]):
            num_held -= 1
        self._held = seen[len(seen) - num_held :]
        return seen[: len(seen) - num_held], None

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


class ReasoningSplitter:
    """`<think>...</think>` at the start of an answer; the rest goes to `inner`.

    `begins_inside`: the prompt has opened the block already, or the model always thinks first.
    """

    def __init__(self, inner: Splitter, *, begins_inside: bool) -> None:
        self._inner = inner
        self._is_inside = begins_inside
        self._is_over = False
        self._opening = Until("<think>")
        self._closing = Until("</think>")
        self._before = ""
        self._has_looked = False
        self._skips_newlines = False

    def push(self, text: str) -> list[Part]:
        if self._is_over:
            return self._skip(text)
        if not self._is_inside:
            before, after = self._opening.push(text)
            self._before += before
            if self._before.strip():
                return self._skip(self._before + self._opening.flush() + (after or ""))
            if after is None:
                return []
            self._is_inside, self._has_looked, text = True, True, after
        elif not self._has_looked:
            # a model may open the block although the prompt has done so
            self._before += text
            start = self._before.lstrip()
            if "<think>".startswith(start) and start != "<think>":
                return []
            self._has_looked = True
            text = start.removeprefix("<think>")
        thought, after = self._closing.push(text)
        found: list[Part] = [Reasoning(thought)] if thought else []
        if after is None:
            return found
        self._skips_newlines = True
        return found + self._skip(after)

    def flush(self) -> list[Part]:
        if self._is_over:
            return self._inner.flush()
        if self._is_inside:
            rest = self._closing.flush() if self._has_looked else self._before
            return [Reasoning(rest)] if rest else []
        return self._skip(self._before + self._opening.flush()) + self._inner.flush()

    def _skip(self, text: str) -> list[Part]:
        self._is_over = True
        if self._skips_newlines:
            text = text.lstrip("\n")
            self._skips_newlines = not text
        return self._inner.push(text) if text else []


_HEAD = re.compile(
    r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)', re.S
)


class CallReader:
    """Reads one call, an object with a name and its arguments, character by character."""

    def __init__(self, index: int, name: str | None = None) -> None:
        """With a `name` the object is the arguments themselves."""
        self._index = index
        self._given_name = name
        self._seen = ""
        self._depth = 0
        self._in_text = False
        self._is_escaped = False
        self._inner_depth = 0 if name is not None else None
        self._has_begun = False

    def push(self, text: str) -> tuple[list[Part], str | None]:
        """Parts, and what follows the call once it is complete."""
        found: list[Part] = []
        if self._given_name is not None and not self._has_begun:
            self._has_begun = True
            found.append(CallBegun(self._index, self._given_name))
        arguments = 0
        for position, char in enumerate(text):
            was_depth = self._depth
            self._step(char)
            if not self._has_begun:
                self._seen += char
                if char == "{" and self._begins(was_depth):
                    found.append(CallBegun(self._index, self._name()))
                    self._has_begun, arguments = True, position
            elif self._inner_depth is not None and self._depth == self._inner_depth < was_depth:
                found.append(CallArguments(self._index, text[arguments : position + 1]))
                self._inner_depth = None
            if self._depth == 0 and was_depth == 1:
                return found + self._whole(), text[position + 1 :]
        if self._has_begun and self._inner_depth is not None and text[arguments:]:
            found.append(CallArguments(self._index, text[arguments:]))
        return found, None

    def flush(self) -> list[Part]:
        """A call that never got its name was none."""
        if self._has_begun or not self._seen:
            return []
        return [Content(self._seen)]

    def _begins(self, depth: int) -> bool:
        if depth != 1 or len(self._seen) > MAX_HEAD_CHARS:
            return False
        match = _HEAD.match(self._seen)
        if match is None or match.end() != len(self._seen) - 1:
            return False
        self._inner_depth = 1
        return True

    def _name(self) -> str:
        match = _HEAD.match(self._seen)
        assert match is not None
        return str(json.loads(match[1]))

    def _whole(self) -> list[Part]:
        """A complete object that did not begin as a call does."""
        if self._has_begun:
            return []
        seen, self._seen = self._seen, ""
        try:
            call = json.loads(seen)
        except (ValueError, RecursionError):
            return [Content(seen)]
        arguments = call.get("arguments", call.get("parameters", {}))
        if not isinstance(call.get("name"), str) or not isinstance(arguments, dict | str):
            return [Content(seen)]
        self._has_begun = True
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        return [CallBegun(self._index, call["name"]), CallArguments(self._index, text)]

    def _step(self, char: str) -> None:
        if self._in_text:
            if self._is_escaped:
                self._is_escaped = False
            elif char == "\\":
                self._is_escaped = True
            elif char == '"':
                self._in_text = False
        elif char == '"':
            self._in_text = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1


class _Calls:
    """Calls one after the other, with whatever a format puts between them."""

    def __init__(self) -> None:
        self._reader: CallReader | None = None
        self._between = ""
        self.num_calls = 0

    def push(self, text: str) -> list[Part]:
        found: list[Part] = []
        rest: str | None = text
        while rest:
            if self._reader is None:
                before, brace, after = rest.partition("{")
                self._between += before
                if not brace:
                    break
                name = self._between.replace("[ARGS]", "").strip(" \n\t[],;") or None
                self._between, rest = "", brace + after
                self._reader = CallReader(self.num_calls, name)
            parts, rest = self._reader.push(rest)
            found += parts
            if rest is not None:
                self._end()
        return found

    def flush(self) -> list[Part]:
        return [] if self._reader is None else self._reader.flush()

    def _end(self) -> None:
        assert self._reader is not None
        self.num_calls += self._reader._has_begun
        self._reader = None


class HermesSplitter:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes and Qwen write."""

    def __init__(self) -> None:
        self._opening = Until("<tool_call>")
        self._closing: Until | None = None
        self._is_after_call = False
        self._calls = _Calls()

    def push(self, text: str) -> list[Part]:
        found: list[Part] = []
        rest: str | None = text
        while rest:
            if self._closing is None:
                before, rest = self._opening.push(rest)
                if self._is_after_call:
                    before = before.lstrip()
                if before:
                    self._is_after_call = False
                    found.append(Content(before))
                if rest is not None:
                    self._closing = Until("</tool_call>")
            else:
                inside, rest = self._closing.push(rest)
                found += self._calls.push(inside)
                if rest is not None:
                    self._closing = None
                    self._is_after_call = True
        return found

    def flush(self) -> list[Part]:
        if self._closing is not None:
            return self._calls.push(self._closing.flush()) + self._calls.flush()
        held = self._opening.flush()
        return [Content(held)] if held else []


class MistralSplitter:
    """`[TOOL_CALLS]` and a list of calls, or a name and its arguments."""

    def __init__(self) -> None:
        self._opening = Until("[TOOL_CALLS]")
        self._calls: _Calls | None = None

    def push(self, text: str) -> list[Part]:
        if self._calls is not None:
            return self._calls.push(text.replace("[TOOL_CALLS]", " "))
        before, after = self._opening.push(text)
        found: list[Part] = [Content(before)] if before else []
        if after is not None:
            self._calls = _Calls()
            found += self.push(after) if after else []
        return found

    def flush(self) -> list[Part]:
        if self._calls is not None:
            return self._calls.flush()
        held = self._opening.flush()
        return [Content(held)] if held else []


class LlamaSplitter:
    """An answer that begins with `<|python_tag|>` or `{` is calls separated by `;`."""

    def __init__(self) -> None:
        self._head = ""
        self._calls: _Calls | None = None
        self._is_content = False

    def push(self, text: str) -> list[Part]:
        if self._is_content:
            return [Content(text)] if text else []
        if self._calls is not None:
            return self._calls.push(text.replace("<|python_tag|>", " "))
        self._head += text
        start = self._head.lstrip()
        if start.startswith(("{", "<|python_tag|>")):
            self._calls = _Calls()
            return self.push(start)
        if "<|python_tag|>".startswith(start):
            return []
        self._is_content = True
        return [Content(self._head)]

    def flush(self) -> list[Part]:
        if self._calls is not None:
            return self._calls.flush()
        return [] if self._is_content or not self._head else [Content(self._head)]


class ListSplitter:
    """An answer that the grammar made a list of calls (`tool_choice` required)."""

    def __init__(self) -> None:
        self._calls = _Calls()

    def push(self, text: str) -> list[Part]:
        return self._calls.push(text)

    def flush(self) -> list[Part]:
        return self._calls.flush()


class NamedSplitter:
    """An answer that the grammar made the arguments of one call (a named `tool_choice`)."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._has_begun = False

    def push(self, text: str) -> list[Part]:
        if not text:
            return []
        begun: Sequence[Part] = () if self._has_begun else (CallBegun(0, self._name),)
        self._has_begun = True
        return [*begun, CallArguments(0, text)]

    def flush(self) -> list[Part]:
        return []


TOOL_PARSERS: dict[str, tuple[MakeSplitter, tuple[str, ...]]] = {
    "hermes": (HermesSplitter, ("<tool_call>", "</tool_call>")),
    "llama3_json": (LlamaSplitter, ("<|python_tag|>",)),
    "mistral": (MistralSplitter, ("[TOOL_CALLS]", "[ARGS]")),
}
"""By name: what splits, and the tokens that must be seen in the text though they are special."""

REASONING_PARSERS = {"qwen3": False, "deepseek_r1": True}
"""By name: whether an answer begins with reasoning even when nothing says so."""

REASONING_MARKERS = ("<think>", "</think>")


def guessed_tool_parser(template: str) -> str:
    """The format that a model's chat template teaches."""
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<|python_tag|>" in template or '"parameters":' in template:
        return "llama3_json"
    return "hermes"
