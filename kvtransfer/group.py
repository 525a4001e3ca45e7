"""The transports of all ranks of a worker as one.

    rank 0                                              a follower, in an event loop of its own
    GroupTransport(own, sockets, on_lost)  <-socket->   serve_transfers(socket, transport)

Each rank reads what it holds, into its own landing zone; a read has ended when all ranks' parts
have, as the worst of them did. Rank 0 asks, followers answer. A follower whose socket ends is lost,
and so is the worker: reads are then of unknown end, `on_lost` is told why, nothing more is read.
"""

import asyncio
import itertools
import logging
import socket
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

import anyio

from common.errors import InternalError, MalformedMessage, PullFailed, TandemError, from_code
from common.frames import Frames, framed
from common.handoff_messages import LinkReply, PoolAddress
from kvtransfer.group_messages import (
    TransferEnded,
    TransferFailure,
    TransferLink,
    TransferLinked,
    TransferOpened,
    TransferRead,
    TransferUnlink,
)
from kvtransfer.transport import PageRead, Read, ReadEnd, Transport, worst

T = TypeVar("T")
log = logging.getLogger(__name__)

RECEIVED_BYTES = 1 << 16


class GroupRead:
    def __init__(self, own: Read, others: "Sequence[asyncio.Future[ReadEnd]]") -> None:
        self._own = own
        self._others = others

    async def wait(self) -> ReadEnd:
        ends = [await self._own.wait()]
        for other in self._others:
            ends.append(await asyncio.shield(other))
        return worst(ends)


class _Follower(asyncio.Protocol):
    """Rank 0's end of a follower's socket. `lost` says why nothing can be asked any more."""

    def __init__(self, rank: int, on_lost: Callable[[str], None]) -> None:
        self._rank = rank
        self._on_lost = on_lost
        self._frames = Frames()
        self._calls = itertools.count()
        self._transport: asyncio.WriteTransport
        self._is_closing = False
        self._links: dict[int, asyncio.Future[TransferFailure | None]] = {}
        self._reads: dict[int, asyncio.Future[ReadEnd]] = {}
        self.opened: asyncio.Future[PoolAddress] = asyncio.get_running_loop().create_future()
        self.lost: str | None = None

    def link(self, source: LinkReply) -> "asyncio.Future[TransferFailure | None]":
        call = next(self._calls)
        future = self._links[call] = asyncio.get_running_loop().create_future()
        self._send(TransferLink(call=call, source=source))
        return future

    def unlink(self, incarnation: str) -> None:
        self._send(TransferUnlink(incarnation=incarnation))

    def read(self, incarnation: str, pages: Sequence[PageRead]) -> "asyncio.Future[ReadEnd]":
        call = next(self._calls)
        future = self._reads[call] = asyncio.get_running_loop().create_future()
        self._send(TransferRead.of(call, incarnation, pages))
        return future

    def close(self) -> None:
        self._is_closing = True
        self.opened.cancel()
        self._transport.close()

    def _send(self, message: object) -> None:
        if self.lost is None:
            self._transport.write(framed(message))

    # --- what the event loop calls ----------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._frames.feed(data):
                self._heard(message)
        except MalformedMessage as error:
            self._lose(f"speaks nonsense: {error.message}")
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._lose("is gone" if error is None else f"is gone: {error}")

    def _heard(self, message: object) -> None:
        match message:
            case TransferOpened(pool=PoolAddress() as pool):
                _settle(self.opened, pool)
            case TransferOpened(failure=TransferFailure() as failure):
                error = from_code(failure.code, f"rank {self._rank}: {failure.message}")
                if not self.opened.done():
                    self.opened.set_exception(error)
            case TransferLinked(call=call) if call in self._links:
                _settle(self._links.pop(call), message.failure)
            case TransferEnded(call=call) if call in self._reads:
                _settle(self._reads.pop(call), message.end)
            case _:
                raise MalformedMessage(f"a {type(message).__name__} was not asked for")

    def _lose(self, why: str) -> None:
        if self.lost is not None:
            return
        self.lost = f"rank {self._rank} of this worker {why}"
        if not self.opened.done():
            self.opened.set_exception(InternalError(self.lost))
        for link in self._links.values():
            _settle(link, TransferFailure(code=PullFailed.code, message=self.lost))
        for read in self._reads.values():
            _settle(read, ReadEnd.UNKNOWN)
        self._links.clear()
        self._reads.clear()
        if not self._is_closing:
            self._on_lost(self.lost)


