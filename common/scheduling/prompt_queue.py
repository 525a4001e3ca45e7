"""Which prompts are computed next, chunk by chunk. Shared by prefill workers and by decode workers
that prefill.

Order: higher priority first, then clients by turns (common/scheduling/fair_line.py), and among the
prompts of a client fewest tokens left, with ageing: a prompt gains `AGEING_TOKENS_PER_S` on those
that arrive later, so a long one is overtaken only by prompts that arrive within a bounded time.
Since ageing is linear in time, waiting prompts never change places.

A prompt's blocks are reserved as a whole when its first chunk is planned. One that does not fit
lets smaller ones pass for at most `MAX_OVERTAKEN_S`, then nothing new is started before it; what
has its blocks always goes on, so they come free.
"""

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from common.scheduling.chunk_budget import ChunkRoom
from common.scheduling.fair_line import FairLine
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
    client: str = ""
    arrival: float = 0.0
    table: BlockTable | None = None
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    planned: deque[PrefillChunk] = field(default_factory=deque)
    """Chunks in plans that have not been applied yet."""
    num_planned_tokens: int = 0
    """Prompt tokens in those chunks."""
    logprobs: list[PromptLogprobs] = field(default_factory=list)
    place: tuple[float, int] = (0.0, 0)
    """Sorts it among its client's prompts; only the queue changes it."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def cost(self) -> int:
        """Tokens left to compute."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_unplanned_tokens(self) -> int:
        return self.cost - self.num_planned_tokens

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
        self._line: FairLine[Prompt] = FairLine()
        self._by_key: dict[OutputKey, Prompt] = {}
        self._started: dict[OutputKey, Prompt] = {}
        self._arrivals = 0
        self._num_whole = 0
        """Prompts whose last chunk is planned and not applied yet."""
        self.num_queued_tokens = 0

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Prompt]:
        return iter(self._by_key.values())

    @property
    def num_unplanned(self) -> int:
        """Prompts with tokens that no plan has yet."""
        return len(self._by_key) - self._num_whole

    @property
    def num_started(self) -> int:
        """Prompts that have their blocks."""
        return len(self._started)

    def add(self, prompt: Prompt, now: float) -> None:
        assert prompt.key not in self._by_key
        self._arrivals += 1
        prompt.arrival = now
        prompt.place = (prompt.cost + AGEING_TOKENS_PER_S * now, self._arrivals)
        self._line.add(prompt)
        self._by_key[prompt.key] = prompt
        if prompt.table is not None:
            self._started[prompt.key] = prompt
        self.num_queued_tokens += prompt.cost

    def get(self, key: OutputKey) -> Prompt | None:
        return self._by_key.get(key)

    def remove(self, key: OutputKey) -> Prompt:
        """Takes a prompt out; its table, if any, stays with it."""
        prompt = self._by_key.pop(key)
        self._started.pop(key, None)
        self._line.remove(prompt)
        self.num_queued_tokens -= prompt.cost
        self._num_whole -= prompt.num_unplanned_tokens == 0
        return prompt

    def plan(
        self, room: int | ChunkRoom, now: float
    ) -> tuple[tuple[OutputStart, ...], tuple[PrefillChunk, ...]]:
        """Chunks that `room` (or a room of so many tokens) has place for, and the outputs that
        start with them. Chunks of an earlier plan may still be under way: these go on behind them.
        """
        if isinstance(room, int):
            room = ChunkRoom(room, self._cache.block_size)
        starts: list[OutputStart] = []
        chunks: list[PrefillChunk] = []
        for prompt in self._candidates(now):
            if prompt.num_unplanned_tokens == 0:
                continue
            start = prompt.num_computed_tokens + prompt.num_planned_tokens
            num_tokens = room.take(start, prompt.num_unplanned_tokens)
            if num_tokens == 0:
                break
            if start == prompt.num_cached_tokens:
                starts.append(_output_start(prompt))
            chunks.append(self._chunk(prompt, start, num_tokens))
            if room.is_full:
                break
        for chunk in chunks:
            prompt = self._by_key[chunk.key]
            prompt.planned.append(chunk)
            prompt.num_planned_tokens += chunk.num_tokens
            self._num_whole += prompt.num_unplanned_tokens == 0
            self._line.charge(prompt.client, prompt.priority, chunk.num_tokens)
        return tuple(starts), tuple(chunks)

    def _candidates(self, now: float) -> Iterator[Prompt]:
        """Prompts with blocks, in the order of service; each is started when it is asked for."""
        given: set[OutputKey] = set()
        num_blocked = 0
        for prompt in self._line:
            if prompt.table is None and not self._start(prompt):
                num_blocked += 1
                if num_blocked > MAX_TRIED or now - prompt.arrival > MAX_OVERTAKEN_S:
                    break
                continue
            given.add(prompt.key)
            yield prompt
        for prompt in sorted(self._started.values(), key=lambda p: (-p.priority, p.place)):
            if prompt.key not in given:
                yield prompt

    def apply(self, chunk: PrefillChunk) -> Prompt | None:
        """A chunk is computed. The prompt; None when it was removed meanwhile (another one may go
        by its key by now). A finished one leaves the queue.
        """
        prompt = self._by_key.get(chunk.key)
        if prompt is None or not prompt.planned or prompt.planned[0] is not chunk:
            return None
        prompt.planned.popleft()
        assert prompt.table is not None
        assert prompt.num_computed_tokens == chunk.start
        self._line.remove(prompt)
        prompt.num_computed_tokens += chunk.num_tokens
        prompt.num_planned_tokens -= chunk.num_tokens
        self.num_queued_tokens -= chunk.num_tokens
        if prompt.cost == 0:
            self._num_whole -= 1
            del self._by_key[prompt.key]
            del self._started[prompt.key]
        else:
            prompt.place = (prompt.place[0] - chunk.num_tokens, prompt.place[1])
            self._line.add(prompt)
        return prompt

    def _start(self, prompt: Prompt) -> bool:
        table = self._cache.start(prompt.hashes, prompt.num_tokens, Counter())
        if table is None:
            return False
        prompt.table = table
        self._started[prompt.key] = prompt
        self.begin_after(prompt, table.num_named * self._cache.block_size)
        return True

    def begin_after(self, prompt: Prompt, num_cached_tokens: int) -> None:
        """The prompt's table holds that many computed tokens already."""
        if prompt.key in self._by_key:
            self.num_queued_tokens -= num_cached_tokens - prompt.num_computed_tokens
        prompt.num_cached_tokens = prompt.num_computed_tokens = num_cached_tokens

    def _chunk(self, prompt: Prompt, start: int, num_tokens: int) -> PrefillChunk:
        assert prompt.table is not None
        end = start + num_tokens
        is_last = end == prompt.num_tokens
        num_blocks = -(-end // self._cache.block_size)
        return PrefillChunk(
            key=prompt.key,
            start=start,
            num_tokens=num_tokens,
            block_ids=tuple(prompt.table.block_ids[:num_blocks]),
            tail=prompt.table.tail if is_last and end % self._cache.block_size else None,
            num_outputs=prompt.sampling.n if is_last else 0,
        )

    def check_invariants(self) -> None:
        self._line.check_invariants()
        assert {id(prompt) for prompt in self._line} == {id(p) for p in self._by_key.values()}
        assert self._started == {p.key: p for p in self if p.table is not None}
        assert self.num_queued_tokens == sum(prompt.cost for prompt in self)
        assert self._num_whole == sum(prompt.num_unplanned_tokens == 0 for prompt in self)
        for prompt in self:
            assert prompt.num_cached_tokens <= prompt.num_computed_tokens < prompt.num_tokens
            assert prompt.num_planned_tokens == sum(c.num_tokens for c in prompt.planned)
            assert prompt.num_planned_tokens <= prompt.cost


def _output_start(prompt: Prompt) -> OutputStart:
    return OutputStart(
        key=prompt.key,
        token_ids=prompt.token_ids,
        num_prompt_tokens=prompt.num_prompt_tokens,
        sampling=prompt.sampling,
        output_index=prompt.output_index,
    )
