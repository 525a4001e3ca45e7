"""Rows of activations to e4m3 with one fp32 scale each, for products with FP8 weights.

One program per row: it reads the row twice, for the largest size and for the values. The scale maps
that to 448, the largest number of the format, so nothing saturates; what is not finite becomes NaN.
See `engine.kernels.reference.quantise_rows`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.gpu.codec import E4M3, encode_fp8

SPAN = 1024


@triton.jit
def quantise_rows_kernel(x_ptr, x_stride, out_ptr, scales_ptr, width, SPAN: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    source = x_ptr + row * x_stride
    largest = tl.zeros([SPAN], tl.float32)
    for first in range(0, width, SPAN):
        at = first + tl.arange(0, SPAN)
        value = tl.load(source + at, mask=at < width, other=0.0).to(tl.float32)
        size = tl.abs(value)
        largest = tl.maximum(largest, tl.where(size < float("inf"), size, 0.0))
    scale = tl.maximum(tl.div_rn(tl.max(largest, axis=0), 448.0), 1e-30)
    tl.store(scales_ptr + row, scale)
    target = out_ptr + row * width
    for first in range(0, width, SPAN):
        at = first + tl.arange(0, SPAN)
        value = tl.load(source + at, mask=at < width, other=0.0).to(tl.float32)
        code = encode_fp8(tl.div_rn(value, scale + tl.zeros_like(value)), E4M3)
        tl.store(target + at, code, mask=at < width)


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [num_rows, width] as float8_e4m3fn, and scales [num_rows, 1] float32 to multiply with."""
    assert x.dim() == 2
    assert x.stride(1) == 1
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    scales = torch.empty((len(x), 1), dtype=torch.float32, device=x.device)
    if len(x):
        quantise_rows_kernel[(len(x),)](x, x.stride(0), codes, scales, x.shape[1], SPAN=SPAN)
    return codes.view(torch.float8_e4m3fn), scales
