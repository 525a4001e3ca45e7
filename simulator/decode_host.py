"""A decode or colocated worker of the simulation: `BatchScheduler` and one `HandoffDestination` for
each pull, as decode_worker/service.py and pull.py run them.

Steps in which nothing can happen but one more token for every running output are advanced together
(`QuietScheduler`). They are applied late: when a message arrives, the steps that have ended by then
are, and the one in flight is planned as usual.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise

from common.errors import TandemError
from common.messages import (
    Admitted,
    Failed,
    FirstTokens,
    GenerateRequest,
    HandoffRequest,
    PagesReady,
    PagesTaken,
    PrefillDone,
    TokenBatch,
    unpack_tokens,
)
from common.scheduling.block_hash import HashChain, HashRoots
from common.scheduling.plan import PageKind
from common.scheduling.step_time import StepShape, StepTimes
from common.types import FinishReason, OutputKey, RequestId, Role, output_key
from decode_worker.chunk_limit import ChunkLimit
from decode_worker.entries import Entry, Facts, Output, State
from decode_worker.pull import HANDOFF_WEIGHT, expected_pages
from decode_worker.scheduler import PLACE_S, BatchScheduler
from kvtransfer.destination import (
    Acknowledge,
    Action,
    Complete,
    Fact,
    Fail,
    FirstTokensKnown,
    HandoffDestination,
    Land,
    Landed,
    ReadEnded,
    SlotsFreed,
    StartRead,
)
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


class KnownLimit(ChunkLimit):
    """With the step times that a worker would have measured long ago."""

    def __init__(self, setup: WorkerSetup) -> None:
        super().__init__(setup.layout.block_size, setup.chunk_tokens, is_auto=setup.is_chunk_auto)
        self._known = setup.step_times

    @property
    def times(self) -> StepTimes | None:
        return self._known


class QuietScheduler(BatchScheduler):
    """The decode worker's scheduler, which can also take many steps at once. It knows its steps'
    times from the beginning; nothing is fitted, since nothing is measured.
    """

    def know(self, limit: "KnownLimit") -> None:
        self._chunks = limit

    def num_quiet_steps(self) -> int:
        """How many steps from now on are one token for each running output and nothing else: none
        of them ends an output, computes a chunk, or could lack a page. Whoever waits for admission
        keeps waiting, since nothing is freed.
        """
        running = self._running.values()
        has_more = self._drops or self._to_start or len(self._queue)
        if has_more or not running or self._in_flight:
            return 0
        most = MAX_STRETCH
        for output in running:
            request = output.entry.request
            so_far = output.num_tokens - request.num_prompt_tokens
            most = min(most, request.sampling.max_tokens - so_far - 1)
        while most > 0 and not self._cache.can_allocate(self._pages_wanted(most)):
            most //= 2
        return max(0, most)

    @property
    def running_keys(self) -> list[OutputKey]:
        """Outputs that get a token in every step, in their order."""
        return list(self._running)

    def _pages_wanted(self, num_steps: int) -> Counter[PageKind]:
        size = self._cache.block_size
        wanted: Counter[PageKind] = Counter()
        for output in self._running.values():
            last = output.num_tokens + num_steps - 1
            wanted[PageKind.PACKED] += -(-last // size) - -(-(output.num_tokens - 1) // size)
            wanted[PageKind.EXACT] += output.table.tail is None and last > size
        return wanted

    def skip(self, num_steps: int, token_of: Callable[[OutputKey], int]) -> None:
        """Takes that many quiet steps: `plan` and `apply` for the outputs that open or fill a block
        in a step, in the order in which they would have come; nothing for the others.
        """
        if num_steps == 0:
            return
        size = self._cache.block_size
        phases: list[list[tuple[Output, int, int]]] = [[] for _ in range(size)]
        for output in self._running.values():
            entry = (output, output.num_tokens, token_of(output.key))
            phases[output.num_tokens % size].append(entry)
        for step in range(num_steps):
            for output, start, token_id in phases[(1 - step) % size]:
                self._advance(output, start + step, token_id)
                grown = self._cache.grow(output.table, output.num_tokens)
                assert grown
            for output, start, token_id in phases[-step % size]:
                self._advance(output, start + step, token_id)
                self._computed(output)
        for output, start, token_id in (item for phase in phases for item in phase):
            self._advance(output, start + num_steps, token_id)
        self._num_context_tokens += num_steps * len(self._running)
        self._steps += num_steps

    def _advance(self, output: Output, num_tokens: int, token_id: int) -> None:
        output.last_tokens.extend([token_id] * (num_tokens - output.num_tokens))
        output.num_tokens = num_tokens


@dataclass(slots=True, eq=False)
class Pull:
    host: "DecodeHost"
    source: PrefillHost
    entry: Entry
    destination: HandoffDestination
    first_tokens_at: float = 0.0
    is_done: bool = False

    @property
    def request_id(self) -> RequestId:
        return self.entry.request.request_id


@dataclass(slots=True, eq=False)
class _Client:
    """What the host must know of a request beside its scheduler."""

    record: Record
    token_id: int
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
        self.scheduler = QuietScheduler(
            self.cache,
            chunk_tokens=setup.chunk_tokens,
            max_num_seqs=setup.max_num_seqs,
            max_waiting=setup.max_waiting,
            max_model_len=setup.max_model_len,
            is_colocated=setup.role is Role.COLOCATED,
            is_chunk_auto=setup.is_chunk_auto,
        )
        self.scheduler.know(KnownLimit(setup))
        self._zone = LandingZone(
            num_packed=setup.num_landing_packed, num_exact=setup.num_landing_exact
        )
        self._deliver = deliver
        self._records = records
        self._gaps = gaps
        self._at_once = at_once
        self._roots = HashRoots(MODEL_FINGERPRINT, setup.layout.block_size)
        self._clients: dict[RequestId, _Client] = {}
        self._token_ids: dict[OutputKey, int] = {}
        self._pulls: list[Pull] = []
        self._has_freed_slots = False
        self._stretch: _Stretch | None = None
        self._step_ends_at = 0.0
        self._outbox: list[object] = []
        self._num_handoffs = 0
        self._handoff_s = 0.0

    def check_invariants(self) -> None:
        self.scheduler.check_invariants()
        self._zone.check_invariants()

    def _load(self) -> Load:
        scheduler = self.scheduler
        return Load(
            blocks=self.cache.load,
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            num_queued_tokens=scheduler.num_queued_tokens,
            max_prompt_tokens=scheduler.max_request_tokens,
            num_decodes=scheduler.num_decodes,
            num_context_tokens=scheduler.num_context_tokens,
            chunk_tokens=scheduler.chunk_tokens,
            step_times=scheduler.step_times,
            handoff_s=self._handoff_s,
        )

    def token_of(self, request_id: RequestId) -> int:
        return self._clients[request_id].token_id

    # --- messages from the router -----------------------------------------------------------------

    def submit(self, request: GenerateRequest) -> None:
        self.settle()
        token_ids = unpack_tokens(request.token_ids)
        chain = HashChain(self._roots.root(request.cache_salt), self.cache.block_size)
        chain.extend(token_ids)
        try:
            self.scheduler.add(request, token_ids, chain, self.events.now)
        except TandemError as error:
            self._outbox.append(Failed.of(request.request_id, error))
            self._flush()
            return
        record = self._records[request.request_id.partition("~")[0]]
        client = _Client(record=record, token_id=-1 - record.number)
        self._clients[request.request_id] = client
        self._token_ids[output_key(request.request_id, request.output_index)] = client.token_id
        self._wake()

    def route(self, request_id: RequestId, source: PrefillHost | None) -> None:
        self.settle()
        if not self.scheduler.is_waiting_for_route(request_id):
            return
        if source is None:
            self._clients[request_id].record.num_local_prefills += 1
            self.scheduler.route_local(request_id)
            self._wake()
            return
        entry = self.scheduler.route_remote(request_id, self.events.now)
        self.events.send(self.events.now + PLACE_S, self._places_freed)
        self._pull(entry, source)

    def _places_freed(self) -> None:
        """A prompt under way for so long has no place any more: others may come in."""
        if self.scheduler.place_freed_in(self.events.now) is not None:
            self.settle()
            self._wake()

    def cancel(self, request_id: RequestId) -> None:
        self.settle()
        self.scheduler.abort(request_id)
        self._forget(request_id)
        self._wake()

    def limit_chunks(self, max_tokens: int) -> None:
        self.scheduler.set_chunk_budget(max_tokens)

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
        plan, facts = self.scheduler.plan(begin)
        assert plan is not None
        assert not facts.ended
        self._plan = plan
        self._step_ends_at = end
        self._ends(end, end - begin, 1)

    def _wake(self) -> None:
        if self._plan is None and self._stretch is None:
            self._begin()

    def _begin(self) -> None:
        """Nothing is in flight: decides what is next."""
        now = self.events.now
        self._admit(now)
        if self._at_once and self.device_free_at <= now and self._begin_stretch(now):
            self._flush()
            return
        plan, facts = self.scheduler.plan(now)
        self._tell(facts)
        self._flush()
        if plan is None:
            return
        seconds = 0.0
        if plan.num_tokens:
            seconds = self.setup.costs.step_s(StepShape.of(plan, self.scheduler.num_context_tokens))
        self._step_ends_at = self._run(plan, now, seconds)

    def _begin_stretch(self, now: float) -> bool:
        num_steps = self.scheduler.num_quiet_steps()
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
        self.scheduler.skip(num_steps, self._token_ids.__getitem__)
        keys = self.scheduler.running_keys
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
        facts = self.scheduler.apply(plan, result, self.events.now)
        self.record.num_prompt_tokens += facts.num_local_tokens
        self._tell(facts)
        self._begin()

    def _admit(self, now: float) -> None:
        for admission in self.scheduler.admit(now):
            record = self._clients[admission.request_id].record
            if record.admitted_s is None:
                record.admitted_s = now
            self._outbox.append(
                Admitted(
                    request_id=admission.request_id,
                    num_cached_tokens=admission.num_cached_tokens,
                    needs_route=admission.needs_route,
                )
            )

    # --- to the router ----------------------------------------------------------------------------

    def _tell(self, facts: Facts) -> None:
        now = self.events.now
        for request_id, num_cached_tokens, _ in facts.prefilled:
            self._outbox.append(
                PrefillDone(request_id=request_id, num_cached_tokens=num_cached_tokens)
            )
            record = self._clients[request_id].record
            if record.first_token_s is None:
                record.num_cached_tokens = num_cached_tokens
        self._tell_tokens(facts, now)
        for request_id, error in facts.failed:
            client = self._clients[request_id]
            if client.num_untold:
                told: list[Token] = [(request_id, client.token_id, None)] * client.num_untold
                self._outbox.append(_batch(told))
            client.record.num_retries += 1
            self._outbox.append(Failed.of(request_id, error))
        for request_id in facts.ended:
            self._forget(request_id)

    def _tell_tokens(self, facts: Facts, now: float) -> None:
        seen_at = now + LATENCY_S
        finished: list[Token] = []
        gaps: dict[float, int] = {}
        columns = zip(facts.request_ids, facts.token_ids, facts.finish_reasons, strict=True)
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

    def _forget(self, request_id: RequestId) -> None:
        client = self._clients.pop(request_id, None)
        if client is not None:
            for pull in self._pulls:
                if pull.request_id == request_id and not pull.is_done:
                    self._finish(pull)
                    break

    def _flush(self) -> None:
        if self._outbox:
            messages, self._outbox = self._outbox, []
            self._to(self._deliver, self, messages)

    # --- pulls ------------------------------------------------------------------------------------

    def _pull(self, entry: Entry, source: PrefillHost) -> None:
        first_block = entry.num_cached_tokens // self.cache.block_size
        destination = HandoffDestination(
            expected=expected_pages(entry, first_block, self.cache.block_size),
            first_block=first_block,
            incarnation=source.order + 1,
            zone=self._zone,
            on_slots_freed=self._slots_freed,
        )
        pull = Pull(host=self, source=source, entry=entry, destination=destination)
        self._pulls.append(pull)
        request = HandoffRequest(
            request=entry.request, incarnation=source.incarnation, num_held_blocks=first_block
        )
        self._to(source.open, request, entry.chain, pull)

    def from_prefill(self, pull: Pull, message: PagesReady | FirstTokens) -> None:
        if pull.is_done:
            return
        if isinstance(message, FirstTokens):
            self.settle()
            self._first_tokens(pull, message)
        else:
            self._on(pull, message)  # begins reads at most: no matter to the steps
        self._after_pulls()

    def handoff_failed(self, pull: Pull, error: TandemError) -> None:
        self.settle()
        pull.is_done = True
        pull.destination.close()
        self._pulls.remove(pull)
        self._outbox.append(Failed.of(pull.request_id, error))
        self.scheduler.abort(pull.request_id)
        self._forget(pull.request_id)
        self._after_pulls()

    def _first_tokens(self, pull: Pull, message: FirstTokens) -> None:
        if pull.entry.state is not State.REMOTE:
            return
        pull.first_tokens_at = self.events.now
        num_cached = max(message.num_cached_tokens, pull.entry.num_cached_tokens)
        facts = self.scheduler.first_tokens(
            pull.request_id, message.token_ids, message.logprobs, num_cached
        )
        if pull.request_id not in facts.ended:
            self._on(pull, FirstTokensKnown())
        self._tell(facts)

    def _on(self, pull: Pull, fact: Fact) -> None:
        if pull.entry.state is not State.REMOTE:
            pull.destination.close()
        self._perform(pull, pull.destination.on(fact))

    def _perform(self, pull: Pull, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case StartRead():
                    self._read(pull, action)
                case Land():
                    self._land(pull, action)
                case Acknowledge(blocks=blocks, num_leading=num_leading):
                    self.scheduler.landed(pull.request_id, num_leading)
                    self._to(pull.source.taken, pull, PagesTaken(blocks=blocks))
                case Complete():
                    self._observe_handoff(self.events.now - pull.first_tokens_at + 2 * LATENCY_S)
                    self.scheduler.landed_all(pull.request_id)
                    self._finish(pull)
                case Fail(error=error):
                    raise AssertionError(f"nothing fails in a simulation: {error}")

    def _observe_handoff(self, seconds: float) -> None:
        """As decode_worker/pull.py measures it."""
        self._num_handoffs += 1
        weight = max(HANDOFF_WEIGHT, 1 / self._num_handoffs)
        self._handoff_s += weight * (seconds - self._handoff_s)

    def _read(self, pull: Pull, action: StartRead) -> None:
        """Both NICs serve one read after the other."""
        num_bytes = sum(self.page_bytes[page.kind] for page in action.pages)
        begin = max(self.events.now, self.link_free_at, pull.source.link_free_at)
        end = begin + self.setup.costs.transfer_s(num_bytes)
        self.link_free_at = pull.source.link_free_at = end
        self.events.send(end, self._read_ended, pull, action.read_id)

    def _read_ended(self, pull: Pull, read_id: int) -> None:
        self.settle()
        self._on(pull, ReadEnded(read_id=read_id, end=ReadEnd.DONE))
        self._after_pulls()

    def _land(self, pull: Pull, action: Land) -> None:
        """On the device: after the step in flight, before the next one."""
        entry = self.scheduler.pin(pull.request_id)
        num_bytes = sum(self.page_bytes[move.kind] for move in action.moves)
        begin = max(self.events.now, self.device_free_at)
        if self._plan is not None:
            begin = max(begin, self._step_ends_at)
        end = begin + self.setup.costs.land_s(num_bytes)
        self.device_free_at = end
        self.record.busy_s += end - begin
        landed = Landed(read_id=action.read_id, refusals=(None,) * len(action.moves))
        self.events.send(end, self._landed, pull, landed, entry)

    def _landed(self, pull: Pull, landed: Landed, entry: Entry) -> None:
        self.settle()
        self.scheduler.unpin(entry)
        self._on(pull, landed)
        self._after_pulls()

    def _finish(self, pull: Pull) -> None:
        pull.is_done = True
        pull.destination.close()
        self._pulls.remove(pull)
        self._to(pull.source.finished, pull)

    def _slots_freed(self) -> None:
        self._has_freed_slots = True

    def _after_pulls(self) -> None:
        while self._has_freed_slots:
            self._has_freed_slots = False
            for pull in list(self._pulls):
                self._on(pull, SlotsFreed())
        self._flush()
        self._wake()


def _batch(tokens: list[Token]) -> TokenBatch:
    request_ids, token_ids, reasons = zip(*tokens, strict=True)
    return TokenBatch(
        request_ids=request_ids,
        output_indices=(0,) * len(tokens),
        token_ids=token_ids,
        finish_reasons=reasons,
    )
