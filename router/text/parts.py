"""An assistant's text as it streams, taken apart: reasoning, content, tool calls.

    text pieces -> Splitter -> Content | Reasoning | CallBegun | CallArguments

One `Splitter` follows one output; joined, the parts are the same for every way of cutting the text.
Only what may become a marker is held back. What looks like a tool call and is none is content.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Protocol

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
    r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*\{', re.S
)


def _name(text: str) -> str | None:
    """The name that a JSON text holds, or None."""
    try:
        name = json.loads(text)
        name.encode()  # half of a surrogate pair is no name
    except ValueError:
        return None
    return name or None


class CallReader:
    """Reads one object that may be a call: a name and its arguments, character by character.

    It has begun once its name and the start of its arguments are there; before that, all of it may
    turn out to be mere text.
    """

    def __init__(self, index: int, name: str | None, *, needs_arguments: bool) -> None:
        """With a `name` the object is the arguments themselves."""
        self._index = index
        self._given_name = name
        self._needs_arguments = needs_arguments
        self._read: list[str] = []
        self._num_read = 0
        self._depth = 0
        self._is_escaped = False
        self._inner_depth: int | None = None
        self.is_in_text = False
        self.has_begun = False

    @property
    def read(self) -> str:
        """What has been read of an object that has not begun."""
        return "".join(self._read)

    def push(self, text: str) -> tuple[list[Part], int | None]:
        """Parts, and how much of `text` belongs to the object once that is complete (or cannot be a
        call any more).
        """
        found: list[Part] = []
        start = 0
        for position, char in enumerate(text):
            was_depth = self._depth
            self._step(char)
            if not self.has_begun:
                name, is_over = self._begun(char, was_depth, text[: position + 1])
                if name is not None:
                    found.append(CallBegun(self._index, name))
                    self.has_begun = True
                    start = position
                    if self._given_name is not None:
                        found.append(CallArguments(self._index, self.read + text[:position]))
                elif is_over:
                    return found, self._keep(text[:position])
            if self._inner_depth is not None and self._depth == self._inner_depth < was_depth:
                found.append(CallArguments(self._index, text[start : position + 1]))
                self._inner_depth = None
            if self._depth == 0:
                return found + self._end(text[: position + 1]), position + 1
        if self._inner_depth is not None and text[start:]:
            found.append(CallArguments(self._index, text[start:]))
        if not self.has_begun:
            self._keep(text)
        return found, None

    def _begun(self, char: str, was_depth: int, text: str) -> tuple[str | None, bool]:
        """The name, where the arguments begin; or whether this can be no call."""
        if self._given_name is not None:
            if was_depth == 0 or char.isspace():
                return None, False
            self._inner_depth = 0
            return (self._given_name, False) if char in '"}' else (None, True)
        if char != "{" or was_depth != 1 or self._num_read + len(text) > MAX_HEAD_CHARS:
            return None, False
        match = _HEAD.fullmatch(self.read + text)
        name = None if match is None else _name(match[1])
        if name is not None:
            self._inner_depth = 1
        return name, False

    def _end(self, text: str) -> list[Part]:
        """A complete object may be a call that did not begin as most do."""
        if self.has_begun:
            return []
        self._keep(text)
        try:
            call = json.loads(self.read)
            name = _name(json.dumps(call.get("name")))
            arguments = call.get("arguments", call.get("parameters"))
            if arguments is None and not self._needs_arguments:
                arguments = {}
            given = arguments if isinstance(arguments, str) else json.dumps(arguments)
        except (ValueError, AttributeError, RecursionError):
            return []
        if name is None or not isinstance(arguments, dict | str):
            return []
        self.has_begun = True
        return [CallBegun(self._index, name), CallArguments(self._index, given)]

    def _keep(self, text: str) -> int:
        self._read.append(text)
        self._num_read += len(text)
        return len(text)

    def _step(self, char: str) -> None:
        if self.is_in_text:
            if self._is_escaped:
                self._is_escaped = False
            elif char == "\\":
                self._is_escaped = True
            elif char == '"':
                self.is_in_text = False
        elif char == '"':
            self.is_in_text = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How a format writes calls."""

    opening: str | None
    """The marker before calls."""
    closing: str | None = None
    """The marker after them."""
    lead: re.Pattern[str] = re.compile(r"[\s\[]*")
    """What may stand between the opening and a call's brace."""
    between: re.Pattern[str] = re.compile(r"[\s,;\]}]*")
    """What may stand between a call and the next one's brace."""


