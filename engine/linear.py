"""Matrices of the GPU model: in the dtype of the computation, or as FP8 (`--weight-dtype fp8`).

FP8 weights are e4m3 with an fp32 scale for each output channel; activations are quantised row by
row on the way in, so the rows beside it change nothing in them. Sums are fp32 throughout: the
tensor cores' short accumulators ("fast accumulation") stay off.

Products are the libraries', which round otherwise for other numbers of rows, or with
`--batch-invariant` `engine.kernels.gpu.matmul`.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from common.errors import ConfigError
from engine.kernels.gpu.matmul import matmul
from engine.kernels.gpu.quantise import quantise_rows

MULTIPLE = 16
"""Of both sizes of a matrix: what the FP8 products of torch take."""
MAX_E4M3 = 448.0
MIN_SCALE = 1e-30


class Linear(Protocol):
    def __call__(self, x: Tensor) -> Tensor:
        """x [num_rows, inputs] to [num_rows, outputs], in the dtype of x."""
        ...


@dataclass(frozen=True, slots=True)
class PlainLinear:
    weight: Tensor
    """[outputs, inputs]"""
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class InvariantLinear:
    weight: Tensor
    """[outputs, inputs]"""
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return matmul(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class Fp8Linear:
    weight: Tensor
    """[outputs, inputs] float8_e4m3fn"""
    scales: Tensor
    """[1, outputs] float32"""
    bias: Tensor | None = None
    is_invariant: bool = False

    @classmethod
    def of(
        cls, weight: Tensor, bias: Tensor | None = None, *, is_invariant: bool = False
    ) -> "Fp8Linear":
        """Raises ConfigError for a matrix that cannot be multiplied as FP8."""
        if any(size % MULTIPLE for size in weight.shape):
            raise ConfigError(
                f"--weight-dtype fp8 needs matrices whose sizes are multiples of {MULTIPLE}; this "
                f"model has one of {list(weight.shape)}. Serve it with --weight-dtype auto",
                param="weight_dtype",
            )
        sizes = weight.abs().amax(dim=1, keepdim=True).float()
        scales = (sizes / MAX_E4M3).clamp_(min=MIN_SCALE)
        codes = (weight.float() / scales).clamp_(-MAX_E4M3, MAX_E4M3).to(torch.float8_e4m3fn)
        return cls(codes, scales.t().contiguous(), bias, is_invariant)

    def __call__(self, x: Tensor) -> Tensor:
        codes, scales = quantise_rows(x)
        if self.is_invariant:
            return matmul(
                codes, self.weight, self.bias, scales=(scales, self.scales), out_dtype=x.dtype
            )
        out: Tensor = torch._scaled_mm(
            codes,
            self.weight.t(),
            scale_a=scales,
            scale_b=self.scales,
            bias=self.bias,
            out_dtype=x.dtype,
            use_fast_accum=False,
        )
        return out


def make_linear(
    weight: Tensor, bias: Tensor | None, weight_dtype: str, *, is_invariant: bool = False
) -> Linear:
    if weight_dtype == "fp8":
        return Fp8Linear.of(weight, bias, is_invariant=is_invariant)
    return InvariantLinear(weight, bias) if is_invariant else PlainLinear(weight, bias)
