"""Reads the fields of a request object one by one, each with its type and range.

Null stands for absent. What has not been read at the end is unknown, and refused (`finish`), as
OpenAI's servers do.
"""

import math
from collections.abc import Sequence
from typing import Any

from common.errors import InvalidRequest, UnsupportedParameter
from common.limits import LARGE_BODY_BYTES
from router.reading.json_body import is_within, shortened

_KIND_NAMES = {str: "a string", bool: "true or false", dict: "an object", int: "an integer"}


class Fields:
    def __init__(self, values: dict[str, Any], within: str = "") -> None:
        self._values = values
        self._unread = dict.fromkeys(values)
        self._within = within

    @property
    def are_small(self) -> bool:
        return is_within(self._values, LARGE_BODY_BYTES)

    def take(self, name: str) -> Any:
        """The value as it came; None when absent or null."""
        self._unread.pop(name, None)
        return self._values.get(name)

    def has(self, name: str) -> bool:
        """Whether it is there; reads nothing."""
        return self._values.get(name) is not None

    def text(self, name: str) -> str | None:
        value = self.take(name)
        if value is not None and not isinstance(value, str):
            raise self.wrong(name, "must be a string", value)
        return value

    def boolean(self, name: str, default: bool) -> bool:
        value = self.take(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(name, "must be true or false", value)
        return value

    def integer(self, name: str, low: int, high: int) -> int | None:
        value = self.take(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wrong(name, "must be an integer", value)
        if not low <= value <= high:
            is_bounded = high < 2**53  # as far as JSON's numbers are sure to be whole
            rule = f"must be from {low} to {high}" if is_bounded else f"must be at least {low}"
            raise self.wrong(name, rule if value < low or is_bounded else "is too large", value)
        return value

    def number(
        self, name: str, default: float, low: float, high: float, *, is_low_open: bool = False
    ) -> float:
        value = self.take(name)
        if value is None:
            return default
        return self.checked_number(name, value, low, high, is_low_open=is_low_open)

    def checked_number(
        self, name: str, value: Any, low: float, high: float, *, is_low_open: bool = False
    ) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(name, "must be a number", value)
        if not (low < value or (value == low and not is_low_open)) or not value <= high:
            rule = (
                f"above {low:g} and at most {high:g}"
                if is_low_open
                else f"from {low:g} to {high:g}"
            )
            raise self.wrong(name, f"must be {rule}", value)
        assert math.isfinite(value)
        return float(value) + 0.0  # no negative zero

    def token_ids(self, name: str, value: Any, vocab_size: int) -> list[int]:
        """A list of token ids of the model."""
        if not isinstance(value, list):
            raise self.wrong(name, "must be a list of token ids", value)
        for token_id in value:
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise self.wrong(name, "holds something that is no token id", token_id)
            if not 0 <= token_id < vocab_size:
                raise self.wrong(name, f"holds a token id outside 0 to {vocab_size - 1}", token_id)
        return value

    def object(self, name: str) -> dict[str, Any] | None:
        value = self.take(name)
        if value is not None and not isinstance(value, dict):
            raise self.wrong(name, "must be an object", value)
        return value

    def unsupported(self, name: str, neutral: Sequence[Any] = ()) -> None:
        """Accepts only values that ask for nothing."""
        value = self.take(name)
        if value is None or any(type(value) is type(n) and value == n for n in neutral):
            return
        raise UnsupportedParameter(
            f"{self._within}{name} is not supported by this server", param=self._within + name
        )

    def ignored(self, name: str, kinds: tuple[type, ...]) -> None:
        """A hint without effect; its value must still be what the protocol says."""
        value = self.take(name)
        is_kind = isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))
        if value is not None and not is_kind:
            names = " or ".join(_KIND_NAMES[kind] for kind in kinds)
            raise self.wrong(name, f"must be {names}", value)

    def rest(self) -> dict[str, Any]:
        """What nobody has read yet; somebody else will."""
        found = {name: self._values[name] for name in self._unread}
        self._unread.clear()
        return found

    def finish(self) -> None:
        for name in self._unread:
            raise InvalidRequest(
                f"Unrecognized request argument supplied: {shortened(self._within + name)}",
                param=(self._within + name)[:64],
            )

    def wrong(self, name: str, rule: str, value: Any) -> InvalidRequest:
        param = self._within + name
        return InvalidRequest(f"{param} {rule}, got {shortened(value)}", param=param)
