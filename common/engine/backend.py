"""Which kernels run a model: numba on CPU, Triton on a GPU. The runner sees one `Backend`."""

from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.engine.batch import StepBatch
from common.engine.pools import PageArena
from common.engine.weights import Checkpoint
from common.errors import ConfigError
from common.kernels.offsets import Offsets
from common.model_config import ModelConfig

FP8_CAPABILITY = (8, 9)
"""Compute capability from which a GPU multiplies FP8: Ada and Hopper."""


class Backend(Protocol):
    def forward(self, batch: StepBatch, num_layers: int | None = None) -> None:
        """Run a step's rows through the layers: KV into the pool's pages. (Fewer layers are for the
        self-test.)
        """
        ...

    def logits(self, wanted: NDArray[np.int64]) -> Tensor:
        """Of rows of the latest `forward`: [len(wanted), vocab_size] float32, valid until the next
        call.
        """
        ...

    def checksum(self, page: Tensor) -> int:
        """`common.pages.checksum` of a page [page_bytes] uint8."""
        ...

    def land(
        self,
        source: Tensor,
        target: Tensor,
        slots: NDArray[np.int64],
        block_ids: NDArray[np.int64],
        tags: NDArray[np.uint8],
    ) -> tuple[NDArray[np.bool_], NDArray[np.uint64]]:
        """As `common.kernels.cpu.landing.land`."""
        ...


def load_backend(
    model_dir: str | Path,
    config: ModelConfig,
    pool: PageArena,
    offsets: Offsets,
    *,
    device: str,
    dtype: str,
    weight_dtype: str,
    num_threads: int,
    max_num_tokens: int,
) -> Backend:
    checkpoint = Checkpoint.open(model_dir)
    if device == "cpu":
        from common.engine.cpu_model import CpuModel, CpuWeights

        if dtype not in ("auto", "float32"):
            raise ConfigError(f"on CPU Tandem computes in float32, not {dtype}", param="dtype")
        if weight_dtype == "fp8":
            check_fp8(torch.float32, None)
        weights = CpuWeights(checkpoint, config)
        return CpuModel(
            config, weights, pool, offsets, max_num_tokens=max_num_tokens, num_threads=num_threads
        )
    from common.engine.triton_model import TritonModel

    compute_dtype = _compute_dtype(dtype, config)
    if weight_dtype == "fp8":
        is_nvidia = torch.version.hip is None
        check_fp8(compute_dtype, torch.cuda.get_device_capability() if is_nvidia else None)
    return TritonModel(config, checkpoint, pool, offsets, compute_dtype, weight_dtype)


def _compute_dtype(dtype: str, config: ModelConfig) -> torch.dtype:
    """What a GPU computes in: as asked, else the checkpoint's own; fp32 checkpoints run in bf16."""
    name = dtype if dtype != "auto" else config.dtype
    dtypes = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.bfloat16}
    if dtype == "float32":
        return torch.float32
    if name not in dtypes:
        raise ConfigError(f"dtype {name!r} is not supported on a GPU", param="dtype")
    return dtypes[name]


def check_fp8(dtype: torch.dtype, capability: tuple[int, int] | None) -> None:
    """Raises ConfigError where FP8 weights cannot be used. `dtype` is what is computed in,
    `capability` the GPU's; None without one of NVIDIA's.
    """
    if capability is None or capability < FP8_CAPABILITY:
        is_none = capability is None
        found = "there is none here" if is_none else "this one has {}.{}".format(*capability or ())
        raise ConfigError(
            "--weight-dtype fp8 needs an NVIDIA GPU of compute capability 8.9 or more (Ada, Hopper "
            f"and later); {found}. Leave --weight-dtype at auto",
            param="weight_dtype",
        )
    if dtype is not torch.bfloat16:
        raise ConfigError(
            "--weight-dtype fp8 computes in bfloat16; add --dtype bfloat16", param="weight_dtype"
        )
