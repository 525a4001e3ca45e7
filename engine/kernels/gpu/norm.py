"""RMSNorm, with the sum of a layer's output and the stream before it: one program per row.

A row is summed by one program in one order, whatever the other rows are.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.gpu.codec import rounded

ONE_WARP = 512
"""Elements that one warp takes."""


@triton.jit
def rms_norm_kernel(
    x_ptr, x_stride, residual_ptr, weight_ptr, normed_ptr, sum_ptr, width, eps,
    HAS_RESIDUAL: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, WIDTH)
    is_dim = dims < width
    dtype = normed_ptr.dtype.element_ty
    x = tl.load(x_ptr + row * x_stride + dims, mask=is_dim, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + row * width + dims, mask=is_dim, other=0.0).to(tl.float32)
        total = rounded(x, dtype)
        tl.store(sum_ptr + row * width + dims, total, mask=is_dim)
        x = total.to(tl.float32)
    factor = tl.rsqrt(tl.sum(x * x, axis=0) / width + eps)
    normed = rounded(x * factor, dtype).to(tl.float32)
    weight = tl.load(weight_ptr + dims, mask=is_dim, other=0.0).to(tl.float32)
    tl.store(normed_ptr + row * width + dims, rounded(normed * weight, dtype), mask=is_dim)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(norm(s) * weight, s) of s = x + residual, or of s = x; all [num_rows, width] in one dtype.

    The mean of squares is taken in fp32; what is normed is cast before the weight is applied.
    """
    num_rows, width = x.shape
    assert weight.shape == (width,)
    assert x.stride(1) == 1
    assert residual is None or (residual.shape == x.shape and residual.is_contiguous())
    normed = torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
    total = x if residual is None else torch.empty_like(normed)
    padded = triton.next_power_of_2(width)
    if num_rows:
        rms_norm_kernel[(num_rows,)](
            x, x.stride(0), x if residual is None else residual, weight, normed, total, width, eps,
            HAS_RESIDUAL=residual is not None, WIDTH=padded, num_warps=warps_of(padded),
        )  # fmt: skip
    return normed, total


def warps_of(width: int) -> int:
    return min(16, max(1, width // ONE_WARP))
