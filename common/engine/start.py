"""From a worker's configuration to a running engine: how much memory the pools get, and the
device's thread.

    sizes = plan_memory(config, model, layout)         # decide
    runner = open_runner(config, sizes, incarnation)   # do: read weights, allocate, self-test

`EngineDevice` is the seam that workers hold: plans and landings go to the one thread that owns the
device.
"""

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from common.config import WorkerConfig
from common.engine.device_thread import DeviceThread
from common.engine.runner import ModelRunner, Runner, load_runner
from common.errors import ConfigError
from common.model_config import ModelConfig
from common.pages import PageLayout, codec_named
from common.pool_size import ACTIVATION_SHARE, PoolSize, landing_of, pool_of, pool_within
from common.scheduling.plan import LandingMove, LandingResult, StepPlan, StepResult
from common.worker import LoopCall

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
    device: str


class EngineDevice:
    """Executes plans and landings of one runner on its thread."""

    def __init__(self, thread: DeviceThread, runner: Runner) -> None:
        self._thread = thread
        self._runner = runner

    async def execute(
        self, plan: StepPlan, on_stored: Callable[[], None] | None = None
    ) -> StepResult:
        if on_stored is None:
            return await self._thread.run(self._runner.execute, plan)
        told = LoopCall(on_stored)
        result = await self._thread.run(self._runner.execute, plan, told)
        told.check()
        return result

    async def land(self, moves: Sequence[LandingMove]) -> LandingResult:
        return await self._thread.run_first(self._runner.land, moves)


def plan_memory(config: WorkerConfig, model: ModelConfig) -> Sizes:
    """Raises ConfigError when what was asked for does not fit the model or the machine."""
    device = _device(config)
    if config.max_model_len is not None and config.max_model_len > model.max_position_embeddings:
        raise ConfigError(
            f"--max-model-len is {config.max_model_len}, the model has "
            f"{model.max_position_embeddings} positions"
        )
    layout = page_layout(config, model)
    num_blocks = config.kv_blocks or _default_blocks(config, layout, device)
    pool = pool_of(num_blocks, config.max_num_seqs)
    landing = PoolSize(num_packed=0, num_exact=0)
    if config.role == "decode":
        landing = landing_of(config.max_chunk_tokens, config.block_size)
    return Sizes(
        num_blocks=pool.num_packed,
        num_exact=pool.num_exact,
        num_landing_packed=landing.num_packed,
        num_landing_exact=landing.num_exact,
        max_model_len=config.max_model_len or model.max_position_embeddings,
        device=device,
    )


def page_layout(config: WorkerConfig, model: ModelConfig) -> PageLayout:
    return PageLayout(
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        block_size=config.block_size,
        head_dim=model.head_dim,
        codec=codec_named(config.kv_codec),
    )


def open_runner(config: WorkerConfig, sizes: Sizes, incarnation: int) -> ModelRunner:
    """Reads the model, allocates the pools, and proves that rows do not depend on their
    neighbours.
    """
    runner = load_runner(
        config.model,
        codec=config.kv_codec,
        block_size=config.block_size,
        num_blocks=sizes.num_blocks,
        num_exact=sizes.num_exact,
        num_landing_packed=sizes.num_landing_packed,
        num_landing_exact=sizes.num_landing_exact,
        device=sizes.device,
        dtype=config.dtype,
        weight_dtype=config.weight_dtype,
        num_threads=config.threads or os.cpu_count() or 1,
        incarnation=incarnation,
        max_num_tokens=config.max_chunk_tokens + config.max_num_seqs,
    )
    runner.self_test()
    return runner


def _device(config: WorkerConfig) -> str:
    has_cuda = torch.cuda.is_available()
    if config.device == "cuda" and not has_cuda:
        raise ConfigError("--device cuda: torch finds no CUDA device here")
    device = config.device if config.device != "auto" else ("cuda" if has_cuda else "cpu")
    if device == "cpu" and config.gpu_memory_utilization is not None:
        raise ConfigError("--gpu-memory-utilization needs a GPU; size the pool with --kv-blocks")
    return device


def _default_blocks(config: WorkerConfig, layout: PageLayout, device: str) -> int:
    if device == "cpu":
        available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return max(
            64, min(MAX_CPU_BLOCKS, int(available * CPU_MEMORY_SHARE) // layout.packed_page_bytes)
        )
    free, total = torch.cuda.mem_get_info()
    weights = sum(path.stat().st_size for path in Path(config.model).glob("*.safetensors"))
    share = config.gpu_memory_utilization or DEFAULT_GPU_SHARE
    budget = min(free, int(total * share)) - weights - int(total * ACTIVATION_SHARE)
    pool = pool_within(budget, layout, config.max_num_seqs)
    if pool is None or pool.num_packed < 64:
        raise ConfigError("the GPU has too little memory for this model; lower --max-num-seqs")
    return pool.num_packed
