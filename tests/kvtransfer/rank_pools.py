"""Pools of workers of several ranks, for tests of who reads what from whom.

A record says what it is: head, kind, page, and the rank whose pool it lies in, over and over.
"""

import asyncio
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from common.handoff_messages import LinkReply, PoolAddress
from common.pages import PageKind
from common.ranks import Ownership, ownership, shares
from kvtransfer.group import GroupTransport, serve_transfers
from kvtransfer.transport import PageRead, Transport

RECORD_BYTES = {PageKind.PACKED: 64, PageKind.EXACT: 128}
NUM_PAGES = {PageKind.PACKED: 12, PageKind.EXACT: 5}
NUM_SLOTS = {PageKind.PACKED: 6, PageKind.EXACT: 3}
NOTHING = bytes(4)

MakeTransport = Callable[[str, Any, Any, Ownership, int], Transport]


def held_by(num_ranks: int, num_kv_heads: int) -> Ownership:
    return ownership(shares(num_ranks, num_kv_heads * num_ranks, num_kv_heads))


def record(kind: PageKind, page: int, head: int, rank: int) -> bytes:
    return bytes([100 + head, kind, page, rank])


def arena(heads: tuple[int, ...], num_pages: dict[PageKind, int]) -> SimpleNamespace:
    """Pages of zeros."""
    rows = {
        kind: torch.zeros(num_pages[kind], len(heads) * size, dtype=torch.uint8)
        for kind, size in RECORD_BYTES.items()
    }
    return SimpleNamespace(packed=rows[PageKind.PACKED], exact=rows[PageKind.EXACT])


def rows_of(pages: SimpleNamespace, kind: PageKind) -> Tensor:
    rows: Tensor = pages.packed if kind is PageKind.PACKED else pages.exact
    return rows


def pool_of(heads: tuple[int, ...], rank: int) -> SimpleNamespace:
    pool = arena(heads, NUM_PAGES)
    for kind in PageKind:
        rows = rows_of(pool, kind)
        for page in range(len(rows)):
            said = b"".join(
                record(kind, page, head, rank) * (RECORD_BYTES[kind] // 4) for head in heads
            )
            rows[page] = torch.frombuffer(bytearray(said), dtype=torch.uint8)
    return pool


def found_in(landing: SimpleNamespace, kind: PageKind, slot: int, place: int) -> bytes:
    """What the record there says, if it says the same all over."""
    size = RECORD_BYTES[kind]
    data: bytes = rows_of(landing, kind)[slot, place * size : (place + 1) * size].numpy().tobytes()
    assert data == data[:4] * (size // 4), f"torn: {data!r}"
    return data[:4]


def reply_of(incarnation: str, ranks: tuple[PoolAddress, ...]) -> LinkReply:
    return LinkReply(
        incarnation=incarnation,
        numeric_incarnation=1,
        layout="",
        layout_fingerprint=b"",
        agent_name="",
        agent_metadata=b"",
        pages=(),
        ranks=ranks,
    )


def packed(block_id: int, slot: int, *heads: int) -> PageRead:
    return PageRead(
        kind=PageKind.PACKED, block_id=block_id, slot=(PageKind.PACKED, slot), heads=heads
    )


def exact(block_id: int, slot: int, *heads: int) -> PageRead:
    return PageRead(
        kind=PageKind.EXACT, block_id=block_id, slot=(PageKind.EXACT, slot), heads=heads
    )


@dataclass(slots=True)
class RankedWorker:
    """A worker whose ranks' transports are all in this process."""

    incarnation: str
    held: Ownership
    transport: Transport
    landings: list[SimpleNamespace]
    serving: "list[asyncio.Task[None]]"
    lost: list[str] = field(default_factory=list)

    @property
    def reply(self) -> LinkReply:
        return reply_of(self.incarnation, self.transport.describe())

    def check(self, theirs: Ownership, read: Iterable[PageRead]) -> None:
        """The landing zones of all ranks hold exactly what these reads bring, each record from one
        of those who hold it.
        """
        wanted: dict[tuple[PageKind, int, int], int] = {}
        for page in read:
            for head in page.heads or {head for heads in self.held for head in heads}:
                wanted[(*page.slot, head)] = page.block_id
        for rank, heads in enumerate(self.held):
            for kind in PageKind:
                for slot in range(NUM_SLOTS[kind]):
                    for place, head in enumerate(heads):
                        found = found_in(self.landings[rank], kind, slot, place)
                        block_id = wanted.get((kind, slot, head))
                        if block_id is None:
                            assert found == NOTHING
                        else:
                            assert found[:3] == record(kind, block_id, head, 0)[:3]
                            assert head in theirs[found[3]]

    async def close(self) -> None:
        await self.transport.close()
        await asyncio.gather(*self.serving)


async def ranked(incarnation: str, held: Ownership, make: MakeTransport) -> RankedWorker:
    landings = [arena(heads, NUM_SLOTS) for heads in held]
    own, *others = (
        make(incarnation, pool_of(heads, rank), landings[rank], held, rank)
        for rank, heads in enumerate(held)
    )
    pairs = [socket.socketpair() for _ in others]
    lost: list[str] = []
    serving = [
        asyncio.ensure_future(serve_transfers(end, other))
        for (_, end), other in zip(pairs, others, strict=True)
    ]
    group = GroupTransport(own, [end for end, _ in pairs], lost.append) if others else own
    await group.open()
    return RankedWorker(incarnation, held, group, landings, serving, lost)
