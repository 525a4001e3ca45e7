"""`load_runner`: an engine as its config says, with its model read and its pages allocated.

On a CPU the kernels are numba's, on a GPU Triton's; the runner sees one `Backend`.
"""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from common.errors import ConfigError
from common.model_config import ModelConfig
from engine.backend import Backend, check_fp8, gpu_arithmetic, gpu_dtype
from engine.config import EngineConfig
from engine.grammar import GrammarTable
from engine.kernels.offsets import Offsets
from engine.model_share import cpu_share
from engine.offsets import open_offsets
from engine.pool_size import PoolSize
from engine.pools import PageArena
from engine.rank_pages import RankPages
from engine.ranks.board import Shared
from engine.ranks.collective import Alone, Collective, TorchCollective
from engine.ranks.followers import ALONE, Followers
from engine.ranks.rank import GroupBackend, Rank
from engine.runner import ModelRunner
from engine.weights import Checkpoint, model_fingerprint
from engine.worker_pages import Origin, WorkerPages

if TYPE_CHECKING:
    from engine.cpu_weights import CpuWeights
    from engine.ranks.board import Board


def load_runner(
    config: EngineConfig,
    *,
    weights: "CpuWeights | None" = None,
    shared: Shared | None = None,
    followers: Followers = ALONE,
) -> ModelRunner:
    """`weights` are a CPU's that were loaded before, of the config's `weight_dtype`: several
    runners may share them. Of several ranks this is rank 0, with what they share and the others.
    """
    model = config.load_model()
    layout = config.layout(model)
    offsets, offsets_hash = open_offsets(
        config.model, model, layout, is_calibrated=config.is_calibrated
    )
    rank = load_rank(config, model, offsets, 0, weights=weights, shared=shared)
    arithmetic = arithmetic_of(config, model)
    origin = Origin(
        fingerprint=layout.fingerprint(
            model_fingerprint(config.model), offsets_hash, config.weight_dtype, arithmetic
        ),
        offsets_hash=offsets_hash,
        arithmetic=arithmetic,
        incarnation=config.incarnation,
    )
    is_alone = config.num_ranks == 1
    return ModelRunner(
        config=model,
        backend=rank.backend if is_alone else GroupBackend(rank, followers, config.block_size),
        pages=WorkerPages(rank.pages, origin, followers),
        grammars=GrammarTable(
            Path(config.model) / "tokenizer.json",
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
        ),
        reads_late=config.device == "cuda",
        weight_bytes=rank.weight_bytes,
    )


def load_follower(config: EngineConfig, rank: int, shared: Shared) -> Rank:
    """A rank other than 0."""
    model = config.load_model()
    offsets, _ = open_offsets(
        config.model, model, config.layout(model), is_calibrated=config.is_calibrated
    )
    return load_rank(config, model, offsets, rank, shared=shared)


def load_rank(
    config: EngineConfig,
    model: ModelConfig,
    offsets: Offsets,
    rank: int,
    *,
    weights: "CpuWeights | None" = None,
    shared: Shared | None = None,
) -> Rank:
    """Its part of the weights, and pages for its KV heads. `offsets` are those of all heads."""
    heads = config.shares(model)[rank].kv_heads
    own = replace(offsets, means=offsets.means[:, :, heads.start : heads.stop].contiguous())
    ranks: Collective = Alone()
    if config.device == "cuda":
        if shared is not None:
            ranks = TorchCollective.join(
                shared.store, rank, config.num_ranks, torch.device("cuda", 0),
                is_ordered=config.batch_invariant,
            )  # fmt: skip
        backend, pool, weight_bytes = load_gpu(config, model, own, ranks)
    else:
        board = None if shared is None else shared.board
        backend, pool, weight_bytes = load_cpu(config, model, own, rank, weights, board)
    landing = PageArena(
        pool.layout, config.landing.num_packed, config.landing.num_exact, config.device
    )
    return Rank(
        backend=backend,
        pages=RankPages(pool, landing, heads),
        weight_bytes=weight_bytes,
        ranks=ranks,
    )


def arithmetic_of(config: EngineConfig, model: ModelConfig) -> str:
    """What decides the last bits, where a worker promises those to others."""
    if not config.batch_invariant:
        return ""
    parts = [gpu_arithmetic(config.dtype, model)] if config.device == "cuda" else []
    parts += [f"{config.num_ranks} ranks"] if config.num_ranks > 1 else []
    return ", ".join(parts)


def load_cpu(
    config: EngineConfig,
    model: ModelConfig,
    offsets: Offsets,
    rank: int,
    weights: "CpuWeights | None",
    board: "Board | None",
) -> tuple[Backend, PageArena, int]:
    from engine.cpu_model import CpuModel  # compiles the kernels
    from engine.cpu_weights import CpuWeights

    assert isinstance(config.pool, PoolSize)
    if config.dtype not in ("auto", "float32"):
        raise ConfigError(f"on CPU Tandem computes in float32, not {config.dtype}", param="dtype")
    if config.weight_dtype == "fp8":
        check_fp8(torch.float32, None)
    layout = config.rank_layout(model, rank)
    pool = PageArena(layout, config.pool.num_packed, config.pool.num_exact)
    if weights is None:
        share = cpu_share(model, config.shares(model)[rank])
        weights = CpuWeights(Checkpoint.open(config.model), model, config.weight_dtype, share)
    backend = CpuModel(
        model,
        weights,
        pool,
        offsets,
        max_num_tokens=config.max_num_tokens,
        num_threads=config.num_threads,
        board=board,
    )
    return backend, pool, weights.num_bytes


def load_gpu(
    config: EngineConfig, model: ModelConfig, offsets: Offsets, ranks: Collective
) -> tuple[Backend, PageArena, int]:
    """See `engine.gpu_memory.open_gpu`."""
    from engine.gpu_memory import CudaGpu, open_gpu  # there is no Triton beside CPUs
    from engine.triton_model import TritonModel

    if config.weight_dtype == "int8":
        raise ConfigError(
            "--weight-dtype int8 is for CPUs; on a GPU choose fp8, or leave it at auto",
            param="weight_dtype",
        )
    compute_dtype = gpu_dtype(config.dtype, model)
    if config.weight_dtype == "fp8":
        is_nvidia = torch.version.hip is None
        check_fp8(compute_dtype, torch.cuda.get_device_capability() if is_nvidia else None)
    checkpoint = Checkpoint.open(config.model)
    weight_bytes = 0

    def make_model(pool: PageArena) -> TritonModel:
        nonlocal weight_bytes
        before = torch.cuda.memory_allocated()
        made = TritonModel(
            model, checkpoint, pool, offsets, compute_dtype, config.weight_dtype,
            is_batch_invariant=config.batch_invariant, ranks=ranks,
        )  # fmt: skip
        weight_bytes = torch.cuda.memory_allocated() - before
        return made

    backend, pool = open_gpu(
        CudaGpu(),
        make_model,
        config.rank_layout(model, ranks.rank),
        config.limits(model),
        room=config.pool,
        landing=config.landing,
        ranks=ranks,
    )
    return backend, pool, weight_bytes
