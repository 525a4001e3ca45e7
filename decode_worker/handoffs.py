"""The shell of a decode worker's hand-offs: links and streams to prefill workers, reads, landings.

It carries out what core.py wants done and reports what came of it. Reads and landings have tasks of
their own: they go on when a hand-off is cut, until nothing can be written any more.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import anyio
from anyio.abc import TaskGroup

from common.clock import Timer
from common.errors import TandemError, WorkerLost
from common.handoff_messages import PagesTaken
from common.rpc import Stream
from common.types import RequestId
from common.watch_thread import until_silent
from common.watchdog import Silence
from decode_worker.actions import (
    Action,
    Connect,
    Cut,
    DropLink,
    Expect,
    Finish,
    GiveUp,
    Land,
    Link,
    PullId,
    Read,
    Send,
)
from decode_worker.core import DecodeCore
from decode_worker.links import Links
from kvtransfer.destination import Fact, Landed, ReadEnded, ReadFailed, Stalled, StreamEnded
from kvtransfer.landing import LandingZone
from kvtransfer.transport import PageRead, Transport
from worker.context import WorkerContext

log = logging.getLogger(__name__)

GOODBYE_S = 5.0
"""How long the other side may take to end a stream that is finished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """What pages come over. `give_up` is called with the reason when nothing can land any more."""

    transport: Transport
    zone: LandingZone
    links: Links
    num_heads: int
    """Records of a page."""
    give_up: Callable[[str], None]

    def num_bytes(self, read: PageRead, link: Link) -> int:
        """That a read brings."""
        whole = link.page_bytes[read.kind]
        return whole * len(read.heads) // self.num_heads if read.heads else whole

    async def close(self) -> None:
        await self.links.close()
        await self.transport.close()


@dataclass(slots=True, eq=False)
class _Handoff:
    request_id: RequestId
    outbox: deque[object] = field(default_factory=deque)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    stream_ended: asyncio.Event = field(default_factory=asyncio.Event)
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    stall: Timer | None = None
    is_finished: bool = False

    def expect(self, timer: Timer | None) -> None:
        if self.stall is not None:
            self.stall.cancel()
        self.stall = timer


