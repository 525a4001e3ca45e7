"""The followers of a worker: child processes that rank 0 starts, tells what to do, and dies with.

    with RankGroup(config, program) as group:      # they load while rank 0 loads
        runner = load_runner(config, shared=group.shared, followers=group.followers)
        group.wait_ready()
        group.when_lost(on_lost)

One rank's end is the worker's end. A follower goes when the connection to rank 0 ends, and the
kernel kills it when rank 0 dies.
"""

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import TracebackType
from typing import Self

from common.environment import child_environment, visible_gpus
from common.errors import ConfigError, InternalError, TandemError, UnsupportedModel
from common.model_config import ModelConfig
from engine.config import EngineConfig
from engine.padding import PANEL, padded
from engine.rank_pages import RankPages
from engine.ranks.board import Board, BoardSizes, Shared
from engine.ranks.commands import pack, unpack
from engine.ranks.followers import Followers, RankLost, received
from engine.self_test import LONG

STOP_S = 5.0
"""For a follower to end by itself when rank 0 has closed its connection."""
ERRORS: dict[str, type[TandemError]] = {
    kind.__name__: kind for kind in (ConfigError, UnsupportedModel, InternalError)
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStart:
    """What a follower is told first."""

    rank: int
    config: EngineConfig
    sizes: BoardSizes
    store: Path
    has_transfers: bool
    """Other workers read its pages, or it theirs."""
    log_level: int

    def pack(self) -> bytes:
        places = [asdict(self.sizes), str(self.store), self.has_transfers, self.log_level]
        return pack([self.rank, self.config.fields(), *places])

    @classmethod
    def unpack(cls, data: bytes) -> "RankStart":
        rank, fields, sizes, store, has_transfers, log_level = unpack(data)
        return cls(
            rank=rank,
            config=EngineConfig.of_fields(fields),
            sizes=BoardSizes(**sizes),
            store=Path(store),
            has_transfers=has_transfers,
            log_level=log_level,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes that one rank holds."""

    weights: int
    pages: int

    @classmethod
    def of(cls, weight_bytes: int, pages: RankPages) -> "RankMemory":
        return cls(weights=weight_bytes, pages=pages.pool.num_bytes + pages.landing.num_bytes)


@dataclass(slots=True)
class _Follower:
    process: "subprocess.Popen[bytes]"
    connection: "Connection"
    transfers: socket.socket


class RankGroup:
    def __init__(
        self, config: EngineConfig, program: Sequence[str], *, has_transfers: bool = False
    ) -> None:
        """`program` is a follower's command line, which gets the numbers of three descriptors: of
        the connection, the board, and a socket that its transfers are asked over.
        """
        model = config.load_model()
        config.shares(model)  # refused before anything is started
        self._config = config
        self._program = tuple(program)
        self._has_transfers = has_transfers
        self._folder = tempfile.TemporaryDirectory(prefix="tandem-ranks-")
        self.board = Board.create(board_sizes(config, model), num_threads=config.num_threads)
        self.shared = Shared(board=self.board, store=Path(self._folder.name) / "store")
        self._members: list[_Follower] = []
        self._is_closing = False
        self._lock = threading.Lock()
        self._lost: str | None = None
        self._on_lost: Callable[[str], None] = lambda reason: None

    def __enter__(self) -> Self:
        try:
            for rank in range(1, self._config.num_ranks):
                member = self._start(rank)
                self._members.append(member)
                arguments = (rank, member.process)
                threading.Thread(target=self._wait_for, args=arguments, daemon=True).start()
        except OSError as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """They end by themselves, or are killed."""
        self._is_closing = True
        if error is not None:
            self.board.lose()
        for member in self._members:
            member.connection.close()
            member.transfers.close()
        for member in self._members:
            try:
                member.process.wait(0 if error is not None else STOP_S)
            except subprocess.TimeoutExpired:
                member.process.kill()
                member.process.wait()
        self._folder.cleanup()
        os.close(self.board.descriptor)  # the memory stays for whoever still sees it

    @property
    def followers(self) -> Followers:
        return Followers(
            [member.connection for member in self._members], lambda: self.board.is_lost
        )

    @property
    def transfers(self) -> list[socket.socket]:
        """For each follower, rank 0's end."""
        return [member.transfers for member in self._members]

    @property
    def pids(self) -> list[int]:
        return [member.process.pid for member in self._members]

    def wait_ready(self) -> list[RankMemory]:
        """Raises what a follower could not start for, or RankLost."""
        return [self._report(rank + 1, member) for rank, member in enumerate(self._members)]

    def when_lost(self, on_lost: Callable[[str], None]) -> None:
        """`on_lost` is called with what happened when a follower ends before the group is closed:
        in a thread of its own, or at once if one has. Until then steps raise RankLost.
        """
        with self._lock:
            self._on_lost = on_lost
            lost = self._lost
        if lost is not None:
            on_lost(lost)

    def _start(self, rank: int) -> _Follower:
        ours, theirs = Pipe()
        transfers, their_transfers = socket.socketpair()
        with theirs, their_transfers:
            descriptors = (theirs.fileno(), self.board.descriptor, their_transfers.fileno())
            process = subprocess.Popen(
                [*self._program, *map(str, descriptors), str(os.getpid())],
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
                env=self._environment(rank),
            )
        start = RankStart(
            rank=rank,
            config=self._config,
            sizes=self.board.sizes,
            store=self.shared.store,
            has_transfers=self._has_transfers,
            log_level=logging.getLogger().getEffectiveLevel(),
        )
        with contextlib.suppress(OSError):  # it has ended already: `wait_ready` says how
            ours.send_bytes(start.pack())
        return _Follower(process, ours, transfers)

    def _environment(self, rank: int) -> dict[str, str]:
        """On GPUs every rank sees one device; rank 0 takes the first of its own."""
        environment = child_environment(self._config.num_threads)
        if self._config.device == "cuda":
            environment["CUDA_VISIBLE_DEVICES"] = visible_gpus()[rank]
        return environment

    def _report(self, rank: int, member: _Follower) -> RankMemory:
        try:
            report = received(member.connection, rank)
        except RankLost:
            how = ended(member.process.wait())
            raise RankLost(f"rank {rank} {how} while it started; its log says why") from None
        match report:
            case {"weights": weights, "pages": pages}:
                return RankMemory(weights=weights, pages=pages)
            case {"kind": kind, "message": message}:
                raise ERRORS.get(kind, InternalError)(f"rank {rank}: {message}")
        raise RankLost(f"rank {rank} reports {report!r}")

    def _wait_for(self, rank: int, process: "subprocess.Popen[bytes]") -> None:
        code = process.wait()
        if self._is_closing:
            return
        self.board.lose()
        with self._lock:
            reason = self._lost = self._lost or f"rank {rank} {ended(code)}"
            on_lost = self._on_lost
        on_lost(reason)


def board_sizes(config: EngineConfig, model: ModelConfig) -> BoardSizes:
    """The self-test's prompt is the largest step, or the scheduler's is."""
    return BoardSizes(
        num_ranks=config.num_ranks,
        num_rows=max(config.max_num_tokens, LONG),
        hidden=padded(model.hidden_size),
        vocab=-(-model.vocab_size // PANEL) * PANEL,
    )


def failure(error: BaseException) -> bytes:
    """What a follower reports that cannot start."""
    message = error.message if isinstance(error, TandemError) else repr(error)
    return pack({"kind": type(error).__name__, "message": message})


def readiness(memory: RankMemory) -> bytes:
    """What a follower reports when it has loaded."""
    return pack(asdict(memory))


def ended(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"


def follower_program(module: str) -> tuple[str, ...]:
    return (sys.executable, "-m", module)
