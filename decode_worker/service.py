"""The decode worker's shell: sessions with routers, hand-offs from prefill workers, the step loop.

    Session:  ChunkBudget -> scheduler.set_chunk_budget
              Submit -> scheduler.add -> admit -> Admitted -> Route -> hand-off, or local prefill
              -> TokenBatch ...
    steps:    admit, plan -> device -> apply -> one TokenBatch per session

A session is the lease of its requests: when its stream ends, all of them are aborted. The outbox of
a session is bounded; a full one breaks the session, never the step. The hand-off's side of things
is in `pull.py`.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import anyio
import numpy as np
from anyio.abc import TaskGroup
from numpy.typing import NDArray

from common.clock import Clock
from common.device import Device
from common.errors import (
    DecodeLost,
    Draining,
    MalformedMessage,
    NotReady,
    Overloaded,
    Preempted,
    TandemError,
    WorkerLost,
)
from common.events import EventLog
from common.messages import (
    PROTOCOL_VERSION,
    Admitted,
    Cancel,
    ChunkBudget,
    Failed,
    GenerateRequest,
    Hello,
    PrefillDone,
    Route,
    ShareParams,
    Submit,
    TokenBatch,
    UnshareParams,
)
from common.request_checks import checked_tokens
from common.rpc import Handler, Stream
from common.scheduling.block_hash import HashChain, HashRoots
from common.scheduling.kv_cache import KvCache
from common.scheduling.plan import StepPlan, StepResult
from common.types import RequestId
from decode_worker.arrivals import Arrivals
from decode_worker.entries import Facts
from decode_worker.pull import Puller
from decode_worker.scheduler import MAX_IN_FLIGHT, BatchScheduler
from worker.metrics import WorkerMetrics
from worker.self_check import SelfCheck
from worker.watch import Identity, Load, WatchService

log = logging.getLogger(__name__)

MAX_OUTBOX = 4096
"""Messages a router may be behind before its session is broken."""


@dataclass(slots=True, eq=False)
class _Session:
    router_id: str
    arrivals: Arrivals
    stop: Callable[[], None] = lambda: None
    outbox: deque[object] = field(default_factory=deque)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    request_ids: set[RequestId] = field(default_factory=set)
    chunk_budget: int | None = None
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


@dataclass(slots=True, eq=False)
class _Request:
    """Times of a request, for metrics, and the session that owns it."""

    session: _Session
    arrival: float
    num_outputs: int
    first_token: float | None = None
    last_token: dict[int, float] = field(default_factory=dict)
    num_tokens: int = 0
    was_admitted: bool = False
    reason: str = "abort"
    """How it ended: an output's finish reason, error, preempted, or abort."""


