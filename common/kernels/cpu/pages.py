"""Page kernels: store rows into exact pages, seal a block into its packed page, load blocks for
attention, checksums.

All work on one (layer, K or V, head) slice, [block_size, head_dim], of one page, given by address.
Element kinds are numbers of `ElementKind`. Sealing reads values that are already rounded to the
exact form, and is done once per block. What a quantised block holds is its distance from the
block's offset (common/kernels/offsets.py); reading adds the offset in the same multiply-add that
applies the scale, so it costs nothing there.
"""

from typing import NamedTuple

import numpy as np
from numba import njit, types
from torch import Tensor

from common.kernels.cpu.simd import (
    add,
    bits_of,
    finite_size,
    float_of,
    get_u8,
    get_u64,
    largest,
    load,
    load_bf16,
    maximum,
    mul,
    put_u8,
    put_u64,
    splat,
    store,
    store_bf16,
    store_e4m3,
    sub,
    transpose8,
    widen_e4m3,
)
from common.kernels.offsets import Offsets
from common.pages import ElementKind, PageLayout

FP32, BF16, E4M3 = int(ElementKind.FP32), int(ElementKind.BF16), int(ElementKind.E4M3)


class Pages(NamedTuple):
    """Both pools as kernels see them: addresses, page sizes, element kinds, shape of a slice."""

    packed: int
    packed_bytes: int
    packed_kind: int
    scales_offset: int
    exact: int
    exact_bytes: int
    exact_kind: int
    num_heads: int  # KV heads
    block_size: int
    head_dim: int
    means: int  # offsets: [layers, 2, KV heads, head_dim] fp32
    block_cos: int  # [blocks, head_dim / 2]
    block_sin: int


NEUTRAL_SCALE = 127
MAX_SCALE = 237  # 2^110: larger values saturate


def pages_of(packed: Tensor, exact: Tensor, layout: PageLayout, offsets: Offsets) -> Pages:
    """A pool's tensors as kernels see them; whoever calls keeps them alive."""
    return Pages(
        packed=packed.data_ptr(),
        packed_bytes=layout.packed_page_bytes,
        packed_kind=int(layout.codec.packed),
        scales_offset=layout.scales_offset,
        exact=exact.data_ptr(),
        exact_bytes=layout.exact_page_bytes,
        exact_kind=int(layout.codec.exact),
        num_heads=layout.num_kv_heads,
        block_size=layout.block_size,
        head_dim=layout.head_dim,
        means=offsets.means.data_ptr(),
        block_cos=offsets.cos.data_ptr(),
        block_sin=offsets.sin.data_ptr(),
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
def element_bytes(kind):
    return 4 if kind == FP32 else (2 if kind == BF16 else 1)


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
def scale_code(amax):
    """E8M0 code of the smallest power of two s with amax / s <= 448; 1 for a block of zeros."""
    if amax == np.float32(0.0):
        return np.int64(NEUTRAL_SCALE)
    bits = bits_of(amax)
    code = (bits >> 23) - 8
    if (bits & 0x7FFFFF) > 0x600000:
        code += 1
    return min(max(code, np.int64(1)), np.int64(MAX_SCALE))


@njit(nogil=True)
def scale_of(code):
    """The power of two with this E8M0 code (1 to 254)."""
    return float_of(np.int64(code) << 23)


@njit(nogil=True)
def seal(rows, row_stride, pages, at, scale_at, offset):
    """Rows [block_size, head_dim] fp32, less the floats [head_dim] at `offset`, into the slice at
    `at` of a packed page; its scale to `scale_at`. A codec without scales takes the rows as they
    are.
    """
    block_size, head_dim, kind = pages.block_size, pages.head_dim, pages.packed_kind
    if kind != E4M3:
        for t in range(block_size):
            to = at + t * head_dim * element_bytes(kind)
            store_exact(rows + t * row_stride, head_dim, to, kind)
        return
    biggest = splat(np.float32(0.0))
    for t in range(block_size):
        for i in range(0, head_dim, 8):
            left = sub(load(rows + t * row_stride + i * 4), load(offset + i * 4))
            biggest = maximum(finite_size(left), biggest)
    code = scale_code(largest(biggest))
    put_u8(scale_at, np.uint8(code))
    inverse = splat(scale_of(254 - code))
    for t in range(block_size):
        for i in range(0, head_dim, 8):
            left = sub(load(rows + t * row_stride + i * 4), load(offset + i * 4))
            store_e4m3(at + t * head_dim + i, mul(left, inverse))


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
def load_packed(page, slice_index, pages, offset, out):
    """A slice of a packed page as fp32 rows [block_size, head_dim] at `out`, the floats [head_dim]
    at `offset` added when it is quantised.
    """
    size, kind = pages.block_size * pages.head_dim, pages.packed_kind
    at = page + slice_index * size * element_bytes(kind)
    if kind != E4M3:
        load_exact(at, size, kind, out)
        return
    factor = read_scale(page + pages.scales_offset + slice_index) * np.float32(256.0)
    for t in range(pages.block_size):
        row = t * pages.head_dim
        for i in range(0, pages.head_dim, 16):
            widen_e4m3(at + row + i, factor, offset + i * 4, out + (row + i) * 4)


@njit(nogil=True)
def read_scale(at):
    return scale_of(np.int64(get_u8(at)))


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
