"""The requests of a batch scheduler: which take tokens, which run, and how each of them ends.

    tokens -> taken -> the last one: the output ends -> the last output: the request is forgotten
    abort, failure, eviction, a deadline -> forgotten

Whatever a request has is given back here, and nowhere else: its place, its table, its row in the
running set, its part of the queue, its state in the runner. Used by `BatchScheduler` alone.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from common.errors import DeadlineExceeded, Preempted, TandemError
from common.messages import GenerateRequest
from common.scheduling.block_hash import HashChain
from common.scheduling.plan import StepResult
from common.scheduling.prompt_queue import PromptQueue
from common.types import OutputKey, RequestId, TokenLogprobs
from decode_worker.admission import Admission
from decode_worker.entries import Entry, Facts, Output, State
from decode_worker.finish import finish_reason
from decode_worker.flights import Flight, Flights
from decode_worker.running import RunningSet


class Requests:
    def __init__(
        self,
        flights: Flights,
        admission: Admission,
        queue: PromptQueue,
        running: RunningSet,
    ) -> None:
        self._flights = flights
        self._admission = admission
        self._queue = queue
        self._running = running
        self._entries: dict[RequestId, Entry] = {}
        self._drops: list[OutputKey] = []
        self._arrivals = 0

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def __getitem__(self, request_id: RequestId) -> Entry:
        return self._entries[request_id]

    def get(self, request_id: RequestId) -> Entry | None:
        return self._entries.get(request_id)

    def of_output(self, key: OutputKey) -> Entry | None:
        return self._entries.get(key.rpartition("/")[0])

    def add(
        self, request: GenerateRequest, token_ids: NDArray[np.int32], chain: HashChain, now: float
    ) -> Entry:
        assert request.request_id not in self._entries
        self._arrivals += 1
        entry = self._entries[request.request_id] = Entry(
            request=request,
            token_ids=token_ids,
            chain=chain,
            arrival=now,
            order=(-request.priority, now - request.age_s, self._arrivals),
        )
        return entry

    # --- tokens ----------------------------------------------------------------------------------

    def take_first(
        self,
        entry: Entry,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprobs | None, ...],
        facts: Facts,
    ) -> None:
        """One token for each output. With its prompt in the pool the request can run."""
        assert len(token_ids) == len(entry.outputs)
        entry.has_first_tokens = True
        for output, token_id, logprob in zip(list(entry.outputs), token_ids, logprobs, strict=True):
            self.take(output, token_id, logprob, facts)
        self.run_if_ready(entry)

    def take_decodes(self, flight: Flight, result: StepResult, row: int, facts: Facts) -> None:
        """A step's tokens, from that row of the result on."""
        failed, running = set(result.failed), self._running.outputs
        token_ids, logprobs = result.token_ids, result.logprobs
        computed, take = self._running.computed, self.take
        for key, output in flight.decodes.items():
            is_running = running.get(key) is output  # else it has ended since it was planned
            if key in failed:
                if is_running:
                    self.fail(output.entry, result.failure(key), facts)
                continue
            if is_running:
                computed(output)
                take(output, token_ids[row], logprobs[row], facts)
            row += 1

    def take(
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
            self.end_output(output, facts)

    def run_if_ready(self, entry: Entry) -> None:
        has_prompt = entry.has_first_tokens and entry.has_landed
        if not has_prompt or entry.state not in (State.REMOTE, State.LOCAL):
            return
        if self._admission.has_arrived(entry):
            self._run(entry)

    def run_late_arrivals(self) -> None:
        """Those that lacked a place."""
        for entry in self._admission.take_ready():
            self._run(entry)

    def _run(self, entry: Entry) -> None:
        entry.move(State.RUNNING)
        for output in entry.outputs:
            if not output.has_ended:
                self._running.add(output)

    # --- ends ------------------------------------------------------------------------------------

    def end_output(self, output: Output, facts: Facts) -> None:
        output.has_ended = True
        entry = output.entry
        if all(o.has_ended for o in entry.outputs) or entry.state is State.RUNNING:
            self._drop(output)
            entry.outputs.remove(output)
        if not entry.outputs or all(o.has_ended for o in entry.outputs):
            self.end(entry, facts)

    def cut(self, entry: Entry, output_index: int, facts: Facts) -> None:
        """No more of this output is wanted. One that has ended already is no mistake."""
        for output in list(entry.outputs):
            if output.index == output_index and not output.has_ended:
                self.end_output(output, facts)

    def fail(self, entry: Entry, error: TandemError, facts: Facts) -> None:
        self.end(entry, facts)
        facts.failed.append((entry.request.request_id, error))

    def make_room(self, output: Output, facts: Facts) -> bool:
        """Evicts somebody, so that the output may grow; False when that is its own request, or must
        not be.
        """
        victim = max((*self._running.entries, *self._admission.ready), key=lambda e: e.order)
        if victim is output.entry and self._admission.is_oldest(victim):
            return False
        self.fail(victim, Preempted("evicted to make room for older requests"), facts)
        return victim is not output.entry

    def fail_expired(self, facts: Facts) -> None:
        for entry in self._admission.waiting.take_expired():
            if entry.state is State.WAITING:
                self._forget(entry, facts)
                late = DeadlineExceeded("the request's time was up while it waited for KV blocks")
                facts.failed.append((entry.request.request_id, late))

    def end(self, entry: Entry, facts: Facts) -> None:
        if entry.state is State.WAITING:
            self._admission.waiting.remove(entry)
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
        self._admission.ended(entry)
        facts.ended.append(request_id)

    def _drop(self, output: Output) -> None:
        self._running.remove(output)
        self._admission.output_ended(output)
        if output.is_started or output.entry.state is State.LOCAL:
            self._drops.append(output.key)
        self._flights.give_up(output)

    @property
    def has_drops(self) -> bool:
        """Outputs that the runner is still to forget."""
        return bool(self._drops)

    def take_drops(self) -> tuple[OutputKey, ...]:
        drops, self._drops = tuple(self._drops), []
        return drops
