"""How deep JSON text is nested and how much it holds, found before anything is made of it.

Looked at in slices by numpy, which lets go of the interpreter: an 8 MiB body costs the event loop's
thread nothing.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SLICE = 128 * 1024
_QUOTE, _BACKSLASH, _COMMA = b'"\\,'
_OPENING, _CLOSING = b"[{", b"]}"


@dataclass(slots=True)
class Shape:
    """`depth` counts objects and lists inside each other, `num_objects` these and texts (names of
    fields included), `num_values` whatever stands between commas.
    """

    depth: int = 0
    num_objects: int = 0
    num_values: int = 1


def shape_of(text: bytes) -> Shape:
    """Of JSON in UTF-8. What is no JSON has some shape too."""
    reader = _Reader()
    for start in range(0, len(text), SLICE):
        reader.read(np.frombuffer(text, np.uint8, min(SLICE, len(text) - start), start))
    return reader.shape


class _Reader:
    """What a slice must know of those before it."""

    def __init__(self) -> None:
        self.shape = Shape()
        self._is_in_text = False
        self._is_escaped = False
        self._depth = 0

    def read(self, chars: NDArray[np.uint8]) -> None:
        quotes = (chars == _QUOTE) & ~self._escaped(chars)
        crossed = np.cumsum(quotes, dtype=np.int32)
        is_outside = ((crossed + self._is_in_text) & 1) == 0
        self._is_in_text = bool((int(crossed[-1]) + self._is_in_text) & 1)
        opens = is_outside & ((chars == _OPENING[0]) | (chars == _OPENING[1]))
        closes = is_outside & ((chars == _CLOSING[0]) | (chars == _CLOSING[1]))
        levels = np.cumsum(opens.astype(np.int8) - closes.astype(np.int8), dtype=np.int32)
        shape = self.shape
        shape.depth = max(shape.depth, self._depth + int(levels.max()))
        self._depth += int(levels[-1])
        num_opened = int(opens.sum())
        # an opening quote and a closing one for each text; the odd one counts early
        shape.num_objects += num_opened + (int(crossed[-1]) + 1) // 2
        shape.num_values += num_opened + int((is_outside & (chars == _COMMA)).sum())

    def _escaped(self, chars: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Whether an odd number of backslashes stands before each character."""
        is_backslash = chars == _BACKSLASH
        places = np.arange(len(chars), dtype=np.int32)
        # place of the last character that is no backslash, before each one
        others = np.maximum.accumulate(np.where(is_backslash, np.int32(-1), places))
        run = places - others  # backslashes up to and with each place
        if self._is_escaped:
            run += others == -1  # one more from the slice before
        odd = (run & 1).astype(bool) & is_backslash
        found = np.empty(len(chars), dtype=bool)
        found[0] = self._is_escaped
        found[1:] = odd[:-1]
        self._is_escaped = bool(odd[-1])
        return found
