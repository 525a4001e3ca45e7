"""The prefill worker's shell: hand-off streams on one side, the device on the other, the scheduler
between.

    Handoff stream -> add -> [plan, device, apply] -> facts -> HandoffSource -> actions -> stream

Each stream has one `HandoffSource`; its actions are performed here, at once and in order. The
stream's end, however it comes about, ends the source, and that frees.
"""

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial

import anyio
import numpy as np
from numpy.typing import NDArray

from common.clock import Clock
from common.device import Device
from common.errors import (
    Draining,
    MalformedMessage,
    PrefillLost,
    PullFailed,
    TandemError,
)
from common.events import EventLog
from common.messages import (
    PROTOCOL_VERSION,
    GenerateRequest,
    HandoffRequest,
    LinkReply,
    LinkRequest,
    PagesTaken,
    Working,
)
from common.request_checks import checked_tokens
from common.rpc import Handler, Stream
from common.scheduling.block_hash import HashChain, HashRoots
from common.scheduling.kv_cache import KvCache
from common.scheduling.plan import StepPlan
from common.scheduling.prompt_queue import Prompt, shareable
from common.shared_params import joined
from common.types import OutputKey
from kvtransfer.source import (
    AbortPrompt,
    Action,
    EndStream,
    Fact,
    HandoffSource,
    PagesFinished,
    PeerFinished,
    PromptDone,
    PromptLost,
    Release,
    Send,
    StreamLost,
    Taken,
)
from kvtransfer.transport import Transport
from prefill_worker.scheduler import ChunkComputed, PrefillScheduler, PromptComputed, PromptFailed
from prefill_worker.scheduler import Fact as SchedulerFact
from prefill_worker.wanted_params import WantedParams
from worker.metrics import WorkerMetrics
from worker.self_check import SelfCheck
from worker.watch import HEARTBEAT_S, Identity, Load, WatchService

log = logging.getLogger(__name__)

MIN_HEARTBEAT_S = 0.5
"""Nobody is told more often than that."""


@dataclass(slots=True, eq=False)
class _Handoff:
    key: OutputKey
    request: GenerateRequest
    arrival: float
    source: HandoffSource = field(default_factory=HandoffSource)
    outbox: deque[object] = field(default_factory=deque)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    has_ended: bool = False
    error: TandemError | None = None
    stall: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    num_chunks: int = 0
    num_held_tokens: int = 0
    """Leading ones that the receiver has in its own prefix cache."""
    was_aborted: bool = False
    heartbeat_s: float = 0.0
    """How often the receiver wants to hear something; 0: it does not know `Working`."""


