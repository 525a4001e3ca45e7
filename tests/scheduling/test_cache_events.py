"""What a prefix cache tells of itself: applied in order, the messages give what it holds."""

from hypothesis import given, settings
from hypothesis import strategies as st

from common.limits import MAX_MESSAGE_BYTES
from common.messages import KvEvents
from common.scheduling import cache_events
from common.scheduling.block_pool import BlockPool
from common.scheduling.cache_events import CacheFeed, CacheJournal
from common.scheduling.kv_cache import KvCache
from common.wire import encode


def name(number: int) -> bytes:
    return number.to_bytes(16, "little")


def hashes(data: bytes) -> list[bytes]:
    return [data[i : i + 16] for i in range(0, len(data), 16)]


class Reader:
    """Does what a router does."""

    def __init__(self, feed: CacheFeed) -> None:
        self._feed = feed
        self._num_messages = 0
        self.held: set[bytes] = set()

    def read(self) -> list[KvEvents]:
        messages = self._feed.take()
        for message in messages:
            assert message.sequence == self._num_messages
            assert message.is_snapshot or self._num_messages > 0
            self._num_messages += 1
            if message.is_snapshot:
                self.held.clear()
            assert set(hashes(message.removed)) <= self.held, "nothing goes that was not there"
            self.held.difference_update(hashes(message.removed))
            assert not self.held & set(hashes(message.stored)), "nothing comes twice"
            self.held.update(hashes(message.stored))
        return messages


@given(
    operations=st.lists(
        st.one_of(
            st.tuples(st.just("name"), st.integers(0, 7)),
            st.tuples(st.just("reclaim"), st.integers(1, 4)),
            st.tuples(st.just("read"), st.integers(0, 1)),
        ),
        max_size=80,
    ),
    max_changes=st.integers(1, 6),
)
@settings(max_examples=80, deadline=None)
def test_readers_at_any_pace_see_what_the_pool_holds(
    operations: list[tuple[str, int]], max_changes: int
) -> None:
    journal = CacheJournal(max_changes)
    pool = BlockPool(4, journal)
    readers = [Reader(CacheFeed(journal, lambda: pool.hashes)) for _ in range(2)]
    for what, number in operations:
        if what == "name":
            block = pool.allocate()
            assert block is not None
            pool.name(block, name(number))
            pool.release(block)
        elif what == "reclaim":
            for block in [pool.allocate() for _ in range(number)]:
                assert block is not None
                pool.release(block)
        else:
            readers[number].read()
            assert readers[number].held == set(pool.hashes)
    for reader in readers:
        reader.read()
        assert reader.held == set(pool.hashes)
        assert reader.read() == []


def test_what_comes_and_goes_between_two_readings_is_not_told() -> None:
    journal = CacheJournal()
    journal.stored(name(1))
    feed = CacheFeed(journal, lambda: [name(1)])
    assert [(m.is_snapshot, m.stored, m.sequence) for m in feed.take()] == [(True, name(1), 0)]
    journal.stored(name(2))
    journal.removed(name(2))
    journal.removed(name(1))
    journal.stored(name(1))
    assert feed.take() == []
    journal.removed(name(1))
    journal.stored(name(3))
    assert [(m.removed, m.stored, m.sequence) for m in feed.take()] == [
        (name(1), b"", 1),
        (b"", name(3), 2),
    ]


def test_a_reader_too_far_behind_gets_a_snapshot() -> None:
    journal = CacheJournal(max_changes=3)
    held: list[bytes] = []
    feed = CacheFeed(journal, lambda: held)
    assert feed.take() == [KvEvents(sequence=0, is_snapshot=True)]
    for number in range(4):
        held.append(name(number))
        journal.stored(name(number))
    assert feed.take() == [KvEvents(sequence=1, stored=b"".join(held), is_snapshot=True)]


def test_a_large_snapshot_is_several_messages_well_below_their_bound() -> None:
    everything = [name(number) for number in range(100_000)]
    messages = CacheFeed(CacheJournal(), lambda: everything).take()
    assert [m.is_snapshot for m in messages] == [True, False, False, False]
    assert [m.sequence for m in messages] == [0, 1, 2, 3]
    assert b"".join(m.stored for m in messages) == b"".join(everything)
    assert max(len(encode(m)) for m in messages) < MAX_MESSAGE_BYTES / 16


def test_recording_costs_one_entry_per_block_and_is_bounded() -> None:
    cache = KvCache(num_packed=64, num_exact=8, block_size=4)
    journal = cache._journal
    names = [name(number) for number in range(3)]
    for _ in range(5):
        table = cache.start(names, 13, spare=cache.pages_for(0))
        assert table is not None
        for num_full in (1, 1, 2, 3, 3):
            cache.name(table, names, num_full)
        cache.free(table)
    assert journal.position == 3, "the same blocks again are no change"
    assert cache.named_hashes() == [names[1], names[2], names[0]]
    assert journal._changes.maxlen == cache_events.MAX_CHANGES
