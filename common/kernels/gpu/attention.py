"""Paged attention for chunks and for decode: one program per (run, KV head, tile of its rows).

A run is consecutive query tokens of one request; see `common.engine.batch.RUN_FIELDS`. Its rows are
(token, head of the group). Blocks come in ascending order: block 0 exact, then the packed blocks
before each row's own, then the rows' own blocks exact, from the step's K and V (chunks) or from
the page of the open block (decode). The same kernel serves both, with fewer rows for decode.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.kernels.gpu.store import E4M3, INT4, INT8, block_offset
from common.kernels.offsets import Offsets
from common.pages import PageLayout


@triton.jit
def decode_e4m3(data):
    """fp32 of e4m3 bytes; 0x7F and 0xFF are NaN."""
    bits = data.to(tl.uint32)
    size = bits & 0x7F
    normal = ((size << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(size < 8, size.to(tl.float32) * 0.001953125, normal)
    value = tl.where(size == 0x7F, float("nan"), value)
    return tl.where(bits >= 0x80, -value, value)


@triton.jit
def decode_int8(data):
    """-128 is NaN."""
    whole = data.to(tl.int8, bitcast=True).to(tl.float32)
    return tl.where(whole == -128.0, float("nan"), whole)


@triton.jit
def load_exact(page, at, mask, KIND: tl.constexpr):
    """Elements `at` of an exact page, as fp32."""
    if KIND == 0:
        return tl.load(page.to(tl.pointer_type(tl.float32)) + at, mask=mask, other=0.0)
    else:
        return from_bf16(tl.load(page.to(tl.pointer_type(tl.uint16)) + at, mask=mask, other=0))


@triton.jit
def from_bf16(half):
    return (half.to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def load_packed(
    page, at, mask, scale_at, offset, slots, dims,
    KIND: tl.constexpr, IS_K: tl.constexpr, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Elements `at` of a packed page, as fp32: what was sealed plus the offset [1, width].

    `scale_at` is where the slice's scales stand in the page.
    """
    if KIND < 2:
        return load_exact(page, at, mask, KIND)
    elif KIND == INT4:
        index = dims if IS_K else slots
        count: tl.constexpr = HEAD_DIM if IS_K else BLOCK
        place = (page + scale_at).to(tl.pointer_type(tl.uint16)) + index
        factor = from_bf16(tl.load(place, mask=index < count, other=0))
        low = from_bf16(tl.load(place + count, mask=index < count, other=0))
        data = tl.load(page + at // 2, mask=mask, other=0).to(tl.int32)
        whole = (data >> ((dims & 1) * 4)) & 0xF
        return whole.to(tl.float32) * factor + (low + offset)
    else:
        data = tl.load(page + at, mask=mask, other=0)
        if KIND == INT8:
            scale = tl.load((page + scale_at).to(tl.pointer_type(tl.float32)))
            return decode_int8(data) * scale + offset
        else:
            code = tl.load(page + scale_at).to(tl.int32)
            scale = (code << 23).to(tl.float32, bitcast=True)
            if KIND == E4M3:
                return decode_e4m3(data) * scale + offset
            else:
                half = (data.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
                return half.to(tl.float32) * scale + offset


@triton.jit
def softmax_step(q, keys, values, seen, largest, sums, acc):
    """Rows q [rows, width] see keys and values [block, width] where `seen` [rows, block]."""
    scores = tl.dot(q, tl.trans(keys.to(q.dtype)), input_precision="ieee")
    scores = tl.where(seen, scores, float("-inf"))
    new = tl.maximum(largest, tl.max(scores, axis=1))
    base = tl.where(new == float("-inf"), 0.0, new)
    weights = tl.exp(scores - base[:, None])
    factor = tl.exp(largest - base)
    acc = acc * factor[:, None]
    acc += tl.dot(weights.to(q.dtype), values.to(q.dtype), input_precision="ieee")
    return new, sums * factor + tl.sum(weights, axis=1), acc


@triton.jit
def attention_kernel(
    q_ptr, q_stride, k_ptr, v_ptr, kv_stride, out_ptr, out_stride, runs_ptr, tables_ptr,
    tables_stride, packed_ptr, packed_bytes, exact_ptr, exact_bytes, first_slice, scales_offset,
    means_ptr, cos_ptr, sin_ptr,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, EXACT_KIND: tl.constexpr, PACKED_KIND: tl.constexpr,
    K_SCALE: tl.constexpr, V_SCALE: tl.constexpr,
):  # fmt: skip
    run, head = tl.program_id(0), tl.program_id(1)
    fields = runs_ptr + run * 6
    row, count, position = tl.load(fields), tl.load(fields + 1), tl.load(fields + 2)
    table = tables_ptr + tl.load(fields + 3) * tables_stride
    own_page, num_after = tl.load(fields + 4), tl.load(fields + 5)

    first_token = tl.program_id(2) * ROWS // GROUP
    if first_token >= count:
        return
    end_token = tl.minimum((tl.program_id(2) * ROWS + ROWS - 1) // GROUP + 1, count)
    row_index = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    tokens = row_index // GROUP
    is_row = tokens < count
    dims, slots = tl.arange(0, WIDTH), tl.arange(0, BLOCK)
    is_dim = dims[None, :] < HEAD_DIM
    q_heads = head * GROUP + row_index % GROUP
    q_at = (row + tokens)[:, None] * q_stride + q_heads[:, None] * HEAD_DIM + dims[None, :]
    q = tl.load(q_ptr + q_at, mask=is_row[:, None] & is_dim, other=0.0)
    positions = position + tokens
    own_blocks = positions // BLOCK

    k_slice = first_slice + head
    v_slice = k_slice + KV_HEADS
    in_slice = slots[:, None] * HEAD_DIM + dims[None, :]
    k_at = k_slice * BLOCK * HEAD_DIM + in_slice
    v_at = v_slice * BLOCK * HEAD_DIM + in_slice
    slot_mask = (slots[:, None] >= 0) & is_dim

    largest = tl.full([ROWS], float("-inf"), tl.float32)
    sums = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, WIDTH], tl.float32)

    page = exact_ptr + tl.load(table).to(tl.int64) * exact_bytes
    keys = load_exact(page, k_at, slot_mask, EXACT_KIND)
    values = load_exact(page, v_at, slot_mask, EXACT_KIND)
    seen = slots[None, :] <= positions[:, None]
    largest, sums, acc = softmax_step(q, keys, values, seen, largest, sums, acc)

    v_offset = tl.load(means_ptr + v_slice * HEAD_DIM + dims, mask=dims < HEAD_DIM, other=0.0)
    k_scale_at = scales_offset + first_slice // 2 * (K_SCALE + V_SCALE) + head * K_SCALE
    v_scale_at = k_scale_at + (KV_HEADS - head) * K_SCALE + head * V_SCALE
    first_own = (position + first_token) // BLOCK
    last_own = (position + end_token - 1) // BLOCK
    for block in range(1, last_own):
        page = packed_ptr + tl.load(table + block).to(tl.int64) * packed_bytes
        k_offset = block_offset(means_ptr, cos_ptr, sin_ptr, k_slice, True, block, dims, HEAD_DIM)
        keys = load_packed(
            page, k_at, slot_mask, k_scale_at, k_offset[None, :], slots[:, None], dims[None, :],
            PACKED_KIND, True, BLOCK, HEAD_DIM,
        )  # fmt: skip
        values = load_packed(
            page, v_at, slot_mask, v_scale_at, v_offset[None, :], slots[:, None], dims[None, :],
            PACKED_KIND, False, BLOCK, HEAD_DIM,
        )  # fmt: skip
        seen = (own_blocks[:, None] > block) & (slots[None, :] >= 0)
        largest, sums, acc = softmax_step(q, keys, values, seen, largest, sums, acc)

    for block in range(tl.maximum(first_own, 1), last_own + 1):
        if own_page >= 0:
            page = exact_ptr + own_page * exact_bytes
            keys = load_exact(page, k_at, slot_mask, EXACT_KIND)
            values = load_exact(page, v_at, slot_mask, EXACT_KIND)
        else:
            token = block * BLOCK - position + slots
            there = (token < count + num_after)[:, None] & is_dim
            at = (row + token)[:, None] * kv_stride + head * HEAD_DIM + dims[None, :]
            keys = tl.load(k_ptr + at, mask=there, other=0.0)
            values = tl.load(v_ptr + at, mask=there, other=0.0)
        is_own = own_blocks[:, None] == block
        seen = is_own & (block * BLOCK + slots[None, :] <= positions[:, None])
        largest, sums, acc = softmax_step(q, keys, values, seen, largest, sums, acc)

    out_at = (row + tokens)[:, None] * out_stride + q_heads[:, None] * HEAD_DIM + dims[None, :]
    tl.store(out_ptr + out_at, acc / sums[:, None], mask=is_row[:, None] & is_dim)


MAX_ROWS = 64
"""Of one program: as many as leave its outputs and queries in registers (bench/aot.py)."""


def rows_of(max_run_tokens: int, group: int, head_dim: int, is_ampere: bool) -> int:
    """Rows of one program. Ampere's dot products keep more in registers, so there are fewer."""
    most = MAX_ROWS // 4 if is_ampere and head_dim > 64 else MAX_ROWS
    return min(most, max(16, triton.next_power_of_2(max_run_tokens * group)))


def warps_of(rows: int) -> int:
    return 8 if rows == MAX_ROWS else 4


@cache
def is_ampere(device: torch.device) -> bool:
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    return is_nvidia and torch.cuda.get_device_capability(device)[0] == 8


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    runs: Tensor,
    tables: Tensor,
    packed: Tensor,
    exact: Tensor,
    layout: PageLayout,
    offsets: Offsets,
    layer: int,
    max_run_tokens: int,
    out: Tensor,
) -> None:
    """Attention of the rows in `runs`, written to out [num_rows, heads, head_dim]; like q, which is
    scaled already.

    k, v [num_rows, kv_heads, head_dim] fp32 are the step's own, in the exact form, and stored
    already. `runs` [num_runs, 6] int64, none longer than `max_run_tokens`; `tables` [.., blocks]
    int32.
    """
    _, num_heads, head_dim = q.shape
    assert out.shape == q.shape
    assert head_dim == layout.head_dim
    assert num_heads % layout.num_kv_heads == 0
    assert q.stride(1) == k.stride(1) == v.stride(1) == head_dim
    assert k.stride() == v.stride()
    assert runs.is_contiguous()
    assert tables.stride(1) == 1
    group = num_heads // layout.num_kv_heads
    rows = rows_of(max_run_tokens, group, head_dim, is_ampere(q.device))
    tiles = triton.cdiv(max_run_tokens * group, rows)
    attention_kernel[(len(runs), layout.num_kv_heads, tiles)](
        q, q.stride(0), k, v, k.stride(0), out, out.stride(0), runs, tables, tables.stride(0),
        packed, layout.packed_page_bytes, exact, layout.exact_page_bytes,
        layer * 2 * layout.num_kv_heads, layout.scales_offset,
        offsets.means, offsets.cos, offsets.sin,
        KV_HEADS=layout.num_kv_heads, GROUP=group, BLOCK=layout.block_size, HEAD_DIM=head_dim,
        WIDTH=triton.next_power_of_2(head_dim),
        ROWS=rows,
        num_warps=warps_of(rows),
        EXACT_KIND=int(layout.codec.exact),
        PACKED_KIND=int(layout.codec.packed),
        K_SCALE=layout.scale_bytes[0],
        V_SCALE=layout.scale_bytes[1],
    )  # fmt: skip
