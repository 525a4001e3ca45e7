"""The chunk scheduler of a prefill worker.

Life of a prompt: `add` -> waiting -> blocks reserved, computed chunk by chunk (`plan`, `stored`,
`apply`) -> forgotten. Every page that a chunk finishes is handed out with a reference of its own in
`ChunkComputed`: whoever takes the fact gives the page back with `release` (the hand-off does, when
the page is acknowledged or its stream ends). So the computing prompt and the hand-off hold a page
independently, and it is cached when both have let go.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from common.errors import ContextLengthExceeded, PromptTooLargeForPool, TandemError
from common.handoff_messages import FirstTokens
from common.pages import PageKind
from common.scheduling.kv_cache import KvCache
from common.scheduling.plan import PrefillChunk, StepPlan, StepResult, TagOrder
from common.scheduling.prompt_pages import PromptNames, PromptPage, prompt_pages
from common.scheduling.prompt_queue import Prompt, PromptQueue
from common.scheduling.step_fit import StepFit
from common.scheduling.step_time import StepShape, StepTimes
from common.types import BlockId, OutputKey
from kvtransfer.source import Page


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkComputed:
    key: OutputKey
    num_tokens: int
    pages: tuple[Page, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptComputed:
    key: OutputKey
    first_tokens: FirstTokens


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFailed:
    """The model gave no usable logits for this prompt, or the grammar of its answer gave up."""

    key: OutputKey
    error: TandemError


Fact = ChunkComputed | PromptComputed | PromptFailed


@dataclass(slots=True)
class _Pages:
    """What a prompt's pages are called, and how many leading ones were handed out."""

    names: PromptNames
    num_handed_out: int


