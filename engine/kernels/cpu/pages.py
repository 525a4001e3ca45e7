"""Page kernels: store rows into exact pages, seal a block into its packed page, load blocks for
attention, checksums.

All work on one (layer, K or V, head) slice, [block_size, head_dim], of one page, given by address;
its place is `exact_slice` or `packed_slice`.
Element kinds are numbers of `ElementKind`. Sealing reads values that are already rounded to the
exact form, and is done once per block. What a quantised block holds is its distance from the
block's offset (engine/kernels/offsets.py); reading adds the offset in the same multiply-add that
applies the scale, so it costs nothing there.
"""

from typing import NamedTuple

import numpy as np
from numba import njit, types
from torch import Tensor

from common.codecs import ElementKind
from common.pages import PageKind, PageLayout
from engine.kernels.cpu.simd import (
    add,
    bits_of,
    div,
    finite_or_zero,
    finite_size,
    float_of,
    fma,
    get_f32,
    get_u8,
    get_u16,
    get_u64,
    if_zero,
    keep_above,
    lane,
    largest,
    load,
    load_bf16,
    load_int4,
    maximum,
    minimum,
    mul,
    put_f32,
    put_u8,
    put_u16,
    put_u64,
    round_bf16,
    splat,
    store,
    store_bf16,
    store_e3m4,
    store_e4m3,
    store_e5m2,
    store_int4,
    store_int8,
    sub,
    total,
    transpose8,
    widen_e3m4,
    widen_e4m3,
    widen_e5m2,
    widen_int8,
)
from engine.kernels.offsets import Offsets

FP32, BF16, E3M4, E4M3, E5M2, INT8, INT4 = (int(kind) for kind in ElementKind)


class Pages(NamedTuple):
    """Both pools as kernels see them: addresses, page sizes, element kinds, shape of a slice."""

    packed: int
    packed_bytes: int  # of a page
    packed_record: int  # of one KV head's part of it
    packed_kind: int
    scales_offset: int
    exact: int
    exact_bytes: int
    exact_record: int
    exact_kind: int
    num_heads: int  # KV heads
    block_size: int
    head_dim: int
    means: int  # offsets: [layers, 2, KV heads, head_dim] fp32
    block_cos: int  # [blocks, head_dim / 2]
    block_sin: int
    k_scale_bytes: int  # of one head
    v_scale_bytes: int


NEUTRAL_SCALE = 127
MAX_SCALE = 237  # 2^110: larger values saturate
SMALLEST = np.float32(2.0**-126)  # a normal number
INT4_LIMIT = np.float32(1e38)  # larger values saturate


def pages_of(packed: Tensor, exact: Tensor, layout: PageLayout, offsets: Offsets) -> Pages:
    """A pool's tensors as kernels see them; whoever calls keeps them alive."""
    return Pages(
        packed=packed.data_ptr(),
        packed_bytes=layout.packed_page_bytes,
        packed_record=layout.record_bytes(PageKind.PACKED),
        packed_kind=int(layout.codec.packed),
        scales_offset=layout.scales_offset,
        exact=exact.data_ptr(),
        exact_bytes=layout.exact_page_bytes,
        exact_record=layout.record_bytes(PageKind.EXACT),
        exact_kind=int(layout.codec.exact),
        num_heads=layout.num_kv_heads,
        block_size=layout.block_size,
        head_dim=layout.head_dim,
        means=offsets.means.data_ptr(),
        block_cos=offsets.cos.data_ptr(),
        block_sin=offsets.sin.data_ptr(),
        k_scale_bytes=layout.scale_bytes[0],
        v_scale_bytes=layout.scale_bytes[1],
    )


@njit(nogil=True)
def block_offset(pages, slice_index, block, out):
    """Address of the offset [head_dim] of a slice of block number `block`; K's is made at `out`."""
    mean = pages.means + slice_index * pages.head_dim * 4
    if slice_index // pages.num_heads % 2 == 1:
        return mean
    half = pages.head_dim * 2
    cos, sin = pages.block_cos + block * half, pages.block_sin + block * half
    for i in range(0, half, 32):
        a, b, c, s = load(mean + i), load(mean + half + i), load(cos + i), load(sin + i)
        store(out + i, sub(mul(a, c), mul(b, s)))
        store(out + half + i, add(mul(b, c), mul(a, s)))
    return out


