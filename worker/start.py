"""From a worker's configuration to a running engine: how much memory the pools get.

    plan = plan_memory(config, model)                     # decide
    runner, sizes = open_runner(config, plan, incarnation)  # do: read weights, allocate, self-test

How many blocks fit a GPU is only known when its weights are loaded and a step has been tried.
"""

import contextlib
import os
from dataclasses import dataclass

from common.errors import ConfigError
from common.model_config import ModelConfig
from engine.backend import device_named, num_gpus
from engine.config import EngineConfig
from engine.load import load_runner
from engine.pool_size import NO_PAGES, PoolShare, PoolSize, landing_of, pool_of
from engine.ranks.group import RankGroup, RankMemory, follower_program
from engine.runner import ModelRunner
from worker.config import WorkerConfig

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
    memory: tuple[RankMemory, ...]
    """Of each rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    pool: PoolSize | PoolShare
    landing: PoolSize
    max_model_len: int
    device: str


def plan_memory(config: WorkerConfig, model: ModelConfig) -> MemoryPlan:
    """Raises ConfigError when what was asked for does not fit the model or the machine."""
    device = device_named(config.device)
    if device == "cpu" and config.gpu_memory_utilization is not None:
        raise ConfigError("--gpu-memory-utilization needs a GPU; size the pool with --kv-blocks")
    if device == "cuda" and config.tensor_parallel > num_gpus():
        raise ConfigError(
            f"--tensor-parallel {config.tensor_parallel} needs a GPU for each rank; this process "
            f"sees {num_gpus()}"
        )
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
        num_blocks = config.kv_blocks or _cpu_blocks(config, model)
        pool = pool_of(num_blocks, config.max_num_seqs)
    landing = NO_PAGES
    if config.role == "decode":
        landing = landing_of(config.max_chunk_tokens, config.block_size)
    return MemoryPlan(
        pool=pool,
        landing=landing,
        max_model_len=config.max_model_len or model.max_position_embeddings,
        device=device,
    )


def open_group(
    config: EngineConfig, *, has_transfers: bool
) -> contextlib.AbstractContextManager[RankGroup | None]:
    """The other ranks, where there are some."""
    if config.num_ranks == 1:
        return contextlib.nullcontext()
    return RankGroup(config, follower_program("worker.follower"), has_transfers=has_transfers)


def overlaps_steps(config: WorkerConfig, plan: MemoryPlan) -> bool:
    if config.role == "prefill":
        return False
    return config.overlap_steps == "on" or (
        config.overlap_steps == "auto" and plan.device == "cuda"
    )


def engine_config(config: WorkerConfig, plan: MemoryPlan, incarnation: int) -> EngineConfig:
    return EngineConfig(
        model=config.model,
        kv_codec=config.kv_codec,
        block_size=config.block_size,
        pool=plan.pool,
        landing=plan.landing,
        device=plan.device,
        dtype=config.dtype,
        weight_dtype=config.weight_dtype,
        batch_invariant=config.batch_invariant,
        num_threads=max(1, (config.threads or os.cpu_count() or 1) // config.tensor_parallel),
        num_ranks=config.tensor_parallel,
        incarnation=incarnation,
        max_num_tokens=config.max_chunk_tokens + config.max_num_seqs,
        max_num_decodes=0 if config.role == "prefill" else config.max_num_seqs,
        max_model_len=plan.max_model_len,
    )


def open_runner(
    config: EngineConfig, plan: MemoryPlan, group: RankGroup | None
) -> tuple[ModelRunner, Sizes]:
    """Reads the model, allocates the pools, and proves that rows do not depend on their
    neighbours.
    """
    followers: list[RankMemory] = []
    if group is None:
        runner = load_runner(config)
    else:
        runner = load_runner(config, shared=group.shared, followers=group.followers)
        followers = group.wait_ready()
    self_test_s = runner.self_test()
    return runner, Sizes(
        num_blocks=len(runner.pool.packed),
        num_exact=len(runner.pool.exact),
        num_landing_packed=plan.landing.num_packed,
        num_landing_exact=plan.landing.num_exact,
        max_model_len=plan.max_model_len,
        self_test_s=self_test_s,
        memory=(RankMemory.of(runner.weight_bytes, runner.pages.own), *followers),
    )


def _cpu_blocks(config: WorkerConfig, model: ModelConfig) -> int:
    layout = EngineConfig(
        model=config.model, kv_codec=config.kv_codec, block_size=config.block_size
    ).layout(model)
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    affordable = int(available * CPU_MEMORY_SHARE) // layout.packed_page_bytes
    return max(64, min(MAX_CPU_BLOCKS, affordable))
