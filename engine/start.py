"""From a worker's configuration to a running engine: how much memory the pools get, and the
device's thread.

    plan = plan_memory(config, model)                     # decide
    runner, sizes = open_runner(config, plan, incarnation)  # do: read weights, allocate, self-test

How many blocks fit a GPU is only known when its weights are loaded and a step has been tried.

`EngineDevice` is the seam that workers hold: plans and landings go to the one thread that owns the
device.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import anyio
import torch

from common.config import WorkerConfig
from common.device import LoopCall
from common.errors import ConfigError, InternalError
from common.model_config import ModelConfig
from common.pages import PageLayout, codec_named
from common.scheduling.plan import LandingMove, LandingResult, StepPlan, StepResult
from common.types import BlockId
from engine.backend import PoolShare
from engine.device_thread import DeviceThread
from engine.padding import padded
from engine.pool_size import PoolSize, landing_of, pool_of
from engine.runner import ModelRunner, Runner, load_runner

log = logging.getLogger(__name__)

CPU_MEMORY_SHARE = 0.08
"""Of the memory that is free at start: several workers, their weights and the rest of the machine
share it.
"""

MAX_CPU_BLOCKS = 4096
DEFAULT_GPU_SHARE = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Pages of each kind in the pool and in the landing zone, and the longest sequence."""

    num_blocks: int
    num_exact: int
    num_landing_packed: int
    num_landing_exact: int
    max_model_len: int
    self_test_s: float
    """What a short prompt through all layers took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    pool: PoolSize | PoolShare
    landing: PoolSize
    max_model_len: int
    device: str


class EngineDevice:
    """Executes plans and landings of one runner on its thread."""

    def __init__(
        self, thread: DeviceThread, runner: Runner, *, overlaps_steps: bool = False
    ) -> None:
        """`overlaps_steps`: a plan may be handed in while another one is executed. On a GPU it is
        launched before that one's tokens are read.
        """
        self._thread = thread
        self._runner = runner
        self.overlaps_steps = overlaps_steps

    async def execute(
        self, plan: StepPlan, on_stored: Callable[[], None] | None = None
    ) -> StepResult:
        if on_stored is None and self.overlaps_steps:
            launched = await self._thread.run(self._runner.launch, plan)
            return await anyio.to_thread.run_sync(launched.result)
        if on_stored is None:
            return await self._thread.run(self._runner.execute, plan)
        told = LoopCall(on_stored)
        result = await self._thread.run(self._runner.execute, plan, told)
        told.check()
        return result

    async def land(self, moves: Sequence[LandingMove]) -> LandingResult:
        return await self._thread.run_first(self._runner.land, moves)

    async def prepare(self, grammar: str) -> None:
        try:
            await asyncio.wrap_future(self._runner.prepare(grammar))
        except Exception as error:  # the library's own: a tokenizer that it cannot read, say
            log.error("a grammar cannot be compiled: %s", error)
            raise InternalError("a grammar cannot be compiled; see the worker's log") from None

    async def self_test(self, block_ids: tuple[BlockId, ...], tail: BlockId) -> None:
        await self._thread.run(self._runner.self_test_on, block_ids, tail)


def plan_memory(config: WorkerConfig, model: ModelConfig) -> MemoryPlan:
    """Raises ConfigError when what was asked for does not fit the model or the machine."""
    device = _device(config)
    if config.max_model_len is not None and config.max_model_len > model.max_position_embeddings:
        raise ConfigError(
            f"--max-model-len is {config.max_model_len}, the model has "
            f"{model.max_position_embeddings} positions"
        )
    model.check_window(config.max_model_len or model.max_position_embeddings)
    pool: PoolSize | PoolShare
    if device == "cuda" and config.kv_blocks is None:
        share = config.gpu_memory_utilization or DEFAULT_GPU_SHARE
        pool = PoolShare(share=share, max_num_seqs=config.max_num_seqs)
    else:
        num_blocks = config.kv_blocks or _cpu_blocks(page_layout(config, model))
        pool = pool_of(num_blocks, config.max_num_seqs)
    landing = PoolSize(num_packed=0, num_exact=0)
    if config.role == "decode":
        landing = landing_of(config.max_chunk_tokens, config.block_size)
    return MemoryPlan(
        pool=pool,
        landing=landing,
        max_model_len=config.max_model_len or model.max_position_embeddings,
        device=device,
    )


def overlaps_steps(config: WorkerConfig, plan: MemoryPlan) -> bool:
    if config.role == "prefill":
        return False
    return config.overlap_steps == "on" or (
        config.overlap_steps == "auto" and plan.device == "cuda"
    )


def page_layout(config: WorkerConfig, model: ModelConfig) -> PageLayout:
    """On a CPU."""
    return PageLayout(
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        block_size=config.block_size,
        head_dim=padded(model.head_dim),
        codec=codec_named(config.kv_codec),
    )


def open_runner(
    config: WorkerConfig, plan: MemoryPlan, incarnation: int
) -> tuple[ModelRunner, Sizes]:
    """Reads the model, allocates the pools, and proves that rows do not depend on their
    neighbours.
    """
    size = plan.pool if isinstance(plan.pool, PoolSize) else PoolSize(num_packed=0, num_exact=0)
    runner = load_runner(
        config.model,
        codec=config.kv_codec,
        block_size=config.block_size,
        num_blocks=size.num_packed,
        num_exact=size.num_exact,
        share=plan.pool if isinstance(plan.pool, PoolShare) else None,
        num_landing_packed=plan.landing.num_packed,
        num_landing_exact=plan.landing.num_exact,
        device=plan.device,
        dtype=config.dtype,
        weight_dtype=config.weight_dtype,
        batch_invariant=config.batch_invariant,
        num_threads=config.threads or os.cpu_count() or 1,
        incarnation=incarnation,
        max_num_tokens=config.max_chunk_tokens + config.max_num_seqs,
        max_num_decodes=0 if config.role == "prefill" else config.max_num_seqs,
        max_model_len=plan.max_model_len,
    )
    self_test_s = runner.self_test()
    return runner, Sizes(
        num_blocks=len(runner.pool.packed),
        num_exact=len(runner.pool.exact),
        num_landing_packed=plan.landing.num_packed,
        num_landing_exact=plan.landing.num_exact,
        max_model_len=plan.max_model_len,
        self_test_s=self_test_s,
    )


def _device(config: WorkerConfig) -> str:
    has_cuda = torch.cuda.is_available()
    if config.device == "cuda" and not has_cuda:
        raise ConfigError("--device cuda: torch finds no CUDA device here")
    device = config.device if config.device != "auto" else ("cuda" if has_cuda else "cpu")
    if device == "cpu" and config.gpu_memory_utilization is not None:
        raise ConfigError("--gpu-memory-utilization needs a GPU; size the pool with --kv-blocks")
    return device


def _cpu_blocks(layout: PageLayout) -> int:
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    affordable = int(available * CPU_MEMORY_SHARE) // layout.packed_page_bytes
    return max(64, min(MAX_CPU_BLOCKS, affordable))
