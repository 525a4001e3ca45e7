"""A pool in a process of its own, for tests of reads across processes: prints its LinkReply, then
waits to be killed.

    python -m tests.kvtransfer.source_process NAME                      a worker of one rank
    python -m tests.kvtransfer.source_process NAME RANK RANKS HEADS     one rank of several
"""

import asyncio
import sys
from types import SimpleNamespace

import torch

from common.wire import encode
from kvtransfer.nixl_transport import NixlTransport
from tests.kvtransfer.rank_pools import NUM_SLOTS, held_by, pool_of, reply_of
from tests.kvtransfer.rank_pools import arena as arena_of

PACKED_BYTES, EXACT_BYTES = 4096, 8192
NUM_PACKED, NUM_EXACT = 64, 16
HELD = ((0, 1),)


def arena(num_packed: int, num_exact: int) -> SimpleNamespace:
    return SimpleNamespace(
        packed=torch.zeros(num_packed, PACKED_BYTES, dtype=torch.uint8),
        exact=torch.zeros(num_exact, EXACT_BYTES, dtype=torch.uint8),
    )


def filled_pool() -> SimpleNamespace:
    """Packed page i holds bytes i, exact page i holds bytes 100 + i."""
    pool = arena(NUM_PACKED, NUM_EXACT)
    pool.packed += torch.arange(NUM_PACKED, dtype=torch.uint8)[:, None]
    pool.exact += 100 + torch.arange(NUM_EXACT, dtype=torch.uint8)[:, None]
    return pool


def transport_of(name: str, numbers: list[int]) -> NixlTransport:
    if not numbers:
        return NixlTransport(name, filled_pool(), arena(0, 0), HELD)
    rank, num_ranks, num_heads = numbers
    held = held_by(num_ranks, num_heads)
    landing = arena_of(held[rank], dict.fromkeys(NUM_SLOTS, 0))
    return NixlTransport(name, pool_of(held[rank], rank), landing, held, rank)


async def main(name: str, *numbers: str) -> None:
    transport = transport_of(name, list(map(int, numbers)))
    await transport.open()
    reply = reply_of(name, transport.describe())
    sys.stdout.buffer.write(encode(reply).hex().encode() + b"\n")
    sys.stdout.buffer.flush()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
