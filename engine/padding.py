"""Sizes that are no multiple of 16, on a CPU: its kernels work on 16 floats at a time.

Matrices and pages get zeros at the end (of each half of a head, since rotary pairs channel i with
channel i + half), so sums are what they were. A norm divides by the number of channels: with n real
ones of m, x / sqrt(sum / n + eps) is sqrt(n / m) * x / sqrt(sum / m + eps * n / m), so weights and
eps take that up. Where nothing is odd, no bit changes.
"""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from common.model_config import ModelConfig

PANEL: Final = 16


def padded(size: int) -> int:
    return -(-size // PANEL) * PANEL


@dataclass(frozen=True, slots=True)
class PaddedSizes:
    hidden: int
    inter: int
    head_dim: int

    @classmethod
    def of(cls, config: ModelConfig) -> "PaddedSizes":
        return cls(
            padded(config.hidden_size), padded(config.intermediate_size), padded(config.head_dim)
        )


def pad_end(tensor: Tensor, dim: int, size: int) -> Tensor:
    """Zeros at the end of dimension `dim`, up to `size`."""
    missing = size - tensor.shape[dim]
    if not missing:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = missing
    return torch.cat([tensor, tensor.new_zeros(shape)], dim=dim)


def pad_heads(tensor: Tensor, dim: int, head_dim: int, size: int) -> Tensor:
    """Dimension `dim` [heads * head_dim] as [heads * size]."""
    if size == head_dim:
        return tensor
    dim %= tensor.ndim
    before, after = tensor.shape[:dim], tensor.shape[dim + 1 :]
    halves = tensor.reshape(*before, -1, 2, head_dim // 2, *after)
    return pad_end(halves, dim + 2, size // 2).flatten(dim, dim + 2)


def unpad_heads(tensor: Tensor, head_dim: int) -> Tensor:
    """The last dimension, one padded head, as it was."""
    if tensor.shape[-1] == head_dim:
        return tensor
    halves = tensor.reshape(*tensor.shape[:-1], 2, -1)
    return halves[..., : head_dim // 2].flatten(-2)


def norm_weight(weight: Tensor, size: int) -> Tensor:
    """Of a norm over `size` channels, of which so many as `weight` has are real; fp32."""
    real = weight.shape[0]
    return pad_end(weight.float() * (real / size) ** 0.5, 0, size)
