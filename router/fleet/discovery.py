"""Finds the workers and keeps in touch: names to addresses, one Watch per address (states, and
changes of the prefix cache), one session per decode worker.

`Discovery.run` owns everything: a loop per configured entry resolves its name again and again, and
every address found gets a task that lives until the name no longer leads there and the worker has
gone quiet. What is seen goes into the fleet; the fleet decides. Entries are `host:port`,
`name:port` with any number of addresses behind the name, or `[v6]:port`.
"""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence

import anyio
from anyio.abc import TaskGroup

from common.addresses import join_address, split_address
from common.clock import Clock, MonotonicClock
from common.errors import Draining, MalformedMessage, TandemError, WorkerLost
from common.messages import (
    PROTOCOL_VERSION,
    Hello,
    KvEvents,
    SelfTest,
    SelfTestDone,
    Watch,
    WorkerState,
)
from common.rpc import Connect, Peer, Stream
from common.watch_thread import until_silent
from common.watchdog import Silence
from router.fleet.breaker import State
from router.fleet.dispatch import Dispatcher
from router.fleet.fleet import Fleet, Worker
from router.fleet.interleave import Interleave
from router.fleet.session import Session

log = logging.getLogger(__name__)

REFRESH_S = 2.0
MAX_BACKOFF_S = 1.0
_FIRST_BACKOFF_S = 0.1
_FIRST_STATE_S = 10.0
_SELF_TEST_S = 10.0

LOST_SESSION = 1.0
"""Failures that a lost session counts as, however many requests it had."""

LOCAL_AFTER_S = 5.0
"""A fleet without prefill workers serves without them after that."""

Resolve = Callable[[str, int], Awaitable[list[str]]]
"""Host and port to addresses that can be connected to."""


async def resolve(host: str, port: int) -> list[str]:
    """All addresses behind `host`, in a stable order; none when the name is not known (yet)."""
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return []
    addresses = dict.fromkeys(join_address(str(info[4][0]), port) for info in found)
    if host == "localhost" and len(addresses) > 1:
        # 127.0.0.1 and ::1 are one machine: take the one a worker most likely listens on
        return [a for a in addresses if not a.startswith("[")][:1]
    return sorted(addresses)