@njit(nogil=True)
def bytes_of(count, kind):
    """Of so many elements."""
    if kind == FP32:
        return count * 4
    if kind == BF16:
        return count * 2
    return count // 2 if kind == INT4 else count


@njit(nogil=True)
def exact_slice(page, slice_index, pages):
    """Address of a slice in an exact page. `slice_index` is (layer * 2 + 0 for K, 1 for V) * KV
    heads + head.
    """
    head, number = slice_index % pages.num_heads, slice_index // pages.num_heads
    size = bytes_of(pages.block_size * pages.head_dim, pages.exact_kind)
    return page + head * pages.exact_record + number * size


@njit(nogil=True)
def packed_slice(page, slice_index, pages):
    """The same in a packed page."""
    head, number = slice_index % pages.num_heads, slice_index // pages.num_heads
    size = bytes_of(pages.block_size * pages.head_dim, pages.packed_kind)
    return page + head * pages.packed_record + number * size


@njit(nogil=True)
def scale_place(page, slice_index, pages):
    """Address of a slice's scales in a packed page."""
    head, number = slice_index % pages.num_heads, slice_index // pages.num_heads
    at = page + head * pages.packed_record + pages.scales_offset
    at += number // 2 * (pages.k_scale_bytes + pages.v_scale_bytes)
    return at + number % 2 * pages.k_scale_bytes


@njit(nogil=True)
def store_exact(row, head_dim, at, kind):
    """One token's K or V of one head into its place in an exact page."""
    if kind == FP32:
        for i in range(0, head_dim, 8):
            store(at + i * 4, load(row + i * 4))
    else:
        for i in range(0, head_dim, 8):
            store_bf16(at + i * 2, load(row + i * 4))


@njit(nogil=True)
def zero_bytes(at, num_bytes):
    for i in range(0, num_bytes, 8):
        put_u64(at + i, np.uint64(0))


@njit(nogil=True)
def copy_bytes(source, target, num_bytes):
    for i in range(0, num_bytes, 8):
        put_u64(target + i, get_u64(source + i))


@njit(nogil=True)
def scale_code(amax, kind):
    """E8M0 code of the smallest power of two s with amax / s <= the largest number of `kind`; 1 for
    a block of zeros.
    """
    exponent, mantissa = 15, 0x600000  # 1.75 * 2^15
    if kind == E3M4:
        exponent, mantissa = 4, 0x700000
    elif kind == E4M3:
        exponent = 8
    if amax == np.float32(0.0):
        return np.int64(NEUTRAL_SCALE)
    bits = bits_of(amax)
    code = (bits >> 23) - exponent
    if (bits & 0x7FFFFF) > mantissa:
        code += 1
    return min(max(code, np.int64(1)), np.int64(MAX_SCALE))


@njit(nogil=True)
def scale_of(code):
    """The power of two with this E8M0 code (1 to 254)."""
    return float_of(np.int64(code) << 23)


@njit(nogil=True)
def _left(rows, row_stride, t, i, offset):
    """Eight channels from `i` on of token `t`, less their offset."""
    return sub(load(rows + t * row_stride + i * 4), load(offset + i * 4))


@njit(nogil=True)
def _largest_left(rows, row_stride, pages, offset):
    biggest = splat(np.float32(0.0))
    for t in range(pages.block_size):
        for i in range(0, pages.head_dim, 8):
            biggest = maximum(finite_size(_left(rows, row_stride, t, i, offset)), biggest)
    return largest(biggest)


@njit(nogil=True)
def _seal_fp8(rows, row_stride, pages, at, scale_at, offset):
    kind = pages.packed_kind
    amax = _largest_left(rows, row_stride, pages, offset)
    code = scale_code(amax, kind)
    put_u8(scale_at, np.uint8(code))
    inverse = splat(scale_of(254 - code))
    for t in range(pages.block_size):
        for i in range(0, pages.head_dim, 8):
            value = mul(_left(rows, row_stride, t, i, offset), inverse)
            to = at + t * pages.head_dim + i
            if kind == E3M4:
                store_e3m4(to, value)
            elif kind == E4M3:
                store_e4m3(to, value)
            else:
                store_e5m2(to, value)


@njit(nogil=True)
def _seal_int8(rows, row_stride, pages, at, scale_at, offset):
    scale = _largest_left(rows, row_stride, pages, offset) / np.float32(127.0)
    if scale < SMALLEST:
        scale = np.float32(1.0)
    put_f32(scale_at, scale)
    divisor = splat(scale)
    for t in range(pages.block_size):
        for i in range(0, pages.head_dim, 8):
            value = div(_left(rows, row_stride, t, i, offset), divisor)
            store_int8(at + t * pages.head_dim + i, value)


