"""Tensors of the open inference protocol v2: checked, and in its binary form."""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from common.errors import InvalidRequest
from router.reading.json_body import shortened

MAX_TEXTS = 1024
"""Elements of an input."""
_MAX_DIMENSIONS = 16
_FORMATS = {
    "BOOL": "?",
    "INT8": "b",
    "INT16": "h",
    "INT32": "i",
    "INT64": "q",
    "UINT8": "B",
    "UINT16": "H",
    "UINT32": "I",
    "UINT64": "Q",
    "FP32": "f",
    "FP64": "d",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """Values are flat, and what the datatype says; texts are str."""

    name: str
    datatype: str
    values: list[Any]


def tensor_of(name: str, datatype: str, shape: Any, values: Sequence[Any]) -> Tensor:
    """A checked tensor; `shape` None is one that nobody gave. Raises InvalidRequest."""
    if len(values) > MAX_TEXTS:
        raise _wrong(name, f"has {len(values)} elements; the limit is {MAX_TEXTS}")
    if shape is not None:
        if not isinstance(shape, list) or not all(type(d) is int and d >= 0 for d in shape):
            raise _wrong(name, "has a shape that is no list of sizes")
        if len(shape) > _MAX_DIMENSIONS or math.prod(shape) != len(values):
            raise _wrong(name, f"has {len(values)} elements, not those of its shape")
    if datatype == "BYTES":
        return Tensor(name=name, datatype=datatype, values=[_text(name, v) for v in values])
    if datatype not in _FORMATS:
        raise _wrong(name, f"is of datatype {shortened(datatype)}, which is not supported")
    for value in values:
        if not _fits(datatype, value):
            raise _wrong(name, f"holds {shortened(value)}, which is no {datatype}")
    return Tensor(name=name, datatype=datatype, values=list(values))


def unpacked(name: str, datatype: str, data: bytes) -> list[Any]:
    """Values of a tensor in the protocol's raw form. Raises InvalidRequest."""
    if datatype == "BYTES":
        return _unpacked_texts(name, data)
    form = _FORMATS.get(datatype)
    if form is None:
        raise _wrong(name, f"is of datatype {shortened(datatype)}, which is not supported")
    count, rest = divmod(len(data), struct.calcsize("<" + form))
    if rest:
        raise _wrong(name, "is cut off")
    if count > MAX_TEXTS:
        raise _wrong(name, f"has {count} elements; the limit is {MAX_TEXTS}")
    return list(struct.unpack(f"<{count}{form}", data))


def packed_texts(texts: Sequence[str]) -> bytes:
    found = b""
    for text in texts:
        data = text.encode()
        found += struct.pack("<I", len(data)) + data
    return found


def _unpacked_texts(name: str, data: bytes) -> list[bytes]:
    found: list[bytes] = []
    position = 0
    while position < len(data):
        start = position + 4
        size = int.from_bytes(data[position:start], "little")
        position = start + size
        if position > len(data):
            raise _wrong(name, "is cut off")
        if len(found) == MAX_TEXTS:
            raise _wrong(name, f"has too many elements; the limit is {MAX_TEXTS}")
        found.append(data[start:position])
    return found


def _text(name: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, bytes):
        raise _wrong(name, f"holds {shortened(value)}; elements of BYTES must be strings")
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise _wrong(name, "holds a text that is not UTF-8") from None


def _fits(datatype: str, value: Any) -> bool:
    if datatype == "BOOL":
        return isinstance(value, bool)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    if isinstance(value, float) and not datatype.startswith("FP"):
        return False
    try:
        struct.pack("<" + _FORMATS[datatype], value)
    except (struct.error, OverflowError):
        return False
    return True


def _wrong(name: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"the input {shortened(name)} {what}", param=name[:64])
