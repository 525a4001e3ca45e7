"""The router of the simulation: the real `Fleet`, policy, `Dispatcher` and `Journey`, with messages
that take a while in place of streams.

Workers tell the router their state at most every `WATCH_INTERVAL_S`, as in life; here they are
asked when a decision is near, so that a quiet worker costs nothing.
"""

from collections.abc import Callable, Iterator

from common.errors import TandemError
from common.messages import Admitted, Failed, GenerateRequest, pack_tokens
from common.types import SamplingParams
from router.fleet.dispatch import Dispatcher
from router.fleet.fleet import Fleet
from router.fleet.interleave import Interleave
from router.fleet.journey import Event, Inbox, Journey
from router.fleet.metrics import RouteTally
from router.fleet.routing import RoutingPolicy
from router.fleet.session import Session
from simulator.decode_host import DecodeHost
from simulator.events import EventQueue, QueueClock
from simulator.host import LATENCY_S, Host
from simulator.records import Record
from simulator.workload import SimulatedRequest
from worker.watch import WATCH_INTERVAL_S


class Line(Session):
    """A session whose stream is the simulation: what it would write is taken from it, what it would
    read is delivered to it.
    """

    def __init__(self, host: DecodeHost) -> None:
        super().__init__(_NoStream(), host.address)
        self.host = host

    def written(self) -> Iterator[object]:
        while not self.outbox.empty():
            yield self.outbox.get_nowait()


class _NoStream:
    num_bytes = 0

    async def send(self, message: object) -> None:
        raise AssertionError("a simulated session has no stream")

    async def receive(self) -> object | None:
        raise AssertionError("a simulated session has no stream")

    async def finish(self) -> None: ...

    def cancel(self) -> None: ...


class _Client(Inbox):
    """Takes a journey's events in place of the one who reads them."""

    def __init__(self, record: Record, on_end: Callable[[Record], None]) -> None:
        super().__init__()
        self._record = record
        self._on_end = on_end

    def put(self, event: Event) -> None:
        if event[3] is not None:
            self._record.has_finished = True
            self._on_end(self._record)

    def fail(self, error: TandemError) -> None:
        self._record.error = error.code
        self._on_end(self._record)


class RouterHost:
    def __init__(
        self,
        events: EventQueue,
        policy: RoutingPolicy,
        *,
        itl_target_s: float | None,
        on_end: Callable[[Record], None],
    ) -> None:
        self._events = events
        self._clock = QueueClock(events)
        self.fleet = Fleet(self._clock)
        self.tally = RouteTally()
        self._dispatcher = Dispatcher(self.fleet, policy, tally=self.tally, clock=self._clock)
        self._interleave = Interleave(itl_target_s)
        self._on_end = on_end
        self._hosts: list[Host] = []
        self._lines: dict[str, Line] = {}
        self._seen_at: dict[str, float] = {}

    def add(self, host: Host) -> None:
        self._hosts.append(host)
        if isinstance(host, DecodeHost):
            line = self._lines[host.address] = Line(host)
            self._dispatcher.session_opened(host.incarnation, line)
            self._interleave.session_opened(host.state(), line.limit_chunks)
        self._see(host)
        self.fleet.session_up(host.address, host.incarnation)

    def arrive(self, request: SimulatedRequest, record: Record) -> None:
        journey = Journey(
            GenerateRequest(
                request_id=str(record.number),
                token_ids=pack_tokens(request.token_ids()),
                num_prompt_tokens=request.prompt_tokens,
                sampling=SamplingParams(max_tokens=request.output_tokens, temperature=0.0),
                priority=request.priority,
            ),
            prompt_index=0,
            inbox=_Client(record, self._on_end),
            dispatcher=self._dispatcher,
            clock=self._clock,
            on_admitted=lambda: None,
        )
        self._observe()
        try:
            journey.start()
        except TandemError as error:
            record.error = error.code
            self._on_end(record)
        self._send()

    def deliver(self, host: DecodeHost, messages: list[object]) -> None:
        """From a decode worker."""
        if any(isinstance(message, Admitted | Failed) for message in messages):
            self._observe()
        line = self._lines[host.address]
        for message in messages:
            line.deliver(message)
        self._send()

    def _observe(self) -> None:
        now = self._events.now
        for host in self._hosts:
            if now - self._seen_at[host.address] >= WATCH_INTERVAL_S:
                self._see(host)

    def _see(self, host: Host) -> None:
        """What the worker's Watch stream would bring."""
        self._seen_at[host.address] = self._events.now
        host.settle()
        state = host.state()
        self.fleet.observe(host.address, state)
        self._interleave.observed(state)
        for events in host.kv_events():
            self.fleet.cache_changed(host.address, events)

    def _send(self) -> None:
        for line in self._lines.values():
            for message in line.written():
                self._events.send(self._events.now + LATENCY_S, line.host.hear, message)
