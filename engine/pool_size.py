"""How many pages a worker's KV memory is divided into. No torch here: the engine allocates what
this decides, and the capacity planner asks the same.
"""

from dataclasses import dataclass

from common.pages import PageLayout

PULLS_AT_ONCE = 4
"""The landing zone holds two chunks for each of them."""
ACTIVATION_SHARE = 0.08
"""Of a GPU's memory: margin for activations and graph capture."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSize:
    num_packed: int
    num_exact: int

    def num_bytes(self, layout: PageLayout) -> int:
        return self.num_packed * layout.packed_page_bytes + self.num_exact * layout.exact_page_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolShare:
    """A pool as large as memory allows, on a GPU of which this worker may use `share`."""

    share: float
    max_num_seqs: int


NO_PAGES = PoolSize(num_packed=0, num_exact=0)


def pool_of(num_packed: int, max_num_seqs: int) -> PoolSize:
    """Two exact pages for each running output (block 0 and the open one), and some to cache."""
    num_exact = min(2 * max_num_seqs, 2 * num_packed) + num_packed // 16 + 2
    return PoolSize(num_packed=num_packed, num_exact=num_exact)


def pool_within(num_bytes: int, layout: PageLayout, max_num_seqs: int) -> PoolSize | None:
    """The largest pool in that many bytes; None when not even one page of each kind fits."""
    exact = (2 * max_num_seqs + 2) * layout.exact_page_bytes
    num_packed = (num_bytes - exact) // (layout.packed_page_bytes + layout.exact_page_bytes // 16)
    return pool_of(num_packed, max_num_seqs) if num_packed > 0 else None


def landing_of(chunk_tokens: int, block_size: int) -> PoolSize:
    return PoolSize(
        num_packed=2 * PULLS_AT_ONCE * -(-chunk_tokens // block_size),
        num_exact=4 * PULLS_AT_ONCE,
    )
