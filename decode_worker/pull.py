"""One hand-off as the decode worker performs it: the stream to the prefill worker, reads, checks,
acknowledgements.

`HandoffDestination` decides; a `Puller` carries out. Reads and landings belong to the worker, not
to the request: they go on when the request is cancelled, until nothing can be written any more.
"""

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import anyio
from anyio.abc import TaskGroup

from common.clock import Clock
from common.device import Device
from common.errors import MalformedMessage, PrefillLost, TandemError, WorkerLost
from common.events import EventLog
from common.messages import (
    FirstTokens,
    GenerateRequest,
    HandoffRequest,
    PagesReady,
    PagesTaken,
    WantParams,
    Working,
)
from common.rpc import Stream
from common.scheduling.plan import PageKind
from common.shared_params import LargeParams, is_large, without_large
from common.watch_thread import until_silent
from common.watchdog import Silence
from decode_worker.entries import Entry, Facts, State
from decode_worker.links import Link, Links
from decode_worker.scheduler import BatchScheduler
from kvtransfer.destination import (
    Acknowledge,
    Action,
    Complete,
    ExpectedPage,
    Fact,
    Fail,
    FirstTokensKnown,
    HandoffDestination,
    Land,
    Landed,
    ReadEnded,
    ReadFailed,
    SlotsFreed,
    Stalled,
    StartRead,
    StreamEnded,
)
from kvtransfer.landing import LandingZone
from kvtransfer.transport import Transport
from worker.metrics import WorkerMetrics

log = logging.getLogger(__name__)

GOODBYE_S = 5.0
"""How long the other side may take to end a stream that is finished."""
HANDOFF_WEIGHT = 0.1
"""Of the latest hand-off in the average."""


@dataclass(slots=True, eq=False)
class _Pull:
    entry: Entry
    link: Link
    destination: HandoffDestination
    tell: Callable[[Facts], None]
    silence: Silence
    outbox: deque[object] = field(default_factory=deque)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    stream_ended: asyncio.Event = field(default_factory=asyncio.Event)
    stall: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    error: TandemError | None = None
    is_done: bool = False
    first_tokens_at: float | None = None

    @property
    def has_ended(self) -> bool:
        return self.is_done or self.error is not None


