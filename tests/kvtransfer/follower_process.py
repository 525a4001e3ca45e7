"""A follower of a decode worker in a process of its own: serves its transfers on the socket whose
number it is given, and prints at the end what has landed, as hex.

    python -m tests.kvtransfer.follower_process NAME SOCKET RANK RANKS HEADS
"""

import asyncio
import socket
import sys

from common.pages import PageKind
from kvtransfer.group import serve_transfers
from kvtransfer.nixl_transport import NixlTransport
from tests.kvtransfer.rank_pools import NUM_SLOTS, arena, found_in, held_by, pool_of


def main(name: str, *arguments: str) -> None:
    number, rank, num_ranks, num_heads = map(int, arguments)
    held = held_by(num_ranks, num_heads)
    landing = arena(held[rank], NUM_SLOTS)
    transport = NixlTransport(name, pool_of(held[rank], rank), landing, held, rank)
    asyncio.run(serve_transfers(socket.socket(fileno=number), transport))
    for slot in range(NUM_SLOTS[PageKind.PACKED]):
        for place in range(len(held[rank])):
            sys.stdout.write(found_in(landing, PageKind.PACKED, slot, place).hex() + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
