"""silu(gate) * up, from the one product that holds both."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.gpu.codec import rounded

COLUMNS = 1024


@triton.jit
def swiglu_kernel(gate_up_ptr, stride, out_ptr, width, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < width
    dtype = out_ptr.dtype.element_ty
    gate_at = gate_up_ptr + row * stride + columns
    gate = tl.load(gate_at, mask=is_column, other=0.0).to(tl.float32)
    up = tl.load(gate_at + width, mask=is_column, other=0.0).to(tl.float32)
    silu = rounded(gate / (1.0 + tl.exp(-gate)), dtype).to(tl.float32)
    tl.store(out_ptr + row * width + columns, rounded(silu * up, dtype), mask=is_column)


def swiglu(gate_up: Tensor) -> Tensor:
    """[num_rows, width] of gate_up [num_rows, 2 * width], the gate first; the silu is taken in fp32
    and cast before it is multiplied.
    """
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.shape[1] == 2 * width
    assert gate_up.stride(1) == 1
    out = torch.empty((num_rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if num_rows:
        swiglu_kernel[(num_rows, triton.cdiv(width, COLUMNS))](
            gate_up, gate_up.stride(0), out, width, COLUMNS=COLUMNS
        )
    return out
