"""A decode or colocated worker of the simulation: carries out on virtual time what
decode_worker/core.py decides.

Steps in which nothing can happen but one more token for every running output are advanced together.
They are applied late: when a message arrives, the steps that have ended by then are, and the one in
flight is planned as usual.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from common.errors import TandemError
from common.handoff_messages import FirstTokens, HandoffRequest
from common.messages import Failed, GenerateRequest, Route, Submit, unpack_tokens
from common.scheduling.block_hash import HashRoots
from common.scheduling.kv_cache import KvCache
from common.scheduling.step_time import StepShape
from common.types import Role
from decode_worker import actions as do
from decode_worker.admission import PLACE_S
from decode_worker.core import DecodeCore
from decode_worker.pulls import Pulls
from decode_worker.scheduler import BatchScheduler
from kvtransfer.destination import Fact, Landed, ReadEnded, StreamEnded
from kvtransfer.landing import LandingZone
from kvtransfer.transport import ReadEnd
from simulator import lanes
from simulator.clients import Clients
from simulator.events import EventQueue
from simulator.host import LATENCY_S, MODEL_FINGERPRINT, Host, WorkerSetup, sampled
from simulator.prefill_host import PrefillHost, Pull

MAX_STRETCH = 64
"""Steps advanced at once; a message in between makes the rest of them worthless."""

Deliver = Callable[["DecodeHost", list[object]], None]


@dataclass(frozen=True, slots=True)
class _Stretch:
    start: float
    ends: list[float]


class DecodeHost(Host):
    """`deliver` takes messages to the router, which learns of them a latency later; `sources` are
    prefill workers by their addresses.
    """

    def __init__(
        self,
        setup: WorkerSetup,
        order: int,
        events: EventQueue,
        *,
        clients: Clients,
        sources: Mapping[str, PrefillHost],
        deliver: Deliver,
        at_once: bool,
    ) -> None:
        super().__init__(setup, order, events)
        self._core: DecodeCore = _core_of(setup, self.cache, self.incarnation)
        self._scheduler = self._core.scheduler
        self._router = self._core.open_session()
        self._clients = clients
        self._sources = sources
        self._deliver = deliver
        self._at_once = at_once
        self._pulls: dict[do.PullId, Pull] = {}
        self._read_share = lanes.read_share(setup.ownership)
        self._stretch: _Stretch | None = None
        self._step_ends_at = 0.0
        self._outbox: list[object] = []

    # --- messages from the router -----------------------------------------------------------------

    def hear(self, message: object) -> None:
        self.settle()
        if isinstance(message, Submit):
            self._submit(message.request)
        else:
            self._note_local_prefill(message)
            self._perform(self._core.receive(self._router, message, self.events.now))
        self._flush()
        self._wake()

    def _submit(self, request: GenerateRequest) -> None:
        token_ids = unpack_tokens(request.token_ids)
        chain = self._core.chain(request.cache_salt, token_ids)
        try:
            self._core.submit(self._router, request, token_ids, chain, self.events.now)
            self._clients.add(request, chain)
        except TandemError as error:
            self._outbox.append(Failed.of(request.request_id, error))

    def _note_local_prefill(self, message: object) -> None:
        if not isinstance(message, Route) or message.prefill is not None:
            return
        if self._scheduler.is_waiting_for_route(message.request_id):
            self._clients[message.request_id].record.num_local_prefills += 1

    def _places_freed(self) -> None:
        """A prompt under way for so long has no place any more: others may come in."""
        if self._core.look_again_in(self.events.now) is not None:
            self.settle()
            self._wake()

    # --- steps ------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Applies the steps of a stretch that have ended; the one in flight becomes a step of its
        own.
        """
        stretch = self._stretch
        if stretch is None:
            return
        num_ended = bisect_left(stretch.ends, self.events.now)
        self._skip(stretch, num_ended)
        begin = stretch.ends[num_ended - 1] if num_ended else stretch.start
        end = stretch.ends[num_ended]
        self._stretch = None
        plan, actions = self._core.plan(begin)
        assert plan is not None
        assert not actions
        self._plan = plan
        self._step_ends_at = end
        self._ends(end, end - begin, 1)

    def _wake(self) -> None:
        if self._plan is None and self._stretch is None:
            self._begin()

    def _begin(self) -> None:
        """Nothing is in flight: decides what is next."""
        now = self.events.now
        self._perform(self._core.admit(now))
        if self._at_once and self.device_free_at <= now and self._begin_stretch(now):
            self._flush()
            return
        plan, actions = self._core.plan(now)
        self._perform(actions)
        self._flush()
        if plan is None:
            return
        shape = StepShape.of(plan, self._scheduler.num_context_tokens)
        seconds = self.setup.costs.step_s(shape) if plan.num_tokens else 0.0
        self._step_ends_at = self._run(plan, now, seconds)

    def _begin_stretch(self, now: float) -> bool:
        num_steps = self._scheduler.num_quiet_steps(MAX_STRETCH)
        if num_steps < 2:
            return False
        num_decodes, context = self._scheduler.num_decodes, self._scheduler.num_context_tokens
        costs, ends, end = self.setup.costs, [], now
        for _ in range(num_steps):
            shape = StepShape(num_decodes=num_decodes, num_context_tokens=context)
            end += costs.step_s(shape)
            ends.append(end)
            context += num_decodes
        self._stretch = _Stretch(now, ends)
        self._life += 1
        self.events.step_end(end, self.order, self._step_ended, self._life)
        return True

    def _skip(self, stretch: _Stretch, num_steps: int) -> None:
        if num_steps == 0:
            return
        ends = stretch.ends[:num_steps]
        keys = self._scheduler.take_quiet_steps(num_steps, self._clients.token_of)
        self._clients.took_quiet_steps(keys, [end + LATENCY_S for end in ends])
        self.record.busy_s += ends[-1] - stretch.start
        self.record.num_steps += num_steps

    def _step_ended(self, life: int) -> None:
        if life != self._life:
            return
        if self._stretch is not None:
            self._skip(self._stretch, len(self._stretch.ends))
            self._stretch = None
            self._begin()
            return
        plan, self._plan = self._plan, None
        assert plan is not None
        self._observe_peak(self._scheduler.num_running)
        result = sampled(plan, self._clients.token_of)
        self.record.num_prompt_tokens += plan.num_tokens - len(plan.decodes)
        self._perform(self._core.apply(plan, result, self.events.now))
        self._begin()

    # --- actions ----------------------------------------------------------------------------------

    def _perform(self, actions: Iterable[do.Action]) -> None:
        for action in actions:
            match action:
                case do.Tell(message=message):
                    now = self.events.now
                    self._outbox += self._clients.told(message, now, now + LATENCY_S)
                case do.Ended(request_id=request_id):
                    self._clients.remove(request_id)
                case do.Connect():
                    self._connect(action)
                case do.Send(pull=pull_id, message=message):
                    self._send(self._pulls[pull_id], message)
                case do.Finish(pull=pull_id) | do.Cut(pull=pull_id):
                    pull = self._pulls.pop(pull_id)
                    self._to(pull.source.hear, pull, None)
                case do.Read():
                    self._read(action)
                case do.Land():
                    self._land(action)

    def _flush(self) -> None:
        if self._outbox:
            messages, self._outbox = self._outbox, []
            self._to(self._deliver, self, messages)

    # --- hand-offs --------------------------------------------------------------------------------

    def _connect(self, action: do.Connect) -> None:
        self.events.send(self.events.now + PLACE_S, self._places_freed)
        source = self._sources[action.address]
        token_id = self._clients[action.request_id].token_id
        self._pulls[action.pull] = Pull(
            action.pull, source, token_id, self._from_prefill, self._handoff_failed
        )
        link = do.Link(
            address=source.address,
            incarnation=source.incarnation,
            numeric_incarnation=source.order + 1,
            round_trip_s=2 * LATENCY_S,
        )
        self._perform(self._core.connected(action.pull, link, self.events.now))

    def _send(self, pull: Pull, message: object) -> None:
        if isinstance(message, HandoffRequest):
            chain = self._clients[message.request.request_id].chain
            self._to(pull.source.open, message, chain, pull)
        else:
            self._to(pull.source.hear, pull, message)

    def _from_prefill(self, pull: Pull, message: object) -> None:
        if isinstance(message, FirstTokens):  # else it begins reads at most: no matter to the steps
            self.settle()
        self._pulled(self._core.heard(pull.id, message, self.events.now))

    def _handoff_failed(self, pull: Pull, error: TandemError) -> None:
        self.settle()
        self._on(pull.id, StreamEnded(error=error))

    def _on(self, pull_id: do.PullId, fact: Fact) -> None:
        self._pulled(self._core.on(pull_id, fact, self.events.now))

    def _pulled(self, actions: Iterable[do.Action]) -> None:
        self._perform(actions)
        self._flush()
        self._wake()

    def _read(self, action: do.Read) -> None:
        """Either side's NICs serve one read after the other, each rank's its own records; the side
        that takes longer decides when the read ends.
        """
        source = self._pulls[action.pull].source
        num_bytes = sum(self.page_bytes[page.kind] for page in action.read.pages)
        begin = max(self.events.now, self.link_free_at, source.link_free_at)
        transfer_s = self.setup.costs.transfer_s
        sent_share = lanes.sent_share(self.setup.ownership, source.setup.ownership)
        self.link_free_at = begin + transfer_s(num_bytes * self._read_share)
        source.link_free_at = begin + transfer_s(num_bytes * sent_share)
        end = max(self.link_free_at, source.link_free_at)
        self.events.send(end, self._read_ended, action)

    def _read_ended(self, action: do.Read) -> None:
        self.settle()
        self._on(action.pull, ReadEnded(read_id=action.read.read_id, end=ReadEnd.DONE))

    def _land(self, action: do.Land) -> None:
        """On the devices: after the step in flight, before the next one."""
        num_bytes = self._read_share * sum(self.page_bytes[move.kind] for move in action.land.moves)
        begin = max(self.events.now, self.device_free_at)
        if self._plan is not None:
            begin = max(begin, self._step_ends_at)
        end = begin + self.setup.costs.land_s(num_bytes)
        self.device_free_at = end
        self.record.busy_s += end - begin
        self.events.send(end, self._landed, action)

    def _landed(self, action: do.Land) -> None:
        self.settle()
        accepted = (None,) * len(action.land.moves)
        self._on(action.pull, Landed(read_id=action.land.read_id, refusals=accepted))


def _core_of(setup: WorkerSetup, cache: KvCache, incarnation: str) -> DecodeCore:
    scheduler = BatchScheduler(
        cache,
        chunk_tokens=setup.chunk_tokens,
        max_num_seqs=setup.max_num_seqs,
        max_waiting=setup.max_waiting,
        max_model_len=setup.max_model_len,
        is_colocated=setup.role is Role.COLOCATED,
        is_chunk_auto=setup.is_chunk_auto,
        step_times=setup.step_times,
    )
    zone = LandingZone(num_packed=setup.num_landing_packed, num_exact=setup.num_landing_exact)
    return DecodeCore(
        cache,
        scheduler,
        roots=HashRoots(MODEL_FINGERPRINT, setup.layout.block_size),
        pulls=Pulls(scheduler.remote, zone, incarnation=incarnation, stall_s=math.inf),
    )
