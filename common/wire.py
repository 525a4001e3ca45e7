"""Messages as bytes: frozen dataclasses to MessagePack and back, checked against their annotations.

A message is a map of field names (so fields may be added), with its class name under `"t"`. Only
classes that `wire_message` has registered can be read. Whatever cannot be what the sender meant
raises `MalformedMessage`.

A message is read as it is declared, header by header: a list where a number belongs is refused at
its header, and a field that nobody knows is skipped without being built. Bounds: bytes (the RPC
layer refuses more before it gets here), items of all lists together, and the nesting of what is
skipped.
"""

import dataclasses
import math
import types
import typing
from collections.abc import Callable
from enum import Enum
from typing import Any, TypeVar

import msgpack

from common.errors import MalformedMessage
from common.limits import MAX_MESSAGE_BYTES, MAX_MESSAGE_ITEMS

T = TypeVar("T")
_NIL = 0xC0
_registry: dict[str, type] = {}
_readers: dict[type, "_Read"] = {}


class _Source:
    """The bytes of one message. `value` reads what is no list and no map; `list` and `map` read a
    header and say how many items follow.
    """

    __slots__ = ("_data", "_left", "_unpacker", "list_header", "map_header", "skip", "value")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._left = MAX_MESSAGE_ITEMS
        unpacker = self._unpacker = msgpack.Unpacker(
            raw=False,
            max_buffer_size=MAX_MESSAGE_BYTES,
            max_array_len=0,
            max_map_len=0,
            max_ext_len=0,
        )
        unpacker.feed(data)
        self.value: Callable[[], Any] = unpacker.unpack
        self.skip: Callable[[], None] = unpacker.skip
        self.list_header: Callable[[], int] = unpacker.read_array_header
        self.map_header: Callable[[], int] = unpacker.read_map_header

    def list(self) -> int:
        return self._counted(self.list_header())

    def map(self) -> int:
        return self._counted(self.map_header())

    def _counted(self, num_items: int) -> int:
        self._left -= num_items
        if self._left < 0:
            raise ValueError(f"more than {MAX_MESSAGE_ITEMS} items in one message")
        return num_items

    def is_nil(self) -> bool:
        place: int = self._unpacker.tell()
        return place < len(self._data) and self._data[place] == _NIL

    def check_end(self) -> None:
        if self._unpacker.tell() != len(self._data):
            raise ValueError("bytes after the message")


_Read = Callable[[_Source], Any]


def wire_message(cls: type[T]) -> type[T]:
    """Class decorator: this dataclass may travel between processes."""
    assert dataclasses.is_dataclass(cls)
    assert cls.__name__ not in _registry
    _registry[cls.__name__] = cls
    return cls


def encode(message: object) -> bytes:
    fields = {"t": type(message).__name__, **_plain_fields(message)}
    packed: bytes = msgpack.packb(fields, use_bin_type=True)
    return packed


def decode(data: bytes) -> object:
    """The message in `data`. Raises MalformedMessage."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise MalformedMessage(
            f"message of {len(data)} bytes is over the limit of {MAX_MESSAGE_BYTES}"
        )
    try:
        name = _name(_Source(data))
        cls = _registry.get(name) if isinstance(name, str) else None
        if cls is None:
            raise MalformedMessage(f"unknown message {str(name)[:40]!r}")
        source = _Source(data)
        message = _reader(cls)(source)
        source.check_end()
        return message
    except (ValueError, TypeError, msgpack.exceptions.UnpackException) as error:
        raise MalformedMessage(
            f"not a message: {type(error).__name__}: {str(error)[:200]}"
        ) from None


def _name(source: _Source) -> Any:
    """What stands under "t"; older processes send it last."""
    for _ in range(source.map()):
        if source.value() == "t":
            return source.value()
        source.skip()
    return None


def _plain_fields(message: Any) -> dict[str, Any]:
    return {name: _plain(getattr(message, name)) for name in message.__dataclass_fields__}


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if dataclasses.is_dataclass(value):
        return _plain_fields(value)
    return value


def _reader(cls: type) -> _Read:
    reader = _readers.get(cls)
    if reader is None:
        reader = _readers[cls] = _make_reader(cls)
    return reader


def _make_reader(cls: type) -> _Read:
    hints = typing.get_type_hints(cls)
    readers = {field.name: _read_of(hints[field.name]) for field in dataclasses.fields(cls)}

    def read(source: _Source) -> Any:
        known: dict[str, Any] = {}
        name = None
        try:
            for _ in range(source.map()):
                name = source.value()
                if type(name) is not str:
                    raise TypeError("a field's name is no text")
                reader = readers.get(name)
                if reader is None:
                    source.skip()
                else:
                    known[name] = reader(source)
            return cls(**known)
        except (TypeError, ValueError, KeyError) as error:
            raise MalformedMessage(f"{cls.__name__}: {name}: {str(error)[:200]}") from None

    return read


def _read_of(hint: Any) -> _Read:
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        (inner,) = [a for a in arguments if a is not type(None)]
        read = _read_of(inner)
        return lambda source: source.value() if source.is_nil() else read(source)
    if origin is tuple:
        return _tuple_reader(arguments)
    if dataclasses.is_dataclass(hint):
        return lambda source: _reader(hint)(source)  # type: ignore[arg-type]
    convert = _scalar(hint)
    return lambda source: convert(source.value())


def _scalar(hint: Any) -> Callable[[Any], Any]:
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint
    if hint is float:
        return _float
    if hint in (int, str, bytes, bool):
        return lambda value: _expect(hint, value)
    raise AssertionError(f"no wire form for {hint}")


def _tuple_reader(arguments: tuple[Any, ...]) -> _Read:
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        if arguments[0] in (int, str):
            return _column_reader(arguments[0])
        read_item = _read_of(arguments[0])
        return lambda source: tuple([read_item(source) for _ in range(source.list())])
    readers = [_read_of(argument) for argument in arguments]

    def read(source: _Source) -> tuple[Any, ...]:
        if source.list() != len(readers):
            raise ValueError(f"expected a list of {len(readers)}")
        return tuple([read_item(source) for read_item in readers])

    return read


def _column_reader(cls: type) -> _Read:
    """Columns are long: their types are looked at together."""

    def read(source: _Source) -> tuple[Any, ...]:
        value = source.value
        items = tuple([value() for _ in range(source.list())])
        for kind in set(map(type, items)):
            if kind is not cls:
                raise TypeError(f"expected {cls.__name__}, got {kind.__name__}")
        return items

    return read


def _float(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise TypeError(f"expected a number, got {type(value).__name__}")
    return float(value)


def _expect(cls: type, value: Any) -> Any:
    if type(value) is not cls:
        raise TypeError(f"expected {cls.__name__}, got {type(value).__name__}")
    return value
