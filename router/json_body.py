"""Bytes of a request to a JSON object, strictly: UTF-8, no duplicate keys, no NaN or Infinity.

Everything wrong is `InvalidRequest`, whatever the bytes are.
"""

import json
import math
from typing import Any

from common.errors import InvalidRequest

_MAX_INTEGER_DIGITS = 400


def parse_json_object(body: bytes) -> dict[str, Any]:
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not UTF-8: byte {error.start} is wrong") from None
    if not text.strip():
        raise InvalidRequest("the body is empty; a JSON object is expected")
    try:
        value = json.loads(
            text,
            object_pairs_hook=_object,
            parse_constant=_constant,
            parse_float=_float,
            parse_int=_integer,
        )
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise InvalidRequest(
            f"the body is not valid JSON: {error.msg} at line {error.lineno} column {error.colno}"
        ) from None
    if not isinstance(value, dict):
        raise InvalidRequest("the body must be a JSON object")
    if "\\u" in text:
        _check_surrogates(value)
    return value


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
    if len(digits) > _MAX_INTEGER_DIGITS:
        raise InvalidRequest(f"{shortened(digits)} is too large a number")
    return int(digits)


def _check_surrogates(value: dict[str, Any]) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise InvalidRequest("a string holds half of a surrogate pair") from None


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


def shortened(value: object) -> str:
    """`value` as a message may show it."""
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."
