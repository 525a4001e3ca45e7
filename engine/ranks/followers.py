"""Rank 0's side of what it tells its followers, and asks them."""

from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from common.errors import InternalError
from engine.ranks.commands import Command, pack_command, unpack


class RankLost(InternalError):
    """A rank has failed, or its process is gone: so is the worker."""


class Asked:
    """Answers that are on their way."""

    def __init__(self, followers: "Sequence[Connection]") -> None:
        self._connections = followers

    def answers(self) -> list[Any]:
        """Of each follower, in the order of ranks. Waits. Raises RankLost."""
        return [received(connection, rank + 1) for rank, connection in enumerate(self._connections)]


class Followers:
    """Of a worker of one rank there are none, and everything is done at once."""

    def __init__(
        self, connections: "Sequence[Connection]", is_lost: Callable[[], bool] = lambda: False
    ) -> None:
        self._connections = connections
        self._is_lost = is_lost

    def __len__(self) -> int:
        return len(self._connections)

    def tell(self, command: Command) -> None:
        """Raises RankLost."""
        if self._connections:
            self._send(pack_command(command))

    def ask(self, command: Command) -> Asked:
        self.tell(command)
        return Asked(self._connections)

    def check(self) -> None:
        """After a step: raises RankLost where it means nothing."""
        if self._is_lost():
            raise RankLost("a rank of this worker has failed; its own log says why")

    def _send(self, data: bytes) -> None:
        for number, connection in enumerate(self._connections):
            try:
                connection.send_bytes(data)
            except OSError as error:
                raise RankLost(f"rank {number + 1} is gone: {error}") from error


def received(connection: "Connection", rank: int) -> Any:
    """Raises RankLost."""
    try:
        return unpack(connection.recv_bytes())
    except (EOFError, OSError) as error:
        raise RankLost(f"rank {rank} is gone") from error


ALONE = Followers(())
