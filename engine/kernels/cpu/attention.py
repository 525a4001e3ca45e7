"""Paged attention: the same code for chunks and for decode tokens.

One call serves one KV head and a run of consecutive query tokens of one request. It visits blocks
in ascending order; block 0 and a query's own block are read exact, every other block packed. Each
block is loaded once for the run, in granules of 16 keys, and every query row that sees it takes one
step of an online softmax, whose arithmetic depends on nothing but the row and the keys. Rows are
(token, head of the group).
"""

from typing import NamedTuple

import numpy as np
from numba import njit
from torch import Tensor

from common.pages import PageLayout
from engine.kernels.cpu.byte_tile import accumulate_bytes, is_byte, is_finite, score_bytes
from engine.kernels.cpu.matmul import F32_WEIGHTS, tile
from engine.kernels.cpu.pages import (
    block_offset,
    byte_scale,
    bytes_of,
    exact_slice,
    load_exact,
    load_packed,
    packed_slice,
    pages_of,
    scale_place,
    transpose_rows,
)
from engine.kernels.cpu.simd import (
    add,
    div,
    exp,
    get_f32,
    keep_first,
    lane,
    largest,
    load,
    maximum,
    prefetch,
    put_f32,
    splat,
    store,
    sub,
    total,
)
from engine.kernels.offsets import Offsets

GRANULE = 16


class Run(NamedTuple):
    """Query tokens of one call, and where their rows stand: addresses, bytes from row to row."""

    q_rows: int  # first token's q, of the first head of the group
    k_rows: int  # first token's K, rounded to the exact form
    v_rows: int
    q_stride: int
    kv_stride: int
    out_rows: int
    out_stride: int
    num_tokens: int
    num_after: int  # tokens of the same chunk that follow
    position: int  # of the first token
    own_page: int  # exact page of the open block; -1: the own block is in the rows


class State(NamedTuple):
    """Scratch of one call: per row q, output, scores, and the softmax's running numbers."""

    q: int  # [rows, head_dim]
    out: int  # [rows, head_dim]
    scores: int  # [rows, 16]
    factors: int  # [rows]
    largests: int  # [rows]
    sums: int  # [rows]
    plain: int  # [block_size, head_dim]: K before it is transposed
    keys: int  # [block_size / 16, head_dim, 16]
    values: int  # [block_size, head_dim]
    offset: int  # [head_dim]


def scratch_floats(num_tokens: int, group: int, head_dim: int, block_size: int) -> int:
    """Floats of scratch that one thread needs for runs of up to `num_tokens`."""
    rows = num_tokens * group
    return rows * (2 * head_dim + GRANULE + 3) + (3 * block_size + 1) * head_dim


@njit(nogil=True)
def _lay_out(at, rows, head_dim, block_size):
    q = at
    out = q + rows * head_dim * 4
    scores = out + rows * head_dim * 4
    factors = scores + rows * GRANULE * 4
    largests = factors + rows * 4
    sums = largests + rows * 4
    plain = sums + rows * 4
    keys = plain + block_size * head_dim * 4
    values = keys + block_size * head_dim * 4
    offset = values + block_size * head_dim * 4
    return State(q, out, scores, factors, largests, sums, plain, keys, values, offset)


@njit(nogil=True)
def _score(q, rows, head_dim, keys, out):
    """out[rows, 16] = q[rows, head_dim] @ keys[head_dim, 16]."""
    step, r = head_dim * 4, 0
    while r < rows:
        at, to = q + r * step, out + r * 64
        if r + 6 <= rows:
            tile(at, step, keys, 0, 64, head_dim, to, 64, 0, 0, 0, 6, 1, F32_WEIGHTS)
            r += 6
        elif r + 3 <= rows:
            tile(at, step, keys, 0, 64, head_dim, to, 64, 0, 0, 0, 3, 1, F32_WEIGHTS)
            r += 3
        else:
            tile(at, step, keys, 0, 64, head_dim, to, 64, 0, 0, 0, 1, 1, F32_WEIGHTS)
            r += 1


