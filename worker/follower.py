"""The process of a rank other than 0:

    python -m worker.follower CONNECTION BOARD TRANSFERS PARENT

It loads its part of the model, then does what rank 0 tells it (engine/ranks). Rank 0 starts it; the
numbers are those of descriptors that it inherits, and of rank 0's process.
"""

import ctypes
import logging
import os
import signal
import socket
import sys
from multiprocessing.connection import Connection

from common.errors import TandemError
from engine.load import load_follower
from engine.ranks.board import Board, Shared
from engine.ranks.group import RankMemory, RankStart, failure, readiness
from engine.ranks.rank import follow

log = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> int:
    connection_number, board_number, transfers_number, parent = map(int, arguments)
    die_with(parent)
    for number in (signal.SIGINT, signal.SIGTERM):  # rank 0 says when it is over
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    connection = Connection(connection_number)
    start = RankStart.unpack(connection.recv_bytes())
    board = Board(start.sizes, board_number)
    transfers = socket.socket(fileno=transfers_number)
    try:
        rank = load_follower(start.config, start.rank, Shared(board=board, store=start.store))
    except Exception as error:
        connection.send_bytes(failure(error))
        if not isinstance(error, TandemError):
            log.exception("rank %d cannot start", start.rank)
        return 2
    connection.send_bytes(readiness(RankMemory.of(rank.weight_bytes, rank.pages)))
    try:
        with transfers:
            follow(connection, rank)
    except Exception:
        log.exception("rank %d has failed: so has its worker", start.rank)
        board.lose()
        return 1
    return 0


def die_with(parent: int) -> None:
    """The kernel kills this process when rank 0 dies, even if it is stopped."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))  # noqa: TID251 - not options: rank 0's own words
