"""The block pool against a naive model, over thousands of random schedules (B83, B95, B96,
B142).
"""

import time
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from common.scheduling.block_hash import HashChain, root_hash
from common.scheduling.block_pool import BlockPool


class PoolMachine(RuleBasedStateMachine):
    """The model: what each holder holds, and which content each block was last given."""

    @initialize(num_blocks=st.integers(1, 12))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.held: list[int] = []
        self.content: dict[int, bytes] = {}
        self.seen: set[tuple[int, int]] = set()

    @rule()
    def allocate(self) -> None:
        available = self.pool.num_available
        block_id = self.pool.allocate()
        assert (block_id is None) == (available == 0)
        if block_id is not None:
            assert block_id not in self.held
            name = (block_id, self.pool.generation(block_id))
            assert name not in self.seen, "a name never means two contents"
            self.seen.add(name)
            self.content.pop(block_id, None)
            self.held.append(block_id)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), content=st.integers(0, 9))
    def name(self, data: st.DataObject, content: int) -> None:
        block_id = data.draw(st.sampled_from(self.held))
        content_hash = bytes([content]) * 16
        if block_id not in self.content and content_hash not in self.content.values():
            self.content[block_id] = content_hash
        self.pool.name(block_id, content_hash)

    @rule(content=st.integers(0, 9))
    def take(self, content: int) -> None:
        content_hash = bytes([content]) * 16
        expected = [b for b, h in self.content.items() if h == content_hash]
        block_id = self.pool.take(content_hash)
        if block_id is None:
            # only a block that nobody holds may have been given to somebody else meanwhile
            assert not set(expected) & set(self.held)
            for gone in expected:
                del self.content[gone]
        else:
            assert expected == [block_id], "a hit is a block with that content"
            self.held.append(block_id)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(self.held))
        self.pool.hold(block_id)
        self.held.append(block_id)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(self.held))
        self.held.remove(block_id)
        self.pool.release(block_id)

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check_invariants(Counter(self.held))
            assert self.pool.num_held == len(set(self.held))


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)


def test_cached_blocks_are_reclaimed_oldest_release_first() -> None:
    pool = BlockPool(3)
    blocks = [pool.allocate() for _ in range(3)]
    for number, block in enumerate(blocks):
        assert block is not None
        pool.name(block, bytes([number]) * 16)
    for block in (blocks[1], blocks[0], blocks[2]):
        assert block is not None
        pool.release(block)
    assert [pool.allocate() for _ in range(3)] == [blocks[1], blocks[0], blocks[2]]
    assert pool.find(bytes([1]) * 16) is None


def test_a_released_block_cannot_be_released_again() -> None:
    pool = BlockPool(1)
    block = pool.allocate()
    assert block is not None
    pool.release(block)
    with pytest.raises(AssertionError):
        pool.release(block)


@pytest.mark.parametrize("num_blocks", [1_000, 100_000])
def test_b142_every_operation_touches_one_block(num_blocks: int) -> None:
    """Counted, not timed: allocating from a pool of cached blocks forgets exactly the allocated
    ones.
    """
    pool = BlockPool(num_blocks)
    for number in range(num_blocks):
        block = pool.allocate()
        assert block is not None
        pool.name(block, number.to_bytes(16, "little"))
        pool.release(block)
    assert pool.num_cached == num_blocks
    started = time.thread_time()
    for _ in range(1_000):
        pool.allocate()
    assert time.thread_time() - started < 0.5
    assert pool.num_cached == num_blocks - 1_000


def test_hashes_depend_on_everything_before_the_block() -> None:
    def chain(tokens: list[int], salt: str = "", model: bytes = b"m", size: int = 4) -> list[bytes]:
        made = HashChain(root_hash(model, size, salt), size)
        made.extend(tokens)
        return made.full

    base = chain([1, 2, 3, 4, 5, 6, 7, 8])
    assert len(base) == 2
    assert chain([1, 2, 3, 4, 5, 6, 7, 9])[0] == base[0]
    assert chain([1, 2, 3, 4, 5, 6, 7, 9])[1] != base[1]
    assert chain([0, 2, 3, 4, 5, 6, 7, 8])[1] != base[1]
    different = [base[0], chain([1, 2, 3, 4], "a")[0], chain([1, 2, 3, 4], model=b"n")[0]]
    assert len(set(different)) == 3


def test_b84_fields_of_a_root_never_concatenate_alike() -> None:
    assert root_hash(b"ab", 16, "c") != root_hash(b"a", 16, "bc")
    assert root_hash(b"m", 16, "") != root_hash(b"m", 32, "")


def test_a_chain_grows_the_same_whatever_the_pieces() -> None:
    tokens = list(range(50))
    whole = HashChain(root_hash(b"m", 16), 16)
    whole.extend(tokens)
    pieces = HashChain(root_hash(b"m", 16), 16)
    for start in range(0, 50, 7):
        pieces.extend(tokens[start : start + 7])
    assert pieces.full == whole.full
    assert pieces.open == whole.open
    assert whole.open not in whole.full
