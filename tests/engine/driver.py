"""Drives a runner without schedulers: one free list per page kind, prompts in chunks, then decode
tokens.

    driver = Driver(runner)
    driver.add("a", prompt, max_tokens=8)
    driver.run(chunk_tokens=64)
    driver.tokens["a"], driver.logits["a"]

Every request's logits are kept, one row per generated token, so tests can compare bits.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from common.pages import PageKind
from common.scheduling.plan import OutputStart, PrefillChunk, StepPlan, StepResult, TagOrder
from common.types import SamplingParams
from engine.backend import Backend
from engine.runner import ModelRunner


class LogitsTap:
    """A backend that keeps the logits of the last step."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.latest: Tensor | None = None

    def logits(self, wanted: NDArray[np.int64]) -> Tensor:
        self.latest = self._backend.logits(wanted)
        return self.latest

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


@dataclass
class Running:
    key: str
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    table: list[int] = field(default_factory=list)
    tail: int | None = None
    num_computed: int = 0
    is_started: bool = False

    @property
    def is_prefilling(self) -> bool:
        return self.num_computed < self.num_prompt_tokens

    @property
    def is_done(self) -> bool:
        return len(self.token_ids) - self.num_prompt_tokens >= self.sampling.max_tokens


class Driver:
    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.tap = LogitsTap(runner.backend)
        runner.backend = self.tap
        self.block_size = runner.layout.block_size
        self.free_packed = list(range(len(runner.pool.packed)))[::-1]
        self.free_exact = list(range(len(runner.pool.exact)))[::-1]
        self.running: dict[str, Running] = {}
        self.tokens: dict[str, list[int]] = {}
        self.logits: dict[str, list[NDArray[np.float32]]] = {}
        self.failed: list[str] = []
        self.num_steps = 0

    def add(self, key: str, prompt: list[int], *, max_tokens: int = 1, **sampling: object) -> None:
        options: dict[str, object] = {"temperature": 0.0} | sampling
        params = SamplingParams(max_tokens=max_tokens, **options)  # type: ignore[arg-type]
        self.running[key] = Running(key, list(prompt), len(prompt), params)
        self.tokens[key], self.logits[key] = [], []

    def run(self, chunk_tokens: int = 512) -> None:
        while any(not r.is_done and r.key not in self.failed for r in self.running.values()):
            self.step(chunk_tokens)

    def step(self, chunk_tokens: int = 512, budget: int = 4096) -> StepResult:
        starts, chunks, decodes = [], [], []
        grown: list[tuple[str, int]] = []
        tails: list[tuple[str, int]] = []
        clears: list[tuple[PageKind, int]] = []
        for request in self.running.values():
            if request.is_done or request.key in self.failed:
                continue
            if not request.is_prefilling:
                self._grow(request, grown, tails)
                decodes.append(request.key)
            elif budget >= min(chunk_tokens, request.num_prompt_tokens - request.num_computed):
                if not request.is_started:
                    request.is_started = True
                    tokens = np.array(request.token_ids, dtype=np.int32)
                    starts.append(
                        OutputStart(
                            key=request.key,
                            token_ids=tokens,
                            num_prompt_tokens=request.num_prompt_tokens,
                            sampling=request.sampling,
                        )
                    )
                chunks.append(self._chunk(request, chunk_tokens))
                budget -= chunks[-1].num_tokens
        self.num_steps += 1
        plan = StepPlan(
            step=self.num_steps,
            starts=tuple(starts),
            chunks=tuple(chunks),
            decodes=tuple(decodes),
            grown=tuple(grown),
            tails=tuple(tails),
            clears=tuple(clears),
        )
        return self._apply(plan, self.runner.execute(plan))

    def finish(self, key: str) -> None:
        """Forget a request and free its pages."""
        request = self.running.pop(key)
        self.runner.execute(StepPlan(step=0, drops=(key,)))
        self.free_exact.append(request.table[0])
        self.free_packed.extend(request.table[1:])
        if request.tail is not None:
            self.free_exact.append(request.tail)

    def tag(self, *orders: TagOrder) -> None:
        self.runner.execute(StepPlan(step=0, tags=orders))

    def page(self, kind: PageKind, block_id: int) -> bytes:
        arena = self.runner.pool
        return bytes(
            (arena.packed if kind is PageKind.PACKED else arena.exact)[block_id].numpy().tobytes()
        )

    def pages(self, key: str) -> list[bytes]:
        """The bytes of every page of a request: block 0, sealed blocks, tail."""
        request = self.running[key]
        num_sealed = (len(request.token_ids) - 1) // self.block_size
        found = [self.page(PageKind.EXACT, request.table[0])]
        found += [self.page(PageKind.PACKED, b) for b in request.table[1 : max(num_sealed, 1)]]
        if (len(request.token_ids) - 1) % self.block_size and num_sealed:
            assert request.tail is not None
            found.append(self.page(PageKind.EXACT, request.tail))
        return found

    def _chunk(self, request: Running, chunk_tokens: int) -> PrefillChunk:
        start = request.num_computed
        count = min(chunk_tokens, request.num_prompt_tokens - start)
        end = start + count
        self._reserve(request, end)
        if end % self.block_size and end > self.block_size and request.tail is None:
            request.tail = self.free_exact.pop()
        request.num_computed = end
        return PrefillChunk(
            key=request.key,
            start=start,
            num_tokens=count,
            block_ids=tuple(request.table),
            tail=request.tail if end % self.block_size and end > self.block_size else None,
            num_outputs=int(end == request.num_prompt_tokens),
        )

    def _reserve(self, request: Running, num_tokens: int) -> list[int]:
        """Blocks for this many tokens; the packed ones that are new."""
        new = []
        while len(request.table) * self.block_size < num_tokens:
            block = self.free_packed.pop() if request.table else self.free_exact.pop()
            if request.table:
                new.append(block)
            request.table.append(block)
        return new

    def _grow(
        self, request: Running, grown: list[tuple[str, int]], tails: list[tuple[str, int]]
    ) -> None:
        grown += [(request.key, block) for block in self._reserve(request, len(request.token_ids))]
        if len(request.token_ids) > self.block_size and request.tail is None:
            request.tail = self.free_exact.pop()
            tails.append((request.key, request.tail))

    def _apply(self, plan: StepPlan, result: StepResult) -> StepResult:
        rows = [c.key for c in plan.chunks if c.num_outputs] + list(plan.decodes)
        self.failed.extend(result.failed)
        if self.tap.latest is not None and rows:
            for key, row in zip(rows, self.tap.latest.numpy(), strict=True):
                self.logits[key].append(row.copy())
        for key, token in zip(result.keys, result.token_ids, strict=True):
            self.running[key].token_ids.append(token)
            self.tokens[key].append(token)
        return result
