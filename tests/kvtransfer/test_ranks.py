"""Workers of different numbers of ranks read each other's pages: in this process, and over NIXL."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import LayoutMismatch, PullFailed
from common.handoff_messages import PoolAddress
from common.ranks import Ownership, possible_ranks
from kvtransfer.nixl_transport import NixlTransport
from kvtransfer.rank_reads import plan_reads
from kvtransfer.transport import ReadEnd, Transport
from tests.fakes.memory_transport import MemoryFabric, MemoryTransport
from tests.kvtransfer.rank_pools import (
    MakeTransport,
    RankedWorker,
    exact,
    held_by,
    packed,
    ranked,
)

SPLITS = [
    (1, 2, 3), (2, 1, 3), (3, 1, 3), (2, 3, 3), (4, 2, 4), (2, 4, 4), (2, 2, 3),
    (4, 1, 2), (1, 4, 2), (4, 2, 2), (2, 4, 2), (4, 4, 2), (8, 2, 1),
]  # fmt: skip
"""Ranks of the prefill worker and of the decode worker, and KV heads: with fewer of these than
ranks, several hold the same."""


def over_nixl(incarnation: str, pool: Any, landing: Any, held: Ownership, rank: int) -> Transport:
    return NixlTransport(f"{incarnation}-{len(held)}", pool, landing, held, rank)


def in_memory(fabric: MemoryFabric) -> MakeTransport:
    return lambda name, pool, landing, held, rank: MemoryTransport(
        fabric, name, pool, landing, held, rank
    )


async def exchange(source: RankedWorker, reader: RankedWorker) -> None:
    """What every pair must be able to do."""
    transport, name = reader.transport, source.incarnation
    with pytest.raises(PullFailed):
        transport.read(name, [packed(0, 0)])
    await asyncio.gather(*(transport.link(source.reply) for _ in range(3)))  # a repeat is a no-op
    pages = [packed(5, 0), packed(11, 3), exact(4, 2)]
    read = transport.read(name, pages)
    assert await read.wait() is ReadEnd.DONE
    assert await read.wait() is ReadEnd.DONE, "it may be waited for again"
    reader.check(source.held, pages)
    last = max(source.held[-1])
    again = [packed(7, 1, last), exact(1, 0)]
    assert await transport.read(name, again).wait() is ReadEnd.DONE
    reader.check(source.held, [*pages, *again])
    with pytest.raises(PullFailed, match="not in the prefill worker's pool"):
        transport.read(name, [packed(12, 0)])
    transport.unlink(name)
    with pytest.raises(PullFailed, match="not linked"):
        transport.read(name, [packed(0, 0)])
    await transport.link(source.reply)
    assert await transport.read(name, [packed(9, 5)]).wait() is ReadEnd.DONE
    reader.check(source.held, [*pages, *again, packed(9, 5)])
    assert reader.lost == source.lost == []


async def between(
    make: MakeTransport,
    split: tuple[int, int, int],
    story: Callable[[RankedWorker, RankedWorker], Awaitable[None]],
) -> None:
    num_source, num_reader, num_heads = split
    source = await ranked("ranks-source", held_by(num_source, num_heads), make)
    reader = await ranked("ranks-reader", held_by(num_reader, num_heads), make)
    try:
        await story(source, reader)
    finally:
        await reader.close()
        await source.close()


@pytest.mark.parametrize("split", SPLITS)
def test_any_split_reads_from_any_other(split: tuple[int, int, int]) -> None:
    asyncio.run(between(in_memory(MemoryFabric()), split, exchange))


@pytest.mark.slow
@pytest.mark.parametrize("split", SPLITS)
def test_any_split_reads_from_any_other_over_nixl(split: tuple[int, int, int]) -> None:
    asyncio.run(between(over_nixl, split, exchange))


@settings(max_examples=150, deadline=None, print_blob=True)
@given(data=st.data())
def test_every_record_comes_from_one_who_holds_it(data: st.DataObject) -> None:
    num_heads = data.draw(st.integers(1, 6), label="KV heads")
    counts = [n for n in possible_ranks(12 * num_heads, num_heads) if n <= 12]
    theirs, mine = (
        held_by(data.draw(st.sampled_from(counts), label=side), num_heads)
        for side in ("prefill ranks", "decode ranks")
    )
    pages = data.draw(
        st.lists(
            st.builds(
                lambda kind, block, slot, heads: kind(block, slot, *heads),
                st.sampled_from([packed, exact]),
                st.integers(0, 4),
                st.integers(0, 2),
                st.sets(st.integers(0, num_heads - 1)).map(sorted),
            ),
            unique_by=lambda page: page.slot,
        )
    )

    async def main() -> None:
        make = in_memory(MemoryFabric())
        source = await ranked("source", theirs, make)
        reader = await ranked("reader", mine, make)
        await reader.transport.link(source.reply)
        assert await reader.transport.read("source", pages).wait() is ReadEnd.DONE
        reader.check(theirs, pages)
        await reader.close()
        await source.close()

    asyncio.run(main())


def test_ranks_that_hold_the_same_read_pages_whole() -> None:
    """One row a page, as between workers of one rank; records only where one is wanted alone."""
    for theirs, mine in ((held_by(1, 3), held_by(1, 3)), (held_by(4, 2), held_by(2, 2))):
        for rank, heads in enumerate(mine):
            pools = [address(held) for held in theirs]
            planned = plan_reads(mine, rank, pools, address(heads).pages)
            assert planned.is_whole
            [part] = planned.of([packed(5, 0), exact(2, 1), packed(7, 3)])
            assert (part.local, part.remote) == ([0, 13, 3], [5, 14, 7])
            assert theirs[part.rank] == heads
            [record] = planned.of([packed(5, 2, heads[-1])])
            count = len(heads)
            assert (record.local, record.remote) == ([3 * count - 1], [6 * count - 1])


def address(heads: tuple[int, ...], record: int = 64, num: int = 12) -> PoolAddress:
    size = record * len(heads)
    return PoolAddress(
        agent_name="", agent_metadata=b"", pages=((0, size, num), (0, 2 * size, 5)), heads=heads
    )


@pytest.mark.parametrize(
    ("pools", "reason"),
    [
        ([], "does not say what its ranks hold"),
        ([address(())], "does not say what its ranks hold"),
        ([address((0, 1)), address((2,), num=7)], "pools of different sizes"),
        ([address((0, 1))], "no rank of the other worker holds KV head 2"),
        ([address((0, 1)), address((2,), record=128)], "64 bytes here and 128 at the prefill"),
        ([PoolAddress(agent_name="", agent_metadata=b"", pages=(), heads=(0, 1, 2))], "say what"),
    ],
)
def test_pools_that_cannot_be_are_refused(pools: list[PoolAddress], reason: str) -> None:
    with pytest.raises(LayoutMismatch, match=reason):
        plan_reads(((0, 1, 2),), 0, pools, address((0, 1, 2)).pages)


# --- faults ---------------------------------------------------------------------------------------


def test_a_source_that_goes_away_ends_the_read_of_every_rank() -> None:
    fabric = MemoryFabric()

    async def story(source: RankedWorker, reader: RankedWorker) -> None:
        await reader.transport.link(source.reply)
        fabric.hold(source.incarnation)
        read = reader.transport.read(source.incarnation, [packed(1, 0)])
        fabric.kill(source.incarnation)
        assert await read.wait() is ReadEnd.DISCONNECTED
        reader.check(source.held, [])
        with pytest.raises(PullFailed):
            reader.transport.read(source.incarnation, [packed(1, 0)])

    asyncio.run(between(in_memory(fabric), (2, 3, 3), story))


def test_a_read_that_was_given_up_goes_on_until_all_ranks_are_done() -> None:
    fabric = MemoryFabric()

    async def story(source: RankedWorker, reader: RankedWorker) -> None:
        await reader.transport.link(source.reply)
        fabric.hold(source.incarnation)
        read = reader.transport.read(source.incarnation, [packed(1, 0)])
        waiting = asyncio.ensure_future(read.wait())
        await asyncio.sleep(0)
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiting
        reader.check(source.held, [])
        fabric.resume(source.incarnation)
        assert await read.wait() is ReadEnd.DONE
        reader.check(source.held, [packed(1, 0)])

    asyncio.run(between(in_memory(fabric), (3, 2, 3), story))