class DecodeService:
    def __init__(
        self,
        *,
        identity: Identity,
        scheduler: BatchScheduler,
        cache: KvCache,
        device: Device,
        clock: Clock,
        metrics: WorkerMetrics,
        events: EventLog,
        unfit: Callable[[str], None],
        overlaps_steps: bool = False,
    ) -> None:
        """`unfit` is called with the reason when the worker must not serve any more.
        `overlaps_steps`: a step is handed to the device while another one runs there.
        """
        self._identity = identity
        self._scheduler = scheduler
        self._cache = cache
        self._device = device
        self._puller: Puller | None = None
        self._clock = clock
        self._metrics = metrics
        self._events = events
        self._max_steps = MAX_IN_FLIGHT if overlaps_steps else 1
        self._roots = HashRoots(identity.model_fingerprint, identity.block_size)
        self._requests: dict[RequestId, _Request] = {}
        self._sessions: set[_Session] = set()
        self._pulls: dict[RequestId, anyio.CancelScope] = {}
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self.watch = WatchService(identity, self._load, cache.feed)
        self._check = SelfCheck(
            device=device, cache=cache, clock=clock, watch=self.watch, give_up=unfit
        )
        metrics.watch_load(self._load)

    def use(self, puller: Puller) -> None:
        """Without one every prompt is computed here."""
        self._puller = puller

    def handlers(self) -> dict[str, Handler]:
        return {
            "Watch": self.watch.serve,
            "Session": self._serve_session,
            "SelfTest": self._check.serve,
        }

    def _load(self) -> Load:
        return Load(
            blocks=self._cache.load,
            running=self._scheduler.num_running,
            waiting=self._scheduler.num_waiting,
            num_queued_tokens=self._scheduler.num_queued_tokens,
            max_prompt_tokens=self._scheduler.max_request_tokens,
            num_decodes=self._scheduler.num_decodes,
            num_context_tokens=self._scheduler.num_context_tokens,
            chunk_tokens=self._scheduler.chunk_tokens,
            step_times=self._scheduler.step_times,
            handoff_s=0.0 if self._puller is None else self._puller.handoff_s,
        )

    async def drained(self) -> None:
        """Returns when no request is left. Nothing new is taken from now on."""
        self.watch.drain()
        while self._requests or any(session.outbox for session in self._sessions):
            self._idle.clear()
            await self._idle.wait()

    async def leave(self) -> None:
        """Whatever is still here goes elsewhere: routers are told that this worker leaves."""
        for session in list(self._sessions):
            session.fail(Draining("this decode worker is shutting down"))
        while self._sessions:
            self._idle.clear()
            await self._idle.wait()

    def stalled(self, fault: str) -> None:
        """The device hangs, or the loop did: whatever is here goes elsewhere, nothing new comes."""
        self.watch.set_fault(fault)
        if fault:
            for session in list(self._sessions):
                session.fail(WorkerLost(f"this decode worker hangs: {fault}"))

    # --- steps ---------------------------------------------------------------------------------

    async def run(self) -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(self._check.run)
            await self._run_steps()

    async def _run_steps(self) -> None:
        """The step loop: decide, do, decide again; with overlap, the next step is decided while one
        runs. Sleeps while there is nothing to do.
        """
        under_way: deque[tuple[StepPlan, asyncio.Future[StepResult]]] = deque()
        try:
            while True:
                self._admit()
                plan, facts = self._scheduler.plan(self._clock.now())
                self._tell(facts)
                if plan is not None:
                    self.watch.changed(can_wait=True)
                    under_way.append((plan, asyncio.ensure_future(self._device.execute(plan))))
                    if len(under_way) < self._max_steps:
                        continue
                if under_way:
                    await self._finish(*under_way.popleft())
                else:
                    self._wake.clear()
                    with anyio.move_on_after(self._scheduler.place_freed_in(self._clock.now())):
                        await self._wake.wait()
        finally:
            for _, result in under_way:
                result.cancel()

    async def _finish(self, plan: StepPlan, under_way: asyncio.Future[StepResult]) -> None:
        result = await under_way
        self._metrics.step.observe(result.duration_s)
        self._check.saw(result)
        self._tell(self._scheduler.apply(plan, result, self._clock.now()))
        self.watch.changed()

    def wake(self) -> None:
        """Something changed that the step loop should look at, and routers should know."""
        self._wake.set()
        self.watch.changed(can_wait=True)

    def _admit(self) -> None:
        now = self._clock.now()
        admissions = self._scheduler.admit(now)
        if admissions:
            self.watch.changed(can_wait=True)
        for admission in admissions:
            request = self._requests[admission.request_id]
            request.was_admitted = True
            self._metrics.queue.observe(now - request.arrival)
            self._metrics.cached_tokens.inc(admission.num_cached_tokens)
            self._events.record("admitted", request_id=admission.request_id)
            request.session.put(
                Admitted(
                    request_id=admission.request_id,
                    num_cached_tokens=admission.num_cached_tokens,
                    needs_route=admission.needs_route,
                )
            )

    def _tell(self, facts: Facts) -> None:
        """Sends what came of a step (or of a hand-off's first tokens) to the sessions concerned."""
        now = self._clock.now()
        self._metrics.prompt_tokens.inc(facts.num_local_tokens)
        for request_id, num_cached_tokens, prompt_logprobs in facts.prefilled:
            request = self._requests[request_id]
            request.session.put(
                PrefillDone(
                    request_id=request_id,
                    num_cached_tokens=num_cached_tokens,
                    prompt_logprobs=prompt_logprobs,
                )
            )
        self._tell_tokens(facts, now)
        for request_id, error in facts.failed:
            self._fail(request_id, error)
        for request_id in facts.ended:
            self._forget(request_id, now)

    def _tell_tokens(self, facts: Facts, now: float) -> None:
        if not facts.are_from_prefill:
            self._metrics.output_tokens.inc(len(facts.token_ids))
        rows: dict[_Session, list[int]] = {}
        for row, request_id in enumerate(facts.request_ids):
            request = self._requests[request_id]
            rows.setdefault(request.session, []).append(row)
            self._observe_token(request, facts.output_indices[row], now)
            reason = facts.finish_reasons[row]
            if reason is not None:
                request.reason = reason
        for session, own in rows.items():
            logprobs = tuple(facts.logprobs[row] for row in own)
            session.put(
                TokenBatch(
                    request_ids=tuple(facts.request_ids[row] for row in own),
                    output_indices=tuple(facts.output_indices[row] for row in own),
                    token_ids=tuple(facts.token_ids[row] for row in own),
                    finish_reasons=tuple(facts.finish_reasons[row] for row in own),
                    logprobs=logprobs if any(item is not None for item in logprobs) else (),
                )
            )

    def _observe_token(self, request: _Request, index: int, now: float) -> None:
        request.num_tokens += 1
        if request.first_token is None:
            request.first_token = now
            self._metrics.ttft.observe(now - request.arrival)
        elif index in request.last_token:
            self._metrics.itl.observe(now - request.last_token[index])
        request.last_token[index] = now

    def _fail(self, request_id: RequestId, error: TandemError, *, at_prefill: bool = False) -> None:
        request = self._requests.get(request_id)
        if request is None:
            return
        if isinstance(error, Preempted):
            self._metrics.preemptions.inc()
            request.reason = "preempted"
        else:
            self._metrics.errors.labels(error.code).inc()
            request.reason = "error"
        request.session.put(Failed.of(request_id, error, at_prefill=at_prefill))

    def _forget(self, request_id: RequestId, now: float) -> None:
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        self._metrics.finished.labels(request.reason).inc()
        request.session.request_ids.discard(request_id)
        pull = self._pulls.get(request_id)
        if pull is not None:
            pull.cancel()
        per_output = request.num_tokens / request.num_outputs
        if request.first_token is not None and per_output > 1:
            self._metrics.tpot.observe((now - request.first_token) / (per_output - 1))
        self._events.record("ended", request_id=request_id)
        self.wake()
        self._idle.set()

    # --- sessions ------------------------------------------------------------------------------

    async def _serve_session(self, stream: Stream) -> None:
        hello = await stream.receive()
        if not isinstance(hello, Hello):
            raise MalformedMessage("a Session stream starts with Hello")
        if hello.protocol != PROTOCOL_VERSION:
            raise MalformedMessage(
                f"protocol {hello.protocol}, this worker speaks {PROTOCOL_VERSION}"
            )
        if hello.incarnation != self._identity.incarnation:
            raise NotReady("this worker was restarted: watch it anew")
        arrivals = Arrivals(self._identity.vocab_size, self._device.prepare)
        session = _Session(router_id=hello.router_id, arrivals=arrivals)
        self._sessions.add(session)
        try:
            async with anyio.create_task_group() as group:
                session.stop = group.cancel_scope.cancel
                group.start_soon(self._send, session, stream)
                await self._receive(session, stream, group)
                group.cancel_scope.cancel()
        finally:
            for request_id in list(session.request_ids):
                self._abort(request_id)
            self._sessions.discard(session)
            self._limit_chunks()
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
            except MalformedMessage as error:
                session.error = error
                return
            except TandemError:
                return
            match message:
                case None:
                    return
                case Submit(request=request):
                    self._submit(session, request, group)
                case ShareParams():
                    session.arrivals.shared.put(message)
                case UnshareParams(key=key):
                    session.arrivals.shared.drop(key)
                case Cancel(request_id=request_id) if request_id in session.arrivals:
                    session.arrivals.cancel(request_id)
                case Route() if message.request_id in session.request_ids:
                    self._route(message, group)
                case Cancel(request_id=request_id, output_index=index) if (
                    request_id in session.request_ids
                ):
                    if index is None:
                        self._abort(request_id, "stop" if message.has_stopped else "abort")
                    else:
                        self._tell(self._scheduler.end_output(request_id, index))
                        self.wake()
                case ChunkBudget(max_tokens=max_tokens) if max_tokens > 0:
                    session.chunk_budget = max_tokens
                    self._limit_chunks()
                case Route() | Cancel():
                    pass  # it has ended meanwhile
                case _:
                    session.error = MalformedMessage(f"{type(message).__name__} in a session")
                    return

    def _limit_chunks(self) -> None:
        """The smallest budget of all sessions holds."""
        budgets = [s.chunk_budget for s in self._sessions if s.chunk_budget is not None]
        self._scheduler.set_chunk_budget(min(budgets, default=None))
        self.watch.changed()

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
            self._metrics.errors.labels(error.code).inc()
            session.put(Failed.of(request_id, error))

    def _add(
        self, session: _Session, request: GenerateRequest, token_ids: NDArray[np.int32]
    ) -> None:
        if self.watch.is_draining:
            raise Draining("this decode worker is draining")
        if self.watch.fault:
            raise DecodeLost(f"this decode worker hangs: {self.watch.fault}")
        if request.request_id in self._requests:
            raise MalformedMessage(f"request {request.request_id} is here already")
        chain = HashChain(self._roots.root(request.cache_salt), self._identity.block_size)
        chain.extend(token_ids)
        now = self._clock.now()
        self._scheduler.add(request, token_ids, chain, now)
        self._requests[request.request_id] = _Request(
            session=session, arrival=now, num_outputs=request.sampling.n
        )
        session.request_ids.add(request.request_id)
        self._events.record("submitted", request_id=request.request_id, num_tokens=len(token_ids))
        self.wake()

    def _route(self, route: Route, group: TaskGroup) -> None:
        if not self._scheduler.is_waiting_for_route(route.request_id):
            return
        if route.prefill is None or self._puller is None:
            self._scheduler.route_local(route.request_id)
            self.wake()
        else:
            group.start_soon(self._pull, route, self._puller)

    async def _pull(self, route: Route, puller: Puller) -> None:
        """One hand-off, from the route to the last page. Ends with the request if that ends
        first.
        """
        request_id = route.request_id
        if not self._scheduler.is_waiting_for_route(request_id):
            return
        entry = self._scheduler.route_remote(request_id, self._clock.now())
        assert route.prefill is not None
        try:
            with anyio.CancelScope() as scope:
                self._pulls[request_id] = scope
                await puller.pull(entry, route.prefill, route.incarnation, self._tell)
        except TandemError as error:
            if request_id in self._requests:
                self._fail(request_id, error, at_prefill=True)
                self._scheduler.abort(request_id)
                self._forget(request_id, self._clock.now())
            else:
                self._metrics.errors.labels(error.code).inc()
        finally:
            del self._pulls[request_id]
            self.wake()

    def _abort(self, request_id: RequestId, reason: str = "abort") -> None:
        """Ends a request without a word; its pages are free when nothing in flight names them."""
        request = self._requests.get(request_id)
        if request is not None:
            request.reason = reason
        self._scheduler.abort(request_id)
        self._forget(request_id, self._clock.now())