_SEPARATORS = re.compile(r"[\s,;\[\]}]*")
_MAX_LEAD_CHARS = 256
_SLICE_CHARS = 1024


class _State(Enum):
    TEXT = auto()
    LEAD = auto()
    """After an opening marker."""
    OBJECT = auto()
    AFTER = auto()
    """After a call, where another one may follow."""


class CallsSplitter:
    """Text with calls in it, as `form` writes them.

    What has been read and is not decided yet is kept as it was written: when it turns out to be no
    call it is content, markers and all.
    """

    def __init__(self, form: Form, *, is_inside: bool = False) -> None:
        """`is_inside`: the answer begins with calls, without an opening."""
        self._form = form
        self._state = _State.LEAD if is_inside else _State.TEXT
        self._pending = ""
        self._kept = ""
        """Written before the pending text or the object, content if there is no call."""
        self._num_calls = 0
        self._has_marker = not is_inside
        self._reader = self._new_reader(None)
        self._skips_space = False
        self._has_ended = False
        self._found: list[Part] = []
        self._steps = {
            _State.TEXT: self._text,
            _State.LEAD: self._lead,
            _State.OBJECT: self._object,
            _State.AFTER: self._after,
        }

    def push(self, text: str) -> list[Part]:
        for start in range(0, len(text), _SLICE_CHARS):
            self._pending += text[start : start + _SLICE_CHARS]
            self._advance()
        return self._taken()

    def flush(self) -> list[Part]:
        self._has_ended = True
        self._advance()
        return self._taken()

    def _taken(self) -> list[Part]:
        found, self._found = self._found, []
        return found

    def _advance(self) -> None:
        while self._steps[self._state]():
            pass

    # --- the steps; each says whether another one can follow --------------------------------------

    def _text(self) -> bool:
        at, marker = self._first_of(self._form.opening)
        self._content(self._pending[:at])
        self._pending = self._pending[at + len(marker) :]
        if not marker:
            return False
        self._open(marker)
        return True

    def _lead(self) -> bool:
        at = self._pending.find("{", 0, _MAX_LEAD_CHARS + 1)
        if at < 0 and len(self._pending) <= _MAX_LEAD_CHARS and not self._has_ended:
            return False
        return self._begin_object(self._form.lead, at)

    def _object(self) -> bool:
        form, reader = self._form, self._reader
        at, marker = self._first_of(form.closing, form.opening)
        parts, num_used = reader.push(self._pending[:at])
        self._found += parts
        if num_used is not None:
            self._pending = self._pending[num_used:]
            self._end_object()
            return True
        self._pending = self._pending[at:]
        if marker == form.opening and reader.has_begun and reader.is_in_text:
            self._found += reader.push(marker)[0]
            self._pending = self._pending[len(marker) :]
            return True
        if not marker and not self._has_ended:
            return False
        self._end_object()
        return True

    def _after(self) -> bool:
        form = self._form
        at, marker = self._first_of("{", form.closing, form.opening)
        if not marker and at <= _MAX_LEAD_CHARS and not self._has_ended:
            return False
        if marker == "{" or at > _MAX_LEAD_CHARS:
            return self._begin_object(form.between, at)
        is_text = _SEPARATORS.fullmatch(self._pending, 0, at) is None
        self._content(self._pending[:at] if is_text else "")
        self._pending = self._pending[at + len(marker) :]
        self._state = _State.TEXT
        self._skips_space = not is_text
        if marker and marker == form.opening:
            self._open(marker)
        return bool(marker)

    # --- inside -----------------------------------------------------------------------------------

    def _open(self, marker: str) -> None:
        self._kept = marker
        self._has_marker = True
        self._state = _State.LEAD

    def _begin_object(self, lead: re.Pattern[str], at: int) -> bool:
        """At the brace, if what stands before it is how a call is led in."""
        match = None if not 0 <= at <= _MAX_LEAD_CHARS else lead.fullmatch(self._pending, 0, at)
        if match is None:
            self._give_up()
            return True
        self._reader = self._new_reader(match.groupdict().get("name"))
        self._kept += self._pending[:at]
        self._pending = self._pending[at:]
        self._state = _State.OBJECT
        return True

    def _end_object(self) -> None:
        if self._reader.has_begun:
            self._num_calls += 1
            self._kept = ""
            self._state = _State.AFTER
        else:
            self._kept += self._reader.read
            self._give_up()

    def _give_up(self) -> None:
        """This is no call."""
        self._content(self._kept)
        self._kept = ""
        self._state = _State.TEXT

    def _content(self, text: str) -> None:
        if self._skips_space:
            text = text.lstrip()
        if text:
            self._skips_space = False
            self._found.append(Content(text))

    def _new_reader(self, name: str | None) -> CallReader:
        return CallReader(self._num_calls, name, needs_arguments=not self._has_marker)

    def _first_of(self, *markers: str | None) -> tuple[int, str]:
        """Where the first marker in the pending text stands, and which it is; without one, where
        that may still begin, and nothing.
        """
        text = self._pending
        known = [marker for marker in markers if marker is not None]
        found = [(at, marker) for marker in known if (at := text.find(marker)) >= 0]
        if found:
            return min(found)
        if self._has_ended:
            return len(text), ""
        longest = max(map(len, known), default=1)
        for at in range(max(len(text) - longest + 1, 0), len(text)):
            if any(marker.startswith(text[at:]) for marker in known):
                return at, ""
        return len(text), ""


