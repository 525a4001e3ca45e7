"""Prompts that a decode worker computes itself, chunk by chunk, beside the tokens of its outputs.

Used by `BatchScheduler` alone; the order of the chunks is `PromptQueue`'s.
"""

from common.scheduling.kv_cache import KvCache
from common.scheduling.plan import StepPlan, StepResult
from common.scheduling.prompt_queue import Prompt, PromptQueue, shareable
from decode_worker.entries import Entry, Facts
from decode_worker.requests import Requests


def prompt_of(entry: Entry, block_size: int) -> Prompt:
    return Prompt(
        key=entry.outputs[0].key,
        token_ids=entry.token_ids,
        num_prompt_tokens=entry.request.num_prompt_tokens,
        sampling=entry.request.sampling,
        hashes=shareable(entry.chain.full, entry.num_tokens, block_size, entry.request.sampling),
        output_index=entry.request.output_index,
        priority=entry.priority,
        client=entry.client,
        table=entry.table,
    )


class LocalPrompts:
    def __init__(self, cache: KvCache, queue: PromptQueue, requests: Requests) -> None:
        self._cache = cache
        self._queue = queue
        self._requests = requests

    def add(self, entry: Entry) -> None:
        prompt = prompt_of(entry, self._cache.block_size)
        self._queue.begin_after(prompt, entry.num_cached_tokens)
        self._queue.add(prompt, entry.arrival)

    def apply(self, plan: StepPlan, result: StepResult, facts: Facts) -> int:
        """What came of the plan's chunks; how many rows of the result were theirs."""
        row = 0
        for chunk in plan.chunks:
            has_failed = chunk.key in result.failed
            rows = slice(row, row + (0 if has_failed else chunk.num_outputs))
            row = rows.stop
            prompt = self._queue.apply(chunk)
            if prompt is None:
                continue
            entry = self._requests.of_output(chunk.key)
            assert entry is not None
            if has_failed:
                self._requests.fail(entry, result.failure(chunk.key), facts)
                continue
            self._name(entry, chunk.start + chunk.num_tokens)
            prompt.logprobs += [part for key, part in result.prompt_logprobs if key == chunk.key]
            if chunk.num_outputs:
                facts.prefilled.append(
                    entry.prefilled(entry.num_cached_tokens, prompt.prompt_logprobs)
                )
                entry.outputs[0].is_started = True
                entry.has_landed = True
                self._requests.take_first(
                    entry, result.token_ids[rows], result.logprobs[rows], facts
                )
        return row

    def _name(self, entry: Entry, num_computed: int) -> None:
        assert entry.table is not None
        num_full = num_computed // self._cache.block_size
        self._cache.name(entry.table, entry.chain.full, num_full)
