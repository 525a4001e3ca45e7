"""Products with a weight whose rows do not depend on the rows beside them (`--batch-invariant`).

One program per (tile of rows, tile of outputs). It sums over all inputs, in ascending steps of a
fixed size, in fp32. The tile follows from the weight and the device, never from the number of rows,
which the kernel is not specialised for either: one machine code computes a row alone and among a
thousand. Libraries choose another kernel, or another split of the sum, for other numbers of rows.

FP8 operands are widened to fp16, so their products are exact and their sums are taken in fp32, on
every device; scales are applied to the sum.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.gpu.codec import e4m3_as_half, rounded
from engine.kernels.gpu.tiles import device_kind, matmul_tile_of


@triton.jit(do_not_specialize=["num_rows"])
def matmul_kernel(
    x_ptr, x_stride, weight_ptr, bias_ptr, x_scales_ptr, weight_scales_ptr, out_ptr, num_rows,
    num_inputs, num_outputs,
    HAS_BIAS: tl.constexpr, HAS_SCALES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    columns = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    depths = tl.arange(0, DEPTH)
    is_row, is_column = rows < num_rows, columns < num_outputs
    x_at = x_ptr + rows[:, None] * x_stride + depths[None, :]
    weight_at = weight_ptr + columns[None, :] * num_inputs + depths[:, None]
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, num_inputs, DEPTH):
        is_input = first + depths < num_inputs
        x = tl.load(x_at + first, mask=is_row[:, None] & is_input[None, :], other=0)
        weight = tl.load(weight_at + first, mask=is_input[:, None] & is_column[None, :], other=0)
        if HAS_SCALES:
            x, weight = e4m3_as_half(x), e4m3_as_half(weight)
        acc = tl.dot(x, weight, acc, input_precision="ieee")
    if HAS_SCALES:
        x_scales = tl.load(x_scales_ptr + rows, mask=is_row, other=0.0)
        weight_scales = tl.load(weight_scales_ptr + columns, mask=is_column, other=0.0)
        acc = acc * 65536.0 * x_scales[:, None] * weight_scales[None, :]
    if HAS_BIAS:
        bias = tl.load(bias_ptr + columns, mask=is_column, other=0.0).to(tl.float32)
        acc += bias[None, :]
    out = out_ptr + rows[:, None] * num_outputs + columns[None, :]
    mask = is_row[:, None] & is_column[None, :]
    tl.store(out, rounded(acc, out_ptr.dtype.element_ty), mask=mask)


def matmul(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    scales: tuple[Tensor, Tensor] | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """x [num_rows, inputs] times weight [outputs, inputs] transposed, plus bias [outputs]; bf16,
    fp16, fp32, or e4m3 with `scales` of the rows [num_rows, 1] and of the outputs [1, outputs].

    [num_rows, outputs] in the dtype of x, or in `out_dtype`.
    """
    num_rows, num_inputs = x.shape
    num_outputs = len(weight)
    assert weight.shape == (num_outputs, num_inputs)
    assert weight.is_contiguous()
    assert x.stride(1) == 1
    assert x.dtype == weight.dtype
    assert bias is None or bias.shape == (num_outputs,)
    assert (scales is not None) == (x.dtype is torch.float8_e4m3fn)
    out = torch.empty((num_rows, num_outputs), dtype=out_dtype or x.dtype, device=x.device)
    if not num_rows:
        return out
    tile = matmul_tile_of(device_kind(x.device), num_outputs)
    x_scales, weight_scales = (out, out) if scales is None else scales
    if scales is not None:
        x, weight = x.view(torch.uint8), weight.view(torch.uint8)
    grid = (triton.cdiv(num_rows, tile.rows), triton.cdiv(num_outputs, tile.columns))
    matmul_kernel[grid](
        x, x.stride(0), weight, out if bias is None else bias, x_scales, weight_scales, out,
        num_rows, num_inputs, num_outputs,
        HAS_BIAS=bias is not None, HAS_SCALES=scales is not None,
        ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=tile.depth_bytes // max(2, x.element_size()),
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return out
