"""Blocks of one kind of page: who holds them, which are cached, which are free.

Life of a block: free -> held (count > 0) -> cached (count 0, content known by hash) or free again.
`allocate` takes a free block, else reclaims the cached block that was released longest ago. Every
allocation starts a new generation, so a name (block, generation) never means two contents. All
operations cost the same however large the pool is. What becomes findable by hash, and what does
not any more, is recorded in a journal (common/scheduling/cache_events.py).

The pool never looks at holders; whoever takes a reference gives it back. Used by `KvCache` alone.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping

from common.scheduling.cache_events import CacheJournal
from common.types import BlockId


class BlockPool:
    def __init__(self, num_blocks: int, journal: CacheJournal | None = None) -> None:
        self.num_blocks = num_blocks
        self._journal = CacheJournal() if journal is None else journal
        self._counts = [0] * num_blocks
        self._generations = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._free: deque[BlockId] = deque(range(num_blocks))
        self._cached: OrderedDict[BlockId, None] = OrderedDict()
        self._by_hash: dict[bytes, BlockId] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could hand out now."""
        return len(self._free) + len(self._cached)

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.num_available

    @property
    def hashes(self) -> Iterable[bytes]:
        """Contents that `find` would find."""
        return self._by_hash.keys()

    def generation(self, block_id: BlockId) -> int:
        return self._generations[block_id]

    def allocate(self) -> BlockId | None:
        """A block with one reference and no known content; None when all are held."""
        if self._free:
            block_id = self._free.popleft()
        elif self._cached:
            block_id, _ = self._cached.popitem(last=False)
            self._forget(block_id)
        else:
            return None
        self._counts[block_id] = 1
        self._generations[block_id] += 1
        return block_id

    def hold(self, block_id: BlockId) -> None:
        """One more reference to a held block."""
        assert self._counts[block_id] > 0, f"block {block_id} is not held"
        self._counts[block_id] += 1

    def find(self, content_hash: bytes) -> BlockId | None:
        """The block with this content, held or cached; takes no reference."""
        return self._by_hash.get(content_hash)

    def take(self, content_hash: bytes) -> BlockId | None:
        """The block with this content, with one more reference."""
        block_id = self._by_hash.get(content_hash)
        if block_id is None:
            return None
        if self._counts[block_id] == 0:
            del self._cached[block_id]
        self._counts[block_id] += 1
        return block_id

    def name(self, block_id: BlockId, content_hash: bytes) -> None:
        """A held block's content is complete. The first block with a content keeps the name."""
        assert self._counts[block_id] > 0, f"block {block_id} is not held"
        if self._hashes[block_id] is None and content_hash not in self._by_hash:
            self._hashes[block_id] = content_hash
            self._by_hash[content_hash] = block_id
            self._journal.stored(content_hash)

    def release(self, block_id: BlockId) -> None:
        assert self._counts[block_id] > 0, f"block {block_id} is not held"
        self._counts[block_id] -= 1
        if self._counts[block_id] == 0:
            if self._hashes[block_id] is None:
                self._free.append(block_id)
            else:
                self._cached[block_id] = None

    def _forget(self, block_id: BlockId) -> None:
        content_hash = self._hashes[block_id]
        assert content_hash is not None
        del self._by_hash[content_hash]
        self._hashes[block_id] = None
        self._journal.removed(content_hash)

    def check_invariants(self, holders: Mapping[BlockId, int] | None = None) -> None:
        """Raises AssertionError. `holders` maps each block to the number of holders that name
        it.
        """
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & cached
        for block_id, count in enumerate(self._counts):
            assert count >= 0
            assert (count == 0) == (block_id in free or block_id in cached), f"block {block_id}"
            assert (self._hashes[block_id] is not None) or block_id not in cached
            assert block_id not in free or self._hashes[block_id] is None
            if holders is not None:
                assert count == holders.get(block_id, 0), (
                    f"block {block_id}: {count} references, {holders.get(block_id, 0)} holders"
                )
        assert self._by_hash == {
            h: block_id for block_id, h in enumerate(self._hashes) if h is not None
        }, "index and blocks disagree"
