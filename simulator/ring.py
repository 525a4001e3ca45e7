"""How long the ranks of a worker take to exchange numbers, over the links between their GPUs."""

from dataclasses import dataclass
from typing import Final

COLLECTIVE_S: Final = 6.6e-6
"""Of any exchange, however small. This and the next one are what NCCL assumes of a ring with its
low-latency protocol (src/graph/tuning.cc: its base latency, and that of NVLink) when it chooses how
to reduce.
"""
RING_STEP_S: Final = 0.6e-6
"""Of handing a part on to the next rank."""
ELEMENT_BYTES: Final = 2.0
"""Of a number that is exchanged: bf16, whatever the weights are kept in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """`bandwidth` from one rank to the next, in bytes a second. One rank exchanges nothing."""

    num_ranks: int
    bandwidth: float

    @property
    def num_steps(self) -> int:
        """Of an all-reduce: n - 1 that sum and n - 1 that hand the sums on."""
        return 2 * (self.num_ranks - 1)

    @property
    def reduced_element_s(self) -> float:
        """In each step an n-th of the bytes."""
        return self.num_steps / self.num_ranks * ELEMENT_BYTES / self.bandwidth

    @property
    def gathered_element_s(self) -> float:
        """Rank 0 has an n-th of them already; all others come over its own link."""
        return (self.num_ranks - 1) / self.num_ranks * ELEMENT_BYTES / self.bandwidth

    def all_reduce_s(self, num_elements: int) -> float:
        """2 (n - 1) latencies and 2 (n - 1) / n times the bytes (Thakur, Rabenseifner, Gropp:
        Optimization of Collective Communication Operations in MPICH, 2005).
        """
        return self._call_s + self.num_steps * RING_STEP_S + num_elements * self.reduced_element_s

    def gather_s(self, num_elements: int) -> float:
        """Of so many elements at rank 0."""
        return self._call_s + num_elements * self.gathered_element_s

    @property
    def _call_s(self) -> float:
        return COLLECTIVE_S if self.num_ranks > 1 else 0.0