@njit(nogil=True)
def _accumulate(weights, rows, values, head_dim, out, factors):
    """out[rows, head_dim] = out * factors + weights[rows, 16] @ values[16, head_dim]."""
    step = head_dim * 4
    for d in range(0, step, 64):
        r = 0
        while r < rows:
            at, v, to, f = weights + r * 64, values + d, out + r * step + d, factors + r * 4
            if r + 6 <= rows:
                tile(at, 64, v, 0, step, GRANULE, to, step, f, 0, 0, 6, 1, F32_WEIGHTS)
                r += 6
            elif r + 3 <= rows:
                tile(at, 64, v, 0, step, GRANULE, to, step, f, 0, 0, 3, 1, F32_WEIGHTS)
                r += 3
            else:
                tile(at, 64, v, 0, step, GRANULE, to, step, f, 0, 0, 1, 1, F32_WEIGHTS)
                r += 1


@njit(nogil=True)
def _softmax_step(scores, visible, largest_at, sum_at, factor_at):
    """One row's scores of 16 keys, the first `visible` of which count, become weights."""
    old = get_f32(largest_at)
    a, b = load(scores), load(scores + 32)
    if visible < GRANULE:
        lowest = splat(np.float32(-np.inf))
        a, b = keep_first(a, visible, lowest), keep_first(b, visible - 8, lowest)
    new = max(old, largest(maximum(a, b)))
    top = splat(new)
    a, b = exp(sub(a, top)), exp(sub(b, top))
    store(scores, a)
    store(scores + 32, b)
    factor = np.float32(1.0) if new == old else lane(exp(sub(splat(old), top)), 0)
    put_f32(largest_at, new)
    put_f32(sum_at, get_f32(sum_at) * factor + total(add(a, b)))
    put_f32(factor_at, factor)


@njit(nogil=True)
def _visit(state, first, last, group, head_dim, position, block_start, block_size):
    """Query tokens [first, last) of the run see the loaded block; the run begins at `position`."""
    first_row, rows = first * group, (last - first) * group
    q, out = state.q + first_row * head_dim * 4, state.out + first_row * head_dim * 4
    largests, sums = state.largests + first_row * 4, state.sums + first_row * 4
    for granule in range(0, block_size, GRANULE):
        if block_start + granule >= position + last:
            return
        offset = granule * head_dim * 4
        _score(q, rows, head_dim, state.keys + offset, state.scores)
        for r in range(rows):
            seen = position + first + r // group + 1 - block_start - granule
            visible = min(max(seen, 0), GRANULE)
            at = r * 4
            _softmax_step(
                state.scores + r * 64, visible, largests + at, sums + at, state.factors + at
            )
        _accumulate(state.scores, rows, state.values + offset, head_dim, out, state.factors)


class Slices(NamedTuple):
    """Where one head's K and V of a layer lie in a page: bytes from its start. Found once for all
    blocks of a run.
    """

    packed_k: int
    packed_v: int
    scale_k: int
    scale_v: int
    exact_k: int
    exact_v: int


@njit(nogil=True)
def _slices(slice_index, pages):
    v_slice = slice_index + pages.num_heads
    return Slices(
        packed_slice(0, slice_index, pages),
        packed_slice(0, v_slice, pages),
        scale_place(0, slice_index, pages),
        scale_place(0, v_slice, pages),
        exact_slice(0, slice_index, pages),
        exact_slice(0, v_slice, pages),
    )


@njit(nogil=True)
def _is_plain(page_number, pages, at):
    """Whether one head's K and V in a packed page are of one byte each, and none is NaN."""
    if not is_byte(pages.packed_kind):
        return False
    size = pages.block_size * pages.head_dim
    page = pages.packed + page_number * pages.packed_bytes
    kind = pages.packed_kind
    return is_finite(kind, page + at.packed_k, size) and is_finite(kind, page + at.packed_v, size)


