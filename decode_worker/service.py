"""The decode worker's shell: carries out over gRPC, and on the device, what core.py decides.

    Session stream -> core.submit, core.receive -> actions -> outboxes, hand-offs
    step loop      -> core.admit, core.plan -> device -> core.apply -> actions -> one TokenBatch
                      per session

Actions are carried out at once and in order. The outbox of a session is bounded; a full one breaks
the session, never the step. The hand-offs' side of things is in handoffs.py.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import anyio
import numpy as np
from anyio.abc import TaskGroup
from numpy.typing import NDArray

from common.errors import (
    Draining,
    MalformedMessage,
    NotReady,
    Overloaded,
    TandemError,
    WorkerLost,
)
from common.messages import (
    PROTOCOL_VERSION,
    Admitted,
    Cancel,
    Failed,
    GenerateRequest,
    Hello,
    ShareParams,
    Submit,
    UnshareParams,
)
from common.request_checks import checked_tokens
from common.rpc import Handler, Stream
from common.scheduling.plan import StepPlan, StepResult
from common.types import RequestId
from decode_worker.actions import Action, Ended, NoteFirstTokens, NotePulled, SessionId, Tell
from decode_worker.arrivals import Arrivals
from decode_worker.core import DecodeCore
from decode_worker.flights import MAX_IN_FLIGHT
from decode_worker.handoffs import Handoffs, Wire
from decode_worker.request_metrics import RequestMetrics
from worker.context import WorkerContext
from worker.self_check import SelfCheck
from worker.watch import WatchService

log = logging.getLogger(__name__)

MAX_OUTBOX = 4096
"""Messages a router may be behind before its session is broken."""


@dataclass(slots=True, eq=False)
class _Session:
    id: SessionId
    arrivals: Arrivals
    stop: Callable[[], None] = lambda: None
    outbox: deque[object] = field(default_factory=deque)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    error: TandemError | None = None

    def put(self, message: object) -> None:
        if len(self.outbox) >= MAX_OUTBOX:
            self.fail(Overloaded("the router does not read its session fast enough"))
            return
        self.outbox.append(message)
        self.wake.set()

    def fail(self, error: TandemError) -> None:
        self.error = self.error or error
        self.stop()


class DecodeService:
    def __init__(
        self,
        context: WorkerContext,
        core: DecodeCore,
        wire: Wire | None,
        *,
        overlaps_steps: bool = False,
    ) -> None:
        """Without a `wire` every prompt is computed here. `overlaps_steps`: a step is handed to the
        device while another one runs there.
        """
        self._identity = context.identity
        self._device = context.device
        self._clock = context.clock
        self._metrics = context.metrics
        self._events = context.events
        self._core = core
        self._max_steps = MAX_IN_FLIGHT if overlaps_steps else 1
        self._of_requests = RequestMetrics(context.metrics)
        self._sessions: dict[SessionId, _Session] = {}
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._handoffs = None if wire is None else Handoffs(context, core, wire, self._report)
        self.watch = WatchService(
            self._identity,
            core.load,
            context.cache.feed,
            (lambda: ()) if wire is None else lambda: wire.links.refused,
        )
        self._check = SelfCheck(
            device=self._device,
            cache=context.cache,
            clock=self._clock,
            watch=self.watch,
            give_up=context.unfit,
        )
        self._metrics.watch_load(core.load)

    def handlers(self) -> dict[str, Handler]:
        return {
            "Watch": self.watch.serve,
            "Session": self._serve_session,
            "SelfTest": self._check.serve,
        }

    async def drained(self) -> None:
        """Returns when no request is left. Nothing new is taken from now on."""
        self._core.is_draining = True
        self.watch.drain()
        while self._core.num_requests or any(s.outbox for s in self._sessions.values()):
            self._idle.clear()
            await self._idle.wait()

    async def leave(self) -> None:
        """Whatever is still here goes elsewhere: routers are told that this worker leaves."""
        self._core.is_draining = True
        self._fail_sessions(Draining("this decode worker is shutting down"))
        while self._sessions:
            self._idle.clear()
            await self._idle.wait()

    def stalled(self, fault: str) -> None:
        """The device hangs, or the loop did: whatever is here goes elsewhere, nothing new comes."""
        self._core.fault = fault
        self.watch.set_fault(fault)
        if fault:
            self._fail_sessions(WorkerLost(f"this decode worker hangs: {fault}"))

    def _fail_sessions(self, error: TandemError) -> None:
        for session in list(self._sessions.values()):
            session.fail(error)

    # --- steps ---------------------------------------------------------------------------------

    async def run(self) -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(self._check.run)
            if self._handoffs is not None:
                group.start_soon(self._handoffs.run)
            await self._run_steps()

    async def _run_steps(self) -> None:
        """The step loop: decide, do, decide again; with overlap, the next step is decided while one
        runs. Sleeps while there is nothing to do.
        """
        under_way: deque[tuple[StepPlan, asyncio.Future[StepResult]]] = deque()
        try:
            while True:
                now = self._clock.now()
                self._perform(self._core.admit(now))
                plan, actions = self._core.plan(now)
                self._perform(actions)
                if plan is not None:
                    self.watch.changed(can_wait=True)
                    under_way.append((plan, asyncio.ensure_future(self._device.execute(plan))))
                    if len(under_way) < self._max_steps:
                        continue
                if under_way:
                    await self._finish(*under_way.popleft())
                else:
                    self._wake.clear()
                    with self._clock.deadline(self._core.look_again_in(self._clock.now())):
                        await self._wake.wait()
        finally:
            for _, result in under_way:
                result.cancel()

    async def _finish(self, plan: StepPlan, under_way: asyncio.Future[StepResult]) -> None:
        result = await under_way
        self._metrics.step.observe(result.duration_s)
        self._metrics.prompt_tokens.inc(plan.num_tokens - len(plan.decodes))
        self._check.saw(result)
        self._perform(self._core.apply(plan, result, self._clock.now()))
        self.watch.changed()

    def _report(self, actions: Iterable[Action]) -> None:
        self._perform(actions)
        self.wake()

    def wake(self) -> None:
        """Something changed that the step loop should look at, and routers should know."""
        self._wake.set()
        self.watch.changed(can_wait=True)

    def _perform(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Tell(session=session, message=message):
                    self._tell(action)
                    self._sessions[session].put(message)
                case Ended(request_id=request_id):
                    self._of_requests.ended(action, self._clock.now())
                    self._events.record("ended", request_id=request_id)
                    self._idle.set()
                    self.watch.changed(can_wait=True)
                case NoteFirstTokens(request_id=request_id, num_missing=missing):
                    self._events.record(
                        "first_tokens_arrived", request_id=request_id, missing=missing
                    )
                case NotePulled(request_id=request_id, exposed_s=exposed_s):
                    self._metrics.exposed.observe(exposed_s)
                    self._events.record("landed", request_id=request_id)
                case _:
                    assert self._handoffs is not None
                    self._handoffs.perform(action)

    def _tell(self, told: Tell) -> None:
        self._of_requests.told(told, self._clock.now())
        if isinstance(told.message, Admitted):
            self._events.record("admitted", request_id=told.message.request_id)
            self.watch.changed(can_wait=True)

    # --- sessions ------------------------------------------------------------------------------

    async def _serve_session(self, stream: Stream) -> None:
        _check(await stream.receive(), self._identity.incarnation)
        arrivals = Arrivals(self._identity.vocab_size, self._device.prepare)
        session = _Session(self._core.open_session(), arrivals)
        self._sessions[session.id] = session
        try:
            async with anyio.create_task_group() as group:
                session.stop = group.cancel_scope.cancel
                group.start_soon(self._send, session, stream)
                await self._receive(session, stream, group)
                group.cancel_scope.cancel()
        finally:
            self._report(self._core.close_session(session.id))
            del self._sessions[session.id]
            self._idle.set()
        if session.error is not None:
            raise session.error

    async def _send(self, session: _Session, stream: Stream) -> None:
        while True:
            while session.outbox:
                message = session.outbox.popleft()
                try:
                    await stream.send(message)
                except TandemError:
                    session.stop()
                    return
            self._idle.set()
            session.wake.clear()
            await session.wake.wait()

    async def _receive(self, session: _Session, stream: Stream, group: TaskGroup) -> None:
        """Until the router ends the session, is gone, or talks nonsense."""
        while True:
            try:
                message = await stream.receive()
                if message is None:
                    return
                self._hear(session, message, group)
            except MalformedMessage as error:
                session.error = error
                return
            except TandemError:
                return

    def _hear(self, session: _Session, message: object, group: TaskGroup) -> None:
        match message:
            case Submit(request=request):
                self._submit(session, request, group)
            case ShareParams():
                session.arrivals.shared.put(message)
            case UnshareParams(key=key):
                session.arrivals.shared.drop(key)
            case Cancel(request_id=request_id) if request_id in session.arrivals:
                session.arrivals.cancel(request_id)
            case _:
                self._report(self._core.receive(session.id, message, self._clock.now()))

    def _submit(self, session: _Session, request: GenerateRequest, group: TaskGroup) -> None:
        with self._telling(session, request.request_id):
            token_ids = checked_tokens(request, self._identity.vocab_size)
            request = session.arrivals.whole(request)
            if request.sampling.grammar is None:
                self._add(session, request, token_ids)
            elif request.request_id in session.arrivals:
                raise MalformedMessage(f"request {request.request_id} is here already")
            else:
                group.start_soon(self._prepare, session, request, token_ids)

    async def _prepare(
        self, session: _Session, request: GenerateRequest, token_ids: NDArray[np.int32]
    ) -> None:
        with self._telling(session, request.request_id):
            if await session.arrivals.prepared(request):
                self._add(session, request, token_ids)

    @contextlib.contextmanager
    def _telling(self, session: _Session, request_id: RequestId) -> Iterator[None]:
        """The router hears why a request cannot be taken."""
        try:
            yield
        except TandemError as error:
            self._perform([Tell(session.id, Failed.of(request_id, error))])

    def _add(
        self, session: _Session, request: GenerateRequest, token_ids: NDArray[np.int32]
    ) -> None:
        now = self._clock.now()
        chain = self._core.chain(request.cache_salt, token_ids)
        self._core.submit(session.id, request, token_ids, chain, now)
        self._of_requests.submitted(request.request_id, request.sampling.n, now)
        self._events.record("submitted", request_id=request.request_id, num_tokens=len(token_ids))
        self.wake()


def _check(hello: object, incarnation: str) -> None:
    if not isinstance(hello, Hello):
        raise MalformedMessage("a Session stream starts with Hello")
    if hello.protocol != PROTOCOL_VERSION:
        raise MalformedMessage(f"protocol {hello.protocol}, this worker speaks {PROTOCOL_VERSION}")
    if hello.incarnation != incarnation:
        raise NotReady("this worker was restarted: watch it anew")
