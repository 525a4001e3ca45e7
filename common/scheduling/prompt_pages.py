"""The page contract of a hand-off: which pages a prompt has, and what each must hold.

    prompt_pages(table, hashes, first, end) -> [PromptPage]

Both sides ask here: a prefill worker for the pages that a chunk finishes, a decode worker for those
that it must be sent. So they cannot disagree about which block is exact, where the open one lies,
or what its name is. (Where KV lives: common/scheduling/plan.py.)
"""

from collections.abc import Sequence
from dataclasses import dataclass

from common.pages import PageKind
from common.scheduling.block_hash import HashChain
from common.scheduling.kv_cache import BlockTable
from common.types import BlockId


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPage:
    """The page of block `index`: where it lies in the pool of whoever asked, and what it holds."""

    index: int
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
    return [
        PromptPage(
            index=index,
            kind=PageKind.PACKED if 0 < index < num_full else PageKind.EXACT,
            block_id=_block_id(table, index, is_open=index == num_full),
            content_hash=names.full[index] if index < num_full else _open(names),
            num_tokens=min(size, names.num_tokens - index * size),
        )
        for index in range(first_block, end_block)
    ]


def _block_id(table: BlockTable, index: int, *, is_open: bool) -> BlockId:
    if index == 0 or not is_open:
        return table.block_ids[index]
    assert table.tail is not None
    return table.tail


def _open(names: PromptNames) -> bytes:
    assert names.open is not None
    return names.open