class Discovery:
    def __init__(
        self,
        entries: Sequence[str],
        *,
        fleet: Fleet,
        dispatcher: Dispatcher,
        connect: Connect,
        router_id: str,
        interleave: Interleave | None = None,
        resolve: Resolve = resolve,
        refresh_s: float = REFRESH_S,
        clock: Clock | None = None,
    ) -> None:
        self._entries = [(entry, *split_address(entry)) for entry in dict.fromkeys(entries)]
        self._fleet = fleet
        self._dispatcher = dispatcher
        self._connect = connect
        self._router_id = router_id
        self._interleave = interleave or Interleave()
        self._resolve = resolve
        self._refresh_s = refresh_s
        self._clock = clock or MonotonicClock()
        self._wanted: dict[str, set[str]] = {}
        self._watched: set[str] = set()
        self._fleet_change = asyncio.Event()
        self._tests: dict[str, Callable[[Worker], None]] = {}
        """How to test the worker at an address, while it is watched."""
        fleet.on_opened = self._opened

    async def run(self) -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(self._follow_degradation)
            for entry, host, port in self._entries:
                group.start_soon(self._follow_name, group, entry, host, port)

    async def _follow_name(self, group: TaskGroup, entry: str, host: str, port: int) -> None:
        while True:
            addresses = await self._resolve(host, port)
            if addresses:
                self._wanted[entry] = set(addresses)
                if entry not in addresses:
                    self._fleet.forget(entry)
            elif not self._wanted.get(entry):
                self._fleet.refuse(entry, "the name does not resolve")
            for address in addresses:
                if address not in self._watched:
                    self._watched.add(address)
                    group.start_soon(self._follow_address, address)
            await asyncio.sleep(self._refresh_s)

    def _changed(self) -> None:
        self._fleet_change.set()
        self._dispatcher.fleet_changed()

    async def _follow_degradation(self) -> None:
        """Lets decode workers compute prompts when no prefill worker comes, and says so."""
        was_degraded = False
        while True:
            self._fleet_change.clear()
            if self._fleet.lacks_prefill() and not self._fleet.is_remote_only:
                with anyio.move_on_after(LOCAL_AFTER_S):
                    while self._fleet.lacks_prefill():
                        await self._fleet_change.wait()
                        self._fleet_change.clear()
                if self._fleet.lacks_prefill():
                    self._fleet.accept_local()
                    self._dispatcher.fleet_changed()
            if self._fleet.is_degraded() != was_degraded:
                was_degraded = not was_degraded
                if was_degraded:
                    log.warning("no prefill worker: decode workers compute prompts themselves")
                else:
                    log.info("no longer without prefill workers that could be used")
            await self._fleet_change.wait()

    def _is_wanted(self, address: str) -> bool:
        return any(address in addresses for addresses in self._wanted.values())

    async def _follow_address(self, address: str) -> None:
        """Until no name leads here any more and the worker does not answer."""
        peer = self._connect(address)
        backoff_s = _FIRST_BACKOFF_S
        try:
            while True:
                try:
                    await self._watch(peer, address)
                except TandemError as error:
                    backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)
                    self._lost(address, error)
                else:
                    backoff_s = _FIRST_BACKOFF_S
                    self._lost(address, WorkerLost("it closed the stream"))
                if not self._is_wanted(address):
                    return
                await asyncio.sleep(backoff_s)
        finally:
            self._watched.discard(address)
            self._fleet.forget(address)
            with anyio.CancelScope(shield=True):
                await peer.close()

    def _lost(self, address: str, error: TandemError) -> None:
        worker = self._fleet.get(address)
        if worker is not None and worker.is_linked:
            log.warning("lost %s %s: %s", worker.state.role, address, error.message)
        reason = error.message.rpartition(": ")[2][:100]
        self._fleet.refuse(address, f"cannot be reached: {reason}")
        self._changed()

    async def _watch(self, peer: Peer, address: str) -> None:
        """A Watch stream and, for a decode worker, its sessions. Returns or raises when the stream
        ends. One that has missed changes of the prefix cache is replaced by a new one, whose
        snapshot makes up for them; sessions go on.
        """
        ended: TandemError | None = None
        incarnation = ""
        try:
            async with anyio.create_task_group() as group:

                def seen(worker: Worker) -> None:
                    nonlocal incarnation
                    if worker.state.incarnation != incarnation:
                        incarnation = worker.state.incarnation
                        if worker.breaker.state is not State.CLOSED:
                            group.start_soon(self._test, peer, worker)
                        if worker.can_decode and worker.state.protocol == PROTOCOL_VERSION:
                            group.start_soon(self._hold_session, peer, address, incarnation)

                def begin_test(worker: Worker) -> None:
                    group.start_soon(self._test, peer, worker)

                self._tests[address] = begin_test
                while not await self._follow_stream(peer.open("Watch"), address, seen):
                    log.warning("missed changes of the prefix cache of %s: asking anew", address)
                    await asyncio.sleep(_FIRST_BACKOFF_S)
                group.cancel_scope.cancel()
        except* TandemError as errors:
            ended = _only(errors)  # raised here, Python before 3.11.4 wraps it in a group again
        finally:
            self._tests.pop(address, None)
        if ended is not None:
            raise ended

    async def _follow_stream(
        self, stream: Stream, address: str, seen: Callable[[Worker], None]
    ) -> bool:
        """True at the end of the stream; False when events of the prefix cache are missing. Raises
        WorkerLost when the worker does not say what it promised to.
        """
        silence = Silence(0.0, self._clock.now())
        is_whole = True
        try:
            await stream.send(Watch())
            async with anyio.create_task_group() as group:
                group.start_soon(self._listen, silence)
                is_whole = await self._read_states(stream, address, seen, silence)
                group.cancel_scope.cancel()
        except* TandemError as errors:
            raise _only(errors) from None
        finally:
            stream.cancel()
        return is_whole

    async def _listen(self, silence: Silence) -> None:
        await until_silent(silence, self._clock)
        raise WorkerLost("it says nothing any more, though its connection is open")

    async def _read_states(
        self, stream: Stream, address: str, seen: Callable[[Worker], None], silence: Silence
    ) -> bool:
        worker: Worker | None = None
        num_events = 0
        message = await _first_state(stream)
        while message is not None:
            silence.heard(self._clock.now())
            if worker is None or not isinstance(message, KvEvents):
                worker = self._observe(address, message)
                silence.heartbeat_s = worker.state.heartbeat_s
                seen(worker)
            elif message.sequence != num_events or (num_events == 0 and not message.is_snapshot):
                return False
            else:
                num_events += 1
                self._fleet.cache_changed(address, message)
            message = await stream.receive()
        return True

    def _observe(self, address: str, message: object) -> Worker:
        if not isinstance(message, WorkerState):
            raise MalformedMessage(f"expected WorkerState, got {type(message).__name__}")
        before = self._fleet.get(address)
        was_linked = before is not None and before.is_linked
        worker = self._fleet.observe(address, message)
        if worker is not before:
            log.info("found %s %s, incarnation %s", message.role, address, message.incarnation)
        elif not was_linked:
            log.info("%s %s is back, incarnation %s", message.role, address, message.incarnation)
        self._interleave.observed(message)
        self._changed()
        return worker

    async def _hold_session(self, peer: Peer, address: str, incarnation: str) -> None:
        """Keeps a session open with one life of a worker, as long as its Watch stream lasts."""
        backoff_s = _FIRST_BACKOFF_S
        while True:
            session = Session(peer.open("Session"), address)
            worker = self._fleet.get(address)
            self._dispatcher.session_opened(incarnation, session)
            if worker is not None:
                self._interleave.session_opened(worker.state, session.limit_chunks)
            self._fleet.session_up(address, incarnation)
            self._changed()
            started_at = asyncio.get_running_loop().time()
            try:
                await session.run(
                    Hello(router_id=self._router_id, incarnation=incarnation),
                    lambda error: self._session_ended(address, incarnation, error),
                )
            except TandemError as error:
                log.warning("session with %s ended: %s", address, error.message)
            if asyncio.get_running_loop().time() - started_at > MAX_BACKOFF_S:
                backoff_s = _FIRST_BACKOFF_S
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    def _opened(self, worker: Worker) -> None:
        log.warning(
            "%s %s has failed too often: it gets no requests, and is tested in %.0f s",
            worker.state.role, worker.address, self._fleet.probe_in_s(worker),
        )  # fmt: skip
        test = self._tests.get(worker.address)
        if test is not None:
            test(worker)

    async def _test(self, peer: Peer, worker: Worker) -> None:
        """An open worker tests itself when its time is over, until it passes."""
        while worker.breaker.state is not State.CLOSED:
            await asyncio.sleep(self._fleet.probe_in_s(worker))
            if self._fleet.get(worker.address) is not worker:
                return
            self._fleet.probe_begun(worker)
            fault = "the connection was lost"
            try:
                fault = await _self_test(peer)
            finally:
                self._fleet.probe_ended(worker, has_passed=not fault)
            verdict = f"has failed its self-test: {fault}" if fault else "has passed its self-test"
            log.warning("%s %s %s", worker.state.role, worker.address, verdict)
            self._changed()

    def _session_ended(self, address: str, incarnation: str, error: TandemError) -> None:
        self._dispatcher.session_closed(incarnation)
        self._interleave.session_closed(incarnation)
        self._fleet.session_down(address, incarnation)
        worker = self._fleet.get(address)
        is_its_own = worker is not None and worker.state.incarnation == incarnation
        if worker is not None and is_its_own and not isinstance(error, Draining):
            self._fleet.failed(worker, LOST_SESSION)


async def _self_test(peer: Peer) -> str:
    """What the worker finds wrong with itself; empty when nothing is."""
    stream = peer.open("SelfTest")
    try:
        with anyio.fail_after(_SELF_TEST_S):
            await stream.send(SelfTest())
            reply = await stream.receive()
    except TimeoutError:
        return f"no answer within {_SELF_TEST_S:g} s"
    except TandemError as error:
        # workers of before have no such test: then time alone decides
        return "" if "unimplemented" in error.message else error.message
    finally:
        stream.cancel()
    return reply.fault if isinstance(reply, SelfTestDone) else "it answers something else"


async def _first_state(stream: Stream) -> object | None:
    with anyio.move_on_after(_FIRST_STATE_S):
        return await stream.receive()
    raise WorkerLost("it does not tell its state")


def _only(group: BaseExceptionGroup[TandemError]) -> TandemError:
    found: BaseException = group
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    assert isinstance(found, TandemError)
    return found
