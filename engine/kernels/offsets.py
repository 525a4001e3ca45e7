"""Offsets: what is subtracted from a block before it is sealed, and added again when it is read.

K's error would be nearly all of the loss of quantising, and it comes from a few channels with a
large constant part. So the mean of K before rotary and of V is measured once per model
(engine/calibration.py). A block's K offset is the mean over the block's positions of that
vector rotated to each; its V offset is the vector itself. The absolute position decides, so an
offset depends neither on the request nor on who computes it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Offsets:
    """Means, and what rotates them: a block's mean cosines and sines."""

    means: Tensor
    """[num_layers, 2 (K before rotary, V), num_kv_heads, head_dim] float32"""
    cos: Tensor
    """[num_blocks, head_dim / 2] float32"""
    sin: Tensor

    @classmethod
    def of(cls, means: Tensor, cos: Tensor, sin: Tensor, block_size: int) -> "Offsets":
        """From the rotary tables [num_positions, head_dim / 2], whole blocks long."""
        blocks = (table.unflatten(0, (-1, block_size)).double().mean(1) for table in (cos, sin))
        return cls(means.float().contiguous(), *(table.float().contiguous() for table in blocks))

    def to(self, device: torch.device) -> "Offsets":
        return Offsets(self.means.to(device), self.cos.to(device), self.sin.to(device))

    def of_block(self, layer: int, block: int) -> Tensor:
        """[2, num_kv_heads, head_dim]: the plain definition."""
        k, v = self.means[layer]
        a, b = k.chunk(2, dim=-1)
        cos, sin = self.cos[block], self.sin[block]
        return torch.stack([torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1), v])