class PrefillService:
    def __init__(
        self,
        *,
        identity: Identity,
        scheduler: PrefillScheduler,
        cache: KvCache,
        device: Device,
        transport: Transport,
        clock: Clock,
        metrics: WorkerMetrics,
        events: EventLog,
        unfit: Callable[[str], None],
        handoff_stall_s: float,
    ) -> None:
        """`unfit` is called with the reason when the worker must not serve any more."""
        self._identity = identity
        self._scheduler = scheduler
        self._cache = cache
        self._device = device
        self._transport = transport
        self._clock = clock
        self._metrics = metrics
        self._events = events
        self._handoff_stall_s = handoff_stall_s
        self._wanted_params = WantedParams(identity.vocab_size, handoff_stall_s)
        self._roots = HashRoots(identity.model_fingerprint, identity.block_size)
        self._handoffs: dict[OutputKey, _Handoff] = {}
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._num_handoffs = 0
        self.watch = WatchService(identity, self._load, cache.feed)
        self._check = SelfCheck(
            device=device, cache=cache, clock=clock, watch=self.watch, give_up=unfit
        )
        metrics.watch_load(self._load)

    def handlers(self) -> dict[str, Handler]:
        return {
            "Watch": self.watch.serve,
            "Handoff": self._serve_handoff,
            "Link": self._serve_link,
            "SelfTest": self._check.serve,
        }

    def _load(self) -> Load:
        return Load(
            blocks=self._cache.load,
            running=self._scheduler.num_running,
            waiting=self._scheduler.num_waiting,
            num_queued_tokens=self._scheduler.num_queued_tokens,
            max_prompt_tokens=min(self._identity.max_model_len, self._cache.max_tokens),
            chunk_tokens=self._scheduler.chunk_tokens,
            step_times=self._scheduler.step_times,
        )

    async def drained(self) -> None:
        """Returns when no hand-off is left. Nothing new is taken from now on."""
        self.watch.drain()
        while self._handoffs:
            self._idle.clear()
            await self._idle.wait()

    async def leave(self) -> None:
        """Whatever is still here goes elsewhere: decode workers are told that this one leaves."""
        self._give_back(Draining("this prefill worker is shutting down"))
        while self._handoffs:
            self._idle.clear()
            await self._idle.wait()

    def stalled(self, fault: str) -> None:
        """The device hangs, or the loop did: whatever is here goes elsewhere, nothing new comes."""
        self.watch.set_fault(fault)
        if fault:
            self._give_back(PrefillLost(f"this prefill worker hangs: {fault}"))

    def _give_back(self, error: TandemError) -> None:
        for handoff in list(self._handoffs.values()):
            self._on(handoff, PromptLost(error=error))
            self._scheduler.abort(handoff.key)

    # --- steps ------------------------------------------------------------------------------------

    async def run(self) -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(self._check.run)
            await self._run_steps()

    async def _run_steps(self) -> None:
        """The step loop: decide, do, decide again. Sleeps while there is nothing to do."""
        while True:
            plan = self._scheduler.plan(self._clock.now())
            if plan is None:
                self._changed()
                self._wake.clear()
                await self._wake.wait()
                continue
            self.watch.changed(can_wait=True)
            for chunk in plan.chunks:
                self._events.record(
                    "chunk_started", key=chunk.key, start=chunk.start, step=plan.step
                )
            result = await self._device.execute(plan, partial(self._stored, plan))
            self._metrics.step.observe(result.duration_s)
            self._check.saw(result)
            for fact in self._scheduler.apply(plan, result, self._clock.now()):
                self._on_scheduler(fact)
            self._changed()

    def _stored(self, plan: StepPlan) -> None:
        """Pages are on their way while the logits are computed."""
        for fact in self._scheduler.stored(plan):
            self._on_scheduler(fact)

    def _woken(self) -> None:
        """Something changed that the step loop should look at, and routers should know."""
        self._wake.set()
        self.watch.changed(can_wait=True)

    def _changed(self) -> None:
        self._metrics.handoffs.set(len(self._handoffs))
        self.watch.changed()

    def _on_scheduler(self, fact: SchedulerFact) -> None:
        handoff = self._handoffs.get(fact.key)
        match fact:
            case ChunkComputed(pages=pages, num_tokens=num_tokens):
                self._metrics.prompt_tokens.inc(num_tokens)
                if handoff is None:
                    self._scheduler.release((page.kind, page.block_id) for page in pages)
                    return
                self._events.record(
                    "pages_ready",
                    key=fact.key,
                    chunk=handoff.num_chunks,
                    blocks=[page.index for page in pages],
                )
                handoff.num_chunks += 1
                self._on(handoff, PagesFinished(pages=pages))
            case PromptComputed() if handoff is not None:
                self._metrics.output_tokens.inc(len(fact.token_ids))
                # what the decode worker holds itself, it has counted
                own = fact.num_cached_tokens - handoff.num_held_tokens
                self._metrics.cached_tokens.inc(max(0, own))
                self._metrics.ttft.observe(self._clock.now() - handoff.arrival)
                self._events.record("first_tokens", key=fact.key)
                self._on(
                    handoff,
                    PromptDone(
                        token_ids=fact.token_ids,
                        logprobs=fact.logprobs,
                        num_cached_tokens=fact.num_cached_tokens,
                        prompt_logprobs=fact.prompt_logprobs,
                    ),
                )
            case PromptFailed() if handoff is not None:
                self._on(handoff, PromptLost(error=fact.error))

    # --- hand-offs --------------------------------------------------------------------------------

    async def _serve_handoff(self, stream: Stream) -> None:
        message = await stream.receive()
        if not isinstance(message, HandoffRequest):
            raise MalformedMessage("a Handoff stream starts with HandoffRequest")
        if self.watch.is_draining:
            raise Draining("this prefill worker is draining")
        if self.watch.fault:
            raise PrefillLost(f"this prefill worker hangs: {self.watch.fault}")
        if message.incarnation != self._identity.incarnation:
            raise PrefillLost("the prefill worker was restarted")
        token_ids = checked_tokens(message.request, self._identity.vocab_size)
        key = message.request.shared
        if not key:
            await self._compute(message, token_ids, stream)
            return
        async with self._wanted_params.of(key, stream) as params:
            whole = replace(message, request=joined(message.request, params))
            await self._compute(whole, token_ids, stream)

    async def _compute(
        self, message: HandoffRequest, token_ids: NDArray[np.int32], stream: Stream
    ) -> None:
        if message.request.sampling.grammar is not None:
            await self._device.prepare(message.request.sampling.grammar)
        handoff = self._begin(message, token_ids)
        try:
            await self._exchange(handoff, stream)
        except TandemError as error:
            self._metrics.errors.labels(error.code).inc()
            raise
        finally:
            # whatever happened: nothing stays held
            self._on(handoff, StreamLost())
            del self._handoffs[handoff.key]
            self._metrics.finished.labels(_how_it_ended(handoff)).inc()
            self._idle.set()
            self._woken()
            self._changed()

    def _begin(self, message: HandoffRequest, token_ids: NDArray[np.int32]) -> _Handoff:
        """Puts the prompt in line. Raises when it can never be computed here."""
        request = message.request
        self._num_handoffs += 1
        # numbered, since a retry may come before its first try is forgotten
        key = f"{request.request_id}#{self._num_handoffs}"
        if not 0 <= message.num_held_blocks <= (len(token_ids) - 1) // self._identity.block_size:
            raise MalformedMessage("num_held_blocks is out of range")
        chain = HashChain(self._roots.root(request.cache_salt), self._identity.block_size)
        chain.extend(token_ids)
        prompt = Prompt(
            key=key,
            token_ids=token_ids,
            num_prompt_tokens=request.num_prompt_tokens,
            sampling=request.sampling,
            hashes=shareable(
                chain.full, len(token_ids), self._identity.block_size, request.sampling
            ),
            output_index=request.output_index,
            priority=request.priority,
            client=request.client,
        )
        now = self._clock.now()
        self._scheduler.add(prompt, chain.full, chain.open, message.num_held_blocks, now)
        handoff = self._handoffs[key] = _Handoff(
            key=key,
            request=request,
            arrival=now,
            num_held_tokens=message.num_held_blocks * self._identity.block_size,
            heartbeat_s=max(MIN_HEARTBEAT_S, message.heartbeat_s) if message.heartbeat_s else 0.0,
        )
        self._events.record("handoff_began", key=key, num_tokens=len(token_ids))
        self._woken()
        return handoff

    async def _exchange(self, handoff: _Handoff, stream: Stream) -> None:
        """Until the source has ended and everything is sent."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._receive, handoff, stream)
            if handoff.heartbeat_s > 0:
                group.start_soon(self._beat, handoff)
            with handoff.stall:
                await self._send(handoff, stream)
            group.cancel_scope.cancel()
        if handoff.stall.cancelled_caught and not handoff.has_ended:
            handoff.error = PullFailed(
                f"the receiver took no page for {self._handoff_stall_s:g} s; the hand-off was ended"
            )
        if handoff.error is not None:
            raise handoff.error

    async def _send(self, handoff: _Handoff, stream: Stream) -> None:
        while handoff.outbox or not handoff.has_ended:
            if not handoff.outbox:
                handoff.wake.clear()
                await handoff.wake.wait()
                continue
            try:
                await stream.send(handoff.outbox.popleft())
            except TandemError:
                self._on(handoff, StreamLost())
                return

    async def _beat(self, handoff: _Handoff) -> None:
        """Says that this worker is there, while the prompt waits and is computed."""
        while True:
            handoff.outbox.append(Working())
            handoff.wake.set()
            await anyio.sleep(handoff.heartbeat_s)

    async def _receive(self, handoff: _Handoff, stream: Stream) -> None:
        while True:
            try:
                message = await stream.receive()
            except TandemError:
                self._on(handoff, StreamLost())
                return
            if message is None:
                self._on(handoff, PeerFinished())
                return
            if not isinstance(message, PagesTaken):
                self._on(handoff, PromptLost(error=MalformedMessage("expected PagesTaken")))
                self._scheduler.abort(handoff.key)
                return
            self._on(handoff, Taken(blocks=message.blocks))

    def _on(self, handoff: _Handoff, fact: Fact) -> None:
        self._perform(handoff, handoff.source.on(fact))
        is_waiting_for_peer = bool(handoff.source.held)
        # (the loop's time: this runs in callbacks too, where anyio knows no task)
        now = asyncio.get_running_loop().time()
        handoff.stall.deadline = now + self._handoff_stall_s if is_waiting_for_peer else math.inf

    def _perform(self, handoff: _Handoff, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Send(message=message):
                    handoff.outbox.append(message)
                case Release(pages=pages):
                    self._scheduler.release(pages)
                    self._woken()
                case AbortPrompt():
                    handoff.was_aborted = True
                    self._scheduler.abort(handoff.key)
                    self._woken()
                case EndStream(error=error):
                    handoff.error = error
                    handoff.has_ended = True
            handoff.wake.set()

    async def _serve_link(self, stream: Stream) -> None:
        message = await stream.receive()
        if not isinstance(message, LinkRequest) or message.protocol != PROTOCOL_VERSION:
            raise MalformedMessage(
                f"a Link stream starts with a LinkRequest of protocol {PROTOCOL_VERSION}"
            )
        address = self._transport.describe()
        await stream.send(
            LinkReply(
                incarnation=self._identity.incarnation,
                numeric_incarnation=self._identity.numeric_incarnation,
                layout=self._identity.layout,
                layout_fingerprint=self._identity.layout_fingerprint,
                agent_name=address.agent_name,
                agent_metadata=address.agent_metadata,
                pages=address.pages,
                shares_parameters=True,
                heartbeat_s=HEARTBEAT_S,
            )
        )


def _how_it_ended(handoff: _Handoff) -> str:
    if handoff.error is not None:
        return "error"
    return "abort" if handoff.was_aborted else "done"