class Puller:
    """`group` outlives requests: it runs the reads and landings. `give_up` is called with the
    reason when nothing can land any more: the worker must drain and be started anew.
    """

    def __init__(
        self,
        *,
        scheduler: BatchScheduler,
        device: Device,
        transport: Transport,
        zone: LandingZone,
        links: Links,
        page_bytes: dict[PageKind, int],
        block_size: int,
        clock: Clock,
        metrics: WorkerMetrics,
        events: EventLog,
        group: TaskGroup,
        wake: Callable[[], None],
        give_up: Callable[[str], None],
        handoff_stall_s: float,
    ) -> None:
        self._scheduler = scheduler
        self._device = device
        self._transport = transport
        self._zone = zone
        self._links = links
        links.on_slots_freed = self.slots_freed
        self._page_bytes = page_bytes
        self._block_size = block_size
        self._clock = clock
        self._metrics = metrics
        self._events = events
        self._group = group
        self._wake = wake
        self._give_up = give_up
        self._handoff_stall_s = handoff_stall_s
        self._pulls: list[_Pull] = []
        self._has_freed_slots = False
        self._num_handoffs = 0
        self.handoff_s = 0.0
        """What a hand-off adds: request and first token on their way, and the time from there until
        the last page is usable; a moving average.
        """

    async def pull(
        self, entry: Entry, address: str, incarnation: str | None, tell: Callable[[Facts], None]
    ) -> None:
        """Returns when every page is in the pool (or nothing more is wanted). Raises why it
        failed.
        """
        link = await self._links.get(address, incarnation)
        pull = _Pull(
            entry=entry,
            link=link,
            destination=self._destination(entry, link),
            tell=tell,
            silence=Silence(link.heartbeat_s, self._clock.now()),
        )
        self._pulls.append(pull)
        self._metrics.handoffs.set(len(self._pulls))
        request = self._shared(entry.request, link)
        stream = link.peer.open("Handoff")
        try:
            await self._exchange(pull, stream, request)
        finally:
            if request.shared:
                self._links.shared_keys.release(entry.request.sampling)
            pull.destination.close()
            self._pulls.remove(pull)
            stream.cancel()
            self._metrics.handoff_stream_bytes.inc(stream.num_bytes)
            self._measure_zone()
            self._metrics.handoffs.set(len(self._pulls))
        if pull.error is not None:
            if isinstance(pull.error, WorkerLost):
                self._links.drop(link)
                raise PrefillLost(pull.error.message)
            raise pull.error

    def _shared(self, request: GenerateRequest, link: Link) -> GenerateRequest:
        """Without what the prefill worker may know from another hand-off; else it asks."""
        if not link.shares_parameters or not is_large(request.sampling):
            return request
        key, _ = self._links.shared_keys.hold(request.sampling)
        return without_large(request, key)

    def _destination(self, entry: Entry, link: Link) -> HandoffDestination:
        first_block = entry.num_cached_tokens // self._block_size
        return HandoffDestination(
            expected=expected_pages(entry, first_block, self._block_size),
            first_block=first_block,
            incarnation=link.numeric_incarnation,
            zone=self._zone,
            on_slots_freed=self.slots_freed,
        )

    # --- the stream ----------------------------------------------------------------------------

    async def _exchange(self, pull: _Pull, stream: Stream, request: GenerateRequest) -> None:
        pull.outbox.append(
            HandoffRequest(
                request=request,
                incarnation=pull.link.incarnation,
                num_held_blocks=pull.destination.first_block,
                heartbeat_s=pull.link.heartbeat_s,
            )
        )
        async with anyio.create_task_group() as group:
            group.start_soon(self._receive, pull, stream)
            group.start_soon(self._listen, pull)
            with pull.stall:
                await self._send(pull, stream)
            if pull.stall.cancelled_caught:
                self._on(pull, Stalled())
            if pull.is_done:
                with anyio.move_on_after(GOODBYE_S):
                    await pull.stream_ended.wait()
            group.cancel_scope.cancel()

    async def _send(self, pull: _Pull, stream: Stream) -> None:
        while pull.outbox or not pull.has_ended:
            if not pull.outbox:
                pull.wake.clear()
                await pull.wake.wait()
                continue
            try:
                await stream.send(pull.outbox.popleft())
            except TandemError as error:
                # the reason, if the other side gave one, is what `receive` raises
                log.debug("sending in a hand-off: %s", error)
                while not pull.has_ended:
                    pull.wake.clear()
                    await pull.wake.wait()
                return
        await stream.finish()

    async def _listen(self, pull: _Pull) -> None:
        """Gives the prefill worker up when it says nothing although it said it would."""
        await until_silent(pull.silence, self._clock)
        silent = WorkerLost(f"the prefill worker at {pull.link.address} says nothing any more")
        self._on(pull, StreamEnded(error=silent))

    async def _receive(self, pull: _Pull, stream: Stream) -> None:
        while True:
            try:
                message = await stream.receive()
            except TandemError as error:
                self._on(pull, StreamEnded(error=error))
                pull.stream_ended.set()
                return
            pull.silence.heard(self._clock.now())
            match message:
                case Working():
                    pass
                case None:
                    self._on(pull, StreamEnded())
                    pull.stream_ended.set()
                    return
                case PagesReady():
                    self._on(pull, message)
                case FirstTokens():
                    self._first_tokens(pull, message)
                case WantParams(key=key):
                    large = LargeParams.of(pull.entry.request.sampling)
                    pull.outbox.append(large.message(key))
                    pull.wake.set()
                case _:
                    nonsense = MalformedMessage(f"{type(message).__name__} in a hand-off")
                    self._on(pull, StreamEnded(error=nonsense))
                    return

    def _first_tokens(self, pull: _Pull, message: FirstTokens) -> None:
        """Forwards them at once; when they end the request, nothing more is wanted."""
        if pull.entry.state is not State.REMOTE:
            return
        if (
            len(message.token_ids) != pull.entry.request.sampling.n
            or pull.first_tokens_at is not None
        ):
            self._on(pull, StreamEnded(error=MalformedMessage("unexpected first tokens")))
            return
        pull.first_tokens_at = self._clock.now()
        request_id = pull.entry.request.request_id
        self._events.record(
            "first_tokens_arrived", request_id=request_id, missing=pull.destination.num_missing
        )
        num_cached = max(message.num_cached_tokens, pull.entry.num_cached_tokens)
        facts = self._scheduler.first_tokens(
            request_id, message.token_ids, message.logprobs, num_cached, message.prompt_logprobs
        )
        if request_id in facts.ended:
            pull.is_done = True
            pull.wake.set()
        else:
            self._on(pull, FirstTokensKnown())
        pull.tell(facts)
        self._wake()

    # --- actions -------------------------------------------------------------------------------

    def _on(self, pull: _Pull, fact: Fact) -> None:
        if pull.entry.state is not State.REMOTE:
            pull.destination.close()  # the request has ended, or runs already
        self._perform(pull, pull.destination.on(fact))
        is_busy = pull.destination.num_reading > 0
        # anyio's clock is this loop's, but cannot be asked for in a callback of any loop
        now = asyncio.get_running_loop().time()
        pull.stall.deadline = now + self._handoff_stall_s if is_busy else math.inf
        self._measure_zone()

    def _perform(self, pull: _Pull, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case StartRead():
                    self._group.start_soon(self._read, pull, action)
                case Land():
                    self._group.start_soon(self._land, pull, action, self._scheduler.pin(_id(pull)))
                case Acknowledge(blocks=blocks, num_leading=num_leading):
                    self._scheduler.landed(_id(pull), num_leading)
                    self._events.record("pages_verified", request_id=_id(pull), blocks=list(blocks))
                    pull.outbox.append(PagesTaken(blocks=blocks))
                case Complete():
                    self._complete(pull)
                case Fail(error=error):
                    pull.error = error
            pull.wake.set()

    def _complete(self, pull: _Pull) -> None:
        assert pull.first_tokens_at is not None
        exposed_s = max(0.0, self._clock.now() - pull.first_tokens_at)
        self._metrics.exposed.observe(exposed_s)
        self._observe_handoff(exposed_s + pull.link.round_trip_s)
        self._events.record("landed", request_id=_id(pull))
        self._scheduler.landed_all(_id(pull))
        pull.is_done = True
        self._wake()

    def _observe_handoff(self, seconds: float) -> None:
        """The first hand-offs are averaged, later ones replace what is old."""
        self._num_handoffs += 1
        weight = max(HANDOFF_WEIGHT, 1 / self._num_handoffs)
        self.handoff_s += weight * (seconds - self.handoff_s)

    async def _read(self, pull: _Pull, action: StartRead) -> None:
        started = self._clock.now()
        try:
            read = self._transport.read(pull.link.incarnation, action.pages)
        except TandemError as error:
            self._on(pull, ReadFailed(read_id=action.read_id, error=error))
            return
        end = await read.wait()
        self._metrics.pull_seconds.observe(self._clock.now() - started)
        self._metrics.pull_pages.inc(len(action.pages))
        self._metrics.pull_bytes.inc(sum(self._page_bytes[page.kind] for page in action.pages))
        self._events.record("pages_read", request_id=_id(pull), num_pages=len(action.pages))
        self._on(pull, ReadEnded(read_id=action.read_id, end=end))

    async def _land(self, pull: _Pull, action: Land, entry: Entry) -> None:
        try:
            result = await self._device.land(action.moves)
        finally:
            self._scheduler.unpin(entry)
        refused = [reason for reason in result.refusals if reason is not None]
        if refused:
            self._metrics.refused.inc(len(refused))
            log.warning("request %s: %d pages refused: %s", _id(pull), len(refused), refused[0])
        self._on(pull, Landed(read_id=action.read_id, refusals=result.refusals))
        self._wake()

    # --- landing slots -------------------------------------------------------------------------

    def slots_freed(self) -> None:
        """Lets pulls that wait for slots go on, oldest first; in a task, not from inside a
        decision.
        """
        if not self._has_freed_slots:
            self._has_freed_slots = True
            self._group.start_soon(self._offer_slots)

    async def _offer_slots(self) -> None:
        self._has_freed_slots = False
        for pull in list(self._pulls):
            self._on(pull, SlotsFreed())

    def _measure_zone(self) -> None:
        self._metrics.landing.labels("in_use").set(self._zone.num_in_use)
        self._metrics.landing.labels("quarantined").set(self._zone.num_quarantined)
        if self._zone.is_exhausted:
            self._give_up(
                "every landing slot is quarantined by reads that were given up and have not ended"
            )


def expected_pages(entry: Entry, first_block: int, block_size: int) -> Sequence[ExpectedPage]:
    """What is pulled for an admitted request that holds its first `first_block` blocks already."""
    sampling = entry.request.sampling
    if len(entry.token_ids) + 1 - entry.request.num_prompt_tokens >= sampling.max_tokens:
        return ()  # the first token is the last one: nothing to decode, nothing to pull
    table, size = entry.table, block_size
    assert table is not None
    num_full = entry.num_tokens // size
    pages = [
        ExpectedPage(
            index=index,
            kind=PageKind.PACKED if index else PageKind.EXACT,
            block_id=table.block_ids[index],
            content_hash=entry.chain.full[index],
            num_tokens=size,
        )
        for index in range(first_block, num_full)
    ]
    open_hash = entry.chain.open
    if open_hash is not None:
        tail = table.block_ids[0] if num_full == 0 else table.tail
        assert tail is not None
        pages.append(
            ExpectedPage(
                index=num_full,
                kind=PageKind.EXACT,
                block_id=tail,
                content_hash=open_hash,
                num_tokens=entry.num_tokens % size,
            )
        )
    return pages


def _id(pull: _Pull) -> str:
    return pull.entry.request.request_id
