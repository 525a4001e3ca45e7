"""Bytes of a request to JSON, strictly and within bounds: UTF-8, no duplicate keys, no NaN or
Infinity, not too deep and not too much of it.

Everything wrong is `InvalidRequest`, whatever the bytes are. What a request holds as JSON inside a
text is read by the same rules.
"""

import json
import math
import reprlib
from typing import Any

from common.errors import InvalidRequest
from common.limits import (
    MAX_INTEGER_DIGITS,
    MAX_JSON_DEPTH,
    MAX_JSON_OBJECTS,
    MAX_JSON_VALUES,
)
from router.reading.json_shape import shape_of


class TooMuchJson(InvalidRequest):
    """Nested too deeply, or too much of it; nothing was made of it."""


def parse_json_object(body: bytes) -> dict[str, Any]:
    if not body.strip():
        raise InvalidRequest("the body is empty; a JSON object is expected")
    value = parse_json(body, "the body")
    if not isinstance(value, dict):
        raise InvalidRequest("the body must be a JSON object")
    return value


def parse_json(given: bytes | str, what: str, param: str | None = None) -> Any:
    """Raises InvalidRequest, which says that `what` is wrong."""
    try:
        return _parsed(given, what)
    except InvalidRequest as error:
        raise type(error)(error.message, param=error.param or param) from None


def _parsed(given: bytes | str, what: str) -> Any:
    try:
        data = given if isinstance(given, bytes) else given.encode()
        text = given if isinstance(given, str) else given.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{what} is not UTF-8: byte {error.start} is wrong") from None
    except UnicodeEncodeError:
        raise InvalidRequest(f"{what} holds half of a surrogate pair") from None
    _check_shape(data, what)
    try:
        value = json.loads(
            text,
            object_pairs_hook=_object,
            parse_constant=_constant,
            parse_float=_float,
            parse_int=_integer,
        )
    except json.JSONDecodeError as error:
        raise InvalidRequest(
            f"{what} is not valid JSON: {error.msg} at line {error.lineno} column {error.colno}"
        ) from None
    if "\\ud" in text or "\\uD" in text:
        _check_surrogates(value)
    return value


def _check_shape(data: bytes, what: str) -> None:
    if len(data) < MAX_JSON_OBJECTS and data.count(b"[") + data.count(b"{") <= MAX_JSON_DEPTH:
        return
    shape = shape_of(data)
    if shape.depth > MAX_JSON_DEPTH:
        raise TooMuchJson(f"{what} is nested too deeply: the limit is {MAX_JSON_DEPTH} levels")
    if shape.num_objects > MAX_JSON_OBJECTS:
        raise TooMuchJson(
            f"{what} holds more than {MAX_JSON_OBJECTS} objects, lists and texts: "
            f"{shape.num_objects}"
        )
    if shape.num_values > MAX_JSON_VALUES:
        raise TooMuchJson(f"{what} holds more than {MAX_JSON_VALUES} values: {shape.num_values}")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise InvalidRequest(f"duplicate key {shortened(name)}", param=name[:64])
            seen.add(name)
    return found


def _constant(name: str) -> None:
    raise InvalidRequest(f"{name} is not a JSON number")


def _float(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise InvalidRequest(f"{shortened(digits)} is too large a number")
    return value


def _integer(digits: str) -> int:
    if len(digits) > MAX_INTEGER_DIGITS:
        raise InvalidRequest(f"{shortened(digits)} is too large a number")
    return int(digits)


def _check_surrogates(value: Any) -> None:
    """Text by text: nothing here holds the interpreter for long."""
    waiting = [value]
    while waiting:
        inner = waiting.pop()
        if isinstance(inner, str):
            try:
                inner.encode()
            except UnicodeEncodeError:
                raise InvalidRequest("a string holds half of a surrogate pair") from None
        elif isinstance(inner, dict):
            waiting.extend(inner)
            waiting.extend(inner.values())
        elif isinstance(inner, list):
            waiting.extend(inner)


def is_within(value: Any, limit: int) -> bool:
    """Whether JSON of `value` has up to about `limit` characters. Looks no further than that."""
    num_chars = 0
    waiting = [value]
    while waiting:
        inner = waiting.pop()
        num_chars += 2
        if isinstance(inner, str):
            num_chars += len(inner)
        elif isinstance(inner, dict | list | tuple):
            num_chars += 2 * len(inner)
            if num_chars <= limit:
                waiting.extend(inner)
                waiting.extend(inner.values() if isinstance(inner, dict) else ())
        if num_chars > limit:
            return False
    return True


_BEGINNING = reprlib.Repr()
_BEGINNING.maxstring = _BEGINNING.maxother = 120


def shortened(value: object) -> str:
    """`value` as a message may show it."""
    # of a large value only the beginning is looked at
    shown = repr(value) if is_within(value, 400) else _BEGINNING.repr(value)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."
