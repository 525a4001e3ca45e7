"""Paged attention: the same code for chunks and for decode tokens.

One call serves one KV head and a run of consecutive query tokens of one request. It visits blocks
in ascending order; block 0 and a query's own block are read exact, every other block packed. Each
block is loaded once for the run, in granules of 16 keys, and every query row that sees it takes one
step of an online softmax, whose arithmetic depends on nothing but the row and the keys. Rows are
(token, head of the group).
"""

import numpy as np
from numba import njit

from common.kernels.cpu.matmul import F32_WEIGHTS, tile
from common.kernels.cpu.pages import load_rows, read_scale, transpose_rows
from common.kernels.cpu.simd import (
    add,
    div,
    exp,
    get_f32,
    keep_first,
    lane,
    largest,
    load,
    maximum,
    put_f32,
    splat,
    store,
    sub,
    total,
)

GRANULE = 16
MAX_RUN_TOKENS = 64
"""Longest run of query tokens in one call; chunks are cut into such runs."""


@njit(nogil=True)
def scratch_floats(group, head_dim, block_size):
    """Floats of scratch that one thread needs."""
    rows = MAX_RUN_TOKENS * group
    return rows * (2 * head_dim + GRANULE + 3) + 3 * block_size * head_dim


@njit(nogil=True)
def _scores(q, rows, head_dim, keys, out):
    """out[rows, 16] = q[rows, head_dim] @ keys[head_dim, 16]."""
    step, r = head_dim * 4, 0
    while r + 6 <= rows:
        tile(q + r * step, step, keys, 0, 64, head_dim, out + r * 64, 64, 0, 6, 1, F32_WEIGHTS)
        r += 6
    while r + 3 <= rows:
        tile(q + r * step, step, keys, 0, 64, head_dim, out + r * 64, 64, 0, 3, 1, F32_WEIGHTS)
        r += 3
    while r < rows:
        tile(q + r * step, step, keys, 0, 64, head_dim, out + r * 64, 64, 0, 1, 1, F32_WEIGHTS)
        r += 1


@njit(nogil=True)
def _softmax_step(scores, visible, largest_at, sum_at, factor_at):
    """Scores of one row against 16 keys, of which the first `visible` count, become weights."""
    old = get_f32(largest_at)
    lowest = splat(np.float32(-np.inf))
    a, b = load(scores), load(scores + 32)
    if visible < GRANULE:
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
def _accumulate(weights, rows, values, head_dim, out, factors):
    """out[rows, head_dim] = out * factors + weights[rows, 16] @ values[16, head_dim]."""
    step = head_dim * 4
    for d in range(0, step, 64):
        r = 0
        while r + 6 <= rows:
            tile(
                weights + r * 64,
                64,
                values + d,
                0,
                step,
                GRANULE,
                out + r * step + d,
                step,
                factors + r * 4,
                6,
                1,
                F32_WEIGHTS,
            )
            r += 6
        while r + 3 <= rows:
            tile(
                weights + r * 64,
                64,
                values + d,
                0,
                step,
                GRANULE,
                out + r * step + d,
                step,
                factors + r * 4,
                3,
                1,
                F32_WEIGHTS,
            )
            r += 3
        while r < rows:
            tile(
                weights + r * 64,
                64,
                values + d,
                0,
                step,
                GRANULE,
                out + r * step + d,
                step,
                factors + r * 4,
                1,
                1,
                F32_WEIGHTS,
            )
            r += 1


@njit(nogil=True)
def _block_step(
    q, first, last, group, head_dim, position, block_start, block_size, keys, values, state
):
    """Query tokens [first, last) of the run against one loaded block. `position` is that of the
    run's first token.
    """
    scores, factors, largests, sums, out = state
    first_row, rows = first * group, (last - first) * group
    for granule in range(0, block_size, GRANULE):
        if block_start + granule > position + last - 1:
            break
        at = q + first_row * head_dim * 4
        _scores(at, rows, head_dim, keys + granule * head_dim * 4, scores)
        for r in range(rows):
            seen = position + first + r // group + 1 - block_start - granule
            place = (first_row + r) * 4
            _softmax_step(
                scores + r * 64,
                min(max(seen, 0), GRANULE),
                largests + place,
                sums + place,
                factors + r * 4,
            )
        _accumulate(
            scores, rows, values + granule * head_dim * 4, head_dim,
            out + first_row * head_dim * 4, factors,
        )  # fmt: skip


@njit(nogil=True)
def _load_page(k_at, v_at, k_scale, v_scale, kind, block_size, head_dim, plain, keys, values):
    load_rows(k_at, block_size * head_dim, kind, k_scale, plain)
    transpose_rows(plain, head_dim * 4, block_size, head_dim, keys)
    load_rows(v_at, block_size * head_dim, kind, v_scale, values)


