"""What the router and its compiler's process say to each other: jobs, and messages on a pipe."""

import json
from dataclasses import dataclass
from typing import IO, Any

NICE = 10
"""Of the compiler's process, once somebody may need the machine more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """`kind` is json, regex, choice, grammar or structural_tag; `name` the field to blame."""

    kind: str
    name: str
    source: Any
    whitespace: str | None = None

    def to_bytes(self) -> bytes:
        return json.dumps([self.kind, self.name, self.source, self.whitespace]).encode()

    @staticmethod
    def of(data: bytes) -> "Job":
        kind, name, source, whitespace = json.loads(data)
        return Job(kind=kind, name=name, source=source, whitespace=whitespace)


def read_message(stream: IO[bytes]) -> bytes | None:
    """Four bytes of length, then as many. None at the end."""
    head = stream.read(4)
    length = int.from_bytes(head, "little")
    data = stream.read(length) if len(head) == 4 else b""
    return data if len(head) == 4 and len(data) == length else None


def write_message(stream: IO[bytes], data: bytes) -> None:
    stream.write(len(data).to_bytes(4, "little") + data)
    stream.flush()
