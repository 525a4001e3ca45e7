"""What the ranks of a worker on GPUs do together, on the devices: sums, logits, tokens.

NCCL's calls can be captured in graphs, and wait for nothing on the host. The same over gloo, for
tests on CPUs. (Ranks on CPUs add up in the kernels instead: engine/ranks/board.py.)
"""

from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore

MEET_S = 600.0
"""For all ranks to get to their first meeting: others may still read weights."""


class Collective(Protocol):
    @property
    def rank(self) -> int: ...

    @property
    def num_ranks(self) -> int: ...

    def sum(self, part: Tensor) -> Tensor:
        """The sum of all ranks' parts; may be in the place of `part`."""
        ...

    def gather(self, part: Tensor) -> Tensor:
        """[rows, ranks * columns] of every rank's [rows, columns], in the order of ranks."""
        ...

    def of_first(self, tensor: Tensor) -> Tensor:
        """What rank 0 gives; the others give a tensor of the same kind."""
        ...

    def least(self, number: int) -> int:
        """Of all ranks' numbers. Waits."""
        ...


class Alone:
    rank, num_ranks = 0, 1

    def sum(self, part: Tensor) -> Tensor:
        return part

    def gather(self, part: Tensor) -> Tensor:
        return part

    def of_first(self, tensor: Tensor) -> Tensor:
        return tensor

    def least(self, number: int) -> int:
        return number


class TorchCollective:
    """A process group of torch.distributed."""

    def __init__(self, group: Any, device: torch.device, *, is_ordered: bool) -> None:
        """`is_ordered`: sums are made in the order of ranks, so that their bits do not depend on
        how many rows there are. NCCL's own choose an algorithm by size.
        """
        self._group = group
        self._device = device
        self._is_ordered = is_ordered
        self.rank = dist.get_rank(group)
        self.num_ranks = dist.get_world_size(group)

    @classmethod
    def join(
        cls, store: Path, rank: int, num_ranks: int, device: torch.device, *, is_ordered: bool
    ) -> "TorchCollective":
        """Waits for the other ranks. `store` is a file that all of them see, not there yet."""
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=FileStore(str(store), num_ranks),
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=MEET_S),
        )
        return cls(dist.group.WORLD, device, is_ordered=is_ordered)

    def sum(self, part: Tensor) -> Tensor:
        if not self._is_ordered:
            dist.all_reduce(part, group=self._group)
            return part
        parts = self._all(part)
        total = parts[0]
        for other in parts[1:]:
            total = total + other
        return total

    def gather(self, part: Tensor) -> Tensor:
        return self._all(part).transpose(0, 1).flatten(1)

    def of_first(self, tensor: Tensor) -> Tensor:
        dist.broadcast(tensor, src=0, group=self._group)
        return tensor

    def least(self, number: int) -> int:
        found = torch.tensor([number], dtype=torch.int64, device=self._device)
        dist.all_reduce(found, op=dist.ReduceOp.MIN, group=self._group)
        return int(found.item())

    def _all(self, part: Tensor) -> Tensor:
        """[ranks, *shape]"""
        part = part.contiguous()
        parts = part.new_empty((self.num_ranks, *part.shape))
        dist.all_gather_into_tensor(parts.flatten(0, 1), part, group=self._group)
        return parts
