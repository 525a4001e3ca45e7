"""Messages as bytes: frozen dataclasses to MessagePack and back, checked against their annotations.

A message is a map of field names (so fields may be added), with its class name under `"t"`. Only
classes that `wire_message` has registered can be read. Whatever cannot be what the sender meant
raises `MalformedMessage`. Bounds: a caller never decodes more than `MAX_MESSAGE_BYTES`; the RPC
layer refuses larger ones before they get here.
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

MAX_MESSAGE_BYTES = 16 * 1024 * 1024

T = TypeVar("T")
_Convert = Callable[[Any], Any]
_registry: dict[str, type] = {}
_readers: dict[type, Callable[[dict[str, Any]], Any]] = {}


def wire_message(cls: type[T]) -> type[T]:
    """Class decorator: this dataclass may travel between processes."""
    assert dataclasses.is_dataclass(cls)
    assert cls.__name__ not in _registry
    _registry[cls.__name__] = cls
    return cls


def encode(message: object) -> bytes:
    fields = _plain_fields(message)
    fields["t"] = type(message).__name__
    packed: bytes = msgpack.packb(fields, use_bin_type=True)
    return packed


def decode(data: bytes) -> object:
    """The message in `data`. Raises MalformedMessage."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise MalformedMessage(
            f"message of {len(data)} bytes is over the limit of {MAX_MESSAGE_BYTES}"
        )
    try:
        fields = msgpack.unpackb(data, raw=False, strict_map_key=True)
    except (ValueError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise MalformedMessage(f"not MessagePack: {type(error).__name__}") from None
    if not isinstance(fields, dict):
        raise MalformedMessage("a message is a map")
    name = fields.pop("t", None)
    cls = _registry.get(name) if isinstance(name, str) else None
    if cls is None:
        raise MalformedMessage(f"unknown message {str(name)[:40]!r}")
    return _reader(cls)(fields)


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


def _reader(cls: type) -> Callable[[dict[str, Any]], Any]:
    reader = _readers.get(cls)
    if reader is None:
        reader = _readers[cls] = _make_reader(cls)
    return reader


def _make_reader(cls: type) -> Callable[[dict[str, Any]], Any]:
    hints = typing.get_type_hints(cls)
    converters = {field.name: _converter(hints[field.name]) for field in dataclasses.fields(cls)}

    def read(fields: dict[str, Any]) -> Any:
        try:
            known = {
                name: convert(fields[name])
                for name, convert in converters.items()
                if name in fields
            }
            return cls(**known)
        except (TypeError, ValueError, KeyError) as error:
            raise MalformedMessage(f"{cls.__name__}: {error}") from None

    return read


def _converter(hint: Any) -> _Convert:
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        (inner,) = [a for a in arguments if a is not type(None)]
        convert = _converter(inner)
        return lambda value: None if value is None else convert(value)
    if origin is tuple:
        return _tuple_converter(arguments)
    if dataclasses.is_dataclass(hint):
        return lambda value: _reader(hint)(_expect(dict, value))  # type: ignore[arg-type]
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint
    if hint is float:
        return _float
    if hint in (int, str, bytes, bool):
        return lambda value: _expect(hint, value)
    raise AssertionError(f"no wire form for {hint}")


def _tuple_converter(arguments: tuple[Any, ...]) -> _Convert:
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        convert = _converter(arguments[0])
        return lambda value: tuple(convert(item) for item in _expect(list, value))
    converters = [_converter(argument) for argument in arguments]

    def read(value: Any) -> tuple[Any, ...]:
        items = _expect(list, value)
        return tuple(c(item) for c, item in zip(converters, items, strict=True))

    return read


def _float(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise TypeError(f"expected a number, got {type(value).__name__}")
    return float(value)


def _expect(cls: type, value: Any) -> Any:
    if type(value) is not cls:
        raise TypeError(f"expected {cls.__name__}, got {type(value).__name__}")
    return value
