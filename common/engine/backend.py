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
    num_threads: int,
    max_num_tokens: int,
) -> Backend:
    checkpoint = Checkpoint.open(model_dir)
    if device == "cpu":
        from common.engine.cpu_model import CpuModel, CpuWeights

        if dtype not in ("auto", "float32"):
            raise ConfigError(f"on CPU Tandem computes in float32, not {dtype}", param="dtype")
        weights = CpuWeights(checkpoint, config)
        return CpuModel(
            config, weights, pool, offsets, max_num_tokens=max_num_tokens, num_threads=num_threads
        )
    from common.engine.triton_model import TritonModel

    return TritonModel(config, checkpoint, pool, offsets, _compute_dtype(dtype, config))


def _compute_dtype(dtype: str, config: ModelConfig) -> torch.dtype:
    """What a GPU computes in: as asked, else the checkpoint's own; fp32 checkpoints run in bf16."""
    name = dtype if dtype != "auto" else config.dtype
    dtypes = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.bfloat16}
    if dtype == "float32":
        return torch.float32
    if name not in dtypes:
        raise ConfigError(f"dtype {name!r} is not supported on a GPU", param="dtype")
    return dtypes[name]
