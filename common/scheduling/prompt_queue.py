"""Which prompts are computed next, chunk by chunk. Shared by prefill workers and by decode workers
that prefill.

Order: higher priority first, then fewest tokens left, with ageing: a prompt gains
`AGEING_TOKENS_PER_S` on those that arrive later, so a long one is overtaken only by prompts that
arrive within a bounded time. Since ageing is linear in time, waiting prompts never change places,
and a sorted list is enough.

A prompt's blocks are reserved as a whole when its first chunk is planned. One that does not fit
lets smaller ones pass for at most `MAX_OVERTAKEN_S`, then the line waits for it.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from common.scheduling.kv_cache import BlockTable, KvCache
from common.scheduling.plan import OutputStart, PrefillChunk
from common.types import OutputKey, PromptLogprobs, SamplingParams

AGEING_TOKENS_PER_S = 1024.0
MAX_OVERTAKEN_S = 2.0
MAX_TRIED = 16
"""Prompts that are tried in one step beyond the first one that does not fit."""


@dataclass(slots=True, eq=False)
class Prompt:
    """A prompt on its way through the queue. `hashes` names its full blocks, the last token's block
    excluded.

    (At least one token is always computed, since its logits are wanted; and its own block must be
    read exact, which a shared, sealed block is not: hence the whole last block is computed.)
    """

    key: OutputKey
    token_ids: NDArray[np.int32]
    num_prompt_tokens: int
    sampling: SamplingParams
    hashes: list[bytes]
    output_index: int = 0
    priority: int = 0
    arrival: float = 0.0
    table: BlockTable | None = None
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    logprobs: list[PromptLogprobs] = field(default_factory=list)
    order: tuple[int, float, int] = field(default=(0, 0.0, 0))

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def is_started(self) -> bool:
        return self.table is not None

    @property
    def prompt_logprobs(self) -> PromptLogprobs | None:
        """Those of all chunks, if they are wanted."""
        num_top = self.sampling.prompt_logprobs
        return None if num_top is None else PromptLogprobs.joined(num_top, self.logprobs)


def shareable(
    hashes: list[bytes],
    num_tokens: int,
    block_size: int,
    sampling: SamplingParams | None = None,
) -> list[bytes]:
    """The leading full blocks of a prompt that a prefix hit may cover: all but the last token's
    block, and none when the prompt's log-probabilities are wanted: these must be computed.
    """
    if sampling is not None and sampling.prompt_logprobs is not None:
        return []
    return hashes[: (num_tokens - 1) // block_size]


class PromptQueue:
    def __init__(self, cache: KvCache) -> None:
        self._cache = cache
        self._order: list[tuple[tuple[int, float, int], Prompt]] = []
        self._by_key: dict[OutputKey, Prompt] = {}
        self._arrivals = 0
        self.num_queued_tokens = 0

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Prompt]:
        return (prompt for _, prompt in self._order)

    def add(self, prompt: Prompt, now: float) -> None:
        assert prompt.key not in self._by_key
        self._arrivals += 1
        prompt.arrival = now
        left = prompt.num_tokens - prompt.num_computed_tokens
        prompt.order = (-prompt.priority, left + AGEING_TOKENS_PER_S * now, self._arrivals)
        insort(self._order, (prompt.order, prompt), key=lambda item: item[0])
        self._by_key[prompt.key] = prompt
        self.num_queued_tokens += left

    def get(self, key: OutputKey) -> Prompt | None:
        return self._by_key.get(key)

    def remove(self, key: OutputKey) -> Prompt:
        """Takes a prompt out; its table, if any, stays with it."""
        prompt = self._by_key.pop(key)
        del self._order[bisect_left(self._order, prompt.order, key=lambda item: item[0])]
        self.num_queued_tokens -= prompt.num_tokens - prompt.num_computed_tokens
        return prompt

    def plan(
        self, budget: int, now: float
    ) -> tuple[tuple[OutputStart, ...], tuple[PrefillChunk, ...]]:
        """Chunks worth at most `budget` tokens, and the outputs that start with them."""
        starts: list[OutputStart] = []
        chunks: list[PrefillChunk] = []
        blocked = 0
        for _, prompt in self._order:
            if budget <= 0 or blocked > MAX_TRIED:
                break
            if prompt.table is None and not self._start(prompt):
                blocked += 1
                if now - prompt.arrival > MAX_OVERTAKEN_S:
                    break
                continue
            num_tokens = self._chunk_tokens(prompt, budget)
            if num_tokens == 0:
                break
            if prompt.num_computed_tokens == prompt.num_cached_tokens:
                starts.append(_output_start(prompt))
            chunks.append(self._chunk(prompt, num_tokens))
            budget -= num_tokens
        return tuple(starts), tuple(chunks)

    def apply(self, chunk: PrefillChunk) -> Prompt | None:
        """A chunk is computed. The prompt; None when it was removed meanwhile. A finished one
        leaves the queue.
        """
        prompt = self._by_key.get(chunk.key)
        if prompt is None:
            return None
        assert prompt.table is not None
        assert prompt.num_computed_tokens == chunk.start
        prompt.num_computed_tokens += chunk.num_tokens
        self.num_queued_tokens -= chunk.num_tokens
        if prompt.num_computed_tokens == prompt.num_tokens:
            self.remove(prompt.key)
        return prompt

    def _start(self, prompt: Prompt) -> bool:
        table = self._cache.start(prompt.hashes, prompt.num_tokens, Counter())
        if table is None:
            return False
        prompt.table = table
        self.begin_after(prompt, table.num_named * self._cache.block_size)
        return True

    def begin_after(self, prompt: Prompt, num_cached_tokens: int) -> None:
        """The prompt's table holds that many computed tokens already."""
        if prompt.key in self._by_key:
            self.num_queued_tokens -= num_cached_tokens - prompt.num_computed_tokens
        prompt.num_cached_tokens = prompt.num_computed_tokens = num_cached_tokens

    def _chunk_tokens(self, prompt: Prompt, budget: int) -> int:
        left = prompt.num_tokens - prompt.num_computed_tokens
        if left <= budget:
            return left
        return budget - budget % self._cache.block_size

    def _chunk(self, prompt: Prompt, num_tokens: int) -> PrefillChunk:
        assert prompt.table is not None
        end = prompt.num_computed_tokens + num_tokens
        is_last = end == prompt.num_tokens
        num_blocks = -(-end // self._cache.block_size)
        return PrefillChunk(
            key=prompt.key,
            start=prompt.num_computed_tokens,
            num_tokens=num_tokens,
            block_ids=tuple(prompt.table.block_ids[:num_blocks]),
            tail=prompt.table.tail if is_last and end % self._cache.block_size else None,
            num_outputs=prompt.sampling.n if is_last else 0,
        )

    def check_invariants(self) -> None:
        assert [order for order, _ in self._order] == sorted(order for order, _ in self._order)
        assert {prompt.key for _, prompt in self._order} == set(self._by_key)
        assert self.num_queued_tokens == sum(
            prompt.num_tokens - prompt.num_computed_tokens for prompt in self
        )
        for prompt in self:
            assert prompt.num_cached_tokens <= prompt.num_computed_tokens < prompt.num_tokens


def _output_start(prompt: Prompt) -> OutputStart:
    return OutputStart(
        key=prompt.key,
        token_ids=prompt.token_ids,
        num_prompt_tokens=prompt.num_prompt_tokens,
        sampling=prompt.sampling,
        output_index=prompt.output_index,
    )
