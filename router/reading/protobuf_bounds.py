"""How much a protobuf message holds, counted on its bytes before it is built.

Two bytes on the wire make an object of a hundred: without a bound a message of a few megabytes
takes gigabytes. Messages inside known messages are looked into; numbers that are packed into one
field are counted at the speed of memory.
"""

from typing import TypeVar

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message

from common.errors import InvalidRequest
from common.limits import MAX_JSON_OBJECTS, MAX_JSON_VALUES

_CONTINUED = bytes(range(128, 256))
_FIXED = {1: 8, 5: 4}
"""Bytes of a value, by wire type."""


M = TypeVar("M", bound=Message)


def parsed(kind: type[M], data: bytes) -> M:
    """Raises InvalidRequest for what holds too much, and for what is no such message."""
    _Scan(data, kind.__name__).check(kind.DESCRIPTOR)  # type: ignore[arg-type]
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise InvalidRequest(f"not a {kind.__name__}: {error}") from None


class _Scan:
    def __init__(self, data: bytes, name: str) -> None:
        self._data = data
        self._name = name
        self._num_values = 0
        self._waiting: list[tuple[int, int, Descriptor | None]] = []

    def check(self, descriptor: Descriptor) -> None:
        self._waiting.append((0, len(self._data), descriptor))
        num_fields = 0
        while self._waiting:
            position, end, kind = self._waiting.pop()
            while position < end:
                num_fields += 1
                if num_fields > MAX_JSON_OBJECTS:
                    raise InvalidRequest(f"the message has more than {MAX_JSON_OBJECTS} fields")
                position = self._field(position, end, kind)
            if position > end:
                raise self._broken()

    def _field(self, position: int, end: int, kind: Descriptor | None) -> int:
        """Where the next one begins."""
        key, position = self._varint(position, end)
        wire_type = key & 7
        if wire_type == 0:
            return self._varint(position, end)[1]
        if wire_type in _FIXED:
            return position + _FIXED[wire_type]
        if wire_type != 2:
            raise self._broken()
        length, position = self._varint(position, end)
        field = None if kind is None else kind.fields_by_number.get(key >> 3)
        if field is None or position + length > end:
            return position + length
        if field.message_type is not None:
            self._waiting.append((position, position + length, field.message_type))
        elif field.type not in (field.TYPE_STRING, field.TYPE_BYTES):
            self._count(position, length)
        return position + length

    def _count(self, position: int, length: int) -> None:
        """Varints end with a byte below 128. (Of numbers of fixed size this is more than there
        are.)
        """
        self._num_values += len(
            self._data[position : position + length].translate(None, _CONTINUED)
        )
        if self._num_values > MAX_JSON_VALUES:
            raise InvalidRequest(f"the message has more than {MAX_JSON_VALUES} numbers")

    def _varint(self, position: int, end: int) -> tuple[int, int]:
        value = shift = 0
        while position < end and shift < 70:
            byte = self._data[position]
            position += 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value, position
            shift += 7
        raise self._broken()

    def _broken(self) -> InvalidRequest:
        return InvalidRequest(f"not a {self._name}: its bytes are no such message")