@njit(nogil=True)
def _visit_bytes(state, page_number, pages, slice_index, at, block, group):
    """The run's only token sees a packed page of one-byte elements, which are widened on the way.

    Bits are those of `_load_packed_page` and `_visit`.
    """
    head_dim, kind, v_slice = pages.head_dim, pages.packed_kind, slice_index + pages.num_heads
    page = pages.packed + page_number * pages.packed_bytes
    k_offset = block_offset(pages, slice_index, block, state.offset)
    k_scale = byte_scale(page + at.scale_k, kind)
    v_offset = block_offset(pages, v_slice, block, state.offset)
    v_scale = byte_scale(page + at.scale_v, kind)
    for granule in range(0, pages.block_size * head_dim, GRANULE * head_dim):
        keys = page + at.packed_k + granule
        score_bytes(
            kind, state.q, group, keys, head_dim, k_scale, k_offset, state.keys, state.scores
        )
        for r in range(group):
            of_row = r * 4
            _softmax_step(
                state.scores + r * 64,
                GRANULE,
                state.largests + of_row,
                state.sums + of_row,
                state.factors + of_row,
            )
        values = page + at.packed_v + granule
        accumulate_bytes(
            kind, state.scores, group, values, head_dim, v_scale, v_offset, state.out,
            state.factors,
        )  # fmt: skip


@njit(nogil=True)
def _load_exact_page(page_number, pages, at, state):
    """K (transposed) and V of one head from an exact page."""
    size = pages.block_size * pages.head_dim
    page = pages.exact + page_number * pages.exact_bytes
    load_exact(page + at.exact_k, size, pages.exact_kind, state.plain)
    load_exact(page + at.exact_v, size, pages.exact_kind, state.values)
    transpose_rows(state.plain, pages.head_dim * 4, pages.block_size, pages.head_dim, state.keys)


@njit(nogil=True)
def _load_packed_page(page_number, pages, slice_index, block, state):
    """The same from the packed page that holds block number `block`."""
    page = pages.packed + page_number * pages.packed_bytes
    k_offset = block_offset(pages, slice_index, block, state.offset)
    load_packed(page, slice_index, pages, k_offset, state.plain)
    v_slice = slice_index + pages.num_heads
    v_offset = block_offset(pages, v_slice, block, state.offset)
    load_packed(page, v_slice, pages, v_offset, state.values)
    transpose_rows(state.plain, pages.head_dim * 4, pages.block_size, pages.head_dim, state.keys)


@njit(nogil=True)
def _load_own_rows(run, first, pages, state):
    """The own block from the step's rows, whose token `first` of the run is the block's first.

    Slots that have no token yet are zero, as in a page.
    """
    row_bytes = pages.head_dim * 4
    count = min(pages.block_size, run.num_tokens + run.num_after - first)
    zero = splat(np.float32(0.0))
    for t in range(pages.block_size):
        row, at = (first + t) * run.kv_stride, t * row_bytes
        for i in range(0, row_bytes, 32):
            store(state.plain + at + i, load(run.k_rows + row + i) if t < count else zero)
            store(state.values + at + i, load(run.v_rows + row + i) if t < count else zero)
    transpose_rows(state.plain, row_bytes, pages.block_size, pages.head_dim, state.keys)


@njit(nogil=True)
def _prefetch_slices(page, pages, at):
    """Ask for K, V and scales of one head of a packed page, before they are needed."""
    num_bytes = bytes_of(pages.block_size * pages.head_dim, pages.packed_kind)
    prefetch(page + at.scale_k)
    prefetch(page + at.scale_v)
    for i in range(0, num_bytes, 64):
        prefetch(page + at.packed_k + i)
        prefetch(page + at.packed_v + i)


@njit(nogil=True)
def _begin(run, state, row_bytes):
    """Gather q, clear outputs and running numbers. `row_bytes` holds a token's group of heads."""
    zero = splat(np.float32(0.0))
    for t in range(run.num_tokens):
        for i in range(0, row_bytes, 32):
            store(state.q + t * row_bytes + i, load(run.q_rows + t * run.q_stride + i))
            store(state.out + t * row_bytes + i, zero)


