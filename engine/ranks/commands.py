"""What rank 0 tells its followers, in the order in which it does the same itself. Nothing of it is
a decision: they are a forward pass, logits, and what happens to pages.

A command travels as MessagePack: its name and its fields, arrays as their bytes.
"""

from dataclasses import dataclass, fields
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from common.pages import PageKind
from engine.batch import StepBatch

Integers = NDArray[np.int64]
ARRAY = 1
"""Type of an array among MessagePack's extensions."""


@dataclass(frozen=True, slots=True)
class Forward:
    """Rows of a step through the layers."""

    token_ids: NDArray[np.int32]
    positions: NDArray[np.int32]
    items: Integers
    runs: Integers
    tables: NDArray[np.int32]
    num_layers: int | None
    unread_rows: Integers
    unread_places: Integers
    num_latest: int
    """Tokens of the step before, which rank 0 sends from its device; 0: they are not needed."""

    @classmethod
    def of(
        cls, batch: StepBatch, num_layers: int | None, num_latest: int, block_size: int
    ) -> "Forward":
        """With no more of the block tables than the step reads."""
        runs, tables = batch.own_tables(block_size)
        return cls(
            batch.token_ids,
            batch.positions,
            batch.items,
            runs,
            tables,
            num_layers,
            batch.unread_rows,
            batch.unread_places,
            num_latest,
        )

    @property
    def batch(self) -> StepBatch:
        return StepBatch(
            token_ids=self.token_ids,
            positions=self.positions,
            items=self.items,
            runs=self.runs,
            tables=self.tables,
            wanted=np.zeros(0, dtype=np.int64),
            num_sampled=0,
            unread_rows=self.unread_rows,
            unread_places=self.unread_places,
        )


@dataclass(frozen=True, slots=True)
class Logits:
    """Of rows of the latest forward pass."""

    wanted: Integers


@dataclass(frozen=True, slots=True)
class Clear:
    kind: PageKind
    pages: Integers


@dataclass(frozen=True, slots=True)
class Copy:
    pairs: Integers


@dataclass(frozen=True, slots=True)
class Tag:
    kind: PageKind
    pages: Integers
    tags: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Land:
    """Answered with what is refused."""

    kind: PageKind
    slots: Integers
    pages: Integers
    tags: NDArray[np.uint8]
    heads: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Convert:
    """As `Land`, of pages of another codec; `places` [pages, 2] are the pages and the numbers of
    their blocks.
    """

    kind: PageKind
    codec: str
    slots: Integers
    places: Integers
    tags: NDArray[np.uint8]
    heads: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Erase:
    pass


@dataclass(frozen=True, slots=True)
class Settle:
    """Answered when pages are complete."""


Command = Forward | Logits | Clear | Copy | Tag | Land | Convert | Erase | Settle
_COMMANDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (Forward, Logits, Clear, Copy, Tag, Land, Convert, Erase, Settle)
}


def pack_command(command: Command) -> bytes:
    values = [getattr(command, field.name) for field in fields(command)]
    return pack([type(command).__name__, *values])


def unpack_command(data: bytes) -> Command:
    name, *values = unpack(data)
    kind = _COMMANDS[name]
    if fields(kind) and fields(kind)[0].type is PageKind:
        values[0] = PageKind(values[0])
    command: Command = kind(*values)
    return command


def pack(value: Any) -> bytes:
    packed: bytes = msgpack.packb(value, default=_array)
    return packed


def unpack(data: bytes) -> Any:
    return msgpack.unpackb(data, ext_hook=_of_bytes, use_list=False)


def _array(value: Any) -> msgpack.ExtType:
    assert isinstance(value, np.ndarray), f"{type(value)} is nothing to send"
    head = msgpack.packb([value.dtype.str, value.shape])
    return msgpack.ExtType(ARRAY, head + np.ascontiguousarray(value).tobytes())


def _of_bytes(code: int, data: bytes) -> NDArray[Any]:
    assert code == ARRAY
    unpacker = msgpack.Unpacker(use_list=False)
    unpacker.feed(data)
    dtype, shape = unpacker.unpack()
    array = np.frombuffer(data, dtype=dtype, offset=unpacker.tell())
    return array.reshape(shape).copy()  # kernels are compiled for arrays that may be written