class GroupTransport:
    """Rank 0's `own` transport and its followers', each over a socket of its own, in the order of
    ranks.
    """

    def __init__(
        self, own: Transport, followers: Sequence[socket.socket], on_lost: Callable[[str], None]
    ) -> None:
        self._own = own
        self._sockets = followers
        self._on_lost = on_lost
        self._followers: list[_Follower] = []
        self._pools: tuple[PoolAddress, ...] = ()

    async def open(self) -> None:
        """Raises a follower's error, with its rank."""
        for rank, end in enumerate(self._sockets, start=1):
            self._followers.append(await _connected(rank, end, self._on_lost))
        try:
            await self._own.open()
            others = [await follower.opened for follower in self._followers]
        except TandemError:
            self._close_followers()
            raise
        self._pools = (*self._own.describe(), *others)

    def describe(self) -> tuple[PoolAddress, ...]:
        return self._pools

    async def link(self, source: LinkReply) -> None:
        self._check()
        asked = [follower.link(source) for follower in self._followers]
        try:
            await self._own.link(source)
            for rank, answer in enumerate(asked, start=1):
                failure = await answer
                if failure is not None:
                    raise from_code(failure.code, f"rank {rank}: {failure.message}")
        except TandemError:
            self.unlink(source.incarnation)
            raise

    def unlink(self, incarnation: str) -> None:
        self._own.unlink(incarnation)
        for follower in self._followers:
            follower.unlink(incarnation)

    def read(self, incarnation: str, pages: Sequence[PageRead]) -> GroupRead:
        self._check()
        own = self._own.read(incarnation, pages)
        return GroupRead(own, [follower.read(incarnation, pages) for follower in self._followers])

    async def close(self) -> None:
        self._close_followers()
        await self._own.close()

    def _close_followers(self) -> None:
        for follower in self._followers:
            follower.close()

    def _check(self) -> None:
        for follower in self._followers:
            if follower.lost is not None:
                raise PullFailed(follower.lost)


async def _connected(rank: int, end: socket.socket, on_lost: Callable[[str], None]) -> _Follower:
    end.setblocking(False)
    follower = _Follower(rank, on_lost)
    await asyncio.get_running_loop().create_unix_connection(lambda: follower, sock=end)
    return follower


async def serve_transfers(end: socket.socket, transport: Transport) -> None:
    """A follower's side: opens the transport, and does what rank 0 says until the socket ends; then
    closes it.
    """
    end.setblocking(False)
    reader, writer = await asyncio.open_unix_connection(sock=end)
    try:
        try:
            await transport.open()
        except TandemError as error:
            writer.write(framed(TransferOpened(failure=TransferFailure.of(error))))
            await writer.drain()
            raise
        [pool] = transport.describe()
        writer.write(framed(TransferOpened(pool=pool)))
        async with anyio.create_task_group() as group:
            frames = Frames()
            while data := await _received(reader):
                for message in frames.feed(data):
                    match message:
                        case TransferRead():
                            group.start_soon(_wait, _begun(transport, message), message, writer)
                        case _:
                            await _perform(transport, message, writer)
            group.cancel_scope.cancel()
    finally:
        writer.close()
        await transport.close()


async def _received(reader: asyncio.StreamReader) -> bytes:
    """Nothing when rank 0 has closed the socket, or is gone."""
    try:
        return await reader.read(RECEIVED_BYTES)
    except OSError:
        return b""


async def _perform(transport: Transport, message: object, writer: asyncio.StreamWriter) -> None:
    """In the order in which rank 0 asked: what is unlinked stays so."""
    match message:
        case TransferLink(call=call, source=source):
            failure = None
            try:
                await transport.link(source)
            except TandemError as error:
                failure = TransferFailure.of(error)
            writer.write(framed(TransferLinked(call=call, failure=failure)))
        case TransferUnlink(incarnation=incarnation):
            transport.unlink(incarnation)
        case _:
            raise MalformedMessage(f"a {type(message).__name__} is nothing to be done")


def _begun(transport: Transport, asked: TransferRead) -> Read | None:
    """None where nothing will be written."""
    try:
        return transport.read(asked.incarnation, asked.pages)
    except TandemError as error:
        log.warning("a read from %s cannot begin: %s", asked.incarnation, error)
        return None


async def _wait(read: Read | None, asked: TransferRead, writer: asyncio.StreamWriter) -> None:
    end = ReadEnd.DISCONNECTED if read is None else await read.wait()
    writer.write(framed(TransferEnded(call=asked.call, end=end)))


def _settle(future: "asyncio.Future[T]", value: T) -> None:
    """Whoever waited may be gone."""
    if not future.done():
        future.set_result(value)
