"""What every transport must do, tried on the in-process one and on NIXL; and what only processes
can show.
"""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from common.errors import LayoutMismatch, PullFailed
from common.handoff_messages import LinkReply
from common.pages import PageKind
from kvtransfer.nixl_transport import NixlTransport
from kvtransfer.transport import PageRead, ReadEnd, Transport
from tests.fakes.fleet import FACTS
from tests.fakes.memory_transport import MemoryFabric, MemoryTransport
from tests.kvtransfer.rank_pools import reply_of
from tests.kvtransfer.source_process import HELD, arena, filled_pool

Pair = tuple[Transport, LinkReply, Any]


async def memory_pair() -> Pair:
    fabric = MemoryFabric()
    source = MemoryTransport(fabric, "source", filled_pool(), arena(0, 0), HELD)
    landing = arena(8, 4)
    reader = MemoryTransport(fabric, "reader", arena(1, 1), landing, HELD)
    return reader, reply_of("source", source.describe()), landing


async def nixl_pair() -> Pair:
    source = NixlTransport("contract-source", filled_pool(), arena(0, 0), HELD)
    landing = arena(8, 4)
    reader = NixlTransport("contract-reader", arena(1, 1), landing, HELD)
    await source.open()
    await reader.open()
    return reader, reply_of("contract-source", source.describe()), landing


def packed(block_id: int, slot: int) -> PageRead:
    return PageRead(kind=PageKind.PACKED, block_id=block_id, slot=(PageKind.PACKED, slot))


def exact(block_id: int, slot: int) -> PageRead:
    return PageRead(kind=PageKind.EXACT, block_id=block_id, slot=(PageKind.EXACT, slot))


@pytest.mark.parametrize("make", [memory_pair, nixl_pair])
def test_contract(make: Callable[[], Awaitable[Pair]]) -> None:
    async def main() -> None:
        reader, reply, landing = await make()
        with pytest.raises(PullFailed):
            reader.read(reply.incarnation, [packed(0, 0)])
        await asyncio.gather(*(reader.link(reply) for _ in range(4)))  # a repeat is a no-op
        read = reader.read(reply.incarnation, [packed(5, 0), packed(63, 7), exact(3, 2)])
        assert await read.wait() is ReadEnd.DONE
        assert await read.wait() is ReadEnd.DONE, "it may be waited for again"
        assert landing.packed[0].unique().tolist() == [5]
        assert landing.packed[7].unique().tolist() == [63]
        assert landing.exact[2].unique().tolist() == [103]
        assert landing.packed[1:7].unique().tolist() == [0], "nothing else was touched"
        assert landing.exact[[0, 1, 3]].unique().tolist() == [0]
        one_head = replace(packed(7, 2), heads=(1,))
        read = reader.read(reply.incarnation, [one_head, exact(4, 3)])
        assert await read.wait() is ReadEnd.DONE
        half = landing.packed.shape[1] // 2
        assert landing.packed[2, :half].unique().tolist() == [0], "the other head's record"
        assert landing.packed[2, half:].unique().tolist() == [7]
        assert landing.exact[3].unique().tolist() == [104], "beside it a whole page"
        reader.unlink(reply.incarnation)
        with pytest.raises(PullFailed):
            reader.read(reply.incarnation, [packed(0, 0)])
        await reader.link(reply)
        assert await reader.read(reply.incarnation, [packed(9, 1)]).wait() is ReadEnd.DONE
        assert landing.packed[1].unique().tolist() == [9]
        await reader.close()

    asyncio.run(main())


@pytest.mark.parametrize("which", ["memory", "nixl"])
def test_pages_of_another_codec_land_in_an_arena_of_their_own(which: str) -> None:
    """The slots have the same numbers there."""

    async def main() -> None:
        fabric = MemoryFabric()
        kinds: dict[str, Callable[..., Any]] = {
            "memory": lambda *made, **more: MemoryTransport(fabric, *made, **more),
            "nixl": NixlTransport,
        }
        make, wide = kinds[which], arena(8, 4)
        own = arena(8, 4)
        own.packed, own.exact = own.packed[:, :1024].clone(), own.exact[:, :2048].clone()
        source = make("codec-source", filled_pool(), arena(0, 0), HELD)
        reader = make(
            "codec-reader", arena(1, 1), own, HELD,
            landing_of=lambda codec: {"wide": wide, "ours": own}[codec],
        )  # fmt: skip
        await source.open()
        await reader.open()
        reply = reply_of("codec-source", source.describe())
        with pytest.raises(LayoutMismatch, match="512 bytes here and 2048 at the prefill worker"):
            await reader.link(replace(reply, facts=replace(FACTS, codec="ours")))
        await reader.link(replace(reply, facts=replace(FACTS, codec="wide")))
        read = reader.read("codec-source", [packed(5, 0), exact(3, 2)])
        assert await read.wait() is ReadEnd.DONE
        assert wide.packed[0].unique().tolist() == [5]
        assert wide.exact[2].unique().tolist() == [103]
        assert not own.packed.any()
        await reader.close()
        await source.close()

    asyncio.run(main())


def test_a_page_that_the_source_does_not_have_is_never_asked_for() -> None:
    async def main() -> None:
        reader, reply, _ = await nixl_pair()
        await reader.link(reply)
        for page in (packed(64, 0), packed(-1, 0), exact(16, 0)):
            with pytest.raises(PullFailed, match="not in the prefill worker's pool"):
                reader.read(reply.incarnation, [page])
        await reader.close()

    asyncio.run(main())


def test_b58_a_killed_source_is_noticed_and_its_next_life_is_linked_anew(
    source_process: Any,
) -> None:
    async def main() -> None:
        landing = arena(8, 4)
        reader = NixlTransport("b58-reader", arena(1, 1), landing, HELD)
        await reader.open()
        for life in range(3):
            process, reply = source_process(f"b58-life-{life}")
            await reader.link(reply)
            assert await reader.read(reply.incarnation, [packed(7, 0)]).wait() is ReadEnd.DONE
            assert landing.packed[0].unique().tolist() == [7]
            landing.packed.zero_()
            process.send_signal(signal.SIGKILL)
            process.wait()
            end = ReadEnd.DONE
            for _ in range(100):
                try:
                    end = await asyncio.wait_for(
                        reader.read(reply.incarnation, [packed(7, 0)]).wait(), timeout=5
                    )
                except PullFailed:
                    break  # known to be gone
                if end is ReadEnd.DISCONNECTED:
                    break
                await asyncio.sleep(0.02)
            assert end is not ReadEnd.UNKNOWN
            with pytest.raises(PullFailed):
                reader.read(reply.incarnation, [packed(7, 0)])
            reader.unlink(reply.incarnation)
        await reader.close()

    asyncio.run(main())


@pytest.mark.parametrize("lanes", ["shm,self", "sm,self"])
def test_b79_lanes_that_cannot_report_a_dead_peer_are_refused_at_start(lanes: str) -> None:
    process = subprocess.run(
        [sys.executable, "-m", "tests.kvtransfer.source_process", "b79"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, "UCX_TLS": lanes},
    )
    assert process.returncode != 0
    assert f"UCX_TLS is {lanes}" in process.stderr
    assert "UCX_TLS=tcp,self" in process.stderr
