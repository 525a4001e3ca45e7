"""Paged attention of chunks: one program per (run, KV head, tile of its rows).

A run is consecutive query tokens of one request; see `engine.batch.RUN_FIELDS`. Its rows are
(token, head of the group). Blocks come in ascending order: block 0 exact, then the packed blocks
before each row's own, then the rows' own blocks exact, from the step's K and V.
`engine.kernels.gpu.decode` does the same for runs of one token.

What is packed is widened to fp32, its offset added, and cast to the type of the queries; both
products take that type and accumulate in fp32, within a block and over blocks. No product is taken
of fp8 numbers, whose accumulators are narrower on some devices: so the error of a long context is
that of its elements and weights, and does not grow with its length
(tests/kernels/test_long_context.py holds it to a bound).
"""

import triton
import triton.language as tl
from torch import Tensor

from common.pages import PageLayout
from engine.kernels.gpu.codec import (
    block_offset,
    load_exact,
    load_packed,
    page_arguments,
    page_constants,
)
from engine.kernels.gpu.tiles import ChunkTile, device_kind, tiles_of
from engine.kernels.offsets import Offsets


@triton.jit
def softmax_step(q, keys, values, seen, largest, sums, acc):
    """Rows q [rows, width] see keys and values [tokens, width] where `seen` [rows, tokens]."""
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
def load_blocks(
    table, blocks, is_there, packed_ptr, packed_bytes, first_slice, scales_offset, head,
    means_ptr, cos_ptr, sin_ptr,
    STEP: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr, KIND: tl.constexpr, K_SCALE: tl.constexpr, V_SCALE: tl.constexpr,
):  # fmt: skip
    """K and V [STEP * BLOCK, WIDTH] fp32 of the packed blocks number `blocks` [STEP, 1, 1] of a
    request, zero where not `is_there`.
    """
    slots = tl.arange(0, BLOCK)[None, :, None]
    dims = tl.arange(0, WIDTH)[None, None, :]
    k_slice = first_slice + head
    v_slice = k_slice + KV_HEADS
    in_slice = slots * HEAD_DIM + dims
    page = packed_ptr + tl.load(table + blocks, mask=is_there, other=0).to(tl.int64) * packed_bytes
    page += head * (packed_bytes // KV_HEADS)
    number = first_slice // KV_HEADS
    mask = is_there & (slots >= 0) & (dims < HEAD_DIM)
    k_scale_at = scales_offset + number // 2 * (K_SCALE + V_SCALE)
    v_scale_at = k_scale_at + K_SCALE
    if KIND < 2:
        k_offset, v_offset = 0.0, 0.0
    else:
        k_offset = block_offset(
            means_ptr, cos_ptr, sin_ptr, k_slice, True, blocks, is_there, dims, HEAD_DIM
        )
        v_mean = means_ptr + v_slice * HEAD_DIM + dims
        v_offset = tl.load(v_mean, mask=dims < HEAD_DIM, other=0.0)
    keys = load_packed(
        page, number * BLOCK * HEAD_DIM + in_slice, mask, is_there, k_scale_at, k_offset, slots,
        dims, KIND, True, BLOCK, HEAD_DIM,
    )  # fmt: skip
    values = load_packed(
        page, (number + 1) * BLOCK * HEAD_DIM + in_slice, mask, is_there, v_scale_at, v_offset,
        slots, dims, KIND, False, BLOCK, HEAD_DIM,
    )  # fmt: skip
    return (
        tl.reshape(keys, [STEP * BLOCK, WIDTH]),
        tl.reshape(values, [STEP * BLOCK, WIDTH]),
    )


@triton.jit
def attention_kernel(
    q_ptr, q_stride, k_ptr, v_ptr, kv_stride, out_ptr, out_stride, runs_ptr, tables_ptr,
    tables_stride, packed_ptr, packed_bytes, exact_ptr, exact_bytes, first_slice, scales_offset,
    means_ptr, cos_ptr, sin_ptr,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, EXACT_KIND: tl.constexpr,
    PACKED_KIND: tl.constexpr, K_SCALE: tl.constexpr, V_SCALE: tl.constexpr,
):  # fmt: skip
    run, head = tl.program_id(0), tl.program_id(1)
    fields = runs_ptr + run * 6
    row, count, position = tl.load(fields), tl.load(fields + 1), tl.load(fields + 2)
    table = tables_ptr + tl.load(fields + 3) * tables_stride
    num_after = tl.load(fields + 5)

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

    largest = tl.full([ROWS], float("-inf"), tl.float32)
    sums = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, WIDTH], tl.float32)

    in_slice = slots[:, None] * HEAD_DIM + dims[None, :]
    k_at = first_slice // KV_HEADS * BLOCK * HEAD_DIM + in_slice
    v_at = k_at + BLOCK * HEAD_DIM
    record = exact_ptr + head * (exact_bytes // KV_HEADS)
    slot_mask = (slots[:, None] >= 0) & is_dim
    page = record + tl.load(table).to(tl.int64) * exact_bytes
    keys = load_exact(page, k_at, slot_mask, EXACT_KIND)
    values = load_exact(page, v_at, slot_mask, EXACT_KIND)
    seen = slots[None, :] <= positions[:, None]
    largest, sums, acc = softmax_step(q, keys, values, seen, largest, sums, acc)

    first_own = (position + first_token) // BLOCK
    last_own = (position + end_token - 1) // BLOCK
    for first in range(1, last_own, STEP):
        blocks = first + tl.arange(0, STEP)[:, None, None]
        packed_keys, packed_values = load_blocks(
            table, blocks, blocks < last_own, packed_ptr, packed_bytes, first_slice, scales_offset,
            head, means_ptr, cos_ptr, sin_ptr, STEP, KV_HEADS, BLOCK, HEAD_DIM, WIDTH, PACKED_KIND,
            K_SCALE, V_SCALE,
        )  # fmt: skip
        of_token = first + tl.arange(0, STEP * BLOCK) // BLOCK
        is_seen = own_blocks[:, None] > of_token[None, :]
        largest, sums, acc = softmax_step(
            q, packed_keys, packed_values, is_seen, largest, sums, acc
        )

    for block in range(tl.maximum(first_own, 1), last_own + 1):
        token = block * BLOCK - position + slots
        there = (token < count + num_after)[:, None] & is_dim
        at = (row + token)[:, None] * kv_stride + head * HEAD_DIM + dims[None, :]
        keys = tl.load(k_ptr + at, mask=there, other=0.0).to(tl.float32)
        values = tl.load(v_ptr + at, mask=there, other=0.0).to(tl.float32)
        is_own = own_blocks[:, None] == block
        seen = is_own & (block * BLOCK + slots[None, :] <= positions[:, None])
        largest, sums, acc = softmax_step(q, keys, values, seen, largest, sums, acc)

    out_at = (row + tokens)[:, None] * out_stride + q_heads[:, None] * HEAD_DIM + dims[None, :]
    tl.store(out_ptr + out_at, acc / sums[:, None], mask=is_row[:, None] & is_dim)


def rows_of(tile: ChunkTile, max_run_tokens: int, group: int) -> int:
    """Rows of one program; no dot product takes fewer than 16."""
    return min(tile.rows, max(16, triton.next_power_of_2(max_run_tokens * group)))


def step_of(step_tokens: int, block_size: int) -> int:
    """Blocks read at once."""
    return max(1, step_tokens // block_size)


def check_inputs(
    q: Tensor, k: Tensor, v: Tensor, runs: Tensor, tables: Tensor, layout: PageLayout, out: Tensor
) -> None:
    """What the kernels of chunks and of decodes take for granted."""
    _, num_heads, head_dim = q.shape
    assert out.shape == q.shape
    assert head_dim == layout.head_dim
    assert num_heads % layout.num_kv_heads == 0
    assert q.stride(1) == k.stride(1) == v.stride(1) == out.stride(1) == head_dim
    assert k.stride() == v.stride()
    assert runs.is_contiguous()
    assert tables.stride(1) == 1


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

    k, v [num_rows, kv_heads, head_dim] are the step's own, in the exact form, and stored already.
    `runs` [num_runs, 6] int64, none longer than `max_run_tokens`, own blocks among the rows;
    `tables` [.., blocks] int32.
    """
    _, num_heads, head_dim = q.shape
    check_inputs(q, k, v, runs, tables, layout, out)
    if not len(runs):
        return
    group = num_heads // layout.num_kv_heads
    tile = tiles_of(device_kind(q.device), head_dim).chunk
    rows = rows_of(tile, max_run_tokens, group)
    grid = (len(runs), layout.num_kv_heads, triton.cdiv(max_run_tokens * group, rows))
    attention_kernel[grid](
        q, q.stride(0), k, v, k.stride(0), out, out.stride(0), runs, tables, tables.stride(0),
        *page_arguments(packed, exact, layout, offsets, layer),
        **page_constants(layout),
        GROUP=group,
        ROWS=rows,
        STEP=step_of(tile.step_tokens, layout.block_size),
        num_warps=tile.num_warps if rows == tile.rows else min(4, tile.num_warps),
    )  # fmt: skip
