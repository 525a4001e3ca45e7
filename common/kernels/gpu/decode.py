"""Paged attention of decodes, split over the context: two launches a layer.

    decode_kernel    one program per (run, KV head, part): the part's share of the context, for all
                     query heads of the group, so that every page is read once
    merge_kernel     one program per (run, query head): the parts together, in ascending order

The context is cut into stretches of a fixed number of tokens, counted from position 0, and part p
takes stretches p, p + parts, p + 2 * parts, ... in that order. So which tokens are summed together,
and in which order, depends on a row's own position and on nothing else of the batch, and a long
context keeps all parts equally busy. Grids depend on the number of runs alone; how long each
row is, is read on the device, and a part without a stretch, or a run of no tokens, ends at once.
So launches can be captured and replayed. Numbers are as in `common.kernels.gpu.attention`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.kernels.gpu.attention import (
    check_inputs,
    load_blocks,
    softmax_step,
    step_of,
)
from common.kernels.gpu.codec import load_exact, page_arguments, page_constants, rounded
from common.kernels.gpu.tiles import device_kind, tiles_of
from common.kernels.offsets import Offsets
from common.pages import PageLayout


@triton.jit
def decode_kernel(
    q_ptr, q_stride, k_ptr, v_ptr, kv_stride, sums_ptr, stats_ptr, runs_ptr, tables_ptr,
    tables_stride, packed_ptr, packed_bytes, exact_ptr, exact_bytes, first_slice, scales_offset,
    means_ptr, cos_ptr, sin_ptr,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, STRETCH: tl.constexpr,
    STEP: tl.constexpr, EXACT_KIND: tl.constexpr, PACKED_KIND: tl.constexpr,
    K_SCALE: tl.constexpr, V_SCALE: tl.constexpr,
):  # fmt: skip
    run, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    fields = runs_ptr + run * 6
    row, count, position = tl.load(fields), tl.load(fields + 1), tl.load(fields + 2)
    own_block = position // BLOCK
    own_stretch = own_block // STRETCH
    if (count == 0) | (part > own_stretch):
        return
    table = tables_ptr + tl.load(fields + 3) * tables_stride
    own_page = tl.load(fields + 4)

    group, dims, slots = tl.arange(0, ROWS), tl.arange(0, WIDTH), tl.arange(0, BLOCK)
    is_dim = dims[None, :] < HEAD_DIM
    is_out = (group < GROUP)[:, None] & is_dim
    q_at = row * q_stride + (head * GROUP + group)[:, None] * HEAD_DIM + dims[None, :]
    q = tl.load(q_ptr + q_at, mask=is_out, other=0.0)
    nobody = tl.zeros([ROWS], tl.int32)[:, None]

    largest = tl.full([ROWS], float("-inf"), tl.float32)
    sums = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, WIDTH], tl.float32)

    in_slice = slots[:, None] * HEAD_DIM + dims[None, :]
    k_at = (first_slice + head) * BLOCK * HEAD_DIM + in_slice
    v_at = k_at + KV_HEADS * BLOCK * HEAD_DIM
    slot_mask = (slots[:, None] >= 0) & is_dim
    if part == 0:
        page = exact_ptr + tl.load(table).to(tl.int64) * exact_bytes
        keys = load_exact(page, k_at, slot_mask, EXACT_KIND)
        values = load_exact(page, v_at, slot_mask, EXACT_KIND)
        seen = slots[None, :] + nobody <= position
        largest, sums, acc = softmax_step(q, keys, values, seen, largest, sums, acc)

    rounds = own_stretch // PARTS
    is_mine = own_stretch % PARTS == part
    num_blocks = (rounds + (part < own_stretch % PARTS).to(tl.int32)) * STRETCH
    num_blocks += tl.where(is_mine, own_block % STRETCH, 0)
    for done in range(0, num_blocks, STEP):
        first = (done // STRETCH * PARTS + part) * STRETCH + done % STRETCH
        blocks = first + tl.arange(0, STEP)[:, None, None]
        keys, values = load_blocks(
            table, blocks, (blocks > 0) & (blocks < own_block), packed_ptr, packed_bytes,
            first_slice, scales_offset, head, means_ptr, cos_ptr, sin_ptr, STEP, KV_HEADS, BLOCK,
            HEAD_DIM, WIDTH, PACKED_KIND, K_SCALE, V_SCALE,
        )  # fmt: skip
        of_token = first + tl.arange(0, STEP * BLOCK)[None, :] // BLOCK + nobody
        seen = (of_token > 0) & (of_token < own_block)
        largest, sums, acc = softmax_step(q, keys, values, seen, largest, sums, acc)

    if is_mine & (own_block > 0):
        if own_page >= 0:
            page = exact_ptr + own_page * exact_bytes
            keys = load_exact(page, k_at, slot_mask, EXACT_KIND)
            values = load_exact(page, v_at, slot_mask, EXACT_KIND)
        else:
            token = own_block * BLOCK - position + slots
            at = (row + token)[:, None] * kv_stride + head * HEAD_DIM + dims[None, :]
            there = (token <= 0)[:, None] & is_dim
            keys = tl.load(k_ptr + at, mask=there, other=0.0).to(tl.float32)
            values = tl.load(v_ptr + at, mask=there, other=0.0).to(tl.float32)
        seen = own_block * BLOCK + slots[None, :] + nobody <= position
        largest, sums, acc = softmax_step(q, keys, values, seen, largest, sums, acc)

    place = ((run * KV_HEADS + head) * GROUP + group).to(tl.int64) * PARTS + part
    tl.store(sums_ptr + place[:, None] * HEAD_DIM + dims[None, :], acc, mask=is_out)
    tl.store(stats_ptr + place * 2, largest, mask=group < GROUP)
    tl.store(stats_ptr + place * 2 + 1, sums, mask=group < GROUP)


@triton.jit
def merge_kernel(
    sums_ptr, stats_ptr, runs_ptr, out_ptr, out_stride,
    BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr,
    STRETCH: tl.constexpr,
):  # fmt: skip
    run, head = tl.program_id(0), tl.program_id(1)
    fields = runs_ptr + run * 6
    row, count, position = tl.load(fields), tl.load(fields + 1), tl.load(fields + 2)
    if count == 0:
        return
    parts, dims = tl.arange(0, PARTS), tl.arange(0, WIDTH)
    is_part = parts <= position // BLOCK // STRETCH
    place = (run * tl.num_programs(1) + head).to(tl.int64) * PARTS + parts
    largest = tl.load(stats_ptr + place * 2, mask=is_part, other=float("-inf"))
    sums = tl.load(stats_ptr + place * 2 + 1, mask=is_part, other=0.0)
    factor = tl.exp(largest - tl.max(largest, axis=0))
    mask = is_part[:, None] & (dims[None, :] < HEAD_DIM)
    acc = tl.load(sums_ptr + place[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
    out = tl.sum(acc * factor[:, None], axis=0) / tl.sum(sums * factor, axis=0)
    out_at = row * out_stride + head * HEAD_DIM + dims
    tl.store(out_ptr + out_at, rounded(out, out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)


@dataclass(frozen=True, slots=True)
class Partials:
    """What the parts of up to `max_runs` runs leave for the merge."""

    sums: Tensor
    """[max_runs, heads, parts, head_dim] float32: values times weights"""
    stats: Tensor
    """[max_runs, heads, parts, 2] float32: largest score, sum of weights"""

    @classmethod
    def allocate(
        cls, max_runs: int, num_heads: int, head_dim: int, device: torch.device
    ) -> "Partials":
        parts = tiles_of(device_kind(device), head_dim).decode.parts
        shape = (max_runs, num_heads, parts)
        return cls(
            torch.empty((*shape, head_dim), dtype=torch.float32, device=device),
            torch.empty((*shape, 2), dtype=torch.float32, device=device),
        )


def decode_attention(
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
    partials: Partials,
    out: Tensor,
) -> None:
    """As `common.kernels.gpu.attention.attention`, of runs of one token each (or none: nothing is
    read or written for those). `partials` is scratch memory, for at least as many runs.
    """
    _, num_heads, head_dim = q.shape
    kv_heads, block_size = layout.num_kv_heads, layout.block_size
    tile = tiles_of(device_kind(q.device), head_dim).decode
    check_inputs(q, k, v, runs, tables, layout, out)
    assert len(runs) <= len(partials.sums)
    assert partials.sums.shape[1:] == (num_heads, tile.parts, head_dim)
    if not len(runs):
        return
    group, constants = num_heads // kv_heads, page_constants(layout)
    stretch = tile.stretch_tokens // block_size
    step = step_of(tile.step_tokens, block_size)
    assert stretch % step == 0
    decode_kernel[(len(runs), kv_heads, tile.parts)](
        q, q.stride(0), k, v, k.stride(0), partials.sums, partials.stats, runs, tables,
        tables.stride(0), *page_arguments(packed, exact, layout, offsets, layer),
        **constants,
        GROUP=group,
        ROWS=max(16, triton.next_power_of_2(group)),
        PARTS=tile.parts, STRETCH=stretch, STEP=step,
        num_warps=tile.num_warps,
    )  # fmt: skip
    merge_kernel[(len(runs), num_heads)](
        partials.sums, partials.stats, runs, out, out.stride(0),
        BLOCK=block_size, HEAD_DIM=head_dim, WIDTH=constants["WIDTH"],
        PARTS=tile.parts, STRETCH=stretch,
    )  # fmt: skip
