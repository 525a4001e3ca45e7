"""One rank of a worker: its backend and its pages, and how a follower does what it is told."""

from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.backend import Backend, Converter
from engine.batch import StepBatch
from engine.rank_pages import RankPages
from engine.ranks.collective import Collective
from engine.ranks.commands import (
    Clear,
    Command,
    Convert,
    Copy,
    Erase,
    Forward,
    Land,
    Logits,
    Settle,
    Tag,
    pack,
    unpack_command,
)
from engine.ranks.followers import Followers


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    backend: Backend
    pages: RankPages
    weight_bytes: int
    ranks: Collective
    """On GPUs; on CPUs there is nothing to be done together but the steps."""

    def do(self, command: Command) -> Any:
        """The answer, where one is waited for."""
        backend, pages = self.backend, self.pages
        match command:
            case Forward(num_latest=num_latest):
                latest = None
                if num_latest:
                    device = pages.pool.packed.device
                    latest = torch.empty(num_latest, dtype=torch.int64, device=device)
                    latest = self.ranks.of_first(latest)
                backend.forward(command.batch, command.num_layers, latest)
            case Logits(wanted):
                backend.logits(wanted)
            case Clear(kind, numbers):
                pages.clear_tags(kind, numbers)
            case Copy(pairs):
                pages.copy_exact(pairs)
            case Tag(kind, numbers, tags):
                pages.tag(kind, numbers, tags, backend)
            case Land(kind, slots, numbers, tags, heads):
                return pages.land(kind, slots, numbers, tags, heads, backend)
            case Convert(kind, codec, slots, places, tags, heads):
                return pages.convert(kind, codec, slots, places, tags, heads, backend)
            case Erase():
                pages.erase()
            case Settle():
                pages.settle()
                return True
        return None


def follow(connection: "Connection", rank: Rank) -> None:
    """Does what rank 0 tells it, until rank 0 ends the connection."""
    while True:
        try:
            data = connection.recv_bytes()
        except (EOFError, OSError):
            return
        answer = rank.do(unpack_command(data))
        if answer is not None:
            connection.send_bytes(pack(answer))


class GroupBackend:
    """The backend of all ranks, as rank 0 sees it."""

    def __init__(self, rank: Rank, followers: Followers, block_size: int) -> None:
        self._own = rank.backend
        self._ranks = rank.ranks
        self._followers = followers
        self._block_size = block_size

    @property
    def is_batch_invariant(self) -> bool:
        return self._own.is_batch_invariant

    def forward(
        self, batch: StepBatch, num_layers: int | None = None, latest: Tensor | None = None
    ) -> None:
        num_latest = 0 if latest is None or not len(batch.unread_rows) else len(latest)
        self._followers.tell(Forward.of(batch, num_layers, num_latest, self._block_size))
        if num_latest and latest is not None:
            latest = self._ranks.of_first(latest)
        self._own.forward(batch, num_layers, latest)
        self._followers.check()

    def logits(self, wanted: NDArray[np.int64]) -> Tensor:
        self._followers.tell(Logits(wanted))
        logits = self._own.logits(wanted)
        self._followers.check()
        return logits

    def checksums(self, pages: Tensor, which: Tensor) -> Tensor:
        return self._own.checksums(pages, which)

    @property
    def converter(self) -> Converter | None:
        return self._own.converter

    def land(
        self,
        source: Tensor,
        target: Tensor,
        slots: NDArray[np.int64],
        block_ids: NDArray[np.int64],
        tags: NDArray[np.uint8],
    ) -> tuple[NDArray[np.bool_], NDArray[np.uint64]]:
        return self._own.land(source, target, slots, block_ids, tags)
