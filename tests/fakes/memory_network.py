"""Streams of messages between hosts of one process: the network of tests and simulations.

    network.serve("p0", handlers)             a host that can be called
    network.connect_from("d0")("p0")          a Peer, as common/rpc.py has over gRPC

Messages are encoded and decoded as on a real wire. What can happen to hosts: `kill` (streams break
at once, its handlers end), `freeze` and `resume` (nothing goes in or out; others notice after the
keepalive), `drop` (one kind of stream breaks). Everything else is the loop's own time.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

import anyio
from anyio.abc import TaskGroup

from common.errors import TandemError, WorkerLost
from common.rpc import KEEPALIVE_S, KEEPALIVE_TIMEOUT_S, Connect, Handler, Stream
from common.wire import decode, encode


@dataclass(eq=False)
class Host:
    name: str
    is_alive: bool = True
    runs: asyncio.Event = field(default_factory=asyncio.Event)
    """Cleared while the host is frozen."""
    ends: "dict[MemoryStream, None]" = field(default_factory=dict)
    handlers: Mapping[str, Handler] = field(default_factory=dict)
    scopes: set[anyio.CancelScope] = field(default_factory=set)
    answers_pings: bool = True
    """While it is frozen: only its loop hangs then."""


class MemoryStream:
    """One end of a stream, at a host."""

    def __init__(self, host: Host, method: str) -> None:
        self.host = host
        self.method = method
        self.num_bytes = 0
        self.other: MemoryStream
        self._inbox: asyncio.Queue[bytes | TandemError | None] = asyncio.Queue()
        self._error: TandemError | None = None
        self._has_finished = False
        host.ends[self] = None

    async def send(self, message: object) -> None:
        await self.host.runs.wait()
        if self._error is not None:
            raise self._error
        if self._has_finished:
            raise WorkerLost("the stream has ended")
        data = encode(message)
        self.num_bytes += len(data)
        self.other.num_bytes += len(data)
        self.other._inbox.put_nowait(data)

    async def receive(self) -> object | None:
        item = await self._inbox.get()
        await self.host.runs.wait()
        if isinstance(item, bytes):
            return decode(item)
        self._inbox.put_nowait(item)  # an end stays an end
        if item is None:
            return None
        self._error = item
        raise item

    async def finish(self) -> None:
        if not self._has_finished:
            self._has_finished = True
            self.other._inbox.put_nowait(None)

    def cancel(self) -> None:
        self.break_with(WorkerLost("the stream was cancelled"))

    def break_with(self, error: TandemError) -> None:
        """Both ends see `error` from now on, after what is already in their inboxes."""
        for end in (self, self.other):
            end.host.ends.pop(end, None)
            if end._error is None:
                end._error = error
                end._has_finished = True
                end._inbox.put_nowait(error)


class MemoryNetwork:
    def __init__(self, group: TaskGroup) -> None:
        self._group = group
        self._hosts: dict[str, Host] = {}

    def host(self, name: str) -> Host:
        """The host of that name in its present life."""
        host = self._hosts.get(name)
        if host is None or not host.is_alive:
            host = self._hosts[name] = Host(name)
            host.runs.set()
        return host

    def serve(self, name: str, handlers: Mapping[str, Handler]) -> Host:
        host = self.host(name)
        host.handlers = handlers
        return host

    def connect_from(self, name: str) -> Connect:
        return lambda address: _Peer(self, self.host(name), address)

    def kill(self, name: str) -> None:
        host = self._hosts[name]
        host.is_alive = False
        for end in list(host.ends):
            end.break_with(WorkerLost(f"{name}: connection lost"))
        for scope in list(host.scopes):
            scope.cancel()
        host.runs.set()

    def freeze(self, name: str, *, answers_pings: bool = False) -> None:
        host = self._hosts[name]
        host.runs.clear()
        host.answers_pings = answers_pings
        if not answers_pings:
            self._group.start_soon(self._keepalive, host, list(host.ends))

    def resume(self, name: str) -> None:
        self._hosts[name].runs.set()

    def runs(self, name: str) -> bool:
        """It is not frozen."""
        return self._hosts[name].runs.is_set()

    def drop(self, name: str, method: str) -> int:
        """Breaks the streams of one kind at a host; returns how many there were."""
        ends = [end for end in self._hosts[name].ends if end.method == method]
        for end in ends:
            end.break_with(WorkerLost(f"{name}: connection reset"))
        return len(ends)

    def open(self, caller: Host, address: str, method: str) -> Stream:
        host = self._hosts.get(address)
        if host is None or not host.is_alive or method not in host.handlers:
            raise WorkerLost(f"{address}: connection refused")
        ours, theirs = MemoryStream(caller, method), MemoryStream(host, method)
        ours.other, theirs.other = theirs, ours
        self._group.start_soon(self._run, host, host.handlers[method], theirs)
        if not host.runs.is_set() and not host.answers_pings:
            self._group.start_soon(self._keepalive, host, [theirs])
        return ours

    async def _run(self, host: Host, handler: Handler, stream: MemoryStream) -> None:
        with anyio.CancelScope() as scope:
            host.scopes.add(scope)
            try:
                await handler(stream)
                await stream.finish()
                stream.host.ends.pop(stream, None)
                stream.other.host.ends.pop(stream.other, None)
            except TandemError as error:
                stream.break_with(error)
            finally:
                host.scopes.discard(scope)

    async def _keepalive(self, host: Host, ends: list[MemoryStream]) -> None:
        """Peers of a frozen host give it up when their pings stay unanswered."""
        with anyio.move_on_after(KEEPALIVE_S + KEEPALIVE_TIMEOUT_S):
            await host.runs.wait()
            return
        for end in ends:
            if end in host.ends:
                end.break_with(WorkerLost(f"{host.name}: keepalive watchdog timeout"))


class _Peer:
    def __init__(self, network: MemoryNetwork, caller: Host, address: str) -> None:
        self._network = network
        self._caller = caller
        self._address = address

    def open(self, method: str) -> Stream:
        return self._network.open(self._caller, self._address, method)

    async def close(self) -> None:
        return None
