"""Rotary embedding: the angles of every position, with long-context scaling, as tables of cosines
and sines.
"""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.model_config import ModelConfig, RopeConfig, RopeKind
from engine.padding import pad_end

MAX_BLOCK_SIZE = 32


def rope_tables(
    config: ModelConfig, width: int | None = None
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Cosines and sines, each [positions, head_dim / 2], for every position a block can hold; with
    `width` for heads that are padded to so many channels.
    """
    num_positions = -(-config.max_position_embeddings // MAX_BLOCK_SIZE) * MAX_BLOCK_SIZE
    positions = torch.arange(num_positions, dtype=torch.float32)
    frequencies = inverse_frequencies(config.rope, config.head_dim)
    angles = torch.outer(positions, pad_end(frequencies, 0, (width or config.head_dim) // 2))
    return angles.cos().numpy(), angles.sin().numpy()


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """[head_dim / 2] float32, as transformers computes them."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    plain = 1.0 / rope.theta**exponents
    match rope.kind:
        case RopeKind.NONE:
            return plain
        case RopeKind.LINEAR:
            return plain / rope.factor
        case RopeKind.LLAMA3:
            return _llama3(plain, rope)


def _llama3(plain: Tensor, rope: RopeConfig) -> Tensor:
    """Long waves are stretched by the factor, short ones kept, those between blended."""
    original = rope.original_max_position_embeddings
    wavelength = 2 * math.pi / plain
    blend = (original / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - blend) * plain / rope.factor + blend * plain
    stretched = torch.where(
        wavelength > original / rope.low_freq_factor, plain / rope.factor, plain
    )
    is_between = (wavelength >= original / rope.high_freq_factor) & (
        wavelength <= original / rope.low_freq_factor
    )
    return torch.where(is_between, blended, stretched)