@njit(nogil=True)
def _int4_minimum(low):
    """Never minus zero, so that it does not depend on the order of the values."""
    return round_bf16(add(maximum(low, splat(-INT4_LIMIT)), splat(np.float32(0.0))))


@njit(nogil=True)
def _int4_factor(low, high, odd):
    """Of fifteen steps from a minimum; `odd` is 0, or NaN when a value was not finite."""
    span = sub(minimum(high, splat(INT4_LIMIT)), low)
    factor = round_bf16(div(span, splat(np.float32(15.0))))
    factor = keep_above(factor, splat(SMALLEST), splat(np.float32(1.0)))
    return if_zero(odd, factor, splat(np.float32(np.nan)))


@njit(nogil=True)
def _put_int4(at, left, low, factor):
    steps = div(sub(left, low), factor)
    steps = maximum(minimum(steps, splat(np.float32(15.0))), splat(np.float32(0.0)))
    store_int4(at, steps)


@njit(nogil=True)
def _seal_int4_k(rows, row_stride, pages, at, scale_at, offset):
    """A factor and a minimum for each channel."""
    minima = scale_at + pages.head_dim * 2
    for i in range(0, pages.head_dim, 8):
        left = _left(rows, row_stride, 0, i, offset)
        low = high = finite_or_zero(left)
        odd = sub(left, left)
        for t in range(1, pages.block_size):
            left = _left(rows, row_stride, t, i, offset)
            finite = finite_or_zero(left)
            low, high = minimum(finite, low), maximum(finite, high)
            odd = add(odd, sub(left, left))
        low = _int4_minimum(low)
        factor = _int4_factor(low, high, odd)
        store_bf16(scale_at + i * 2, factor)
        store_bf16(minima + i * 2, low)
        for t in range(pages.block_size):
            left = _left(rows, row_stride, t, i, offset)
            _put_int4(at + (t * pages.head_dim + i) // 2, left, low, factor)


@njit(nogil=True)
def _seal_int4_v(rows, row_stride, pages, at, scale_at, offset):
    """A factor and a minimum for each token."""
    minima, zero = scale_at + pages.block_size * 2, splat(np.float32(0.0))
    for t in range(pages.block_size):
        left = _left(rows, row_stride, t, 0, offset)
        low = high = finite_or_zero(left)
        odd = sub(left, left)
        for i in range(8, pages.head_dim, 8):
            left = _left(rows, row_stride, t, i, offset)
            finite = finite_or_zero(left)
            low, high = minimum(finite, low), maximum(finite, high)
            odd = add(odd, sub(left, left))
        low = _int4_minimum(splat(-largest(sub(zero, low))))
        factor = _int4_factor(low, splat(largest(high)), splat(total(odd)))
        put_u16(scale_at + t * 2, np.uint16(bits_of(lane(factor, 0)) >> 16))
        put_u16(minima + t * 2, np.uint16(bits_of(lane(low, 0)) >> 16))
        for i in range(0, pages.head_dim, 8):
            left = _left(rows, row_stride, t, i, offset)
            _put_int4(at + (t * pages.head_dim + i) // 2, left, low, factor)


@njit(nogil=True)
def seal(rows, row_stride, pages, page, slice_index, offset):
    """Rows [block_size, head_dim] fp32, less the floats [head_dim] at `offset`, into a slice of the
    packed page at address `page`, with their scales. A codec without scales takes the rows as they
    are.
    """
    block_size, head_dim, kind = pages.block_size, pages.head_dim, pages.packed_kind
    at = packed_slice(page, slice_index, pages)
    scale_at = scale_place(page, slice_index, pages)
    if kind < E3M4:
        for t in range(block_size):
            store_exact(rows + t * row_stride, head_dim, at + bytes_of(t * head_dim, kind), kind)
    elif kind == INT8:
        _seal_int8(rows, row_stride, pages, at, scale_at, offset)
    elif kind == INT4:
        if slice_index // pages.num_heads % 2 == 0:
            _seal_int4_k(rows, row_stride, pages, at, scale_at, offset)
        else:
            _seal_int4_v(rows, row_stride, pages, at, scale_at, offset)
    else:
        _seal_fp8(rows, row_stride, pages, at, scale_at, offset)


@njit(nogil=True)
def load_exact(at, count, kind, out):
    """`count` elements of a page, stored as fp32 or bf16, as fp32 at `out`."""
    if kind == BF16:
        for i in range(0, count, 8):
            store(out + i * 4, load_bf16(at + i * 2))
    else:
        for i in range(0, count, 8):
            store(out + i * 4, load(at + i * 4))


@njit(nogil=True)
def _load_int4_k(at, scale_at, pages, offset, out):
    minima = scale_at + pages.head_dim * 2
    for i in range(0, pages.head_dim, 8):
        factor = load_bf16(scale_at + i * 2)
        base = add(load_bf16(minima + i * 2), load(offset + i * 4))
        for t in range(pages.block_size):
            place = t * pages.head_dim + i
            store(out + place * 4, fma(load_int4(at + place // 2), factor, base))


@njit(nogil=True)
def _load_int4_v(at, scale_at, pages, offset, out):
    minima = scale_at + pages.block_size * 2
    for t in range(pages.block_size):
        factor = splat(float_of(np.int64(get_u16(scale_at + t * 2)) << 16))
        low = splat(float_of(np.int64(get_u16(minima + t * 2)) << 16))
        for i in range(0, pages.head_dim, 8):
            place = t * pages.head_dim + i
            base = add(low, load(offset + i * 4))
            store(out + place * 4, fma(load_int4(at + place // 2), factor, base))


@njit(nogil=True)
def byte_scale(scale_at, kind):
    """What an element of one byte is multiplied by."""
    if kind == INT8:
        return get_f32(scale_at)
    scale = scale_of(np.int64(get_u8(scale_at)))
    if kind == E3M4:
        return scale * np.float32(4096.0)
    return scale * np.float32(256.0) if kind == E4M3 else scale


@njit(nogil=True)
def load_packed(page, slice_index, pages, offset, out):
    """A slice of a packed page as fp32 rows [block_size, head_dim] at `out`, the floats [head_dim]
    at `offset` added when it is quantised.
    """
    size, kind = pages.block_size * pages.head_dim, pages.packed_kind
    at = packed_slice(page, slice_index, pages)
    scale_at = scale_place(page, slice_index, pages)
    if kind == E3M4:
        factor = byte_scale(scale_at, kind)
        for row in range(0, size, pages.head_dim):
            for i in range(0, pages.head_dim, 16):
                widen_e3m4(at + row + i, factor, offset + i * 4, out + (row + i) * 4)
    elif kind == E4M3:
        factor = byte_scale(scale_at, kind)
        for row in range(0, size, pages.head_dim):
            for i in range(0, pages.head_dim, 16):
                widen_e4m3(at + row + i, factor, offset + i * 4, out + (row + i) * 4)
    elif kind == E5M2:
        factor = byte_scale(scale_at, kind)
        for row in range(0, size, pages.head_dim):
            for i in range(0, pages.head_dim, 16):
                widen_e5m2(at + row + i, factor, offset + i * 4, out + (row + i) * 4)
    elif kind == INT8:
        factor = byte_scale(scale_at, kind)
        for row in range(0, size, pages.head_dim):
            for i in range(0, pages.head_dim, 16):
                widen_int8(at + row + i, factor, offset + i * 4, out + (row + i) * 4)
    elif kind == INT4:
        if slice_index // pages.num_heads % 2 == 0:
            _load_int4_k(at, scale_at, pages, offset, out)
        else:
            _load_int4_v(at, scale_at, pages, offset, out)
    else:
        load_exact(at, size, kind, out)


@njit(nogil=True)
def transpose_rows(rows, row_stride, num_rows, head_dim, out):
    """Rows [num_rows, head_dim] as granules [num_rows / 16, head_dim, 16]."""
    for j in range(0, num_rows, 8):
        granule = out + (j // 16) * head_dim * 64 + (j % 16) * 4
        for d in range(0, head_dim, 8):
            transpose8(rows + j * row_stride + d * 4, row_stride, granule + d * 64, 64)


@njit(types.uint64(types.int64, types.int64), nogil=True, cache=True)
def checksum_of(at, num_bytes):
    """As `common.pages.checksum`: words times odd factors, the last word left out."""
    total = np.uint64(0)
    spread = np.uint64(0)
    for i in range(0, num_bytes - 8, 8):
        spread += np.uint64(0x9E3779B97F4A7C15)
        total += get_u64(at + i) * ((spread ^ (spread >> np.uint64(32))) | np.uint64(1))
    return total
