"""Matrices as int8: symmetric, one bf16 factor for 32 consecutive inputs of an output.

`int8_panels` packs them the way `engine/kernels/cpu/int8_weights.py` reads them; `int8_values` is
what they read as, to the bit.
"""

from typing import Final

import torch
from torch import Tensor

from common.errors import UnsupportedModel

GROUP: Final = 32
PANEL: Final = 16


def int8_panels(matrix: Tensor) -> Tensor:
    """[n, k] as uint8 [ceil(n / 16), bytes of a panel]; columns beyond n are zero."""
    panels = [_panels_of(part) for part in _by_length(matrix, -(-matrix.shape[0] // PANEL) * PANEL)]
    return torch.cat(panels, dim=1).contiguous()


def int8_values(matrix: Tensor) -> Tensor:
    """[n, k] fp32: what is left of `matrix`."""
    parts = [_quantised(part) for part in _by_length(matrix, matrix.shape[0])]
    return torch.cat([(q * scale[..., None]).flatten(1) for q, scale in parts], dim=1)


def _by_length(matrix: Tensor, num_rows: int) -> list[Tensor]:
    """fp32 [num_rows, groups, length], first the whole groups of inputs, then what is left."""
    if not matrix.isfinite().all():
        raise UnsupportedModel("a weight is not finite; it cannot be stored as int8")
    n, k = matrix.shape
    padded = torch.nn.functional.pad(matrix.float(), (0, 0, 0, num_rows - n))
    whole = k // GROUP * GROUP
    parts = (padded[:, :whole].reshape(num_rows, -1, GROUP), padded[:, None, whole:])
    return [part for part in parts if part.numel()]


def _quantised(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Integers -127 to 127 as fp32 [n, groups, length] and factors [n, groups], bf16 values."""
    scale = (groups.abs().amax(-1) / 127).bfloat16().float()
    q = (groups / scale.where(scale > 0, 1.0)[..., None]).round().clamp(-127, 127)
    return q, scale


def _panels_of(groups: Tensor) -> Tensor:
    """uint8 [n / 16, bytes]: of each group the 16 columns' factors, then [length, 16] integers."""
    q, scale = _quantised(groups)
    n, count, length = q.shape
    integers = q.to(torch.int8).view(n // PANEL, PANEL, count, length).permute(0, 2, 3, 1)
    factors = scale.bfloat16().view(n // PANEL, PANEL, count).transpose(1, 2).contiguous()
    record = torch.cat(
        [factors.view(torch.uint8), integers.reshape(-1, count, length * PANEL).view(torch.uint8)],
        dim=2,
    )
    return record.flatten(1)
