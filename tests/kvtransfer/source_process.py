"""A pool in a process of its own, for tests of reads across processes: prints its LinkReply, then
waits to be killed.
"""

import asyncio
import sys
from types import SimpleNamespace

import torch

from common.handoff_messages import LinkReply
from common.wire import encode
from kvtransfer.nixl_transport import NixlTransport

PACKED_BYTES, EXACT_BYTES = 4096, 8192
NUM_PACKED, NUM_EXACT = 64, 16


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


def reply_of(transport: NixlTransport, incarnation: str) -> LinkReply:
    address = transport.describe()
    return LinkReply(
        incarnation=incarnation,
        numeric_incarnation=1,
        layout="",
        layout_fingerprint=b"",
        agent_name=address.agent_name,
        agent_metadata=address.agent_metadata,
        pages=address.pages,
    )


async def main(incarnation: str) -> None:
    transport = NixlTransport(incarnation, filled_pool(), arena(0, 0))
    await transport.open()
    sys.stdout.buffer.write(encode(reply_of(transport, incarnation)).hex().encode() + b"\n")
    sys.stdout.buffer.flush()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
