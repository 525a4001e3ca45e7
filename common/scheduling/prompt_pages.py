"""The page contract of a hand-off: which pages a prompt has, and what each must hold.

    prompt_pages(table, hashes, first, end) -> [PromptPage]

Both sides ask here: a prefill worker for the pages that a chunk finishes, a decode worker for those
that it must be sent. So they cannot disagree about which block is exact, where the open one lies,
or what its name is. (Where KV lives: common/scheduling/plan.py.)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from common.pages import PageKind
from common.scheduling.block_hash import HashChain
from common.scheduling.kv_cache import BlockTable
from common.types import BlockId


class PromptPage(NamedTuple):
    """The page of a prompt's `block`-th block: where it lies in the pool of whoever asked, and what
    it holds. (A tuple: a step makes one for each page that it finishes.)
    """

    block: int
    kind: PageKind
    block_id: BlockId
    content_hash: bytes
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptNames:
    """Names of a prompt's blocks. `open` is that of the partly filled last one; None: it is full.

    `full` may grow behind the prompt's blocks (with those of its answer).
    """

    num_tokens: int
    block_size: int
    full: Sequence[bytes]
    open: bytes | None

    @staticmethod
    def of(chain: HashChain, num_tokens: int, block_size: int) -> "PromptNames":
        """`chain` covers the prompt, no more."""
        return PromptNames(
            num_tokens=num_tokens, block_size=block_size, full=chain.full, open=chain.open
        )

    @property
    def num_full(self) -> int:
        return self.num_tokens // self.block_size

    @property
    def num_blocks(self) -> int:
        return self.num_full + (self.open is not None)

    def finished_by(self, end: int) -> int:
        """How many leading blocks have all their tokens when the first `end` tokens are computed:
        the open one only at the prompt's end.
        """
        return self.num_blocks if end == self.num_tokens else end // self.block_size


def prompt_pages(
    table: BlockTable, names: PromptNames, first_block: int, end_block: int
) -> list[PromptPage]:
    """Of blocks `first_block` to `end_block` - 1; `table` has their pages."""
    size, num_full = names.block_size, names.num_full
    last, packed = min(end_block, num_full), PageKind.PACKED
    block_ids, full = table.block_ids, names.full
    pages = [
        PromptPage(block, packed, block_ids[block], full[block], size)
        for block in range(max(1, first_block), last)
    ]
    if first_block == 0 < last:
        pages.insert(0, PromptPage(0, PageKind.EXACT, block_ids[0], full[0], size))
    if first_block <= num_full < end_block:
        pages.append(_open_page(table, names))
    return pages


def _open_page(table: BlockTable, names: PromptNames) -> PromptPage:
    index, block_id = names.num_full, table.tail if names.num_full else table.block_ids[0]
    assert block_id is not None
    assert names.open is not None
    num_tokens = names.num_tokens - index * names.block_size
    return PromptPage(index, PageKind.EXACT, block_id, names.open, num_tokens)