@njit(nogil=True)
def _finish(run, state, group, head_dim):
    """Divide by the sums and hand the rows over."""
    for t in range(run.num_tokens):
        for g in range(group):
            row = t * group + g
            divisor = splat(get_f32(state.sums + row * 4))
            source = state.out + row * head_dim * 4
            target = run.out_rows + t * run.out_stride + g * head_dim * 4
            for i in range(0, head_dim * 4, 32):
                store(target + i, div(load(source + i), divisor))


@njit(nogil=True)
def attend(run, table, pages, slice_index, group, scratch):
    """Attention of a `Run` for one KV head and its group of `group` query heads.

    `slice_index`, layer * 2 * kv heads + head, is the number of the head's K slice in a page; its V
    slice comes kv heads later. `table` [blocks] is the request's block table.
    """
    head_dim, block_size = pages.head_dim, pages.block_size
    position, count = run.position, run.num_tokens
    state = _lay_out(scratch, count * group, head_dim, block_size)
    at = _slices(slice_index, pages)
    _begin(run, state, group * head_dim * 4)
    for r in range(count * group):
        put_f32(state.largests + r * 4, np.float32(-np.inf))
        put_f32(state.sums + r * 4, np.float32(0.0))
    last_block = (position + count - 1) // block_size
    for block in range(last_block + 1):
        start = block * block_size
        if block + 1 < last_block or (block < last_block and count > 1):
            page = pages.packed + table[block + 1] * pages.packed_bytes
            _prefetch_slices(page, pages, at)
        first = min(max(start - position, 0), count)  # tokens [first, last) stand in this block
        last = min(max(start + block_size - position, 0), count)
        if block == 0:
            _load_exact_page(table[0], pages, at, state)
            _visit(state, 0, count, group, head_dim, position, start, block_size)
            continue
        if last < count and count == 1 and _is_plain(table[block], pages, at):
            _visit_bytes(state, table[block], pages, slice_index, at, block, group)
            continue
        if last < count:
            _load_packed_page(table[block], pages, slice_index, block, state)
            _visit(state, last, count, group, head_dim, position, start, block_size)
        if first < last:
            if run.own_page >= 0:
                _load_exact_page(run.own_page, pages, at, state)
            else:
                _load_own_rows(run, start - position, pages, state)
            _visit(state, first, last, group, head_dim, position, start, block_size)
    _finish(run, state, group, head_dim)


@njit(nogil=True)
def _attend_all(q, k, v, runs, tables, layer, pages, group, scratch, out):
    head_bytes = pages.head_dim * 4
    q_bytes, kv_bytes = pages.num_heads * group * head_bytes, pages.num_heads * head_bytes
    for index in range(len(runs)):
        row, count, position, table, own_page, num_after = runs[index]
        for head in range(pages.num_heads):
            q_at = row * q_bytes + head * group * head_bytes
            kv_at = row * kv_bytes + head * head_bytes
            run = Run(
                q + q_at, k + kv_at, v + kv_at, q_bytes, kv_bytes, out + q_at, q_bytes,
                count, num_after, position, own_page,
            )  # fmt: skip
            slice_index = layer * 2 * pages.num_heads + head
            attend(run, tables[table], pages, slice_index, group, scratch)


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
    """As `engine.kernels.gpu.attention.attention`, on contiguous fp32 tensors."""
    assert all(tensor.is_contiguous() for tensor in (q, k, v, runs, tables, out))
    group = q.shape[1] // layout.num_kv_heads
    size = scratch_floats(max_run_tokens, group, layout.head_dim, layout.block_size)
    scratch = np.empty(size, dtype=np.float32)
    _attend_all(
        q.data_ptr(), k.data_ptr(), v.data_ptr(), runs.numpy(), tables.numpy(), layer,
        pages_of(packed, exact, layout, offsets), group, scratch.ctypes.data, out.data_ptr(),
    )  # fmt: skip
