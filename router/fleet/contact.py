"""The contact with the worker at one address: its Watch stream (states, and changes of the prefix
cache), one session with each life of a decode worker, and self-tests of one that has failed too
often.

What is seen goes into the fleet; the fleet decides.
"""

import logging
from collections.abc import Callable

import anyio
from anyio.abc import TaskGroup

from common.clock import Clock
from common.errors import Draining, MalformedMessage, TandemError, WorkerLost, first_of
from common.messages import (
    PROTOCOL_VERSION,
    Hello,
    KvEvents,
    SelfTest,
    SelfTestDone,
    Watch,
    WorkerState,
)
from common.rpc import Peer, Stream
from common.watch_thread import until_silent
from common.watchdog import Silence
from router.fleet.breaker import State
from router.fleet.dispatch import Dispatcher
from router.fleet.fleet import Fleet
from router.fleet.interleave import Interleave
from router.fleet.reach import Reach
from router.fleet.session import Session
from router.fleet.worker import Worker

log = logging.getLogger(__name__)

MAX_BACKOFF_S = 1.0
FIRST_BACKOFF_S = 0.1
_FIRST_STATE_S = 10.0
_SELF_TEST_S = 10.0

LOST_SESSION = 1.0
"""Failures that a lost session counts as, however many requests it had."""


