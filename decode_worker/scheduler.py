"""The batch scheduler of a decode worker: continuous batching, local prefill, eviction.

Life of a request:

    add -> WAITING -> admit -> ADMITTED -> route_remote -> REMOTE -> first_tokens, landed -> RUNNING
                                        -> route_local  -> LOCAL  -> (chunks, steps)      -> RUNNING

Who comes in is `admission.py`'s, who is in the next step `running.py`'s, and when pages are free
`flights.py`'s; here are the verbs, and what a step came to.

Blocks for the whole prompt are taken on admission, so a pull never waits for memory. A running
request takes a page when its open block is full; when none is left, the youngest running request of
the lowest priority is evicted (`Preempted`: the router resubmits it with the tokens so far, and its
full blocks stay cached here). The oldest one of the highest priority is never evicted, so it ends;
if only requests that are still being prefilled are younger, it waits for them.

What a step computes for an output that turns out to have ended is thrown away.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from common.messages import Admitted, GenerateRequest
from common.scheduling.block_hash import HashChain
from common.scheduling.kv_cache import KvCache
from common.scheduling.plan import StepPlan, StepResult
from common.scheduling.prompt_queue import PromptQueue
from common.scheduling.step_time import StepTimes
from common.types import OutputKey, RequestId
from decode_worker.admission import Admission
from decode_worker.chunk_limit import ChunkLimit
from decode_worker.entries import Entry, Facts, State
from decode_worker.flights import Flights
from decode_worker.local_prompts import LocalPrompts
from decode_worker.pull_order import PullOrder
from decode_worker.remote_prompts import RemotePrompts
from decode_worker.requests import Requests
from decode_worker.running import Decodes, RunningSet


class BatchScheduler:
    def __init__(
        self,
        cache: KvCache,
        *,
        chunk_tokens: int,
        max_num_seqs: int,
        max_waiting: int,
        max_model_len: int,
        is_colocated: bool,
        is_chunk_auto: bool = False,
        step_times: StepTimes | None = None,
    ) -> None:
        """A step carries at most `chunk_tokens` prompt tokens. With `is_chunk_auto`, beside running
        streams as many as the router's budget says, or else as `chunk_budget` does. `step_times`
        None: they are measured.
        """
        assert chunk_tokens >= cache.block_size
        self._cache = cache
        self._max_model_len = max_model_len
        self._is_colocated = is_colocated
        self._chunks = ChunkLimit(
            cache.block_size, chunk_tokens, is_auto=is_chunk_auto, known=step_times
        )
        self._flights = Flights(cache)
        self._admission = Admission(
            cache,
            self._flights,
            max_waiting=max_waiting,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
        )
        self._queue = PromptQueue(cache)
        self._running = RunningSet(cache, self._flights)
        self._requests = Requests(self._flights, self._admission, self._queue, self._running)
        self._local = LocalPrompts(cache, self._queue, self._requests)
        self.remote = RemotePrompts(cache, self._flights, self._requests)
        self._steps = 0

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return self._admission.num_holding

    @property
    def num_waiting(self) -> int:
        return len(self._admission.waiting)

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens to be computed here; those of waiting requests where it is known."""
        waiting = self._admission.waiting.num_tokens if self._is_colocated else 0
        return self._queue.num_queued_tokens + waiting

    @property
    def num_decodes(self) -> int:
        """Outputs that get a token in every step."""
        return len(self._running)

    @property
    def num_context_tokens(self) -> int:
        """Tokens in the caches of these outputs, together."""
        return self._running.num_context_tokens

    @property
    def chunk_tokens(self) -> int:
        """Prompt tokens that a step may carry at present."""
        return self._chunks.budget(len(self._running), self.num_context_tokens, len(self._queue))

    @property
    def step_times(self) -> StepTimes | None:
        return self._chunks.times

    @property
    def max_request_tokens(self) -> int:
        return min(self._max_model_len, self._cache.max_tokens)

    def set_chunk_budget(self, max_tokens: int | None) -> None:
        """What routers allow beside running streams; None when none of them says."""
        self._chunks.told = max_tokens

    # --- coming in -----------------------------------------------------------------------------

    def add(
        self, request: GenerateRequest, token_ids: NDArray[np.int32], chain: HashChain, now: float
    ) -> None:
        """`chain` covers the tokens. Raises when it can never run here or too many wait."""
        self._admission.waiting.check(request)
        self._admission.waiting.add(self._requests.add(request, token_ids, chain, now))

    def admit(self, now: float) -> list[Admitted]:
        """Blocks for waiting requests, in their order; the next `plan` tells whose time is up."""
        return [self._admitted(entry) for entry in self._admission.let_in(now)]

    def _admitted(self, entry: Entry) -> Admitted:
        size = self._cache.block_size
        is_nearly_all_cached = entry.num_cached_tokens > 0 and entry.cost <= size
        needs_route = not (self._is_colocated or is_nearly_all_cached)
        if not needs_route:
            self.route_local(entry.request.request_id)
        return Admitted(
            request_id=entry.request.request_id,
            num_cached_tokens=entry.num_cached_tokens,
            needs_route=needs_route,
        )

    def place_freed_in(self, now: float) -> float | None:
        """When `admit` may find a place for somebody, whatever else happens; None: never."""
        return self._admission.place_freed_in(now)

    def is_waiting_for_route(self, request_id: RequestId) -> bool:
        entry = self._requests.get(request_id)
        return entry is not None and entry.state is State.ADMITTED

    # --- prefill -------------------------------------------------------------------------------

    def route_local(self, request_id: RequestId) -> None:
        entry = self._requests[request_id]
        entry.move(State.LOCAL)
        self._local.add(entry)

    def route_remote(self, request_id: RequestId, now: float) -> PullOrder:
        entry = self._requests[request_id]
        entry.move(State.REMOTE)
        self._admission.away(entry, now)
        return PullOrder.of(entry, self._cache.block_size)

    # --- steps ---------------------------------------------------------------------------------

    def plan(self, now: float) -> tuple[StepPlan | None, Facts]:
        """The next step, if there is anything to do; at most `MAX_IN_FLIGHT` are under way."""
        facts = Facts()
        self._requests.run_late_arrivals()
        self._requests.fail_expired(facts)
        if self._running.must_wait:
            return None, facts
        decodes = self._running.next_step(
            self._chunks.times, lambda output: self._requests.make_room(output, facts)
        )
        return self._planned(decodes, now), facts

    def _planned(self, decodes: Decodes, now: float) -> StepPlan | None:
        outputs, num_tokens = decodes.outputs, decodes.num_context_tokens
        room = self._chunks.room(len(outputs), num_tokens, self._queue.num_unplanned)
        prompt_starts, chunks = self._queue.plan(room, now)
        if not outputs and not chunks and not self._requests.has_drops:
            return None
        starts, copies = self._running.starts()
        grown, tails = decodes.grown, decodes.tails
        if starts:  # their tables are whole already
            told = {start.key for start in starts}
            grown = [item for item in grown if item[0] not in told]
            tails = [item for item in tails if item[0] not in told]
        self._steps += 1
        plan = StepPlan(
            step=self._steps,
            starts=(*starts, *prompt_starts),
            chunks=chunks,
            decodes=tuple(outputs),
            grown=tuple(grown),
            tails=tuple(tails),
            copies=copies,
            clears=self._cache.drain_clears(),
            drops=self._requests.take_drops(),
        )
        self._flights.begin(plan, num_tokens, outputs)
        return plan

    def apply(self, plan: StepPlan, result: StepResult, now: float) -> Facts:
        """What came of the oldest plan that is under way."""
        flight = self._flights.end(plan)
        self._chunks.observe(flight.shape, max(0.0, result.duration_s - result.mask_wait_s))
        facts = Facts()
        row = self._local.apply(plan, result, facts)
        self._requests.take_decodes(flight, result, row, facts)
        self._running.observe(result)
        return facts

    # --- many steps at once ----------------------------------------------------------------------

    def num_quiet_steps(self, most: int) -> int:
        """How many steps from now on, at most `most`, are one token for each running output and
        nothing else: none of them ends an output, computes a chunk, or could lack a page. Whoever
        waits for admission keeps waiting, since nothing is freed.
        """
        if self._requests.has_drops or len(self._queue):
            return 0
        return self._running.num_quiet_steps(most)

    def take_quiet_steps(
        self, num_steps: int, token_of: Callable[[OutputKey], int]
    ) -> list[OutputKey]:
        """What `plan` and `apply` would have come to in that many quiet steps. The outputs that got
        a token in each of them, in their order.
        """
        self._steps += num_steps
        return self._running.take_quiet_steps(num_steps, token_of)

    # --- going out -----------------------------------------------------------------------------

    def abort(self, request_id: RequestId) -> None:
        """Forgets a request in whatever state. Pages come free when nothing names them any more."""
        entry = self._requests.get(request_id)
        if entry is not None:
            self._requests.end(entry, Facts())

    def end_output(self, request_id: RequestId, output_index: int) -> Facts:
        """No more of this output is wanted. One that has ended already is no mistake."""
        facts = Facts()
        entry = self._requests.get(request_id)
        if entry is not None and entry.has_first_tokens:
            self._requests.cut(entry, output_index, facts)
        return facts

    def check_invariants(self) -> None:
        self._queue.check_invariants()
        entries = list(self._requests)
        self._admission.check_invariants(entries)
        self._running.check_invariants()
        dead = self._flights.dead_tables()
        self._cache.check_invariants([*(e.pages() for e in entries), *(t.pages() for t in dead)])
