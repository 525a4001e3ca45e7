"""The process of a rank other than 0:

    python -m worker.follower CONNECTION BOARD TRANSFERS PARENT

It loads its part of the model, then does what rank 0 tells it (engine/ranks). Rank 0 starts it; the
numbers are those of descriptors that it inherits, and of rank 0's process.
"""

import asyncio
import ctypes
import logging
import os
import signal
import socket
import sys
import threading
from multiprocessing.connection import Connection

from common.errors import TandemError
from common.ranks import ownership
from engine.load import load_follower
from engine.ranks.board import Board, Shared
from engine.ranks.group import RankMemory, RankStart, failure, readiness
from engine.ranks.rank import Rank, follow

log = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1
CLOSE_S = 2.0
"""For reads to end, and memory to be released, when it is over."""


def main(arguments: list[str]) -> int:
    connection_number, board_number, transfers_number, parent = map(int, arguments)
    die_with(parent)
    for number in (signal.SIGINT, signal.SIGTERM):  # rank 0 says when it is over
        signal.signal(number, signal.SIG_IGN)
    connection = Connection(connection_number)
    start = RankStart.unpack(connection.recv_bytes())
    logging.basicConfig(
        level=start.log_level,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    board = Board(start.sizes, board_number)
    transfers = socket.socket(fileno=transfers_number)
    try:
        rank = load_follower(start.config, start.rank, Shared(board=board, store=start.store))
    except Exception as error:
        connection.send_bytes(failure(error))
        if not isinstance(error, TandemError):
            log.exception("rank %d cannot start", start.rank)
        return 2
    serving = None
    if start.has_transfers:
        asked = (transfers, start, rank)
        serving = threading.Thread(target=serve, args=asked, name="transfers", daemon=True)
        serving.start()
    connection.send_bytes(readiness(RankMemory.of(rank.weight_bytes, rank.pages)))
    try:
        follow(connection, rank)
    except Exception:
        log.exception("rank %d has failed: so has its worker", start.rank)
        board.lose()
        return 1
    if serving is not None:
        serving.join(CLOSE_S)
    return 0


def serve(end: socket.socket, start: RankStart, rank: Rank) -> None:
    """Until rank 0 closes the socket. Its end tells rank 0 that this rank is lost."""
    from kvtransfer.group import serve_transfers
    from kvtransfer.nixl_transport import NixlTransport  # not beside a colocated worker

    config = start.config
    held = ownership(config.shares(config.load_model()))
    name = f"{config.incarnation:016x}-{start.rank}"
    pages = rank.pages
    transport = NixlTransport(
        name, pages.pool, pages.landing, held, start.rank, landing_of=pages.landings.of
    )
    try:
        asyncio.run(serve_transfers(end, transport))
    except Exception as error:
        expected = isinstance(error, TandemError)
        log.error("rank %d: %s", start.rank, error, exc_info=None if expected else error)


def die_with(parent: int) -> None:
    """The kernel kills this process when rank 0 dies, even if it is stopped."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))  # noqa: TID251 - not options: rank 0's own words
