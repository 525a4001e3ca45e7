"""One call of a function, read while it is being written."""

import json
import re

from router.text.parts import CallArguments, CallBegun, Part

MAX_HEAD_CHARS = 4096
"""A call whose name has not come by then is read as a whole."""

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
