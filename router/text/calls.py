"""Text with calls of functions in it, as models write them."""

import re
from dataclasses import dataclass
from enum import Enum, auto

from router.text.call_reader import CallReader
from router.text.parts import Content, Part


@dataclass(frozen=True, slots=True, kw_only=True)
class CallForm:
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

    def __init__(self, form: CallForm, *, is_inside: bool = False) -> None:
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


_HERMES = CallForm(opening="<tool_call>", closing="</tool_call>")
_LLAMA = CallForm(opening="<|python_tag|>")
_NAMED = r"(?P<name>[A-Za-z0-9_.-]{1,128})"
_MISTRAL = CallForm(
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