_HERMES = Form(opening="<tool_call>", closing="</tool_call>")
_LLAMA = Form(opening="<|python_tag|>")
_LIST = Form(opening=None)
_NAMED = r"(?P<name>[A-Za-z0-9_.-]{1,128})"
_MISTRAL = Form(
    opening="[TOOL_CALLS]",
    lead=re.compile(rf"[\s\[]*|\s*{_NAMED}(?:\[ARGS\]\s*)?"),
    between=re.compile(rf"[\s,;\]}}]*(?:{_NAMED}\[ARGS\]\s*)?"),
)


class HermesSplitter(CallsSplitter):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes and Qwen write."""

    def __init__(self) -> None:
        super().__init__(_HERMES)


class MistralSplitter(CallsSplitter):
    """`[TOOL_CALLS]` and a list of calls, or a name and its arguments."""

    def __init__(self) -> None:
        super().__init__(_MISTRAL)


class ListSplitter:
    """An answer that the grammar made a list of calls (`tool_choice` required).

    None of it is content: what is no call was cut off before it became one.
    """

    def __init__(self) -> None:
        self._inner = CallsSplitter(_LIST, is_inside=True)

    def push(self, text: str) -> list[Part]:
        return [part for part in self._inner.push(text) if not isinstance(part, Content)]

    def flush(self) -> list[Part]:
        return [part for part in self._inner.flush() if not isinstance(part, Content)]


class LlamaSplitter:
    """Calls separated by `;` after `<|python_tag|>`, or an answer that begins with `{`."""

    def __init__(self) -> None:
        self._head = ""
        self._inner: CallsSplitter | None = None

    def push(self, text: str) -> list[Part]:
        if self._inner is None:
            self._head += text
            if not self._head.strip():
                return []
            is_inside = self._head.lstrip().startswith("{")
            self._inner = CallsSplitter(_LLAMA, is_inside=is_inside)
            text, self._head = self._head, ""
        return self._inner.push(text)

    def flush(self) -> list[Part]:
        if self._inner is None:
            return [Content(self._head)] if self._head else []
        return self._inner.flush()


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


def parsed_arguments(text: str) -> dict[str, Any] | None:
    """A call's arguments; None when they were cut off or are none."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def guessed_tool_parser(template: str) -> str:
    """The format that a model's chat template teaches."""
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<|python_tag|>" in template or '"parameters":' in template:
        return "llama3_json"
    return "hermes"