class Handoffs:
    def __init__(
        self,
        context: WorkerContext,
        core: DecodeCore,
        wire: Wire,
        report: Callable[[list[Action]], None],
    ) -> None:
        """`report` takes what the core wants done next."""
        self._device = context.device
        self._clock = context.clock
        self._metrics = context.metrics
        self._events = context.events
        self._core = core
        self._wire = wire
        self._report = report
        self._handoffs: dict[PullId, _Handoff] = {}
        self._group: TaskGroup | None = None

    async def run(self) -> None:
        async with anyio.create_task_group() as self._group:
            await anyio.sleep_forever()

    def perform(self, action: Action) -> None:
        assert self._group is not None
        match action:
            case Connect():
                self._handoffs[action.pull] = _Handoff(action.request_id)
                self._group.start_soon(self._run_handoff, action)
            case Send():
                self._send_soon(action)
            case Finish(pull=pull):
                handoff = self._handoffs[pull]
                handoff.is_finished = True
                handoff.expect(None)
                handoff.wake.set()
            case Cut(pull=pull):
                if pull in self._handoffs:
                    self._handoffs[pull].scope.cancel()
            case DropLink(link=link):
                self._wire.links.drop(link)
            case Read():
                self._group.start_soon(self._read, action)
            case Land():
                self._group.start_soon(self._land, action)
            case Expect(pull=pull, within_s=within_s):
                if pull in self._handoffs:  # else the worker is ending
                    self._expect(pull, within_s)
            case GiveUp(reason=reason):
                self._wire.give_up(reason)

    def _send_soon(self, action: Send) -> None:
        handoff = self._handoffs[action.pull]
        if isinstance(action.message, PagesTaken):
            blocks = list(action.message.blocks)
            self._events.record("pages_verified", request_id=handoff.request_id, blocks=blocks)
        handoff.outbox.append(action.message)
        handoff.wake.set()

    def _expect(self, pull: PullId, within_s: float | None) -> None:
        timer = None
        if within_s is not None:
            timer = self._clock.call_later(within_s, lambda: self._stalled(pull))
        self._handoffs[pull].expect(timer)

    def _stalled(self, pull: PullId) -> None:
        self._on(pull, Stalled())

    def _on(self, pull: PullId, fact: Fact) -> None:
        self._heard(self._core.on(pull, fact, self._clock.now()))

    def _heard(self, actions: list[Action]) -> None:
        self._report(actions)
        zone = self._wire.zone
        self._metrics.landing.labels("in_use").set(zone.num_in_use)
        self._metrics.landing.labels("quarantined").set(zone.num_quarantined)

    # --- the stream ------------------------------------------------------------------------------

    async def _run_handoff(self, action: Connect) -> None:
        pull, handoff = action.pull, self._handoffs[action.pull]
        try:
            with handoff.scope:
                link, peer = await self._wire.links.get(action.address, action.incarnation)
                self._heard(self._core.connected(pull, link, self._clock.now()))
                await self._exchange(pull, handoff, link, peer.open("Handoff"))
        except TandemError as error:
            self._on(pull, StreamEnded(error=error))
        finally:
            handoff.expect(None)
            del self._handoffs[pull]
            # the link's test may have had some
            self._heard(self._core.slots_freed(self._clock.now()))

    async def _exchange(self, pull: PullId, handoff: _Handoff, link: Link, stream: Stream) -> None:
        self._metrics.handoffs.inc()
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._receive, pull, handoff, link, stream, group)
                await self._send(handoff, stream)
                with self._clock.deadline(GOODBYE_S):
                    await handoff.stream_ended.wait()
                group.cancel_scope.cancel()
        finally:
            stream.cancel()
            self._metrics.handoff_stream_bytes.inc(stream.num_bytes)
            self._metrics.handoffs.dec()

    async def _send(self, handoff: _Handoff, stream: Stream) -> None:
        while handoff.outbox or not handoff.is_finished:
            if not handoff.outbox:
                handoff.wake.clear()
                await handoff.wake.wait()
                continue
            try:
                await stream.send(handoff.outbox.popleft())
            except TandemError as error:
                # the reason, if the other side gave one, is what `receive` raises
                log.debug("sending in a hand-off: %s", error)
                await handoff.stream_ended.wait()
                return
        await stream.finish()

    async def _receive(
        self, pull: PullId, handoff: _Handoff, link: Link, stream: Stream, group: TaskGroup
    ) -> None:
        silence = Silence(link.heartbeat_s, self._clock.now())
        group.start_soon(self._listen, pull, link, silence)
        while True:
            try:
                message = await stream.receive()
            except TandemError as error:
                handoff.stream_ended.set()
                self._on(pull, StreamEnded(error=error))
                return
            silence.heard(self._clock.now())
            if message is None:
                handoff.stream_ended.set()
            self._heard(self._core.heard(pull, message, self._clock.now()))
            if message is None:
                return

    async def _listen(self, pull: PullId, link: Link, silence: Silence) -> None:
        """Gives the prefill worker up when it says nothing although it said it would."""
        await until_silent(silence, self._clock)
        silent = WorkerLost(f"the prefill worker at {link.address} says nothing any more")
        self._on(pull, StreamEnded(error=silent))

    # --- pages -----------------------------------------------------------------------------------

    async def _read(self, action: Read) -> None:
        pull, read_id, pages = action.pull, action.read.read_id, action.read.pages
        started = self._clock.now()
        try:
            read = self._wire.transport.read(action.link.incarnation, pages)
        except TandemError as error:
            self._on(pull, ReadFailed(read_id=read_id, error=error))
            return
        end = await read.wait()
        self._metrics.pull_seconds.observe(self._clock.now() - started)
        self._metrics.pull_pages.inc(len(pages))
        self._metrics.pull_bytes.inc(sum(self._wire.num_bytes(page, action.link) for page in pages))
        self._events.record("pages_read", request_id=action.request_id, num_pages=len(pages))
        self._on(pull, ReadEnded(read_id=read_id, end=end))

    async def _land(self, action: Land) -> None:
        result = await self._device.land(action.land.moves)
        refused = [refusal.reason for refusal in result.refusals if refusal is not None]
        if refused:
            self._metrics.refused.inc(len(refused))
            log.warning(
                "request %s: %d pages refused: %s", action.request_id, len(refused), refused[0]
            )
        self._on(action.pull, Landed(read_id=action.land.read_id, refusals=result.refusals))
