"""The runner: carries out a `StepPlan` on the device. The seam between schedulers and the model.

`ModelRunner.execute` is called on the device thread, once per step; `land` between steps, for pages
that a pull has brought. Decisions are the scheduler's: the runner allocates nothing and chooses
nothing. Of a worker of several ranks it is at rank 0, and its backend and pages tell the others.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

import numpy as np
import torch

from common.model_config import ModelConfig
from common.pages import PageLayout
from common.scheduling.plan import (
    LandingMove,
    LandingResult,
    OutputStart,
    StepPlan,
    StepResult,
)
from common.types import BlockId, OutputKey, PromptLogprobs
from engine.backend import Backend
from engine.batch import StepBatch, make_batch
from engine.grammar import GrammarTable
from engine.launched import LaunchedStep, StepClock
from engine.outputs import OutputTable
from engine.pools import PageArena
from engine.sampler import choose, score
from engine.self_test import check_all_layers, check_at_start
from engine.worker_pages import WorkerPages


class Runner(Protocol):
    """What the workers need of an engine."""

    @property
    def pool(self) -> PageArena: ...

    @property
    def landing(self) -> PageArena: ...

    @property
    def layout(self) -> PageLayout: ...

    @property
    def config(self) -> ModelConfig: ...

    @property
    def layout_fingerprint(self) -> bytes: ...

    def execute(
        self, plan: StepPlan, on_stored: Callable[[], object] | None = None
    ) -> StepResult: ...

    def launch(self, plan: StepPlan) -> LaunchedStep: ...

    def land(self, moves: Sequence[LandingMove]) -> LandingResult: ...

    def self_test(self) -> float: ...

    def prepare(self, grammar: str) -> Future[object]: ...

    def self_test_on(self, block_ids: tuple[BlockId, ...], tail: BlockId) -> None: ...


class ModelRunner:
    """A model, its pools and what it remembers of the outputs that are running."""

    def __init__(
        self,
        *,
        config: ModelConfig,
        backend: Backend,
        pages: WorkerPages,
        grammars: GrammarTable,
        reads_late: bool = False,
        weight_bytes: int = 0,
    ) -> None:
        """`weight_bytes` are those of this rank. `reads_late`: the tokens of a step that was only
        launched are read when the next one has been launched. The backend must be able to feed
        them on the device.
        """
        self.config = config
        self.backend = backend
        self.pages = pages
        self.grammars = grammars
        self.reads_late = reads_late
        self.weight_bytes = weight_bytes
        self._latest: LaunchedStep | None = None
        self.outputs = OutputTable(
            max_blocks=-(-config.max_position_embeddings // self.layout.block_size),
            num_packed=len(self.pool.packed),
            num_exact=len(self.pool.exact),
            vocab_size=config.vocab_size,
            device=self.pool.packed.device.type,
        )

    @property
    def layout(self) -> PageLayout:
        return self.pages.own.pool.layout

    @property
    def pool(self) -> PageArena:
        return self.pages.own.pool

    @property
    def landing(self) -> PageArena:
        return self.pages.own.landing

    @property
    def layout_fingerprint(self) -> bytes:
        return self.pages.origin.fingerprint

    @property
    def num_outputs(self) -> int:
        """Outputs that the runner keeps state for."""
        return len(self.outputs)

    def execute(self, plan: StepPlan, on_stored: Callable[[], object] | None = None) -> StepResult:
        """`on_stored` is called when the step's pages are complete and tagged, before the logits
        are computed.
        """
        launched = self.launch(plan, on_stored)
        self.read_latest()
        return launched.result()

    def launch(self, plan: StepPlan, on_stored: Callable[[], object] | None = None) -> LaunchedStep:
        """As `execute`, without waiting for the step's tokens on a GPU. Its own samples are chosen
        once those of the step before have been read: grammars and penalties need them; the device
        computes meanwhile.
        """
        clock = StepClock(is_cuda=self.pool.packed.is_cuda)
        self.begin(plan)
        batch = None
        if plan.chunks or plan.decodes:
            batch = make_batch(plan, self.outputs, self.layout.block_size)
            latest = None if self._latest is None else self._latest.token_ids
            self.backend.forward(batch, latest=latest)
        self.pages.tag(plan.tags, self.backend)
        if on_stored is not None:
            self.pages.settle()
            on_stored()
        self.read_latest()
        launched = LaunchedStep(plan.step, clock)
        if batch is not None:
            self._sample(plan, batch, launched)
        clock.stop()
        self._latest = launched
        if not self.reads_late:
            self.read_latest()
        return launched

    def read_latest(self) -> None:
        """Waits for the tokens of the step launched last and writes them down."""
        latest, self._latest = self._latest, None
        if latest is None or latest.sampling is None:
            return
        sampled = latest.sampled()
        places = self.outputs.record(latest.sampling, sampled.token_ids, sampled.is_finite)
        if len(self.grammars):
            for place in places.tolist():
                self.grammars.record(latest.keys[place], int(sampled.token_ids[place]))

    def all_logits(self, plan: StepPlan) -> torch.Tensor:
        """For tools: carries out a plan up to the forward pass and gives the logits [num_rows,
        vocab_size] of all its rows. Nothing is sampled; valid until the next call.
        """
        self.begin(plan)
        batch = make_batch(plan, self.outputs, self.layout.block_size)
        rows = np.arange(len(batch.token_ids), dtype=np.int64)
        self.backend.forward(batch)
        return self.backend.logits(rows)

    def begin(self, plan: StepPlan) -> None:
        """All of a plan that comes before its forward pass."""
        for key in plan.drops:
            self.outputs.drop(key)
            self.grammars.drop(key)
        self.pages.clear_tags(plan.clears)
        self.pages.copy_exact(plan.copies)
        for start in plan.starts:
            self._start(start)
        for key, block_id in plan.grown:
            self.outputs.append_block(key, block_id)
        for key, block_id in plan.tails:
            self.outputs.give_tail(key, block_id)

    def land(self, moves: Sequence[LandingMove]) -> LandingResult:
        """Check first, copy then; the pages' tags stay behind, since this worker has not vouched
        for them.
        """
        return self.pages.land(moves, self.backend)

    def prepare(self, grammar: str) -> Future[object]:
        """Compiles a grammar in a thread beside the device's. Callable from any thread."""
        return self.grammars.prepare(grammar)

    def self_test(self) -> float:
        """Raise unless rows come out the same whatever stands beside them (to the bit where the
        backend promises that) and all layers give finite numbers. Seconds of the latter.
        """
        return check_at_start(self.config, self.backend, self.pool, self.pages.erase)

    def self_test_on(self, block_ids: tuple[BlockId, ...], tail: BlockId) -> None:
        """Between steps, in pages that are held for it: raise unless all layers give finite
        numbers.
        """
        check_all_layers(self.config, self.backend, self.pool, block_ids, tail)

    def _start(self, start: OutputStart) -> None:
        self.outputs.start(start)
        if start.sampling.grammar is not None:
            output = start.token_ids[start.num_prompt_tokens :].tolist()
            self.grammars.start(start.key, start.sampling.grammar, output)

    def _sample(self, plan: StepPlan, batch: StepBatch, launched: LaunchedStep) -> None:
        """Chooses for each first token wanted and each decode, and scores prompts."""
        finished = [chunk for chunk in plan.chunks if chunk.num_outputs]
        wanted = [chunk.key for chunk in finished] + list(plan.decodes)
        pending = self.grammars.begin(wanted)
        logits = self.backend.logits(batch.wanted)
        launched.scores = _scores(batch, logits)
        logits = logits[: batch.num_sampled]
        decodes = self.outputs.rows(plan.decodes)
        if not finished and not len(decodes):
            return
        first_rows = np.array([self.outputs.row(chunk.key) for chunk in finished], dtype=np.int64)
        repeats = [chunk.num_outputs for chunk in finished] + [1] * len(decodes)
        seeds = [seed for chunk in finished for seed in self.outputs.first_seeds(chunk)]
        rows = np.repeat(np.concatenate([first_rows, decodes]), repeats)
        if len(rows) != len(logits):
            [counts] = self.pages.own.sender.send_arrays([np.array(repeats, dtype=np.int64)])
            logits = logits.repeat_interleave(counts, dim=0, output_size=len(rows))
        all_seeds = np.concatenate([np.array(seeds, dtype=np.uint64), self.outputs.seed[decodes]])
        masks = None
        if pending is not None:
            began = time.perf_counter()
            masks = pending.masks(repeats)
            launched.mask_wait_s = time.perf_counter() - began
            launched.slow_masks = tuple((wanted[row], s) for row, s in pending.slow())
        choice = choose(logits, self.outputs.sampling_rows(rows, all_seeds), masks)
        keys = (
            tuple(chunk.key for chunk in finished for _ in range(chunk.num_outputs)) + plan.decodes
        )
        failed = {}
        if len(self.grammars):
            failed = {k: self.grammars.failure(k) for k in keys if self.grammars.has_failed(k)}
        # the first output of each prompt goes on under its key, the others start later
        leads = np.cumsum([0, *repeats[:-1]])
        launched.chosen(keys, choice, self.outputs.sampled(rows[leads], leads), failed)


def _scores(batch: StepBatch, logits: torch.Tensor) -> tuple[tuple[OutputKey, PromptLogprobs], ...]:
    found = []
    first = batch.num_sampled
    for rows in batch.scored:
        end = first + len(rows.targets)
        found.append((rows.key, score(logits[first:end], rows.targets, rows.num_top)))
        first = end
    return tuple(found)
