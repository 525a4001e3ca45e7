"""Paged attention split over the context, of decodes, or of all rows: two launches a layer.

    decode_kernel    one program per (run, KV head, part, tile of rows): the part's share of the
                     context, for all query heads of the group, so that every page is read once
    merge_kernel     one program per (row, query head): the parts together, in ascending order

The context is cut into stretches of a fixed number of tokens, counted from position 0, and part p
takes stretches p, p + parts, p + 2 * parts, ... in that order. So which tokens are summed together,
and in which order, depends on a row's own position and on nothing else of the batch, and a long
context keeps all parts equally busy. Grids depend on the number of runs alone; how long each
row is, is read on the device, and a part without a stretch, or a run of no tokens, ends at once.
So launches can be captured and replayed. Numbers are as in `engine.kernels.gpu.attention`.

With `--batch-invariant` chunks come here too. A tile holds tokens of one block, each in the rows of
its place there, so all its rows see the same packed blocks, in steps that are the same for a decode
and for a chunk from wherever; and one machine code computes both. That fixes every bit of a row.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.pages import PageLayout
from engine.kernels.gpu.attention import (
    check_inputs,
    load_blocks,
    softmax_step,
    step_of,
)
from engine.kernels.gpu.codec import load_exact, page_arguments, page_constants, rounded
from engine.kernels.gpu.tiles import Tiles, device_kind, tiles_of
from engine.kernels.offsets import Offsets


@triton.jit(do_not_specialize=["tables_stride"])
def decode_kernel(
    q_ptr, q_stride, k_ptr, v_ptr, kv_stride, sums_ptr, stats_ptr, runs_ptr, tables_ptr,
    tables_stride, packed_ptr, packed_bytes, exact_ptr, exact_bytes, first_slice, scales_offset,
    means_ptr, cos_ptr, sin_ptr,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, STRETCH: tl.constexpr,
    STEP: tl.constexpr, BY_ROW: tl.constexpr, EXACT_KIND: tl.constexpr, PACKED_KIND: tl.constexpr,
    K_SCALE: tl.constexpr, V_SCALE: tl.constexpr,
):  # fmt: skip
    run, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    fields = runs_ptr + run * 6
    row, count, position = tl.load(fields), tl.load(fields + 1), tl.load(fields + 2)
    rows, dims, slots = tl.arange(0, ROWS), tl.arange(0, WIDTH), tl.arange(0, BLOCK)
    if BY_ROW:
        TOKENS: tl.constexpr = ROWS // GROUP  # of a tile
        TILES: tl.constexpr = (BLOCK + TOKENS - 1) // TOKENS  # of a block
        tile = position // BLOCK * TILES + position % BLOCK // TOKENS + part // PARTS
        part %= PARTS
        own_block = tile // TILES
        tile_slots = tile % TILES * TOKENS + rows // GROUP
        tokens = own_block * BLOCK + tile_slots - position  # counted from the run's first
        is_row = (rows < TOKENS * GROUP) & (tile_slots < BLOCK) & (tokens >= 0) & (tokens < count)
        is_idle = own_block * BLOCK + tile % TILES * TOKENS - position >= count
        positions = (position + tokens)[:, None]
        num_there = count + tl.load(fields + 5)
        q_heads = head * GROUP + rows % GROUP
        q_rows = (row + tokens)[:, None]
        place = ((row + tokens) * KV_HEADS * GROUP + q_heads) * PARTS + part
    else:
        own_block = position // BLOCK
        is_row = rows < GROUP
        is_idle = False
        positions = position + tl.zeros([ROWS], tl.int32)[:, None]
        num_there = 1
        q_heads = head * GROUP + rows
        q_rows = row
        place = (run * KV_HEADS * GROUP + q_heads).to(tl.int64) * PARTS + part
    own_stretch = own_block // STRETCH
    if (count == 0) | is_idle | (part > own_stretch):
        return
    table = tables_ptr + tl.load(fields + 3) * tables_stride
    own_page = tl.load(fields + 4)

    is_dim = dims[None, :] < HEAD_DIM
    is_out = is_row[:, None] & is_dim
    q_at = q_rows * q_stride + q_heads[:, None] * HEAD_DIM + dims[None, :]
    q = tl.load(q_ptr + q_at, mask=is_out, other=0.0)

    largest = tl.full([ROWS], float("-inf"), tl.float32)
    sums = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, WIDTH], tl.float32)

    in_slice = slots[:, None] * HEAD_DIM + dims[None, :]
    k_at = first_slice // KV_HEADS * BLOCK * HEAD_DIM + in_slice
    v_at = k_at + BLOCK * HEAD_DIM
    record = exact_ptr + head * (exact_bytes // KV_HEADS)
    slot_mask = (slots[:, None] >= 0) & is_dim
    if part == 0:
        page = record + tl.load(table).to(tl.int64) * exact_bytes
        keys = load_exact(page, k_at, slot_mask, EXACT_KIND)
        values = load_exact(page, v_at, slot_mask, EXACT_KIND)
        seen = slots[None, :] <= positions
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
        of_token = first + tl.arange(0, STEP * BLOCK)[None, :] // BLOCK
        seen = (of_token > 0) & (of_token < own_block) & (positions >= 0)
        largest, sums, acc = softmax_step(q, keys, values, seen, largest, sums, acc)

    if is_mine & (own_block > 0):
        if own_page >= 0:
            page = record + own_page * exact_bytes
            keys = load_exact(page, k_at, slot_mask, EXACT_KIND)
            values = load_exact(page, v_at, slot_mask, EXACT_KIND)
        else:
            token = own_block * BLOCK - position + slots
            at = (row + token)[:, None] * kv_stride + head * HEAD_DIM + dims[None, :]
            there = (token < num_there)[:, None] & is_dim
            keys = tl.load(k_ptr + at, mask=there, other=0.0).to(tl.float32)
            values = tl.load(v_ptr + at, mask=there, other=0.0).to(tl.float32)
        seen = own_block * BLOCK + slots[None, :] <= positions
        largest, sums, acc = softmax_step(q, keys, values, seen, largest, sums, acc)

    tl.store(sums_ptr + place[:, None] * HEAD_DIM + dims[None, :], acc, mask=is_out)
    tl.store(stats_ptr + place * 2, largest, mask=is_row)
    tl.store(stats_ptr + place * 2 + 1, sums, mask=is_row)


@triton.jit
def merge_kernel(
    sums_ptr, stats_ptr, runs_ptr, out_ptr, out_stride,
    BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr,
    STRETCH: tl.constexpr, BY_ROW: tl.constexpr,
):  # fmt: skip
    run, head, token = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    fields = runs_ptr + run * 6
    row, count, position = tl.load(fields), tl.load(fields + 1), tl.load(fields + 2)
    if token >= count:
        return
    row += token
    position += token
    parts, dims = tl.arange(0, PARTS), tl.arange(0, WIDTH)
    is_part = parts <= position // BLOCK // STRETCH
    owner = row if BY_ROW else run.to(tl.int64)
    place = (owner * tl.num_programs(1) + head) * PARTS + parts
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
    """What the parts of up to `max_rows` rows leave for the merge."""

    sums: Tensor
    """[max_rows, heads, parts, head_dim] float32: values times weights"""
    stats: Tensor
    """[max_rows, heads, parts, 2] float32: largest score, sum of weights"""

    @classmethod
    def allocate(
        cls, max_rows: int, num_heads: int, head_dim: int, device: torch.device
    ) -> "Partials":
        parts = tiles_of(device_kind(device), head_dim).decode.parts
        shape = (max_rows, num_heads, parts)
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
    *,
    max_run_tokens: int = 1,
    is_invariant: bool = False,
) -> None:
    """As `engine.kernels.gpu.attention.attention`, of runs of one token each (or none: nothing is
    read or written for those). `partials` is scratch memory, for at least as many rows.

    With `is_invariant` runs may be longer, if they start with a block, and a row's bits are the
    same in all of them. `partials` then has to be for as many rows as q has.
    """
    _, num_heads, head_dim = q.shape
    tiles = tiles_of(device_kind(q.device), head_dim)
    check_inputs(q, k, v, runs, tables, layout, out)
    assert is_invariant or max_run_tokens == 1
    assert (len(q) if is_invariant else len(runs)) <= len(partials.sums)
    assert partials.sums.shape[1:] == (num_heads, tiles.decode.parts, head_dim)
    if not len(runs):
        return
    group, parts = num_heads // layout.num_kv_heads, tiles.decode.parts
    constants, num_warps = constants_of(layout, group, tiles, is_invariant=is_invariant)
    num_tiles = 1
    if max_run_tokens > 1:
        of_block = triton.cdiv(layout.block_size, constants["ROWS"] // group)
        num_tiles = triton.cdiv(max_run_tokens, layout.block_size) * of_block
    decode_kernel[(len(runs), layout.num_kv_heads, parts * num_tiles)](
        q, q.stride(0), k, v, k.stride(0), partials.sums, partials.stats, runs, tables,
        tables.stride(0), *page_arguments(packed, exact, layout, offsets, layer),
        **constants, num_warps=num_warps,
    )  # fmt: skip
    merge_kernel[(len(runs), num_heads, max_run_tokens)](
        partials.sums, partials.stats, runs, out, out.stride(0),
        BLOCK=layout.block_size, HEAD_DIM=head_dim, WIDTH=constants["WIDTH"], PARTS=parts,
        STRETCH=constants["STRETCH"], BY_ROW=is_invariant,
    )  # fmt: skip


def constants_of(
    layout: PageLayout, group: int, tiles: Tiles, *, is_invariant: bool
) -> tuple[dict[str, int], int]:
    """Of `decode_kernel`, and its warps."""
    block_size, tile = layout.block_size, tiles.invariant if is_invariant else tiles.decode
    rows = min(tiles.invariant.rows, block_size * group) if is_invariant else 1
    constants = page_constants(layout) | {
        "GROUP": group,
        "ROWS": max(16, triton.next_power_of_2(max(rows, group))),
        "PARTS": tiles.decode.parts,
        "STRETCH": tiles.decode.stretch_tokens // block_size,
        "STEP": step_of(tile.step_tokens, block_size),
        "BY_ROW": is_invariant,
    }
    assert constants["STRETCH"] % constants["STEP"] == 0
    return constants, tile.num_warps