@njit(nogil=True)
def _load_own_rows(k_rows, v_rows, row_stride, count, block_size, head_dim, plain, keys, values):
    """The own block from the step's rows; slots beyond `count` are zero, as in a page."""
    for t in range(block_size):
        for i in range(0, head_dim * 4, 32):
            at = t * head_dim * 4 + i
            if t < count:
                store(plain + at, load(k_rows + t * row_stride + i))
                store(values + at, load(v_rows + t * row_stride + i))
            else:
                store(plain + at, splat(np.float32(0.0)))
                store(values + at, splat(np.float32(0.0)))
    transpose_rows(plain, head_dim * 4, block_size, head_dim, keys)


@njit(nogil=True)
def attend(
    q_rows, k_rows, v_rows, row_stride, count, rows_after, position, own_page, table,
    group, head_dim, block_size, packed, packed_bytes, packed_kind, exact, exact_bytes, exact_kind,
    slice_index, num_heads, scales_offset, scratch, out_rows, out_stride,
):  # fmt: skip
    """Attention of `count` consecutive query tokens, the first at `position`, for one KV head.

    `q_rows` is the head group's q of the first token, `k_rows` and `v_rows` its K and V (already
    rounded), tokens `row_stride` apart; `rows_after` tokens of the same chunk follow the run.
    `own_page` is the exact page that holds the open block, or -1 when the own block's K and V stand
    in the rows. `slice_index` is (layer * 2) * kv heads + head: the K slice's number in a page; V's
    is `num_heads` further.
    """
    rows = count * group
    q = scratch
    acc = q + rows * head_dim * 4
    scores = acc + rows * head_dim * 4
    factors = scores + rows * GRANULE * 4
    largests = factors + rows * 4
    sums = largests + rows * 4
    plain = sums + rows * 4
    keys = plain + block_size * head_dim * 4
    values = keys + block_size * head_dim * 4
    state = (scores, factors, largests, sums, acc)
    for t in range(count):
        for i in range(0, group * head_dim * 4, 32):
            store(q + t * group * head_dim * 4 + i, load(q_rows + t * row_stride + i))
            store(acc + t * group * head_dim * 4 + i, splat(np.float32(0.0)))
    for r in range(rows):
        put_f32(largests + r * 4, np.float32(-np.inf))
        put_f32(sums + r * 4, np.float32(0.0))

    slice_elements = block_size * head_dim
    exact_slice = slice_elements * (4 if exact_kind == 0 else 2)
    packed_slice = slice_elements * (4 if packed_kind == 0 else (2 if packed_kind == 1 else 1))
    one = np.float32(1.0)
    for block in range((position + count - 1) // block_size + 1):
        start = block * block_size
        own_first = min(max(start - position, 0), count)
        own_last = min(max(start + block_size - position, 0), count)
        if block == 0:
            at = exact + table[0] * exact_bytes + slice_index * exact_slice
            _load_page(
                at,
                at + num_heads * exact_slice,
                one,
                one,
                exact_kind,
                block_size,
                head_dim,
                plain,
                keys,
                values,
            )
            _block_step(
                q, 0, count, group, head_dim, position, start, block_size, keys, values, state
            )
            continue
        if own_last < count:
            at = packed + table[block] * packed_bytes
            k_scale, v_scale = one, one
            if packed_kind == 2:
                k_scale = read_scale(at + scales_offset + slice_index)
                v_scale = read_scale(at + scales_offset + slice_index + num_heads)
            at += slice_index * packed_slice
            _load_page(
                at,
                at + num_heads * packed_slice,
                k_scale,
                v_scale,
                packed_kind,
                block_size,
                head_dim,
                plain,
                keys,
                values,
            )
            _block_step(
                q,
                own_last,
                count,
                group,
                head_dim,
                position,
                start,
                block_size,
                keys,
                values,
                state,
            )
        if own_first < own_last:
            if own_page >= 0:
                at = exact + own_page * exact_bytes + slice_index * exact_slice
                _load_page(
                    at,
                    at + num_heads * exact_slice,
                    one,
                    one,
                    exact_kind,
                    block_size,
                    head_dim,
                    plain,
                    keys,
                    values,
                )
            else:
                row = (start - position) * row_stride
                _load_own_rows(
                    k_rows + row,
                    v_rows + row,
                    row_stride,
                    min(block_size, count + rows_after - (start - position)),
                    block_size,
                    head_dim,
                    plain,
                    keys,
                    values,
                )
            _block_step(
                q,
                own_first,
                own_last,
                group,
                head_dim,
                position,
                start,
                block_size,
                keys,
                values,
                state,
            )

    for t in range(count):
        for g in range(group):
            r = t * group + g
            divisor = splat(get_f32(sums + r * 4))
            for i in range(0, head_dim * 4, 32):
                store(
                    out_rows + t * out_stride + g * head_dim * 4 + i,
                    div(load(acc + r * head_dim * 4 + i), divisor),
                )
