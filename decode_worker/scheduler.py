"""The batch scheduler of a decode worker: continuous batching, local prefill, admission, eviction.

Life of a request:

    add -> WAITING -> admit -> ADMITTED -> route_remote -> REMOTE -> first_tokens, landed -> RUNNING
                                        -> route_local  -> LOCAL  -> (chunks, steps)      -> RUNNING

Blocks for the whole prompt are taken on admission, so a pull never waits for memory. A running
request takes a page when its open block is full; when none is left, the youngest running request of
the lowest priority is evicted (`Preempted`: the router resubmits it with the tokens so far, and its
full blocks stay cached here). The oldest one of the highest priority is never evicted, so it ends;
if only requests that are still being prefilled are younger, it waits for them.

A request takes a place among `max_num_seqs` when it is admitted. One that waits for a prefill
worker for longer than `PLACE_S` gives its place up, so that a prefill worker which hangs holds
nobody else up; when its prompt is here after all, it runs as soon as there is a place again, before
anybody new.

`n` > 1: all outputs share the prompt's full blocks; each has its own open block.

A second step may be planned while the first one runs, before its tokens are known (they are
*unread*): outputs go on with one more token than they have, without those that end with it for
certain; what such a step computes for an output that turns out to have ended is thrown away. Pages
stay until the last plan that may name them is applied. Nothing is evicted meanwhile: when pages run
short, no further step is planned before those under way are applied.
"""

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from common.errors import DeadlineExceeded, Preempted
from common.messages import GenerateRequest
from common.scheduling.block_hash import HashChain
from common.scheduling.chunk_budget import quiet_step_s
from common.scheduling.kv_cache import BlockTable, KvCache
from common.scheduling.plan import OutputStart, PageKind, StepPlan, StepResult
from common.scheduling.prompt_queue import Prompt, PromptQueue, shareable
from common.scheduling.step_time import StepShape, StepTimes
from common.types import (
    BlockId,
    OutputKey,
    PromptLogprobs,
    RequestId,
    TokenLogprobs,
    output_key,
)
from decode_worker.chunk_limit import ChunkLimit
from decode_worker.entries import Admission, Entry, Facts, Output, State
from decode_worker.finish import finish_reason
from decode_worker.form_turns import FormTurns
from decode_worker.waiting import WaitingRequests

MAX_IN_FLIGHT = 2
PLACE_S = 2.0
"""How long a prompt may be under way from a prefill worker before its place is another's."""