class Contact:
    def __init__(
        self,
        address: str,
        *,
        fleet: Fleet,
        dispatcher: Dispatcher,
        interleave: Interleave,
        reach: Reach,
        clock: Clock,
        on_change: Callable[[], None],
    ) -> None:
        self._address = address
        self._fleet = fleet
        self._dispatcher = dispatcher
        self._interleave = interleave
        self._router_id = reach.router_id
        self._peer: Peer = reach.connect(address)
        self._clock = clock
        self._on_change = on_change
        self._group: TaskGroup | None = None
        """Of a Watch stream and what lives as long."""
        self._incarnation = ""
        """Whom that stream has been about last."""

    async def run(self, is_wanted: Callable[[], bool]) -> None:
        """Until no name leads here any more and the worker does not answer."""
        backoff_s = FIRST_BACKOFF_S
        try:
            while True:
                try:
                    await self._watch()
                except TandemError as error:
                    backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)
                    self._lost(error)
                else:
                    backoff_s = FIRST_BACKOFF_S
                    self._lost(WorkerLost("it closed the stream"))
                if not is_wanted():
                    return
                await self._clock.sleep(backoff_s)
        finally:
            self._fleet.forget(self._address)
            with anyio.CancelScope(shield=True):
                await self._peer.close()

    def test(self, worker: Worker) -> None:
        """The worker has failed too often: it tests itself when its time is over. (One that is not
        watched now is tested when it is seen again.)
        """
        if self._group is not None:
            self._group.start_soon(self._test, worker)

    def _lost(self, error: TandemError) -> None:
        worker = self._fleet.get(self._address)
        if worker is not None and worker.is_linked:
            log.warning("lost %s %s: %s", worker.state.role, self._address, error.message)
        reason = error.message.rpartition(": ")[2][:100]
        self._fleet.refuse(self._address, f"cannot be reached: {reason}")
        self._on_change()

    # --- the Watch stream -------------------------------------------------------------------------

    async def _watch(self) -> None:
        """A Watch stream and, for a decode worker, its sessions. Returns or raises when the stream
        ends. One that has missed changes of the prefix cache is replaced by a new one, whose
        snapshot makes up for them; sessions go on.
        """
        ended: TandemError | None = None
        self._incarnation = ""
        try:
            async with anyio.create_task_group() as group:
                self._group = group
                while not await self._follow_stream(self._peer.open("Watch")):
                    log.warning(
                        "missed changes of the prefix cache of %s: asking anew", self._address
                    )
                    await self._clock.sleep(FIRST_BACKOFF_S)
                group.cancel_scope.cancel()
        except* TandemError as errors:
            ended = first_of(errors)  # raised here, Python before 3.11.4 wraps it in a group again
        finally:
            self._group = None
        if ended is not None:
            raise ended

    async def _follow_stream(self, stream: Stream) -> bool:
        """True at the end of the stream; False when events of the prefix cache are missing. Raises
        WorkerLost when the worker does not say what it promised to.
        """
        silence = Silence(0.0, self._clock.now())
        is_whole = True
        try:
            await stream.send(Watch())
            async with anyio.create_task_group() as group:
                group.start_soon(self._listen, silence)
                is_whole = await self._read_states(stream, silence)
                group.cancel_scope.cancel()
        except* TandemError as errors:
            raise first_of(errors) from None
        finally:
            stream.cancel()
        return is_whole

    async def _listen(self, silence: Silence) -> None:
        await until_silent(silence, self._clock)
        raise WorkerLost("it says nothing any more, though its connection is open")

    async def _read_states(self, stream: Stream, silence: Silence) -> bool:
        worker: Worker | None = None
        num_events = 0
        message = await self._first_state(stream)
        while message is not None:
            silence.heard(self._clock.now())
            if worker is None or not isinstance(message, KvEvents):
                worker = self._observe(message)
                silence.heartbeat_s = worker.state.heartbeat_s
                self._seen(worker)
            elif message.sequence != num_events or (num_events == 0 and not message.is_snapshot):
                return False
            else:
                num_events += 1
                self._fleet.cache_changed(self._address, message)
            message = await stream.receive()
        return True

    async def _first_state(self, stream: Stream) -> object | None:
        with self._clock.deadline(_FIRST_STATE_S):
            return await stream.receive()
        raise WorkerLost("it does not tell its state")

    def _observe(self, message: object) -> Worker:
        if not isinstance(message, WorkerState):
            raise MalformedMessage(f"expected WorkerState, got {type(message).__name__}")
        address, role, incarnation = self._address, message.role, message.incarnation
        before = self._fleet.get(address)
        was_linked = before is not None and before.is_linked
        worker = self._fleet.observe(address, message)
        if worker is not before:
            log.info("found %s %s, incarnation %s", role, address, incarnation)
        elif not was_linked:
            log.info("%s %s is back, incarnation %s", role, address, incarnation)
        self._interleave.observed(message)
        self._on_change()
        return worker

    def _seen(self, worker: Worker) -> None:
        if worker.state.incarnation == self._incarnation:
            return
        self._incarnation = worker.state.incarnation
        if worker.breaker.state is not State.CLOSED:
            self.test(worker)
        if worker.can_decode and worker.state.protocol == PROTOCOL_VERSION:
            assert self._group is not None
            self._group.start_soon(self._hold_session, self._incarnation)

    # --- sessions ---------------------------------------------------------------------------------

    async def _hold_session(self, incarnation: str) -> None:
        """Keeps a session open with one life of a worker, as long as its Watch stream lasts."""
        backoff_s = FIRST_BACKOFF_S
        while True:
            session = Session(self._peer.open("Session"), self._address)
            worker = self._fleet.get(self._address)
            self._dispatcher.session_opened(incarnation, session)
            if worker is not None:
                self._interleave.session_opened(worker.state, session.limit_chunks)
            self._fleet.session_up(self._address, incarnation)
            self._on_change()
            started_at = self._clock.now()
            try:
                await session.run(
                    Hello(router_id=self._router_id, incarnation=incarnation),
                    lambda error: self._session_ended(incarnation, error),
                )
            except TandemError as error:
                log.warning("session with %s ended: %s", self._address, error.message)
            if self._clock.now() - started_at > MAX_BACKOFF_S:
                backoff_s = FIRST_BACKOFF_S
            await self._clock.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    def _session_ended(self, incarnation: str, error: TandemError) -> None:
        self._dispatcher.session_closed(incarnation)
        self._interleave.session_closed(incarnation)
        self._fleet.session_down(self._address, incarnation)
        worker = self._fleet.get(self._address)
        is_its_own = worker is not None and worker.state.incarnation == incarnation
        if worker is not None and is_its_own and not isinstance(error, Draining):
            self._fleet.failed(worker, LOST_SESSION)

    # --- self-tests -------------------------------------------------------------------------------

    async def _test(self, worker: Worker) -> None:
        """Again and again, until it passes."""
        while worker.breaker.state is not State.CLOSED:
            await self._clock.sleep(self._fleet.probe_in_s(worker))
            if self._fleet.get(worker.address) is not worker:
                return
            self._fleet.probe_begun(worker)
            fault = "the connection was lost"
            try:
                fault = await self._fault()
            finally:
                self._fleet.probe_ended(worker, has_passed=not fault)
            verdict = f"has failed its self-test: {fault}" if fault else "has passed its self-test"
            log.warning("%s %s %s", worker.state.role, worker.address, verdict)
            self._on_change()

    async def _fault(self) -> str:
        """What the worker finds wrong with itself; empty when nothing is."""
        stream = self._peer.open("SelfTest")
        try:
            with self._clock.deadline(_SELF_TEST_S):
                await stream.send(SelfTest())
                reply = await stream.receive()
                if isinstance(reply, SelfTestDone):
                    return reply.fault
                return "it answers something else"
        except TandemError as error:
            # workers of before have no such test: then time alone decides
            return "" if "unimplemented" in error.message else error.message
        finally:
            stream.cancel()
        return f"no answer within {_SELF_TEST_S:g} s"
