"""Page kernels: store rows into exact pages, seal a block into its packed page, load blocks for
attention, checksums.

All work on one (layer, K or V, head) slice, [block_size, head_dim], of one page, given by address.
Element kinds: `FP32`, `BF16`, `E4M3`. Sealing reads values that are already rounded to the exact
form, and is done once per block.
"""

from typing import NamedTuple

import numpy as np
from numba import njit, types
from torch import Tensor

from common.kernels.cpu.simd import (
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
    transpose8,
    widen_e4m3,
)
from common.pages import PageLayout

FP32, BF16, E4M3 = 0, 1, 2


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


NEUTRAL_SCALE = 127
MAX_SCALE = 237  # 2^110: larger values saturate


def pages_of(packed: Tensor, exact: Tensor, layout: PageLayout) -> Pages:
    """A pool's tensors as kernels see them."""
    kinds = {4: FP32, 2: BF16, 1: E4M3}
    return Pages(
        packed=packed.data_ptr(),
        packed_bytes=layout.packed_page_bytes,
        packed_kind=kinds[layout.codec.packed_element_bytes],
        scales_offset=layout.scales_offset,
        exact=exact.data_ptr(),
        exact_bytes=layout.exact_page_bytes,
        exact_kind=kinds[layout.codec.exact_element_bytes],
        num_heads=layout.num_kv_heads,
        block_size=layout.block_size,
        head_dim=layout.head_dim,
    )


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
def seal(rows, row_stride, pages, at, scale_at):
    """Rows [block_size, head_dim] fp32 into the slice at `at` of a packed page; its scale, if the
    codec has one, to `scale_at`.
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
            biggest = maximum(finite_size(load(rows + t * row_stride + i * 4)), biggest)
    code = scale_code(largest(biggest))
    put_u8(scale_at, np.uint8(code))
    inverse = splat(scale_of(254 - code))
    for t in range(block_size):
        for i in range(0, head_dim, 8):
            value = mul(load(rows + t * row_stride + i * 4), inverse)
            store_e4m3(at + t * head_dim + i, value)


@njit(nogil=True)
def load_rows(at, count, kind, scale, out):
    """`count` elements from a page as fp32 at `out`, times `scale` for e4m3."""
    if kind == E4M3:
        factor = scale * np.float32(256.0)
        for i in range(0, count, 16):
            widen_e4m3(at + i, factor, out + i * 4)
    elif kind == BF16:
        for i in range(0, count, 8):
            store(out + i * 4, load_bf16(at + i * 2))
    else:
        for i in range(0, count, 8):
            store(out + i * 4, load(at + i * 4))


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


@njit(nogil=True)
def read_scale(at):
    return scale_of(np.int64(get_u8(at)))
