"""Which kernels run a model: numba on CPU, Triton on a GPU. The runner sees one `Backend`."""

from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.codecs import ElementKind
from common.errors import ConfigError
from common.model_config import ModelConfig
from common.pages import PageKind
from engine.batch import StepBatch

if TYPE_CHECKING:
    pass

FP8_CAPABILITY = (8, 9)
"""Compute capability from which a GPU multiplies FP8: Ada and Hopper."""


class Backend(Protocol):
    @property
    def is_batch_invariant(self) -> bool:
        """A row's bits depend on its own request alone."""
        ...

    def forward(
        self, batch: StepBatch, num_layers: int | None = None, latest: Tensor | None = None
    ) -> None:
        """Run a step's rows through the layers: KV into the pool's pages. (Fewer layers are for the
        self-test.) `latest` are the tokens [..] int64 of the step before, on the device; unread
        ones are taken from them.
        """
        ...

    def logits(self, wanted: NDArray[np.int64]) -> Tensor:
        """Of rows of the latest `forward`: [len(wanted), vocab_size] float32, valid until the next
        call.
        """
        ...

    def checksums(self, pages: Tensor, which: Tensor) -> Tensor:
        """int64 [len(which)]: the bits of `common.pages.checksum` of some of pages [num_pages,
        page_bytes] uint8. `which` int64, on the pages' device; does not wait for it.
        """
        ...

    def land(
        self,
        source: Tensor,
        target: Tensor,
        slots: NDArray[np.int64],
        block_ids: NDArray[np.int64],
        tags: NDArray[np.uint8],
    ) -> tuple[NDArray[np.bool_], NDArray[np.uint64]]:
        """As `engine.kernels.cpu.landing.land`."""
        ...

    @property
    def converter(self) -> "Converter | None":
        """Lands exact pages of another codec in its own; None: that is not done here."""
        ...


class Converter(Protocol):
    def __call__(
        self,
        source: Tensor,
        element: ElementKind,
        kind: PageKind,
        moves: NDArray[np.int64],
        tags: NDArray[np.uint8],
    ) -> tuple[NDArray[np.bool_], NDArray[np.uint64]]:
        """As `engine.kernels.cpu.convert.land_converted`, into the pool."""
        ...


def device_named(name: str) -> str:
    """cpu or cuda, of what `--device` says. Raises ConfigError where that is not here."""
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise ConfigError("--device cuda: torch finds no CUDA device here")
    if name == "auto":
        return "cuda" if has_cuda else "cpu"
    return name


def num_gpus() -> int:
    return int(torch.cuda.device_count())


def gpu_arithmetic(dtype: str, config: ModelConfig) -> str:
    """What decides the bits of a worker with `--batch-invariant`, beside the model and its weights:
    the kind of this machine's GPU, and what it computes in.
    """
    if torch.version.hip is not None:
        kind = torch.cuda.get_device_properties().gcnArchName.split(":")[0]
    else:
        kind = "sm_{}{}".format(*torch.cuda.get_device_capability())
    return f"{kind} in {str(gpu_dtype(dtype, config)).removeprefix('torch.')}"


def gpu_dtype(dtype: str, config: ModelConfig) -> torch.dtype:
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
            f"and later); {found}. Leave --weight-dtype at auto, or on a CPU choose int8",
            param="weight_dtype",
        )
    if dtype is not torch.bfloat16:
        raise ConfigError(
            "--weight-dtype fp8 computes in bfloat16; add --dtype bfloat16", param="weight_dtype"
        )
