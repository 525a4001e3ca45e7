"""`load_runner`: an engine as its config says, with its model read and its pages allocated.

On a CPU the kernels are numba's, on a GPU Triton's; the runner sees one `Backend`.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from common.errors import ConfigError
from common.model_config import ModelConfig
from engine.backend import Backend, check_fp8, gpu_arithmetic, gpu_dtype
from engine.config import EngineConfig
from engine.grammar import GrammarTable
from engine.kernels.offsets import Offsets
from engine.offsets import open_offsets
from engine.pool_size import PoolSize
from engine.pools import PageArena
from engine.runner import ModelRunner
from engine.weights import Checkpoint, model_fingerprint
from engine.worker_pages import Origin, WorkerPages

if TYPE_CHECKING:
    from engine.cpu_model import CpuWeights


def load_runner(config: EngineConfig, *, weights: "CpuWeights | None" = None) -> ModelRunner:
    """`weights` are a CPU's that were loaded before, of the config's `weight_dtype`: several
    runners may share them.
    """
    model = config.load_model()
    layout = config.layout(model)
    offsets, offsets_hash = open_offsets(
        config.model, model, layout, is_calibrated=config.is_calibrated
    )
    is_gpu = config.device == "cuda"
    arithmetic = ""
    if is_gpu:
        if config.batch_invariant:
            arithmetic = gpu_arithmetic(config.dtype, model)
        backend, pool = load_gpu(config, model, offsets)
    else:
        backend, pool = load_cpu(config, model, offsets, weights)
    landing = PageArena(layout, config.landing.num_packed, config.landing.num_exact, config.device)
    origin = Origin(
        fingerprint=layout.fingerprint(
            model_fingerprint(config.model), offsets_hash, config.weight_dtype, arithmetic
        ),
        offsets_hash=offsets_hash,
        arithmetic=arithmetic,
        incarnation=config.incarnation,
    )
    return ModelRunner(
        config=model,
        backend=backend,
        pages=WorkerPages(pool, landing, origin),
        grammars=GrammarTable(
            Path(config.model) / "tokenizer.json",
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
        ),
        reads_late=is_gpu,
    )


def load_cpu(
    config: EngineConfig, model: ModelConfig, offsets: Offsets, weights: "CpuWeights | None"
) -> tuple[Backend, PageArena]:
    from engine.cpu_model import CpuModel, CpuWeights  # compiles the kernels

    assert isinstance(config.pool, PoolSize)
    if config.dtype not in ("auto", "float32"):
        raise ConfigError(f"on CPU Tandem computes in float32, not {config.dtype}", param="dtype")
    if config.weight_dtype == "fp8":
        check_fp8(torch.float32, None)
    pool = PageArena(config.layout(model), config.pool.num_packed, config.pool.num_exact)
    if weights is None:
        weights = CpuWeights(Checkpoint.open(config.model), model, config.weight_dtype)
    backend = CpuModel(
        model,
        weights,
        pool,
        offsets,
        max_num_tokens=config.max_num_tokens,
        num_threads=config.num_threads,
    )
    return backend, pool


def load_gpu(
    config: EngineConfig, model: ModelConfig, offsets: Offsets
) -> tuple[Backend, PageArena]:
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

    def make_model(pool: PageArena) -> TritonModel:
        return TritonModel(
            model, checkpoint, pool, offsets, compute_dtype, config.weight_dtype,
            is_batch_invariant=config.batch_invariant,
        )  # fmt: skip

    return open_gpu(
        CudaGpu(),
        make_model,
        config.layout(model),
        config.limits(model),
        room=config.pool,
        landing=config.landing,
    )
