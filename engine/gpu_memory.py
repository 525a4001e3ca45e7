"""A GPU's memory shared out: weights, the largest step, graphs; KV gets the rest.

    open_gpu:  weights -> dry run of the largest step -> graphs, on trial -> KV pool -> graphs

What a step or a graph takes is measured, not estimated. Graphs are captured twice, since they hold
the addresses of the pool, whose size they decide.
"""

import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from common.errors import ConfigError
from common.pages import PageLayout
from engine.backend import Backend
from engine.batch import ITEM_FIELDS, MAX_RUN_TOKENS, RUN_FIELDS, StepBatch
from engine.config import StepLimits
from engine.cuda_graphs import Capture, CudaCapture
from engine.graphed_model import GraphedModel
from engine.outputs import NO_PAGE
from engine.pool_size import PoolShare, PoolSize, pool_of, pool_within
from engine.pools import PageArena
from engine.ranks.collective import Alone, Collective
from engine.sampler import SamplingRows, sample
from engine.triton_model import TritonModel

log = logging.getLogger(__name__)

MARGIN_BYTES = 256 << 20
"""For what is allocated later: kernels loaded on first use, gaps in torch's allocator."""
TRIAL = PoolSize(num_packed=2, num_exact=2)
MIN_BLOCKS = 64


class Gpu(Protocol):
    device: str

    def free_and_total(self) -> tuple[int, int]:
        """Bytes, after everything unused was given back."""
        ...

    def peak_of(self, action: Callable[[], object]) -> int:
        """Bytes that `action` holds at most, beyond what was held before."""
        ...

    def capture(self) -> Capture: ...


class CudaGpu:
    device = "cuda"

    def free_and_total(self) -> tuple[int, int]:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()

    def peak_of(self, action: Callable[[], object]) -> int:
        """Of what torch reserves, so that gaps count."""
        self.free_and_total()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_reserved()
        action()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_reserved() - before

    def capture(self) -> Capture:
        return CudaCapture()


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """All in bytes."""

    total: int
    free_at_start: int
    held: int
    """Weights and graphs."""
    peak: int
    """Of the largest step."""
    landing: int

    def left_for_pool(self, share: float) -> int:
        """`share` of the GPU is this worker's, or what others have left of it."""
        most = min(self.free_at_start, int(self.total * share))
        return most - self.held - self.peak - self.landing - MARGIN_BYTES


def open_gpu(
    gpu: Gpu,
    make_model: Callable[[PageArena], TritonModel],
    layout: PageLayout,
    limits: StepLimits,
    *,
    room: PoolSize | PoolShare,
    landing: PoolSize,
    ranks: Collective | None = None,
) -> tuple[Backend, PageArena]:
    """The model with its graphs, and its pool. `landing` is allocated later, by the caller. All
    ranks get as many pages as the one that has least room.

    Raises ConfigError when the memory leaves too little for a pool.
    """
    free_at_start, total = gpu.free_and_total()
    model = make_model(PageArena(layout, TRIAL.num_packed, TRIAL.num_exact, gpu.device))
    if isinstance(room, PoolSize):
        size = room
    else:
        peak = gpu.peak_of(lambda: dry_run(model, limits))
        trial = _graphed(gpu, model, limits)
        use = MemoryUse(
            total=total,
            free_at_start=free_at_start,
            held=free_at_start - gpu.free_and_total()[0],
            peak=peak,
            landing=landing.num_bytes(layout),
        )
        del trial
        gpu.free_and_total()
        size = pool_size(use, room, layout)
        num_packed = (ranks or Alone()).least(size.num_packed)
        size = pool_of(num_packed, room.max_num_seqs)
        log.info(
            "GPU memory in MiB: %d of %d free at start, %d weights and graphs, %d the largest step,"
            " %d landing zone; KV pool of %d blocks",
            *(n >> 20 for n in (free_at_start, total, use.held, use.peak, use.landing)),
            size.num_packed,
        )
    pool = PageArena(layout, size.num_packed, size.num_exact, gpu.device)
    model.use_pool(pool)
    return _graphed(gpu, model, limits), pool


def pool_size(use: MemoryUse, room: PoolShare, layout: PageLayout) -> PoolSize:
    left = use.left_for_pool(room.share)
    size = pool_within(left, layout, room.max_num_seqs)
    if size is None or size.num_packed < MIN_BLOCKS:
        raise ConfigError(
            f"the GPU's memory leaves {max(left, 0) >> 20} MiB for KV, too little: weights and "
            f"graphs take {use.held >> 20} MiB, the largest step {use.peak >> 20}. Lower "
            "--max-num-seqs or --chunk-tokens, raise --gpu-memory-utilization, or keep weights as "
            "FP8 (--weight-dtype fp8)"
        )
    return size


def _graphed(gpu: Gpu, model: TritonModel, limits: StepLimits) -> Backend:
    if limits.num_decodes == 0:
        return model
    graphed = GraphedModel(
        model,
        gpu.capture(),
        max_rows=limits.num_decodes,
        max_blocks=-(-limits.max_tokens // model.block_size),
    )
    graphed.capture()
    return graphed


def dry_run(model: TritonModel, limits: StepLimits) -> None:
    """The largest step from end to end: every row's logits, every decode drawn with a filter."""
    batch = largest_step(limits, model.block_size)
    model.forward(batch)
    logits = model.logits(batch.wanted)
    count = max(limits.num_decodes, 1)
    rows = SamplingRows.filtered(count)
    sample(logits[-count:], rows)


def largest_step(limits: StepLimits, block_size: int) -> StepBatch:
    """A chunk from position 0 on and all decodes; nothing is stored, and block 0 is read."""
    chunk, decodes = limits.chunk_tokens, limits.num_decodes
    rows = np.arange(chunk + decodes, dtype=np.int64)
    positions = np.where(rows < chunk, rows, 0)
    firsts = np.arange(0, chunk, block_size, dtype=np.int64)
    items = np.zeros((len(firsts) + decodes, ITEM_FIELDS), dtype=np.int64)
    items[:, 0] = np.concatenate([firsts, rows[chunk:]])
    items[: len(firsts), 1] = np.minimum(block_size, chunk - firsts)
    items[len(firsts) :, 1] = 1
    items[: len(firsts), 2] = firsts
    items[:, 3:5] = NO_PAGE
    starts = np.arange(0, chunk, MAX_RUN_TOKENS, dtype=np.int64)
    runs = np.zeros((len(starts) + decodes, RUN_FIELDS), dtype=np.int64)
    runs[:, 0] = np.concatenate([starts, rows[chunk:]])
    runs[: len(starts), 1] = np.minimum(MAX_RUN_TOKENS, chunk - starts)
    runs[len(starts) :, 1] = 1
    runs[: len(starts), 2] = starts
    runs[len(starts) :, 3] = 1 + np.arange(decodes)
    runs[: len(starts), 4] = NO_PAGE
    runs[: len(starts), 5] = chunk - starts - runs[: len(starts), 1]
    return StepBatch(
        token_ids=np.zeros(len(rows), dtype=np.int32),
        positions=positions.astype(np.int32),
        items=items,
        runs=runs,
        tables=np.zeros((1 + decodes, 1 + -(-limits.max_tokens // block_size)), dtype=np.int32),
        wanted=rows,
        num_sampled=decodes,
    )
