"""The prefill worker's shell: carries out over gRPC, and on the device, what core.py decides.

    Handoff stream -> core.begin, core.receive -> actions -> stream
    step loop      -> core.plan -> device -> core.stored, core.apply -> actions -> streams

Actions are carried out at once and in order. The stream's end, however it comes about, ends the
hand-off, and that frees.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial

import anyio
import numpy as np
from numpy.typing import NDArray

from common.errors import Draining, MalformedMessage, PrefillLost, TandemError
from common.handoff_messages import HandoffRequest, LinkRequest, Working
from common.messages import PROTOCOL_VERSION
from common.request_checks import checked_tokens
from common.rpc import Handler, Stream
from common.scheduling.plan import StepPlan
from common.shared_params import joined
from common.types import OutputKey
from kvtransfer.transport import Transport
from prefill_worker.core import Action, EndStream, NoteChunk, NoteFirstTokens, PrefillCore, Send
from prefill_worker.link_reply import link_reply
from prefill_worker.wanted_params import WantedParams
from worker.context import WorkerContext
from worker.self_check import SelfCheck
from worker.watch import WatchService

log = logging.getLogger(__name__)

MIN_HEARTBEAT_S = 0.5
"""Nobody is told more often than that."""


@dataclass(slots=True, eq=False)
class _Handoff:
    """What is on its way to a receiver."""

    key: OutputKey
    outbox: deque[object] = field(default_factory=deque)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    sending: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    end: EndStream | None = None

    def put(self, message: object) -> None:
        self.outbox.append(message)
        self.wake.set()

    def ends(self, end: EndStream) -> None:
        self.end = end
        self.wake.set()
        if end.at_once:
            self.sending.cancel()


class PrefillService:
    def __init__(
        self,
        context: WorkerContext,
        core: PrefillCore,
        transport: Transport,
        *,
        handoff_stall_s: float,
    ) -> None:
        self._identity = context.identity
        self._device = context.device
        self._clock = context.clock
        self._metrics = context.metrics
        self._events = context.events
        self._core = core
        self._transport = transport
        self._wanted_params = WantedParams(self._identity.vocab_size, handoff_stall_s, self._clock)
        self._handoffs: dict[OutputKey, _Handoff] = {}
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self.watch = WatchService(self._identity, core.load, context.cache.feed)
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
            "Handoff": self._serve_handoff,
            "Link": self._serve_link,
            "SelfTest": self._check.serve,
        }

    async def drained(self) -> None:
        """Returns when no hand-off is left. Nothing new is taken from now on."""
        self.watch.drain()
        await self._emptied()

    async def leave(self) -> None:
        """Whatever is still here goes elsewhere: decode workers are told that this one leaves."""
        self._give_back(Draining("this prefill worker is shutting down"))
        await self._emptied()

    async def _emptied(self) -> None:
        while self._handoffs:
            self._idle.clear()
            await self._idle.wait()

    def stalled(self, fault: str) -> None:
        """The device hangs, or the loop did: whatever is here goes elsewhere, nothing new comes."""
        self.watch.set_fault(fault)
        if fault:
            self._give_back(PrefillLost(f"this prefill worker hangs: {fault}"))

    def _give_back(self, error: TandemError) -> None:
        self._perform(self._core.give_back_all(error, self._clock.now()))

    # --- steps ------------------------------------------------------------------------------------

    async def run(self) -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(self._check.run)
            await self._run_steps()

    async def _run_steps(self) -> None:
        """The step loop: decide, do, decide again. Sleeps while there is nothing to do."""
        while True:
            plan = self._core.plan(self._clock.now())
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
            self._perform(self._core.apply(plan, result, self._clock.now()))
            self._changed()

    def _stored(self, plan: StepPlan) -> None:
        self._perform(self._core.stored(plan, self._clock.now()))

    def _woken(self) -> None:
        """Something changed that the step loop should look at, and routers should know."""
        self._wake.set()
        self.watch.changed(can_wait=True)

    def _changed(self) -> None:
        self._metrics.handoffs.set(len(self._handoffs))
        self.watch.changed()

    def _perform(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Send(key=key, message=message):
                    self._handoffs[key].put(message)
                case EndStream(key=key):
                    self._handoffs[key].ends(action)
                case NoteChunk(key=key):
                    self._metrics.prompt_tokens.inc(action.num_tokens)
                    if key in self._handoffs:
                        blocks = list(action.blocks)
                        self._events.record(
                            "pages_ready", key=key, chunk=action.number, blocks=blocks
                        )
                case NoteFirstTokens(key=key):
                    self._metrics.output_tokens.inc(action.num_tokens)
                    self._metrics.cached_tokens.inc(action.num_cached_tokens)
                    self._metrics.ttft.observe(action.seconds)
                    self._events.record("first_tokens", key=key)

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
        chain = self._core.chain(message.request.cache_salt, token_ids)
        key = self._core.begin(message, token_ids, chain, self._clock.now())
        handoff = self._handoffs[key] = _Handoff(key)
        self._events.record("handoff_began", key=key, num_tokens=len(token_ids))
        self._woken()
        try:
            await self._exchange(handoff, stream, message.heartbeat_s)
        except TandemError as error:
            self._metrics.errors.labels(error.code).inc()
            raise
        finally:
            # whatever happened: nothing stays held
            how_it_ended = self._core.end(key, self._clock.now())
            del self._handoffs[key]
            self._metrics.finished.labels(how_it_ended).inc()
            self._idle.set()
            self._woken()
            self._changed()

    async def _exchange(self, handoff: _Handoff, stream: Stream, heartbeat_s: float) -> None:
        """Until the core has ended it and everything is sent. A receiver that gives no interval
        does not know `Working`.
        """
        async with anyio.create_task_group() as group:
            group.start_soon(self._receive, handoff, stream)
            group.start_soon(self._watch_receiver, handoff)
            if heartbeat_s:
                group.start_soon(self._beat, handoff, max(MIN_HEARTBEAT_S, heartbeat_s))
            with handoff.sending:
                await self._send(handoff, stream)
            group.cancel_scope.cancel()
        if handoff.end is not None and handoff.end.error is not None:
            raise handoff.end.error

    async def _send(self, handoff: _Handoff, stream: Stream) -> None:
        while handoff.outbox or handoff.end is None:
            if not handoff.outbox:
                handoff.wake.clear()
                await handoff.wake.wait()
                continue
            try:
                await stream.send(handoff.outbox.popleft())
            except TandemError:
                self._heard(self._core.lost(handoff.key, self._clock.now()))
                return

    async def _beat(self, handoff: _Handoff, every_s: float) -> None:
        """Says that this worker is there, while the prompt waits and is computed."""
        while True:
            handoff.put(Working())
            await self._clock.sleep(every_s)

    async def _watch_receiver(self, handoff: _Handoff) -> None:
        while handoff.end is None:
            await self._clock.sleep(self._core.stall_in_s(handoff.key, self._clock.now()))
            self._heard(self._core.stalled(handoff.key, self._clock.now()))

    async def _receive(self, handoff: _Handoff, stream: Stream) -> None:
        while True:
            try:
                message = await stream.receive()
            except TandemError:
                self._heard(self._core.lost(handoff.key, self._clock.now()))
                return
            self._heard(self._core.receive(handoff.key, message, self._clock.now()))
            if message is None or handoff.end is not None:
                return

    def _heard(self, actions: Iterable[Action]) -> None:
        """Pages may have come free."""
        self._perform(actions)
        self._woken()

    async def _serve_link(self, stream: Stream) -> None:
        message = await stream.receive()
        if not isinstance(message, LinkRequest) or message.protocol != PROTOCOL_VERSION:
            raise MalformedMessage(
                f"a Link stream starts with a LinkRequest of protocol {PROTOCOL_VERSION}"
            )
        await stream.send(link_reply(self._identity, self._transport.describe()))