class PrefillScheduler:
    def __init__(self, cache: KvCache, *, chunk_tokens: int, max_model_len: int) -> None:
        assert chunk_tokens >= cache.block_size
        self._cache = cache
        self._chunk_tokens = chunk_tokens
        self._max_model_len = max_model_len
        self._queue = PromptQueue(cache)
        self._pages: dict[OutputKey, _Pages] = {}
        self._in_flight: StepPlan | None = None
        self._has_stored = False
        self._aborted: dict[OutputKey, Prompt] = {}
        self._drops: list[OutputKey] = []
        self._handed_out: Counter[tuple[PageKind, BlockId]] = Counter()
        self._steps = 0
        self._step_fit = StepFit()

    @property
    def num_running(self) -> int:
        return self._queue.num_started

    @property
    def num_waiting(self) -> int:
        return len(self._queue) - self.num_running

    @property
    def num_queued_tokens(self) -> int:
        return self._queue.num_queued_tokens

    @property
    def chunk_tokens(self) -> int:
        """Prompt tokens that a step may carry."""
        return self._chunk_tokens

    @property
    def num_context_tokens(self) -> int:
        """Of decodes, which there are none of here."""
        return 0

    @property
    def step_times(self) -> StepTimes | None:
        return self._step_fit.times

    def add(
        self,
        prompt: Prompt,
        names: PromptNames,
        num_held_blocks: int,
        now: float,
    ) -> None:
        """`num_held_blocks` leading blocks need not be handed out. Raises when the prompt can never
        be computed.
        """
        if prompt.num_tokens > self._max_model_len:
            raise ContextLengthExceeded(
                f"the prompt has {prompt.num_tokens} tokens, this worker's context is "
                f"{self._max_model_len}"
            )
        if prompt.num_tokens > self._cache.max_tokens:
            raise PromptTooLargeForPool(
                f"the prompt has {prompt.num_tokens} tokens, the prefill worker's pool holds "
                f"{self._cache.max_tokens}"
            )
        self._pages[prompt.key] = _Pages(names, num_handed_out=num_held_blocks)
        self._queue.add(prompt, now)

    def plan(self, now: float) -> StepPlan | None:
        """The next step; None when there is nothing to do."""
        assert self._in_flight is None
        starts, chunks = self._queue.plan(self._chunk_tokens, now)
        drops, self._drops = tuple(self._drops), []
        if not chunks and not drops:
            return None
        self._steps += 1
        self._has_stored = False
        self._in_flight = StepPlan(
            step=self._steps,
            starts=starts,
            chunks=chunks,
            clears=self._cache.drain_clears(),
            tags=tuple(tag for chunk in chunks for tag in self._tags(chunk)),
            drops=drops,
        )
        return self._in_flight

    def stored(self, plan: StepPlan) -> list[ChunkComputed]:
        """The step's pages are complete and tagged, its samples are still to come: the pages are
        handed out. `apply` does it when nobody has.
        """
        assert plan is self._in_flight
        if self._has_stored:
            return []
        self._has_stored = True
        return [self._hand_out(chunk) for chunk in plan.chunks if chunk.key not in self._aborted]

    def apply(self, plan: StepPlan, result: StepResult, now: float) -> list[Fact]:
        self._step_fit.observe(StepShape.of(plan, 0), result.duration_s)
        facts: list[Fact] = [*self.stored(plan)]
        self._in_flight = None
        row = 0
        for chunk in plan.chunks:
            has_failed = chunk.key in result.failed
            num_rows = 0 if has_failed else chunk.num_outputs
            rows = slice(row, row + num_rows)
            row += num_rows
            if chunk.key in self._aborted:
                self._free(self._aborted.pop(chunk.key))
                continue
            facts += self._computed(chunk, has_failed, result, rows)
        return facts

    def abort(self, key: OutputKey) -> None:
        """The prompt is not wanted any more. Its blocks are let go at once, or when the step that
        uses them ends.
        """
        if self._queue.get(key) is None:
            return
        prompt = self._queue.remove(key)
        if self._in_flight is not None and any(
            chunk.key == key for chunk in self._in_flight.chunks
        ):
            self._aborted[key] = prompt
        else:
            self._free(prompt)

    def release(self, pages: Iterable[tuple[PageKind, BlockId]]) -> None:
        """Gives back pages that a `ChunkComputed` handed out."""
        pages = list(pages)
        self._handed_out.subtract(pages)
        self._cache.release(pages)
        for page in pages:
            if self._handed_out[page] == 0:
                del self._handed_out[page]

    def _computed(
        self, chunk: PrefillChunk, has_failed: bool, result: StepResult, rows: slice
    ) -> list[Fact]:
        prompt = self._queue.apply(chunk)
        assert prompt is not None
        assert prompt.table is not None
        if has_failed:
            if self._queue.get(chunk.key) is not None:
                self._queue.remove(chunk.key)
            self._free(prompt)
            return [PromptFailed(key=chunk.key, error=result.failure(chunk.key))]
        names = self._pages[chunk.key].names
        end = chunk.start + chunk.num_tokens
        prompt.logprobs += [part for key, part in result.prompt_logprobs if key == chunk.key]
        self._cache.name(prompt.table, names.full, end // self._cache.block_size)
        if not chunk.num_outputs:
            return []
        self._free(prompt)
        return [
            PromptComputed(
                key=chunk.key,
                first_tokens=FirstTokens(
                    token_ids=result.token_ids[rows],
                    logprobs=result.logprobs[rows],
                    num_cached_tokens=prompt.num_cached_tokens,
                    prompt_logprobs=prompt.prompt_logprobs,
                ),
            )
        ]

    def _hand_out(self, chunk: PrefillChunk) -> ChunkComputed:
        """Pages from the last one handed out on."""
        pages = self._pages[chunk.key]
        first = pages.num_handed_out
        finished = pages.names.finished_by(chunk.start + chunk.num_tokens)
        pages.num_handed_out = max(first, finished)
        generation = self._cache.generation
        handed_out = tuple(
            Page(index=block, kind=kind, block_id=block_id, generation=generation(kind, block_id))
            for block, kind, block_id, _, _ in self._prompt_pages(chunk.key, first, finished)
        )
        self._cache.hold((page.kind, page.block_id) for page in handed_out)
        self._handed_out.update((page.kind, page.block_id) for page in handed_out)
        return ChunkComputed(key=chunk.key, num_tokens=chunk.num_tokens, pages=handed_out)

    def _tags(self, chunk: PrefillChunk) -> Iterable[TagOrder]:
        """Every full block is tagged when it is finished: a later hit may hand it out."""
        names = self._pages[chunk.key].names
        first = chunk.start // self._cache.block_size
        finished = names.finished_by(chunk.start + chunk.num_tokens)
        generation = self._cache.generation
        for _, kind, block_id, content_hash, num_tokens in self._prompt_pages(
            chunk.key, first, finished
        ):
            yield TagOrder(
                kind=kind,
                block_id=block_id,
                content_hash=content_hash,
                num_tokens=num_tokens,
                generation=generation(kind, block_id),
            )

    def _prompt_pages(self, key: OutputKey, first: int, end: int) -> list[PromptPage]:
        prompt = self._queue.get(key)
        assert prompt is not None
        assert prompt.table is not None
        return prompt_pages(prompt.table, self._pages[key].names, first, end)

    def _free(self, prompt: Prompt) -> None:
        if prompt.table is not None:
            self._cache.free(prompt.table)
            self._drops.append(prompt.key)
        del self._pages[prompt.key]

    def check_invariants(self) -> None:
        self._queue.check_invariants()
        held = [prompt.table.pages() for prompt in self._queue if prompt.table is not None]
        held += [
            prompt.table.pages() for prompt in self._aborted.values() if prompt.table is not None
        ]
        self._cache.check_invariants([*held, self._handed_out.elements()])
        assert set(self._pages) == {p.key for p in self._queue} | set(self._aborted)