@dataclass(slots=True, eq=False)
class _Flight:
    """A plan that has not been applied yet. `decodes` are its outputs, `dead` tables that were
    given up since: it, or one before it, may name their pages.
    """

    plan: StepPlan
    shape: StepShape
    decodes: dict[OutputKey, Output]
    dead: list[BlockTable] = field(default_factory=list)


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
    ) -> None:
        """A step carries at most `chunk_tokens` prompt tokens. With `is_chunk_auto`, beside running
        streams as many as the router's budget says, or else as `chunk_budget` does.
        """
        assert chunk_tokens >= cache.block_size
        self._cache = cache
        self._max_num_seqs = max_num_seqs
        self._max_model_len = max_model_len
        self._is_colocated = is_colocated
        self._chunks = ChunkLimit(cache.block_size, chunk_tokens, is_auto=is_chunk_auto)
        self._entries: dict[RequestId, Entry] = {}
        self._holding: dict[RequestId, Entry] = {}
        self._waiting = WaitingRequests(
            cache,
            max_waiting=max_waiting,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
        )
        self._queue = PromptQueue(cache)
        self._running: dict[OutputKey, Output] = {}
        self._to_start: dict[OutputKey, Output] = {}
        self._form_turns = FormTurns()
        self._in_flight: deque[_Flight] = deque()
        self._is_short = False
        """Pages lacked for a step beside one that is under way."""
        self._pinned: list[Entry] = []
        self._drops: list[OutputKey] = []
        self._num_outputs = 0
        self._num_without_place = 0
        self._remote: dict[RequestId, tuple[float, Entry]] = {}
        """Those that are computed elsewhere and still have their places, and since when."""
        self._ready: dict[RequestId, Entry] = {}
        """Those whose prompts are here, and whose places are another's."""
        self._num_context_tokens = 0
        self._arrivals = 0
        self._steps = 0

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return len(self._holding)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens that are to be computed here. Where those of waiting requests will be is
        not known yet, unless the worker is colocated.
        """
        waiting = self._waiting.num_tokens if self._is_colocated else 0
        return self._queue.num_queued_tokens + waiting

    @property
    def num_decodes(self) -> int:
        """Outputs that get a token in every step."""
        return len(self._running)

    @property
    def num_context_tokens(self) -> int:
        """Tokens in the caches of these outputs, together."""
        return self._num_context_tokens

    @property
    def chunk_tokens(self) -> int:
        """Prompt tokens that a step may carry at present."""
        return self._chunks.budget(len(self._running), self._num_context_tokens, len(self._queue))

    @property
    def step_times(self) -> StepTimes | None:
        return self._chunks.times

    def set_chunk_budget(self, max_tokens: int | None) -> None:
        """What routers allow beside running streams; None when none of them says."""
        self._chunks.told = max_tokens

    @property
    def max_request_tokens(self) -> int:
        return min(self._max_model_len, self._cache.max_tokens)

    # --- coming in -----------------------------------------------------------------------------

    def add(
        self, request: GenerateRequest, token_ids: NDArray[np.int32], chain: HashChain, now: float
    ) -> None:
        """`chain` covers `token_ids`. Raises when the request can never run here or too many
        wait.
        """
        assert request.request_id not in self._entries
        self._waiting.check(request)
        self._arrivals += 1
        entry = Entry(
            request=request,
            token_ids=token_ids,
            chain=chain,
            arrival=now,
            order=(-request.priority, now - request.age_s, self._arrivals),
        )
        self._entries[request.request_id] = entry
        self._waiting.add(entry)

    def admit(self, now: float) -> list[Admission]:
        """Gives waiting requests their blocks, in the order of the line. One whose deadline has
        passed ends instead; the next `plan` tells.
        """
        self._free_places(now)
        admitted = self._waiting.let_in(now, self._has_place, self._admit)
        return [self._admission(entry) for entry in admitted]

    def _has_place(self, entry: Entry) -> bool:
        return not self._ready and self._has_room(entry.request.sampling.n)

    def _has_room(self, num_outputs: int) -> bool:
        return self._num_outputs - self._num_without_place + num_outputs <= self._max_num_seqs

    def place_freed_in(self, now: float) -> float | None:
        """When somebody who waits should be looked at again, whatever happens; None: never."""
        if not self._remote or not len(self._waiting):
            return None
        since, _ = next(iter(self._remote.values()))
        return max(0.0, since + PLACE_S - now)

    def _free_places(self, now: float) -> None:
        while self._remote:
            request_id, (since, entry) = next(iter(self._remote.items()))
            if now - since < PLACE_S:
                return
            del self._remote[request_id]
            entry.has_place = False
            self._num_without_place += len(entry.outputs)

    def _run_ready(self) -> None:
        """The oldest first, as far as there are places."""
        while self._ready:
            request_id, entry = next(iter(self._ready.items()))
            if not self._has_room(len(entry.outputs)):
                return
            del self._ready[request_id]
            self._run(entry)

    def _admit(self, entry: Entry) -> bool:
        size = self._cache.block_size
        hashes = shareable(entry.chain.full, entry.num_tokens, size, entry.request.sampling)
        n = entry.request.sampling.n
        # afterwards every running output can grow by one block, and the other outputs get their
        # open blocks
        growing = self._num_outputs + 2 * n
        spare = Counter({PageKind.PACKED: growing, PageKind.EXACT: 2 * n})
        if not self._entries_hold_pages():
            spare = Counter({PageKind.PACKED: n - 1, PageKind.EXACT: n - 1})
        table = self._cache.start(hashes, entry.num_tokens, spare)
        if table is None:
            return False
        entry.table = table
        entry.num_cached_tokens = table.num_named * size
        for offset in range(n):
            self._add_output(entry, offset, table)
        self._num_outputs += n
        self._holding[entry.request.request_id] = entry
        entry.move(State.ADMITTED)
        return True

    def _entries_hold_pages(self) -> bool:
        return bool(self._holding or self._pinned or any(f.dead for f in self._in_flight))

    def _add_output(self, entry: Entry, offset: int, table: BlockTable) -> None:
        copy = None
        if offset > 0:
            forked = self._cache.fork(table, entry.num_tokens)
            assert forked is not None, "admission kept pages for it"
            table, copy = forked
        index = entry.request.output_index + offset
        entry.outputs.append(
            Output(
                key=output_key(entry.request.request_id, index),
                entry=entry,
                index=index,
                table=table,
                chain=entry.chain.copy() if offset else entry.chain,
                num_tokens=entry.num_tokens,
                copy=copy,
            )
        )

    def _admission(self, entry: Entry) -> Admission:
        left = entry.num_tokens - entry.num_cached_tokens
        is_nearly_all_cached = entry.num_cached_tokens > 0 and left <= self._cache.block_size
        needs_route = not (self._is_colocated or is_nearly_all_cached)
        if not needs_route:
            self.route_local(entry.request.request_id)
        return Admission(
            request_id=entry.request.request_id,
            num_cached_tokens=entry.num_cached_tokens,
            needs_route=needs_route,
        )

    def is_waiting_for_route(self, request_id: RequestId) -> bool:
        entry = self._entries.get(request_id)
        return entry is not None and entry.state is State.ADMITTED

    def is_remote(self, request_id: RequestId) -> bool:
        entry = self._entries.get(request_id)
        return entry is not None and entry.state is State.REMOTE

    # --- prefill -------------------------------------------------------------------------------

    def route_local(self, request_id: RequestId) -> None:
        entry = self._entries[request_id]
        entry.move(State.LOCAL)
        size = self._cache.block_size
        prompt = Prompt(
            key=entry.outputs[0].key,
            token_ids=entry.token_ids,
            num_prompt_tokens=entry.request.num_prompt_tokens,
            sampling=entry.request.sampling,
            hashes=shareable(entry.chain.full, entry.num_tokens, size, entry.request.sampling),
            output_index=entry.request.output_index,
            priority=entry.priority,
            client=entry.client,
            table=entry.table,
        )
        self._queue.begin_after(prompt, entry.num_cached_tokens)
        self._queue.add(prompt, entry.arrival)

    def route_remote(self, request_id: RequestId, now: float) -> Entry:
        entry = self._entries[request_id]
        entry.move(State.REMOTE)
        self._remote[request_id] = (now, entry)
        return entry

    def first_tokens(
        self,
        request_id: RequestId,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprobs | None, ...],
        num_cached_tokens: int,
        prompt_logprobs: PromptLogprobs | None = None,
    ) -> Facts:
        """The prefill worker's samples, one for each output. Forwarded at once; the pages may land
        later.
        """
        entry = self._entries[request_id]
        assert entry.state is State.REMOTE
        assert not entry.has_first_tokens
        facts = Facts(are_from_prefill=True)
        facts.prefilled.append((request_id, num_cached_tokens, prompt_logprobs))
        self._take_first_tokens(entry, token_ids, logprobs, facts)
        self._run_if_ready(entry)
        return facts

    def pin(self, request_id: RequestId) -> Entry:
        """A landing is about to write the prompt's blocks: they are not freed before `unpin`."""
        entry = self._entries[request_id]
        if entry.num_pins == 0:
            self._pinned.append(entry)
        entry.num_pins += 1
        return entry

    def unpin(self, entry: Entry) -> None:
        entry.num_pins -= 1
        if entry.num_pins == 0:
            self._pinned.remove(entry)
            for table in entry.dead_tables:
                self._free(table)
            entry.dead_tables.clear()

    def landed(self, request_id: RequestId, num_leading: int) -> None:
        """The first `num_leading` blocks of the prompt (an open last one counted) are in the
        pool.
        """
        entry = self._entries[request_id]
        assert entry.table is not None
        num_full = min(num_leading, entry.num_tokens // self._cache.block_size)
        self._cache.name(entry.table, entry.chain.full, num_full)

    def landed_all(self, request_id: RequestId) -> None:
        """Every page of the prompt is in the pool: with its first tokens, the request can run."""
        entry = self._entries[request_id]
        entry.has_landed = True
        self._run_if_ready(entry)

    def _take_first_tokens(
        self,
        entry: Entry,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprobs | None, ...],
        facts: Facts,
    ) -> None:
        assert len(token_ids) == len(entry.outputs)
        entry.has_first_tokens = True
        for output, token_id, logprob in zip(list(entry.outputs), token_ids, logprobs, strict=True):
            self._take(output, token_id, logprob, facts)

    def _run_if_ready(self, entry: Entry) -> None:
        if not (
            entry.has_first_tokens
            and entry.has_landed
            and entry.state in (State.REMOTE, State.LOCAL)
        ):
            return
        self._remote.pop(entry.request.request_id, None)
        if entry.has_place or (not self._ready and self._has_room(len(entry.outputs))):
            self._run(entry)
        else:
            self._ready[entry.request.request_id] = entry

    def _run(self, entry: Entry) -> None:
        if not entry.has_place:
            entry.has_place = True
            self._num_without_place -= len(entry.outputs)
        entry.move(State.RUNNING)
        for output in entry.outputs:
            if not output.has_ended:
                self._running[output.key] = output
                if not output.is_started:
                    self._to_start[output.key] = output
                self._num_context_tokens += output.num_tokens

    # --- steps ---------------------------------------------------------------------------------

    def plan(self, now: float) -> tuple[StepPlan | None, Facts]:
        """The next step, if there is anything to do, and what was evicted for it. At most
        `MAX_IN_FLIGHT` are under way at a time.
        """
        assert len(self._in_flight) < MAX_IN_FLIGHT
        facts = Facts()
        self._run_ready()
        self._tell_expired(facts)
        if self._is_short and self._in_flight:
            return None, facts
        self._is_short = False
        going_on = self._going_on()
        taking_turns = self._form_turns.in_step(going_on, self._quiet_s(going_on))
        decodes, grown, tails = self._grow(
            going_on if taking_turns is None else taking_turns, facts
        )
        num_context_tokens = self._context_of(decodes)
        prompt_starts, chunks = self._queue.plan(
            self._chunks.room(len(decodes), num_context_tokens, self._queue.num_unplanned), now
        )
        if not decodes and not chunks and not self._drops:
            return None, facts
        starts, copies = self._starts()
        told = {start.key for start in starts}  # their tables are whole already
        drops, self._drops = tuple(self._drops), []
        self._steps += 1
        plan = StepPlan(
            step=self._steps,
            starts=(*starts, *prompt_starts),
            chunks=chunks,
            decodes=tuple(decodes),
            grown=tuple(item for item in grown if item[0] not in told),
            tails=tuple(item for item in tails if item[0] not in told),
            copies=copies,
            clears=self._cache.drain_clears(),
            drops=drops,
        )
        self._in_flight.append(_Flight(plan, StepShape.of(plan, num_context_tokens), decodes))
        return plan, facts

    def _unread(self, output: Output) -> int:
        """Tokens that are under way: 1 when the step in flight decodes the output."""
        flights = self._in_flight
        return int(bool(flights) and flights[-1].decodes.get(output.key) is output)

    def _going_on(self) -> dict[OutputKey, Output]:
        """Outputs that want one more token than they have, unread ones counted."""
        if not self._in_flight:
            return self._running
        return {
            key: output
            for key, output in self._running.items()
            if not (self._unread(output) and output.num_tokens + 1 >= output.entry.most_tokens)
        }

    def _quiet_s(self, outputs: dict[OutputKey, Output]) -> float:
        times = self._chunks.times
        if times is None:
            return 0.0
        return quiet_step_s(times, len(outputs), self._num_context_tokens)

    def _context_of(self, decodes: dict[OutputKey, Output]) -> int:
        """Tokens in the caches of a step's outputs, when it runs."""
        if not self._in_flight and len(decodes) == len(self._running):
            return self._num_context_tokens
        return sum(output.num_tokens + self._unread(output) for output in decodes.values())

    def _tell_expired(self, facts: Facts) -> None:
        for entry in self._waiting.take_expired():
            if entry.state is State.WAITING:
                self._forget(entry, facts)
                late = DeadlineExceeded("the request's time was up while it waited for KV blocks")
                facts.failed.append((entry.request.request_id, late))

    def _starts(self) -> tuple[list[OutputStart], tuple[tuple[BlockId, BlockId], ...]]:
        """Outputs the runner does not know yet: those prefilled elsewhere, and the siblings of a
        local prefill.
        """
        starts: list[OutputStart] = []
        copies: list[tuple[BlockId, BlockId]] = []
        for output in self._to_start.values():
            output.is_started = True
            if output.copy is not None:
                copies.append(output.copy)
            entry = output.entry
            starts.append(
                OutputStart(
                    key=output.key,
                    token_ids=np.append(
                        entry.token_ids, np.asarray(output.last_tokens[-1:], dtype=np.int32)
                    ),
                    num_prompt_tokens=entry.request.num_prompt_tokens,
                    sampling=entry.request.sampling,
                    output_index=output.index,
                    block_ids=tuple(output.table.block_ids),
                    tail=output.table.tail,
                )
            )
        self._to_start.clear()
        return starts, tuple(copies)

    def _grow(
        self, going_on: dict[OutputKey, Output], facts: Facts
    ) -> tuple[
        dict[OutputKey, Output], list[tuple[OutputKey, BlockId]], list[tuple[OutputKey, BlockId]]
    ]:
        """Those of the outputs that have a page for their next token, with the pages and the tails
        that were added for it.
        """
        size = self._cache.block_size
        grown: list[tuple[OutputKey, BlockId]] = []
        tails: list[tuple[OutputKey, BlockId]] = []
        stalled: set[OutputKey] = set()
        # only a token that opens a block needs pages
        if self._in_flight:
            opening = [o for o in going_on.values() if (o.num_tokens + self._unread(o)) % size == 1]
        else:
            opening = [o for o in going_on.values() if o.num_tokens % size == 1]
        for output in opening:
            if output.key not in self._running:
                continue  # evicted for another one
            had_tail = output.table.tail is not None
            if not self._grow_or_evict(output, facts):
                stalled.add(output.key)
                continue
            grown.append((output.key, output.table.block_ids[-1]))
            if output.table.tail is not None and not had_tail:
                tails.append((output.key, output.table.tail))
        if not stalled and not facts.ended:
            return dict(going_on), grown, tails
        decodes = {
            key: output
            for key, output in going_on.items()
            if key in self._running and key not in stalled
        }
        return decodes, _of(decodes, grown), _of(decodes, tails)

    def _grow_or_evict(self, output: Output, facts: Facts) -> bool:
        while not self._cache.grow(output.table, output.num_tokens + self._unread(output)):
            if self._in_flight:
                self._is_short = True
                return False
            running = (o.entry for o in self._running.values())
            victim = max((*running, *self._ready.values()), key=lambda e: e.order)
            if victim is output.entry and self._is_oldest(victim):
                return False
            self._end(victim, facts)
            facts.failed.append(
                (victim.request.request_id, Preempted("evicted to make room for older requests"))
            )
            if victim is output.entry:
                return False
        return True

    def _is_oldest(self, entry: Entry) -> bool:
        return all(entry.order <= other.order for other in self._holding.values())

    def apply(self, plan: StepPlan, result: StepResult, now: float) -> Facts:
        """What came of the oldest plan that is under way."""
        flight = self._in_flight.popleft()
        assert plan is flight.plan
        self._chunks.observe(flight.shape, max(0.0, result.duration_s - result.mask_wait_s))
        for table in flight.dead:
            self._cache.free(table)
        facts = Facts()
        failed = set(result.failed)
        row = 0
        for chunk in plan.chunks:
            num_rows = 0 if chunk.key in failed else chunk.num_outputs
            rows = slice(row, row + num_rows)
            row += num_rows
            facts.num_local_tokens += chunk.num_tokens
            prompt = self._queue.apply(chunk)
            if prompt is None:
                continue
            if chunk.key in failed:
                self._fail(chunk.key, result, facts)
                continue
            entry = self._entries[chunk.key.rpartition("/")[0]]
            end = chunk.start + chunk.num_tokens
            assert entry.table is not None
            self._cache.name(entry.table, entry.chain.full, end // self._cache.block_size)
            prompt.logprobs += [part for key, part in result.prompt_logprobs if key == chunk.key]
            if chunk.num_outputs:
                entry.outputs[0].is_started = True
                entry.has_landed = True
                facts.prefilled.append(
                    (entry.request.request_id, entry.num_cached_tokens, prompt.prompt_logprobs)
                )
                self._take_first_tokens(entry, result.token_ids[rows], result.logprobs[rows], facts)
                self._run_if_ready(entry)
        for key, output in flight.decodes.items():
            is_running = self._running.get(key) is output  # else it has ended since it was planned
            if key in failed:
                if is_running:
                    self._fail(key, result, facts)
                continue
            if is_running:
                self._computed(output)
                self._num_context_tokens += 1
                self._take(output, result.token_ids[row], result.logprobs[row], facts)
            row += 1
        self._form_turns.observe(self._running, result.slow_masks)
        return facts

    def _fail(self, key: OutputKey, result: StepResult, facts: Facts) -> None:
        entry = self._entries.get(key.rpartition("/")[0])
        if entry is not None:
            self._end(entry, facts)
            facts.failed.append((entry.request.request_id, result.failure(key)))

    def _computed(self, output: Output) -> None:
        """The output's last known token is in the cache now."""
        if output.num_tokens % self._cache.block_size == 0:
            output.chain.extend(output.last_tokens)
            output.last_tokens.clear()
            self._cache.name(output.table, output.chain.full, len(output.chain.full))

    def _take(
        self, output: Output, token_id: int, logprob: TokenLogprobs | None, facts: Facts
    ) -> None:
        """A sampled token: one more known token, sent on; perhaps the last one."""
        output.num_tokens += 1
        output.last_tokens.append(token_id)
        request = output.entry.request
        reason = finish_reason(
            request.sampling, token_id, output.num_tokens - request.num_prompt_tokens
        )
        facts.request_ids.append(request.request_id)
        facts.output_indices.append(output.index)
        facts.token_ids.append(token_id)
        facts.finish_reasons.append(reason)
        facts.logprobs.append(logprob)
        if reason is not None:
            self._end_output(output, facts)

    # --- going out -----------------------------------------------------------------------------

    def abort(self, request_id: RequestId) -> None:
        """Forgets a request in whatever state. Pages named by the step in flight are freed when it
        ends.

        Blocks that a landing is about to write are freed when it is unpinned.
        """
        entry = self._entries.get(request_id)
        if entry is not None:
            self._end(entry, Facts())

    def end_output(self, request_id: RequestId, output_index: int) -> Facts:
        """No more of this output is wanted. One that has ended already is no mistake."""
        facts = Facts()
        entry = self._entries.get(request_id)
        if entry is not None and entry.has_first_tokens:
            for output in list(entry.outputs):
                if output.index == output_index and not output.has_ended:
                    self._end_output(output, facts)
        return facts

    def _end_output(self, output: Output, facts: Facts) -> None:
        output.has_ended = True
        entry = output.entry
        if all(o.has_ended for o in entry.outputs) or entry.state is State.RUNNING:
            self._drop(output)
            entry.outputs.remove(output)
        if not entry.outputs or all(o.has_ended for o in entry.outputs):
            self._end(entry, facts)

    def _end(self, entry: Entry, facts: Facts) -> None:
        if entry.state is State.WAITING:
            self._waiting.remove(entry)
        self._forget(entry, facts)

    def _forget(self, entry: Entry, facts: Facts) -> None:
        request_id = entry.request.request_id
        for output in list(entry.outputs):
            if self._queue.get(output.key) is not None:
                self._queue.remove(output.key)
            self._drop(output)
        entry.outputs.clear()
        entry.move(State.ENDED)
        del self._entries[request_id]
        self._holding.pop(request_id, None)
        self._remote.pop(request_id, None)
        self._ready.pop(request_id, None)
        facts.ended.append(request_id)

    def _drop(self, output: Output) -> None:
        if self._running.pop(output.key, None) is not None:
            self._num_context_tokens -= output.num_tokens
            self._to_start.pop(output.key, None)
        self._num_outputs -= 1
        self._num_without_place -= not output.entry.has_place
        self._waiting.generated(output)
        if output.is_started or output.entry.state is State.LOCAL:
            self._drops.append(output.key)
        if output.entry.num_pins:
            output.entry.dead_tables.append(output.table)
        else:
            self._free(output.table)

    def _free(self, table: BlockTable) -> None:
        """Plans under way may name the table's pages: then they are kept until the last of these
        is applied.
        """
        if self._in_flight:
            self._in_flight[-1].dead.append(table)
        else:
            self._cache.free(table)

    def check_invariants(self) -> None:
        self._queue.check_invariants()
        entries = self._entries.values()
        assert self._num_outputs == sum(len(entry.outputs) for entry in entries)
        without = [entry for entry in entries if not entry.has_place]
        assert self._num_without_place == sum(len(entry.outputs) for entry in without)
        assert all(entry.state is State.REMOTE for entry in without)
        assert all(not entry.has_place for entry in self._ready.values())
        assert self._num_outputs - self._num_without_place <= self._max_num_seqs
        self._waiting.check_invariants([e for e in entries if e.state is State.WAITING])
        assert self._holding == {
            key: e for key, e in self._entries.items() if e.state is not State.WAITING
        }
        assert self._to_start == {k: o for k, o in self._running.items() if not o.is_started}
        assert self._num_context_tokens == sum(o.num_tokens for o in self._running.values())
        for output in self._running.values():
            assert output.entry.state is State.RUNNING
            assert not output.has_ended
        dead = [table for flight in self._in_flight for table in flight.dead]
        dead += [table for entry in self._pinned for table in entry.dead_tables]
        self._cache.check_invariants(
            [*(entry.pages() for entry in entries), *(table.pages() for table in dead)]
        )


def _of(
    decodes: dict[OutputKey, Output], pages: Iterable[tuple[OutputKey, BlockId]]
) -> list[tuple[OutputKey, BlockId]]:
    return [item for item in pages if item[0] in decodes]
