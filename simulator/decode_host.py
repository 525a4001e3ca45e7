"""A decode or colocated worker of the simulation: carries out on virtual time what
decode_worker/core.py decides.

Steps in which nothing can happen but one more token for every running output are advanced together.
They are applied late: when a message arrives, the steps that have ended by then are, and the one in
flight is planned as usual.
"""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise

from common.errors import TandemError
from common.messages import (
    Admitted,
    Cancel,
    ChunkBudget,
    Failed,
    FirstTokens,
    GenerateRequest,
    HandoffRequest,
    PagesReady,
    PagesTaken,
    PrefillDone,
    Route,
    TokenBatch,
    unpack_tokens,
)
from common.scheduling.block_hash import HashChain, HashRoots
from common.scheduling.step_time import StepShape
from common.types import FinishReason, OutputKey, RequestId, Role, output_key
from decode_worker.actions import (
    Action,
    Connect,
    Cut,
    Ended,
    Finish,
    Land,
    Link,
    PullId,
    Read,
    Send,
    Tell,
)
from decode_worker.admission import PLACE_S
from decode_worker.core import DecodeCore
from decode_worker.pulls import Pulls
from decode_worker.scheduler import BatchScheduler
from kvtransfer.destination import Fact, Landed, ReadEnded, StreamEnded
from kvtransfer.landing import LandingZone
from kvtransfer.transport import ReadEnd
from simulator.events import EventQueue
from simulator.host import LATENCY_S, MODEL_FINGERPRINT, Host, WorkerSetup, sampled
from simulator.prefill_host import PrefillHost
from simulator.records import Gaps, Record
from worker.watch import Load

MAX_STRETCH = 64
"""Steps advanced at once; a message in between makes the rest of them worthless."""

Token = tuple[RequestId, int, FinishReason | None]
Deliver = Callable[["DecodeHost", list[object]], None]


@dataclass(frozen=True, slots=True, eq=False)
class Pull:
    """The hand-off's stream, as its two ends know it."""

    host: "DecodeHost"
    source: PrefillHost
    id: PullId


@dataclass(slots=True, eq=False)
class _Client:
    """What the host must know of a request beside its core."""

    record: Record
    token_id: int
    chain: HashChain
    num_untold: int = 0
    """Tokens that the router was not told of: it would do nothing with them. It is told when it has
    to submit the request anew.
    """


@dataclass(frozen=True, slots=True)
class _Stretch:
    start: float
    ends: list[float]


