"""A worker's ranks as one transport: what one of them does or suffers, all of them did."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from common.errors import ConfigError, InternalError, PullFailed
from common.frames import Frames, framed
from common.handoff_messages import LinkReply, PoolAddress
from common.pages import PageKind
from kvtransfer.group import GroupTransport, serve_transfers
from kvtransfer.group_messages import TransferEnded, TransferOpened, TransferRead
from kvtransfer.nixl_transport import NixlTransport
from kvtransfer.transport import PageRead, ReadEnd
from tests.kvtransfer.rank_pools import (
    NOTHING,
    NUM_SLOTS,
    RankedWorker,
    arena,
    exact,
    held_by,
    packed,
    pool_of,
    record,
    reply_of,
)

SOURCE = reply_of("source", ())


class ScriptedRead:
    def __init__(self) -> None:
        self.end: asyncio.Future[ReadEnd] = asyncio.get_running_loop().create_future()

    async def wait(self) -> ReadEnd:
        return await asyncio.shield(self.end)


class ScriptedTransport:
    """Of one rank; reads end when the test says so."""

    def __init__(self, rank: int, **failures: Exception) -> None:
        self.rank = rank
        self.failures = failures
        self.links: list[str] = []
        self.reads: list[tuple[Sequence[PageRead], ScriptedRead]] = []
        self.begun = asyncio.Event()
        self.is_closed = False

    def _may(self, step: str) -> None:
        if step in self.failures:
            raise self.failures[step]

    async def open(self) -> None:
        self._may("open")

    def describe(self) -> tuple[PoolAddress, ...]:
        return (
            PoolAddress(
                agent_name=f"rank-{self.rank}", agent_metadata=b"", pages=(), heads=(self.rank,)
            ),
        )

    async def link(self, source: LinkReply) -> None:
        self._may("link")
        self.links.append(source.incarnation)

    def unlink(self, incarnation: str) -> None:
        if incarnation in self.links:
            self.links.remove(incarnation)

    def read(self, incarnation: str, pages: Sequence[PageRead]) -> ScriptedRead:
        self.begun.set()
        self._may("read")
        read = ScriptedRead()
        self.reads.append((pages, read))
        return read

    async def close(self) -> None:
        self.is_closed = True


class ScriptedGroup:
    """Three ranks; of the last one the test may have the socket itself."""

    def __init__(self, *ranks: ScriptedTransport) -> None:
        self.ranks = ranks
        self.lost: list[str] = []
        pairs = [socket.socketpair() for _ in ranks[1:]]
        self.ends = [end for _, end in pairs]
        self.transport = GroupTransport(ranks[0], [end for end, _ in pairs], self.lost.append)
        self.serving = [
            asyncio.ensure_future(serve_transfers(end, rank))
            for end, rank in zip(self.ends, ranks[1:], strict=True)
        ]

    async def begun(self) -> None:
        for rank in self.ranks:
            await rank.begun.wait()

    async def close(self) -> None:
        await self.transport.close()
        await asyncio.gather(*self.serving, return_exceptions=True)
        assert all(rank.is_closed for rank in self.ranks)


def three(**failures: Exception) -> ScriptedGroup:
    """Failures of rank 2."""
    return ScriptedGroup(
        ScriptedTransport(0), ScriptedTransport(1), ScriptedTransport(2, **failures)
    )


@pytest.mark.parametrize(
    ("ends", "end"),
    [
        ((ReadEnd.DONE, ReadEnd.DONE, ReadEnd.DONE), ReadEnd.DONE),
        ((ReadEnd.DONE, ReadEnd.DISCONNECTED, ReadEnd.DONE), ReadEnd.DISCONNECTED),
        ((ReadEnd.DISCONNECTED, ReadEnd.DONE, ReadEnd.UNKNOWN), ReadEnd.UNKNOWN),
        ((ReadEnd.UNKNOWN, ReadEnd.DISCONNECTED, ReadEnd.DONE), ReadEnd.UNKNOWN),
    ],
)
def test_a_read_ends_with_its_last_rank_as_the_worst_of_them(
    ends: tuple[ReadEnd, ...], end: ReadEnd
) -> None:
    async def main() -> None:
        group = three()
        await group.transport.open()
        assert [pool.heads for pool in group.transport.describe()] == [(0,), (1,), (2,)]
        await group.transport.link(SOURCE)
        assert [rank.links for rank in group.ranks] == [["source"]] * 3
        pages = [packed(3, 1), exact(2, 0, 1, 2)]
        waiting = asyncio.ensure_future(group.transport.read("source", pages).wait())
        await group.begun()
        assert [list(rank.reads[0][0]) for rank in group.ranks] == [pages] * 3
        for rank, of_rank in zip(group.ranks, ends, strict=True):
            assert not waiting.done()
            rank.reads[0][1].end.set_result(of_rank)
        assert await waiting is end
        group.transport.unlink("source")
        await group.close()
        assert [rank.links for rank in group.ranks] == [[], [], []]
        assert group.lost == []

    asyncio.run(main())


def test_a_follower_that_cannot_open_says_why() -> None:
    async def main() -> None:
        group = three(open=ConfigError("no lane that works"))
        with pytest.raises(ConfigError, match="rank 2: no lane that works"):
            await group.transport.open()
        await group.close()

    asyncio.run(main())


def test_a_link_that_one_rank_cannot_make_is_nobody_s() -> None:
    async def main() -> None:
        group = three(link=PullFailed("cannot link to source: no route"))
        await group.transport.open()
        with pytest.raises(PullFailed, match="rank 2: cannot link to source: no route"):
            await group.transport.link(SOURCE)
        await group.close()
        assert [rank.links for rank in group.ranks] == [[], [], []]

    asyncio.run(main())


def test_a_follower_that_cannot_read_has_written_nothing() -> None:
    async def main() -> None:
        group = three(read=PullFailed("known to be gone"))
        await group.transport.open()
        read = group.transport.read("source", [packed(0, 0)])
        await group.begun()
        for rank in group.ranks[:2]:
            rank.reads[0][1].end.set_result(ReadEnd.DONE)
        assert await read.wait() is ReadEnd.DISCONNECTED
        await group.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    "says", [b"", b"\xff\xff\xff\xff", framed(TransferEnded(call=9, end=ReadEnd.DONE))]
)
def test_reads_of_a_follower_that_is_lost_are_of_unknown_end(says: bytes) -> None:
    """It ends, or speaks nonsense."""

    async def main() -> None:
        own, (here, there) = ScriptedTransport(0), socket.socketpair()
        lost: list[str] = []
        group = GroupTransport(own, [here], lost.append)
        [pool] = ScriptedTransport(1).describe()
        there.sendall(framed(TransferOpened(pool=pool)))
        await group.open()
        read = group.read("source", [packed(0, 0)])
        linking = asyncio.ensure_future(group.link(SOURCE))
        own.reads[0][1].end.set_result(ReadEnd.DONE)
        await asyncio.sleep(0)
        there.sendall(says)
        if not says:
            there.close()
        assert await read.wait() is ReadEnd.UNKNOWN
        with pytest.raises(PullFailed, match="rank 1 of this worker"):
            await linking
        assert own.links == []
        assert len(lost) == 1
        assert lost[0].startswith("rank 1 of this worker")
        with pytest.raises(PullFailed, match="rank 1 of this worker"):
            group.read("source", [packed(0, 0)])
        with pytest.raises(PullFailed, match="rank 1 of this worker"):
            await group.link(SOURCE)
        assert len(own.reads) == 1, "nothing more is begun"
        await group.close()
        there.close()

    asyncio.run(main())


def test_a_follower_that_is_lost_before_it_has_opened_ends_the_start() -> None:
    async def main() -> None:
        here, there = socket.socketpair()
        there.close()
        lost: list[str] = []
        group = GroupTransport(ScriptedTransport(0), [here], lost.append)
        with pytest.raises(InternalError, match="rank 1 of this worker is gone"):
            await group.open()
        assert lost == ["rank 1 of this worker is gone"]
        await group.close()

    asyncio.run(main())


def test_reads_travel_as_they_are() -> None:
    for pages in ([packed(1, 2), exact(3, 0)], [packed(1, 2, 0, 3), exact(4, 1)], []):
        assert TransferRead.of(0, "source", pages).pages == pages


def test_frames_come_in_any_pieces() -> None:
    messages = [TransferEnded(call=n, end=ReadEnd.DONE) for n in range(3)]
    data = b"".join(map(framed, messages))
    for size in (1, 3, 7, len(data)):
        frames = Frames()
        found = [m for at in range(0, len(data), size) for m in frames.feed(data[at : at + size])]
        assert found == messages


# --- processes ------------------------------------------------------------------------------------


class FollowerProcess:
    """Rank 1 of a reader of two."""

    def __init__(self, num_heads: int) -> None:
        self.held = held_by(2, num_heads)
        self.landing = arena(self.held[0], NUM_SLOTS)
        own = NixlTransport("group-reader", pool_of(self.held[0], 0), self.landing, self.held, 0)
        here, there = socket.socketpair()
        self.process = subprocess.Popen(
            [
                sys.executable, "-m", "tests.kvtransfer.follower_process",
                "group-reader", str(there.fileno()), "1", "2", str(num_heads),
            ],
            stdout=subprocess.PIPE, text=True, pass_fds=[there.fileno()],
        )  # fmt: skip
        there.close()
        lost: list[str] = []
        self.transport = GroupTransport(own, [here], lost.append)
        self.reader = RankedWorker(
            "group-reader", self.held[:1], self.transport, [self.landing], [], lost
        )

    def finish(self) -> str:
        try:
            found, _ = self.process.communicate(timeout=30)
        finally:
            self.process.kill()
        return found


@pytest.mark.slow
def test_ranks_in_processes_of_their_own_read_from_ranks_in_others(source_process: Any) -> None:
    """Three ranks, one of which is killed: all that is read from them ends as disconnected."""

    async def main() -> None:
        sources = [source_process("group-source", rank, 3, 3) for rank in range(3)]
        pools = tuple(pool for _, reply in sources for pool in reply.ranks)
        follower = FollowerProcess(num_heads=3)
        transport = follower.transport
        await transport.open()
        await transport.link(reply_of("group-source", pools))
        pages = [packed(5, 0), packed(11, 3)]
        again = [packed(2, 1, 2)]  # a head of the follower alone
        for read in (pages, again):
            assert await transport.read("group-source", read).wait() is ReadEnd.DONE
        follower.reader.check(held_by(3, 3), pages)
        process, _ = sources[2]  # whose head the follower has
        process.send_signal(signal.SIGKILL)
        process.wait()
        ends = set()
        for _ in range(100):
            ends.add(await transport.read("group-source", [packed(5, 0)]).wait())
            if ends != {ReadEnd.DONE}:
                break
        assert ends <= {ReadEnd.DONE, ReadEnd.DISCONNECTED}
        assert ReadEnd.DISCONNECTED in ends
        await transport.close()
        found = follower.finish().split()
        wanted = {0: 5, 3: 11, 1: 2}
        assert found == [
            (record(PageKind.PACKED, wanted[slot], 2, 2) if slot in wanted else NOTHING).hex()
            for slot in range(NUM_SLOTS[PageKind.PACKED])
        ]
        assert follower.reader.lost == []

    asyncio.run(main())


@pytest.mark.slow
def test_a_follower_that_is_killed_is_noticed(source_process: Any) -> None:
    async def main() -> None:
        _, reply = source_process("group-source", 0, 1, 3)
        follower = FollowerProcess(num_heads=3)
        await follower.transport.open()
        await follower.transport.link(reply)
        os.kill(follower.process.pid, signal.SIGSTOP)
        read = follower.transport.read("group-source", [packed(1, 0)])
        waiting = asyncio.ensure_future(read.wait())
        os.kill(follower.process.pid, signal.SIGKILL)
        assert await waiting is ReadEnd.UNKNOWN
        assert len(follower.reader.lost) == 1
        assert follower.reader.lost[0].startswith("rank 1 of this worker is gone")
        follower.finish()
        await follower.transport.close()

    asyncio.run(main())
