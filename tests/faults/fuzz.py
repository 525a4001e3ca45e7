"""Coverage-guided fuzzing of what reads bytes from outside: `make fuzz`, with atheris.

    python -m tests.faults.fuzz wire|json [libFuzzer options]

`wire`: whatever `decode` takes for a message comes back the same when it is sent on; anything else
is a `MalformedMessage`. `json`: a body is an object, or an `InvalidRequest`. Seeds are messages of
every kind, made by the constructors.
"""

import dataclasses
import sys
import typing
from enum import Enum
from pathlib import Path
from typing import Any

import atheris

with atheris.instrument_imports():
    from common import handoff_messages, messages, wire
    from common.errors import InvalidRequest, MalformedMessage
    from router.reading.json_body import parse_json_object

SMALLEST: dict[Any, Any] = {str: "", bytes: b"", int: 0, float: 0.0, bool: False}


def fuzz_wire(data: bytes) -> None:
    try:
        message = wire.decode(data)
    except MalformedMessage:
        return
    assert wire.decode(wire.encode(message)) == message


def fuzz_json(data: bytes) -> None:
    try:
        found = parse_json_object(data)
    except InvalidRequest:
        return
    assert isinstance(found, dict)


def smallest(kind: Any) -> Any:
    """A value of an annotated type."""
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        values = {f.name: smallest(hints[f.name]) for f in dataclasses.fields(kind)}
        return kind(**values)  # type: ignore[operator]
    if isinstance(kind, type) and issubclass(kind, Enum):
        return next(iter(kind))
    if kind in SMALLEST:
        return SMALLEST[kind]
    arguments = typing.get_args(kind)
    if type(None) in arguments:
        return None
    return ()


def seeds(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, kind in (vars(messages) | vars(handoff_messages)).items():
        if name in wire._registry:
            (folder / name).write_bytes(wire.encode(smallest(kind)))
    (folder / "body").write_bytes(b'{"prompt": "x", "max_tokens": 1, "stop": ["a"]}')


def main() -> None:
    target = {"wire": fuzz_wire, "json": fuzz_json}[sys.argv[1]]
    corpus = Path("build/fuzz", sys.argv[1])
    seeds(corpus)
    atheris.Setup([sys.argv[0], *sys.argv[2:], str(corpus)], target)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