class DecodeHost(Host):
    """`deliver` takes messages to the router, which learns of them a latency later."""

    def __init__(
        self,
        setup: WorkerSetup,
        order: int,
        events: EventQueue,
        *,
        deliver: Deliver,
        records: dict[RequestId, Record],
        gaps: Gaps,
        at_once: bool,
    ) -> None:
        super().__init__(setup, order, events)
        self.scheduler = BatchScheduler(
            self.cache,
            chunk_tokens=setup.chunk_tokens,
            max_num_seqs=setup.max_num_seqs,
            max_waiting=setup.max_waiting,
            max_model_len=setup.max_model_len,
            is_colocated=setup.role is Role.COLOCATED,
            is_chunk_auto=setup.is_chunk_auto,
            step_times=setup.step_times,
        )
        zone = LandingZone(num_packed=setup.num_landing_packed, num_exact=setup.num_landing_exact)
        self._core = DecodeCore(
            self.cache,
            self.scheduler,
            roots=HashRoots(MODEL_FINGERPRINT, setup.layout.block_size),
            pulls=Pulls(self.scheduler, zone, incarnation=self.incarnation, stall_s=math.inf),
        )
        self._router = self._core.open_session()
        self._deliver = deliver
        self._records = records
        self._gaps = gaps
        self._at_once = at_once
        self._clients: dict[RequestId, _Client] = {}
        self._token_ids: dict[OutputKey, int] = {}
        self._sources: dict[str, PrefillHost] = {}
        self._pulls: dict[PullId, Pull] = {}
        self._stretch: _Stretch | None = None
        self._step_ends_at = 0.0
        self._outbox: list[object] = []

    def check_invariants(self) -> None:
        self._core.check_invariants()

    def _load(self) -> Load:
        return self._core.load()

    def token_of(self, request_id: RequestId) -> int:
        return self._clients[request_id].token_id

    # --- messages from the router -----------------------------------------------------------------

    def submit(self, request: GenerateRequest) -> None:
        self.settle()
        token_ids = unpack_tokens(request.token_ids)
        chain = self._core.chain(request.cache_salt, token_ids)
        try:
            self._core.submit(self._router, request, token_ids, chain, self.events.now)
        except TandemError as error:
            self._outbox.append(Failed.of(request.request_id, error))
            self._flush()
            return
        record = self._records[request.request_id.partition("~")[0]]
        client = _Client(record, -1 - record.number, chain)
        self._clients[request.request_id] = client
        self._token_ids[output_key(request.request_id, request.output_index)] = client.token_id
        self._wake()

    def route(self, request_id: RequestId, source: PrefillHost | None) -> None:
        self.settle()
        if source is None and self.scheduler.is_waiting_for_route(request_id):
            self._clients[request_id].record.num_local_prefills += 1
        address = None if source is None else source.address
        if source is not None:
            self._sources[source.address] = source
        self._hear(Route(request_id=request_id, prefill=address))

    def cancel(self, request_id: RequestId) -> None:
        self.settle()
        self._hear(Cancel(request_id=request_id))

    def limit_chunks(self, max_tokens: int) -> None:
        self._perform(
            self._core.receive(self._router, ChunkBudget(max_tokens=max_tokens), self.events.now)
        )

    def _hear(self, message: Route | Cancel) -> None:
        self._perform(self._core.receive(self._router, message, self.events.now))
        self._wake()

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
        seconds = 0.0
        if plan.num_tokens:
            seconds = self.setup.costs.step_s(StepShape.of(plan, self.scheduler.num_context_tokens))
        self._step_ends_at = self._run(plan, now, seconds)

    def _begin_stretch(self, now: float) -> bool:
        num_steps = self.scheduler.num_quiet_steps(MAX_STRETCH)
        if num_steps < 2:
            return False
        num_decodes, context = self.scheduler.num_decodes, self.scheduler.num_context_tokens
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
        seen = [end + LATENCY_S for end in ends]
        keys = self.scheduler.take_quiet_steps(num_steps, self._token_ids.__getitem__)
        gaps = [later - earlier for earlier, later in pairwise(seen)]
        counts = {gap: len(keys) * number for gap, number in Counter(gaps).items()}
        worst = max(gaps, default=0.0)
        for key in keys:
            client = self._clients[key.rpartition("/")[0]]
            record = client.record
            first_gap = seen[0] - record.last_token_s
            counts[first_gap] = counts.get(first_gap, 0) + 1
            record.worst_gap_s = max(record.worst_gap_s, first_gap, worst)
            record.last_token_s = seen[-1]
            record.num_tokens += num_steps
            client.num_untold += num_steps
            if record.token_times is not None:
                record.token_times += seen
        self._gaps.add_all(counts)
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
        self._observe_peak(self.scheduler.num_running)
        result = sampled(plan, self._token_ids.__getitem__)
        self.record.num_prompt_tokens += plan.num_tokens - len(plan.decodes)
        self._perform(self._core.apply(plan, result, self.events.now))
        self._begin()

    # --- actions ----------------------------------------------------------------------------------

    def _perform(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Tell(message=message):
                    self._tell(message)
                case Ended(request_id=request_id):
                    del self._clients[request_id]
                case Connect():
                    self._connect(action)
                case Send(pull=pull_id, message=message):
                    self._send(self._pulls[pull_id], message)
                case Finish(pull=pull_id) | Cut(pull=pull_id):
                    pull = self._pulls.pop(pull_id)
                    self._to(pull.source.finished, pull)
                case Read():
                    self._read(action)
                case Land():
                    self._land(action)

    def _tell(self, message: object) -> None:
        match message:
            case TokenBatch():
                self._tell_tokens(message)
                return
            case Admitted(request_id=request_id):
                record = self._clients[request_id].record
                if record.admitted_s is None:
                    record.admitted_s = self.events.now
            case PrefillDone(request_id=request_id):
                record = self._clients[request_id].record
                if record.first_token_s is None:
                    record.num_cached_tokens = message.num_cached_tokens
            case Failed(request_id=request_id):
                client = self._clients[request_id]
                if client.num_untold:
                    told: list[Token] = [(request_id, client.token_id, None)] * client.num_untold
                    self._outbox.append(_batch(told))
                client.record.num_retries += not message.at_prefill
        self._outbox.append(message)

    def _tell_tokens(self, batch: TokenBatch) -> None:
        seen_at = self.events.now + LATENCY_S
        finished: list[Token] = []
        gaps: dict[float, int] = {}
        columns = zip(batch.request_ids, batch.token_ids, batch.finish_reasons, strict=True)
        for request_id, token_id, reason in columns:
            client = self._clients[request_id]
            record = client.record
            if record.first_token_s is None:
                record.first_token_s = seen_at
            else:
                gap = seen_at - record.last_token_s
                gaps[gap] = gaps.get(gap, 0) + 1
                if gap > record.worst_gap_s:
                    record.worst_gap_s = gap
            record.last_token_s = seen_at
            record.num_tokens += 1
            if record.token_times is not None:
                record.token_times.append(seen_at)
            client.num_untold += 1
            if reason is not None:
                finished.append((request_id, token_id, reason))
        self._gaps.add_all(gaps)
        if finished:
            self._outbox.append(_batch(finished))

    def _flush(self) -> None:
        if self._outbox:
            messages, self._outbox = self._outbox, []
            self._to(self._deliver, self, messages)

    # --- hand-offs --------------------------------------------------------------------------------

    def _connect(self, action: Connect) -> None:
        self.events.send(self.events.now + PLACE_S, self._places_freed)
        source = self._sources[action.address]
        self._pulls[action.pull] = Pull(self, source, action.pull)
        link = Link(
            address=source.address,
            incarnation=source.incarnation,
            numeric_incarnation=source.order + 1,
            round_trip_s=2 * LATENCY_S,
        )
        self._perform(self._core.connected(action.pull, link, self.events.now))

    def _send(self, pull: Pull, message: object) -> None:
        match message:
            case HandoffRequest(request=request):
                chain = self._clients[request.request_id].chain
                self._to(pull.source.open, message, chain, pull)
            case PagesTaken():
                self._to(pull.source.taken, pull, message)

    def from_prefill(self, pull: Pull, message: PagesReady | FirstTokens) -> None:
        if isinstance(message, FirstTokens):  # else it begins reads at most: no matter to the steps
            self.settle()
        self._pulled(self._core.heard(pull.id, message, self.events.now))

    def handoff_failed(self, pull: Pull, error: TandemError) -> None:
        self.settle()
        self._on(pull.id, StreamEnded(error=error))

    def _on(self, pull_id: PullId, fact: Fact) -> None:
        self._pulled(self._core.on(pull_id, fact, self.events.now))

    def _pulled(self, actions: Iterable[Action]) -> None:
        self._perform(actions)
        self._flush()
        self._wake()

    def _read(self, action: Read) -> None:
        """Both NICs serve one read after the other."""
        source = self._pulls[action.pull].source
        num_bytes = sum(self.page_bytes[page.kind] for page in action.read.pages)
        begin = max(self.events.now, self.link_free_at, source.link_free_at)
        end = begin + self.setup.costs.transfer_s(num_bytes)
        self.link_free_at = source.link_free_at = end
        self.events.send(end, self._read_ended, action)

    def _read_ended(self, action: Read) -> None:
        self.settle()
        self._on(action.pull, ReadEnded(read_id=action.read.read_id, end=ReadEnd.DONE))

    def _land(self, action: Land) -> None:
        """On the device: after the step in flight, before the next one."""
        num_bytes = sum(self.page_bytes[move.kind] for move in action.land.moves)
        begin = max(self.events.now, self.device_free_at)
        if self._plan is not None:
            begin = max(begin, self._step_ends_at)
        end = begin + self.setup.costs.land_s(num_bytes)
        self.device_free_at = end
        self.record.busy_s += end - begin
        self.events.send(end, self._landed, action)

    def _landed(self, action: Land) -> None:
        self.settle()
        accepted = (None,) * len(action.land.moves)
        self._on(action.pull, Landed(read_id=action.land.read_id, refusals=accepted))


def _batch(tokens: list[Token]) -> TokenBatch:
    request_ids, token_ids, reasons = zip(*tokens, strict=True)
    return TokenBatch(
        request_ids=request_ids,
        output_indices=(0,) * len(tokens),
        token_ids=token_ids,
        finish_reasons=reasons,
    )
