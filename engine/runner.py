"""The runner: carries out a `StepPlan` on the device. The seam between schedulers and the model.

`ModelRunner.execute` is called on the device thread, once per step; `land` between steps, for pages
that a pull has brought. Decisions are the scheduler's: the runner allocates nothing and chooses
nothing. It is one rank of a group of size 1.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from common.codecs import DEFAULT_KV_CODEC, codec_named
from common.errors import ConfigError
from common.model_config import ModelConfig
from common.pages import TAG_BYTES, PageLayout, PageTag, tag_mismatch
from common.scheduling.plan import (
    LandingMove,
    LandingResult,
    OutputStart,
    PageKind,
    StepPlan,
    StepResult,
    TagOrder,
)
from common.types import BlockId, OutputKey, PromptLogprobs
from engine.backend import (
    Backend,
    PoolShare,
    StepLimits,
    gpu_arithmetic,
    load_cpu,
    load_gpu,
)
from engine.batch import StepBatch, make_batch
from engine.device_inputs import InputBuffer
from engine.grammar import GrammarTable
from engine.launched import LaunchedStep, StepClock
from engine.offsets import open_offsets
from engine.outputs import OutputTable
from engine.padding import padded
from engine.pool_size import PoolSize
from engine.pools import PageArena
from engine.sampler import choose, score
from engine.self_test import check_all_layers, check_at_start
from engine.weights import model_fingerprint

MIN_POSITIONS = 1024
"""Of the rotary tables, which are as long as a request can get: what the self-test takes."""

if TYPE_CHECKING:
    from engine.cpu_model import CpuWeights

NUM_SENT = 16
"""Host buffers: a step sends at most six things beside its batch, and two steps may be under way.
"""


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
        pool: PageArena,
        landing: PageArena,
        grammars: GrammarTable,
        layout_fingerprint: bytes,
        offsets_hash: bytes,
        incarnation: int,
        device: str = "cpu",
        reads_late: bool = False,
        arithmetic: str = "",
    ) -> None:
        """`reads_late`: the tokens of a step that was only launched are read when the next one has
        been launched. The backend must be able to feed them on the device.
        """
        self.config = config
        self.layout = pool.layout
        self.pool = pool
        self.landing = landing
        self.layout_fingerprint = layout_fingerprint
        self.offsets_hash = offsets_hash
        self.arithmetic = arithmetic
        self._backend = backend
        self._incarnation = incarnation
        self._grammars = grammars
        self._reads_late = reads_late
        self._latest: LaunchedStep | None = None
        self._sender = InputBuffer(torch.device(device), num_host_buffers=NUM_SENT)
        self._beside: Any = None
        """A stream of its own for landings: what comes back of them is waited for, steps that were
        launched before are not. Nobody names a page that is being landed in.
        """
        if self.pool.packed.is_cuda:
            self._beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._outputs = OutputTable(
            max_blocks=-(-config.max_position_embeddings // self.layout.block_size),
            num_packed=len(pool.packed),
            num_exact=len(pool.exact),
            vocab_size=config.vocab_size,
            device=device,
        )

    @property
    def num_outputs(self) -> int:
        """Outputs that the runner keeps state for."""
        return len(self._outputs)

    def execute(self, plan: StepPlan, on_stored: Callable[[], object] | None = None) -> StepResult:
        """`on_stored` is called when the step's pages are complete and tagged, before the logits
        are computed.
        """
        launched = self.launch(plan, on_stored)
        self._read_latest()
        return launched.result()

    def launch(self, plan: StepPlan, on_stored: Callable[[], object] | None = None) -> LaunchedStep:
        """As `execute`, without waiting for the step's tokens on a GPU. Its own samples are chosen
        once those of the step before have been read: grammars and penalties need them; the device
        computes meanwhile.
        """
        clock = StepClock(is_cuda=self.pool.packed.is_cuda)
        self._prepare(plan)
        batch = None
        if plan.chunks or plan.decodes:
            batch = make_batch(plan, self._outputs, self.layout.block_size)
            latest = None if self._latest is None else self._latest.token_ids
            self._backend.forward(batch, latest=latest)
        for kind in PageKind:
            self._write_tags(kind, [order for order in plan.tags if order.kind is kind])
        if on_stored is not None:
            self._settle()
            on_stored()
        self._read_latest()
        launched = LaunchedStep(plan.step, clock)
        if batch is not None:
            self._sample(plan, batch, launched)
        clock.stop()
        self._latest = launched
        if not self._reads_late:
            self._read_latest()
        return launched

    def _read_latest(self) -> None:
        """Waits for the tokens of the step launched last and writes them down."""
        latest, self._latest = self._latest, None
        if latest is None or latest.sampling is None:
            return
        sampled = latest.sampled()
        places = self._outputs.record(latest.sampling, sampled.token_ids, sampled.is_finite)
        if len(self._grammars):
            for place in places.tolist():
                self._grammars.record(latest.keys[place], int(sampled.token_ids[place]))

    def all_logits(self, plan: StepPlan) -> torch.Tensor:
        """For tools: carries out a plan up to the forward pass and gives the logits [num_rows,
        vocab_size] of all its rows. Nothing is sampled; valid until the next call.
        """
        self._prepare(plan)
        batch = make_batch(plan, self._outputs, self.layout.block_size)
        rows = np.arange(len(batch.token_ids), dtype=np.int64)
        self._backend.forward(batch)
        return self._backend.logits(rows)

    def _prepare(self, plan: StepPlan) -> None:
        """All of a plan that comes before its forward pass."""
        for key in plan.drops:
            self._outputs.drop(key)
            self._grammars.drop(key)
        for page_kind in PageKind:
            self._clear_tags(page_kind, [page for kind, page in plan.clears if kind is page_kind])
        self._copy_exact(plan.copies)
        for start in plan.starts:
            self._start(start)
        for key, block_id in plan.grown:
            self._outputs.append_block(key, block_id)
        for key, block_id in plan.tails:
            self._outputs.give_tail(key, block_id)

    def land(self, moves: Sequence[LandingMove]) -> LandingResult:
        """Check first, copy then; the pages' tags stay behind, since this worker has not vouched
        for them.
        """
        refusals: list[str | None] = [None] * len(moves)
        with torch.cuda.stream(self._beside):
            for kind in PageKind:
                which = [index for index, move in enumerate(moves) if move.kind is kind]
                if which:
                    found = self._land(kind, [moves[i] for i in which])
                    for index, refusal in zip(which, found, strict=True):
                        refusals[index] = refusal
        return LandingResult(refusals=tuple(refusals))

    def prepare(self, grammar: str) -> Future[object]:
        """Compiles a grammar in a thread beside the device's. Callable from any thread."""
        return self._grammars.prepare(grammar)

    def self_test(self) -> float:
        """Raise unless rows come out the same whatever stands beside them (to the bit where the
        backend promises that) and all layers give finite numbers. Seconds of the latter.
        """
        return check_at_start(self.config, self._backend, self.pool)

    def self_test_on(self, block_ids: tuple[BlockId, ...], tail: BlockId) -> None:
        """Between steps, in pages that are held for it: raise unless all layers give finite
        numbers.
        """
        check_all_layers(self.config, self._backend, self.pool, block_ids, tail)

    def _start(self, start: OutputStart) -> None:
        self._outputs.start(start)
        if start.sampling.grammar is not None:
            output = start.token_ids[start.num_prompt_tokens :].tolist()
            self._grammars.start(start.key, start.sampling.grammar, output)

    def _sample(self, plan: StepPlan, batch: StepBatch, launched: LaunchedStep) -> None:
        """Chooses for each first token wanted and each decode, and scores prompts."""
        finished = [chunk for chunk in plan.chunks if chunk.num_outputs]
        wanted = [chunk.key for chunk in finished] + list(plan.decodes)
        pending = self._grammars.begin(wanted)
        logits = self._backend.logits(batch.wanted)
        launched.scores = _scores(batch, logits)
        logits = logits[: batch.num_sampled]
        decodes = self._outputs.rows(plan.decodes)
        if not finished and not len(decodes):
            return
        first_rows = np.array([self._outputs.row(chunk.key) for chunk in finished], dtype=np.int64)
        repeats = [chunk.num_outputs for chunk in finished] + [1] * len(decodes)
        seeds = [seed for chunk in finished for seed in self._outputs.first_seeds(chunk)]
        rows = np.repeat(np.concatenate([first_rows, decodes]), repeats)
        if len(rows) != len(logits):
            [counts] = self._sender.send_arrays([np.array(repeats, dtype=np.int64)])
            logits = logits.repeat_interleave(counts, dim=0, output_size=len(rows))
        all_seeds = np.concatenate([np.array(seeds, dtype=np.uint64), self._outputs.seed[decodes]])
        masks = None
        if pending is not None:
            began = time.perf_counter()
            masks = pending.masks(repeats)
            launched.mask_wait_s = time.perf_counter() - began
            launched.slow_masks = tuple((wanted[row], s) for row, s in pending.slow())
        choice = choose(logits, self._outputs.sampling_rows(rows, all_seeds), masks)
        keys = (
            tuple(chunk.key for chunk in finished for _ in range(chunk.num_outputs)) + plan.decodes
        )
        failed = {}
        if len(self._grammars):
            failed = {k: self._grammars.failure(k) for k in keys if self._grammars.has_failed(k)}
        # the first output of each prompt goes on under its key, the others start later
        leads = np.cumsum([0, *repeats[:-1]])
        launched.chosen(keys, choice, self._outputs.sampled(rows[leads], leads), failed)

    def _pages(self, kind: PageKind, arena: PageArena) -> torch.Tensor:
        return arena.packed if kind is PageKind.PACKED else arena.exact

    def _clear_tags(self, kind: PageKind, block_ids: list[int]) -> None:
        if block_ids:
            [which] = self._sender.send_arrays([np.array(block_ids, dtype=np.int64)])
            self._pages(kind, self.pool)[which, -TAG_BYTES:] = 0

    def _copy_exact(self, copies: Sequence[tuple[int, int]]) -> None:
        if copies:
            [which] = self._sender.send_arrays([np.array(copies, dtype=np.int64).T])
            sources, destinations = which
            self.pool.exact[destinations, :-TAG_BYTES] = self.pool.exact[sources, :-TAG_BYTES]

    def _write_tags(self, kind: PageKind, orders: list[TagOrder]) -> None:
        """The tags with no checksum yet, then the checksums of the pages as they are now."""
        if not orders:
            return
        tags = [
            PageTag(
                content_hash=order.content_hash,
                fingerprint=self.layout_fingerprint,
                num_tokens=order.num_tokens,
                incarnation=self._incarnation,
                generation=order.generation,
            ).pack()
            for order in orders
        ]
        words = np.frombuffer(b"".join(tags), dtype=np.int64).reshape(len(orders), -1)
        block_ids = np.array([order.block_id for order in orders], dtype=np.int64)
        which, sent = self._sender.send_arrays([block_ids, words])
        pages = self._pages(kind, self.pool)
        of_pages = pages.view(torch.int64)
        of_pages[which, -TAG_BYTES // 8 :] = sent
        of_pages[which, -1] = self._backend.checksums(pages, which)

    def _settle(self) -> None:
        """Until pages are complete: whoever is told of them may read them by other ways."""
        if self.pool.packed.is_cuda:
            torch.cuda.current_stream().synchronize()

    def _land(self, kind: PageKind, moves: list[LandingMove]) -> Iterator[str | None]:
        wanted = [
            PageTag(
                content_hash=move.content_hash,
                fingerprint=self.layout_fingerprint,
                num_tokens=move.num_tokens,
                incarnation=move.incarnation,
                generation=move.generation,
            )
            for move in moves
        ]
        source, tags = self._pages(kind, self.landing), b"".join(tag.pack() for tag in wanted)
        accepted, sums = self._backend.land(
            source,
            self._pages(kind, self.pool),
            np.array([move.slot for move in moves], dtype=np.int64),
            np.array([move.block_id for move in moves], dtype=np.int64),
            np.frombuffer(tags, dtype=np.uint8).reshape(len(moves), TAG_BYTES),
        )
        for move, tag, is_accepted, checksum in zip(moves, wanted, accepted, sums, strict=True):
            if is_accepted:
                yield None
            else:
                found = PageTag.unpack(source[move.slot, -TAG_BYTES:].cpu().numpy().tobytes())
                yield tag_mismatch(found, tag.with_checksum(int(checksum)))


def _scores(batch: StepBatch, logits: torch.Tensor) -> tuple[tuple[OutputKey, PromptLogprobs], ...]:
    found = []
    first = batch.num_sampled
    for rows in batch.scored:
        end = first + len(rows.targets)
        found.append((rows.key, score(logits[first:end], rows.targets, rows.num_top)))
        first = end
    return tuple(found)


def load_runner(
    model_dir: str | Path,
    *,
    codec: str = DEFAULT_KV_CODEC,
    block_size: int = 16,
    num_blocks: int = 0,
    num_exact: int = 0,
    share: PoolShare | None = None,
    num_landing_packed: int = 0,
    num_landing_exact: int = 0,
    device: str = "cpu",
    dtype: str = "auto",
    weight_dtype: str = "auto",
    batch_invariant: bool = False,
    num_threads: int = 1,
    incarnation: int = 0,
    max_num_tokens: int = 512,
    max_num_decodes: int = 0,
    max_model_len: int | None = None,
    is_calibrated: bool = True,
    weights: "CpuWeights | None" = None,
) -> ModelRunner:
    """Read a model and allocate its pools. `num_blocks` counts packed pages; on a GPU, `share` may
    say instead how large the pool gets. `max_num_tokens` counts rows of a step, `max_num_decodes`
    those of them that decode (a GPU captures graphs for so many). `batch_invariant` is for GPUs; on
    a CPU rows never depend on their batch. `is_calibrated` is False to leave the model's offsets
    aside. `weights` are a CPU's that were loaded before, of `weight_dtype`: several runners may
    share them.
    """
    config = ModelConfig.load(model_dir)
    max_tokens = max_model_len or config.max_position_embeddings
    config.check_window(max_tokens)
    # the pool of a GPU is sized later
    room = (num_blocks + num_exact) * block_size if device == "cpu" else max_tokens
    config = config.with_positions(max(min(max_tokens, room), MIN_POSITIONS))
    layout = PageLayout(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        block_size=block_size,
        head_dim=padded(config.head_dim) if device == "cpu" else config.head_dim,
        codec=codec_named(codec),
    )
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"device {device!r} is neither cpu nor cuda", param="device")
    if num_threads < 1:
        raise ConfigError(f"a worker needs at least one thread, not {num_threads}", param="threads")
    offsets, offsets_hash = open_offsets(model_dir, config, layout, is_calibrated=is_calibrated)
    size = PoolSize(num_packed=num_blocks, num_exact=num_exact)
    landing = PoolSize(num_packed=num_landing_packed, num_exact=num_landing_exact)
    backend: Backend
    arithmetic = ""
    if device == "cuda":
        if batch_invariant:
            arithmetic = gpu_arithmetic(dtype, config)
        backend, pool = load_gpu(
            model_dir,
            config,
            layout,
            offsets,
            dtype=dtype,
            weight_dtype=weight_dtype,
            is_batch_invariant=batch_invariant,
            limits=StepLimits(
                chunk_tokens=min(max_num_tokens - max_num_decodes, max_tokens),
                num_decodes=max_num_decodes,
                max_tokens=max_tokens,
            ),
            room=share or size,
            landing=landing,
        )
    else:
        assert share is None, "only a GPU's pool is sized by what is left"
        pool = PageArena(layout, num_blocks, num_exact)
        backend = load_cpu(
            model_dir,
            config,
            pool,
            offsets,
            dtype=dtype,
            weight_dtype=weight_dtype,
            num_threads=num_threads,
            max_num_tokens=max_num_tokens,
            weights=weights,
        )
    return ModelRunner(
        config=config,
        backend=backend,
        pool=pool,
        landing=PageArena(layout, landing.num_packed, landing.num_exact, device),
        grammars=GrammarTable(
            Path(model_dir) / "tokenizer.json",
            vocab_size=config.vocab_size,
            eos_token_ids=config.eos_token_ids,
        ),
        layout_fingerprint=layout.fingerprint(
            model_fingerprint(model_dir), offsets_hash, weight_dtype, arithmetic
        ),
        offsets_hash=offsets_hash,
        incarnation=incarnation,
        device=device,
        reads_late=device == "cuda",
        arithmetic=arithmetic,
    )
