"""The KV of requests as blocks: tables, tails, prefix sharing. Pure bookkeeping over two pools.

Block 0 of a request is an exact page, every later full block a packed page, the open block (from
block 1 on) the request's tail, an exact page (common/scheduling/plan.py). Only full blocks are
named and shared. A request that needs more pages gets all of them or none.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from common.messages import PoolLoad
from common.pages import PageKind
from common.scheduling.block_pool import BlockPool
from common.scheduling.cache_events import CacheFeed, CacheJournal
from common.types import BlockId


@dataclass(slots=True)
class BlockTable:
    """One request's pages. Owned by whoever asked for it; changed only by `KvCache`."""

    block_ids: list[BlockId] = field(default_factory=list)
    tail: BlockId | None = None
    num_named: int = 0
    """Leading full blocks whose content is in the prefix cache's index."""
    is_apart: bool = False
    """No more of its blocks come into the index: they hold other keys and values than this worker
    computes for such tokens.
    """

    def pages(self) -> Iterable[tuple[PageKind, BlockId]]:
        for index, block_id in enumerate(self.block_ids):
            yield (PageKind.PACKED if index else PageKind.EXACT), block_id
        if self.tail is not None:
            yield PageKind.EXACT, self.tail


class KvCache:
    def __init__(self, *, num_packed: int, num_exact: int, block_size: int) -> None:
        self.block_size = block_size
        self._journal = CacheJournal()
        self._pools = {
            PageKind.PACKED: BlockPool(num_packed, self._journal),
            PageKind.EXACT: BlockPool(num_exact, self._journal),
        }
        self._clears: list[tuple[PageKind, BlockId]] = []

    @property
    def load(self) -> PoolLoad:
        pools = self._pools.values()
        return PoolLoad(
            total=sum(pool.num_blocks for pool in pools),
            free=sum(pool.num_free for pool in pools),
            cached=sum(pool.num_cached for pool in pools),
            held=sum(pool.num_held for pool in pools),
            num_packed=self._pools[PageKind.PACKED].num_blocks,
            num_exact=self._pools[PageKind.EXACT].num_blocks,
        )

    def feed(self) -> CacheFeed:
        """The names of all shareable blocks, from now on, for one more reader."""
        return CacheFeed(self._journal, self.named_hashes)

    def named_hashes(self) -> list[bytes]:
        """A full block's hash says where in a prompt it is, so no hash is in both pools."""
        return [content_hash for pool in self._pools.values() for content_hash in pool.hashes]

    def generation(self, kind: PageKind, block_id: BlockId) -> int:
        return self._pools[kind].generation(block_id)

    def pages_for(self, num_tokens: int) -> Counter[PageKind]:
        """Pages that an unshared request of that many tokens holds."""
        num_blocks = -(-num_tokens // self.block_size)
        has_tail = num_blocks > 1 and num_tokens % self.block_size != 0
        return Counter(
            {PageKind.PACKED: max(0, num_blocks - 1), PageKind.EXACT: min(1, num_blocks) + has_tail}
        )

    @property
    def max_tokens(self) -> int:
        """Longest request that the idle pools can hold."""
        exact = self._pools[PageKind.EXACT].num_blocks
        packed = self._pools[PageKind.PACKED].num_blocks
        if exact < 2:
            return self.block_size * exact
        return (packed + 1) * self.block_size

    def fits(self, pages: Counter[PageKind]) -> bool:
        """Whether the idle pools have that many pages."""
        return all(self._pools[kind].num_blocks >= count for kind, count in pages.items())

    def can_allocate(self, pages: Counter[PageKind]) -> bool:
        return all(self._pools[kind].num_available >= count for kind, count in pages.items())

    def find_prefix(self, hashes: Sequence[bytes]) -> int:
        """Leading blocks of `hashes` that are held or cached."""
        for index, content_hash in enumerate(hashes):
            if self._pool(index).find(content_hash) is None:
                return index
        return len(hashes)

    def start(
        self, hashes: Sequence[bytes], num_tokens: int, spare: Counter[PageKind]
    ) -> BlockTable | None:
        """A table for `num_tokens` tokens that shares the cached prefix among `hashes`.

        Afterwards `spare` pages can still be allocated. None when that is not possible now; then
        nothing changed.
        """
        table = BlockTable()
        for index in range(self.find_prefix(hashes)):
            block_id = self._pool(index).take(hashes[index])
            assert block_id is not None
            table.block_ids.append(block_id)
        table.num_named = len(table.block_ids)
        if not self.can_allocate(self._missing(table, num_tokens) + spare):
            self.free(table)
            return None
        grown = self.grow(table, num_tokens)
        assert grown
        return table

    def grow(self, table: BlockTable, num_tokens: int) -> bool:
        """Makes room for `num_tokens` tokens in all. False, and nothing changed, when there are not
        enough pages.
        """
        num_new = -(-num_tokens // self.block_size) - len(table.block_ids)
        needs_tail = self._needs_tail(table, num_tokens)
        num_first = int(num_new > 0 and not table.block_ids)
        packed, exact = self._pools[PageKind.PACKED], self._pools[PageKind.EXACT]
        if (
            packed.num_available < num_new - num_first
            or exact.num_available < num_first + needs_tail
        ):
            return False
        for _ in range(num_new):
            kind = PageKind.PACKED if table.block_ids else PageKind.EXACT
            table.block_ids.append(self._allocate(kind))
        if needs_tail:
            table.tail = self._allocate(PageKind.EXACT)
        return True

    def fork(
        self, table: BlockTable, num_tokens: int
    ) -> tuple[BlockTable, tuple[BlockId, BlockId] | None] | None:
        """A second table over the same `num_tokens` tokens: full blocks shared, the open block its
        own.

        Returns it with the (source, destination) exact page to copy; None when there is no page for
        that.
        """
        is_open = num_tokens % self.block_size != 0
        if is_open and not self.can_allocate(Counter({PageKind.EXACT: 1, PageKind.PACKED: 1})):
            return None
        num_full = num_tokens // self.block_size
        other = BlockTable(num_named=min(table.num_named, num_full), is_apart=table.is_apart)
        for index in range(num_full):
            self._pool(index).hold(table.block_ids[index])
            other.block_ids.append(table.block_ids[index])
        if not is_open:
            return other, None
        if num_full == 0:
            other.block_ids.append(self._allocate(PageKind.EXACT))
            return other, (table.block_ids[0], other.block_ids[0])
        other.block_ids.append(self._allocate(PageKind.PACKED))
        other.tail = self._allocate(PageKind.EXACT)
        assert table.tail is not None
        return other, (table.tail, other.tail)

    def name(self, table: BlockTable, hashes: Sequence[bytes], num_full: int) -> None:
        """The first `num_full` blocks are complete; others may share them from now on, unless the
        table is apart.
        """
        if table.is_apart:
            return
        for index in range(table.num_named, num_full):
            self._pool(index).name(table.block_ids[index], hashes[index])
        table.num_named = max(table.num_named, num_full)

    def hold(self, pages: Iterable[tuple[PageKind, BlockId]]) -> None:
        for kind, block_id in pages:
            self._pools[kind].hold(block_id)

    def release(self, pages: Iterable[tuple[PageKind, BlockId]]) -> None:
        for kind, block_id in pages:
            self._pools[kind].release(block_id)

    def free(self, table: BlockTable) -> None:
        """Gives every page back; last blocks first, so that the prefix stays cached longest."""
        self.release(reversed(list(table.pages())))
        table.block_ids.clear()
        table.tail = None
        table.num_named = 0
        table.is_apart = False

    def drain_clears(self) -> tuple[tuple[PageKind, BlockId], ...]:
        """Pages allocated since the last call: their old tags must be erased before they are
        written.
        """
        clears = tuple(self._clears)
        self._clears.clear()
        return clears

    def check_invariants(
        self, holders: Iterable[Iterable[tuple[PageKind, BlockId]]] | None = None
    ) -> None:
        """`holders` yields, for everything that names pages, the pages it names."""
        if holders is None:
            for pool in self._pools.values():
                pool.check_invariants()
            return
        counts = Counter(page for pages in holders for page in pages)
        for kind, pool in self._pools.items():
            pool.check_invariants({block_id: n for (k, block_id), n in counts.items() if k is kind})

    def _pool(self, index: int) -> BlockPool:
        return self._pools[PageKind.PACKED if index else PageKind.EXACT]

    def _missing(self, table: BlockTable, num_tokens: int) -> Counter[PageKind]:
        num_blocks = -(-num_tokens // self.block_size)
        new = range(len(table.block_ids), num_blocks)
        return Counter(
            {
                PageKind.PACKED: sum(1 for index in new if index > 0),
                PageKind.EXACT: sum(1 for index in new if index == 0)
                + self._needs_tail(table, num_tokens),
            }
        )

    def _needs_tail(self, table: BlockTable, num_tokens: int) -> bool:
        return (
            table.tail is None
            and num_tokens > self.block_size
            and num_tokens % self.block_size != 0
        )

    def _allocate(self, kind: PageKind) -> BlockId:
        block_id = self._pools[kind].allocate()
        assert block_id is not None
        self._clears.append((kind, block_id))
        return block_id
