"""Streams over real gRPC: a call that ends under a task is an error for it, never a silent end."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import anyio
import pytest

from common.errors import WorkerLost
from common.messages import Watch
from common.rpc import Peer, Stream, connect, serve


async def silent(stream: Stream) -> None:
    """Takes one message and says nothing."""
    await stream.receive()
    await asyncio.Event().wait()


def with_peer(work: Callable[[Peer], Awaitable[None]]) -> None:
    async def main() -> None:
        server = await serve("127.0.0.1:0", {"Silent": silent})
        try:
            async with asyncio.timeout(20):
                await work(connect(f"127.0.0.1:{server.port}"))
        finally:
            await server.stop(0)

    asyncio.run(main())


async def begun(peer: Peer) -> Stream:
    stream = peer.open("Silent")
    await stream.send(Watch())
    return stream


@pytest.mark.parametrize("how", ["cancel", "close"])
def test_a_call_that_is_cancelled_under_a_task_is_a_lost_worker(how: str) -> None:
    async def work(peer: Peer) -> None:
        stream = await begun(peer)
        waiting = asyncio.create_task(stream.receive())
        await asyncio.sleep(0)
        if how == "cancel":
            stream.cancel()
        else:
            await peer.close()
        with pytest.raises(WorkerLost):
            await waiting
        if how == "cancel":
            await peer.close()

    with_peer(work)


def test_scopes_around_a_stream_end_where_they_should() -> None:
    """Deadlines and cancellation of the task, not of the call."""

    async def work(peer: Peer) -> None:
        stream = await begun(peer)
        with anyio.move_on_after(0.05) as scope:
            await stream.receive()
        assert scope.cancelled_caught
        with pytest.raises(WorkerLost):
            await stream.receive()  # grpc ends the call with the wait
        with pytest.raises(TimeoutError), anyio.fail_after(0.05):
            await (await begun(peer)).receive()
        waiting = asyncio.create_task((await begun(peer)).receive())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await peer.close()

    with_peer(work)


def test_scopes_around_the_server_end_too() -> None:
    caught: list[bool] = []
    ended = asyncio.Event()

    async def impatient(stream: Stream) -> None:
        with anyio.move_on_after(0.05) as scope:
            await stream.receive()
        caught.append(scope.cancelled_caught)
        ended.set()

    async def main() -> None:
        server = await serve("127.0.0.1:0", {"Impatient": impatient})
        peer = connect(f"127.0.0.1:{server.port}")
        stream = peer.open("Impatient")
        async with asyncio.timeout(20):
            waiting = asyncio.create_task(stream.receive())
            await ended.wait()
            with contextlib.suppress(WorkerLost):
                await waiting
        await peer.close()
        await server.stop(0)

    asyncio.run(main())
    assert caught == [True]
