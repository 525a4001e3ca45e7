"""Elements of pages, to and from fp32: what every kernel that touches pages is made of.

Shapes are free: places, scales and offsets broadcast against each other. Bytes are decoded by
shifts, so that no kernel needs a device that knows fp8.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from common.pages import PageLayout
from engine.kernels.offsets import Offsets

MAGIC = tl.constexpr(12582912.0)
"""1.5 * 2^23: added to a small float, it leaves the nearest integer in the low mantissa bits."""
E3M4, E4M3, E5M2, INT8, INT4 = (tl.constexpr(kind) for kind in (2, 3, 4, 5, 6))


@triton.jit
def encode_fp8(x, KIND: tl.constexpr):
    """Bytes of x [..] fp32: nearest, ties to even, saturating; not finite becomes NaN."""
    mantissa: tl.constexpr = 4 if KIND == E3M4 else (3 if KIND == E4M3 else 2)
    bias: tl.constexpr = 3 if KIND == E3M4 else (7 if KIND == E4M3 else 15)
    # 30, 448 and 57344
    most: tl.constexpr = (
        0x41F00000 if KIND == E3M4 else (0x43E00000 if KIND == E4M3 else 0x47600000)
    )
    dropped: tl.constexpr = 23 - mantissa
    bits = x.to(tl.uint32, bitcast=True)
    size = bits & 0x7FFFFFFF
    is_bad = size >= 0x7F800000
    size = tl.minimum(size, most)
    half: tl.constexpr = (1 << (dropped - 1)) - 1
    normal = ((size + half + ((size >> dropped) & 1)) >> dropped) - ((127 - bias) << mantissa)
    per_one: tl.constexpr = 1 << (bias - 1 + mantissa)
    steps = size.to(tl.float32, bitcast=True) * per_one + MAGIC
    subnormal = steps.to(tl.uint32, bitcast=True) & 0x1F
    code = tl.where(size < ((128 - bias) << 23), subnormal, normal)
    code = tl.where(is_bad, 0x7F, code | ((bits >> 24) & 0x80))
    return code.to(tl.uint8)


@triton.jit
def scale_code(amax, KIND: tl.constexpr):
    """E8M0 code of the smallest power of two s with amax / s <= the largest fp8 number."""
    exponent: tl.constexpr = 4 if KIND == E3M4 else (8 if KIND == E4M3 else 15)
    mantissa: tl.constexpr = 0x700000 if KIND == E3M4 else 0x600000
    bits = amax.to(tl.int32, bitcast=True)
    code = (bits >> 23) - exponent + ((bits & 0x7FFFFF) > mantissa).to(tl.int32)
    code = tl.minimum(tl.maximum(code, 1), 237)
    return tl.where(bits == 0, 127, code)


@triton.jit
def round_bf16(x):
    bits = x.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return tl.where(x == x, rounded.to(tl.float32, bitcast=True), x)


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """fp32 x as `dtype`, to nearest also where a cast would truncate (Triton's interpreter)."""
    if dtype == tl.bfloat16:
        x = round_bf16(x)
    return x.to(dtype)


@triton.jit
def upper_half(x):
    return (x.to(tl.uint32, bitcast=True) >> 16).to(tl.uint16)


@triton.jit
def seal_fp8(block, amax, place, scale_at, mask, KIND: tl.constexpr):
    code = scale_code(amax, KIND)
    inverse = ((254 - code) << 23).to(tl.float32, bitcast=True)
    tl.store(place, encode_fp8(block * inverse, KIND), mask=mask)
    tl.store(scale_at, code.to(tl.uint8))


@triton.jit
def seal_int8(block, amax, place, scale_at, mask):
    scale = tl.div_rn(amax, 127.0)
    scale = tl.where(scale < 1.1754943508222875e-38, 1.0, scale)
    value = tl.div_rn(block, scale + tl.zeros_like(block))
    is_good = tl.abs(value) < float("inf")
    whole = (value + MAGIC).to(tl.int32, bitcast=True)
    tl.store(place, tl.where(is_good, whole, 128).to(tl.uint8), mask=mask)
    tl.store(scale_at.to(tl.pointer_type(tl.float32)), scale)


@triton.jit
def seal_int4(
    block, slice_at, scale_at, is_k, slots, dims,
    BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """K with a factor and a minimum for each channel, V for each token."""
    is_dim = dims < HEAD_DIM
    nothing = tl.zeros_like(block)
    finite = tl.where(tl.abs(block) < float("inf"), block, 0.0)
    lows = tl.where(is_dim, finite, float("inf"))
    highs = tl.where(is_dim, finite, float("-inf"))
    odds = tl.where(is_dim & (tl.abs(block) < float("inf")), 0, is_dim.to(tl.int32))
    low = tl.where(is_k, tl.min(lows, axis=0)[None, :], tl.min(lows, axis=1)[:, None]) + nothing
    high = tl.where(is_k, tl.max(highs, axis=0)[None, :], tl.max(highs, axis=1)[:, None]) + nothing
    odd = tl.where(is_k, tl.sum(odds, axis=0)[None, :], tl.sum(odds, axis=1)[:, None])
    low = round_bf16(tl.where(low > -1e38, low, -1e38) + 0.0)
    high = tl.where(high < 1e38, high, 1e38)
    factor = round_bf16(tl.div_rn(high - low, nothing + 15.0))
    factor = tl.where(factor >= 1.1754943508222875e-38, factor, 1.0)
    factor = tl.where(odd == 0, factor, float("nan"))
    index = tl.where(is_k, dims, slots)
    is_first = tl.where(is_k, slots, dims) == 0
    count = tl.where(is_k, HEAD_DIM, BLOCK)
    place = scale_at.to(tl.pointer_type(tl.uint16)) + index
    tl.store(place, upper_half(factor), mask=is_first & is_dim)
    tl.store(place + count, upper_half(low), mask=is_first & is_dim)
    steps = tl.div_rn(block - low, factor)
    steps = tl.where(steps < 15.0, steps, 15.0)
    steps = tl.where(steps > 0.0, steps, 0.0)
    whole = (steps + MAGIC).to(tl.int32, bitcast=True) & 0xF
    pairs = tl.reshape(whole, [BLOCK, WIDTH // 2, 2])
    pairs = pairs << (tl.arange(0, 2) * 4)[None, None, :]
    pair = tl.arange(0, WIDTH // 2)[None, :]
    at = slice_at + slots * (HEAD_DIM // 2) + pair
    tl.store(at, tl.sum(pairs, axis=2).to(tl.uint8), mask=pair * 2 < HEAD_DIM)


@triton.jit
def block_offset(
    means_ptr, cos_ptr, sin_ptr, slice_index, is_k, block, is_there, dims, HEAD_DIM: tl.constexpr
):
    """Offset of a slice of blocks number `block`, where `is_there`, at `dims`; see
    engine/kernels/offsets.py.
    """
    half: tl.constexpr = HEAD_DIM // 2
    is_dim = dims < HEAD_DIM
    is_low = dims < half
    mean = means_ptr + slice_index * HEAD_DIM
    own = tl.load(mean + dims, mask=is_dim, other=0.0)
    other = tl.load(mean + tl.where(is_low, dims + half, dims - half), mask=is_dim, other=0.0)
    at = block * half + tl.where(is_low, dims, dims - half)
    cos = tl.load(cos_ptr + at, mask=is_dim & is_there, other=0.0)
    sin = tl.load(sin_ptr + at, mask=is_dim & is_there, other=0.0)
    a, b = own * cos, other * sin
    turned = tl.where(is_low, a - b, a + b)
    return tl.where(is_k, turned, own)


@triton.jit
def seal(
    block, page, number, scale_at, is_k, slots, dims,
    KIND: tl.constexpr, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write a slice's block [BLOCK, WIDTH], its offset subtracted, into the packed record `page`,
    with its scales. `number` is layer * 2 for K, and one more for V.
    """
    is_dim = dims < HEAD_DIM
    at = number * BLOCK * HEAD_DIM + slots * HEAD_DIM + dims
    if KIND < 2:
        store_exact(page, at, block, is_dim, KIND)
    elif KIND == INT4:
        first = page + number * BLOCK * HEAD_DIM // 2
        seal_int4(block, first, page + scale_at, is_k, slots, dims, BLOCK, HEAD_DIM, WIDTH)
    else:
        size = tl.abs(block)
        is_counted = is_dim & (size < float("inf"))
        amax = tl.max(tl.max(tl.where(is_counted, size, 0.0), axis=1), axis=0)
        if KIND == INT8:
            seal_int8(block, amax, page + at, page + scale_at, is_dim)
        else:
            seal_fp8(block, amax, page + at, page + scale_at, is_dim, KIND)


@triton.jit
def store_exact(page, at, values, mask, KIND: tl.constexpr):
    """fp32 values, already of the exact form, as elements `at` of a page."""
    if KIND == 0:
        tl.store(page.to(tl.pointer_type(tl.float32)) + at, values, mask=mask)
    else:
        tl.store(page.to(tl.pointer_type(tl.uint16)) + at, upper_half(values), mask=mask)


@triton.jit
def decode_fp8(data, KIND: tl.constexpr):
    """fp32 of e3m4 or e4m3 bytes; 0x7F and 0xFF are NaN."""
    mantissa: tl.constexpr = 4 if KIND == E3M4 else 3
    bias: tl.constexpr = 3 if KIND == E3M4 else 7
    smallest: tl.constexpr = 0.015625 if KIND == E3M4 else 0.001953125
    bits = data.to(tl.uint32)
    size = bits & 0x7F
    normal = ((size << (23 - mantissa)) + ((127 - bias) << 23)).to(tl.float32, bitcast=True)
    value = tl.where(size < (1 << mantissa), size.to(tl.float32) * smallest, normal)
    value = tl.where(size == 0x7F, float("nan"), value)
    return tl.where(bits >= 0x80, -value, value)


@triton.jit
def e4m3_as_half(data):
    """fp16 of e4m3 bytes, by 2^8 too small: then both number their exponents alike, and shifts are
    exact, for subnormals too.
    """
    bits = data.to(tl.uint16)
    size = bits & 0x7F
    half = tl.where(size == 0x7F, 0x7E00, size << 7) | ((bits & 0x80) << 8)
    return half.to(tl.uint16).to(tl.float16, bitcast=True)


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
    page, at, mask, is_there, scale_at, offset, slots, dims,
    KIND: tl.constexpr, IS_K: tl.constexpr, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Elements `at` of packed pages, as fp32: what was sealed plus the offset.

    `scale_at` is where the slice's scales stand in a page; `is_there` says which pages are.
    """
    if KIND < 2:
        return load_exact(page, at, mask, KIND)
    elif KIND == INT4:
        index = dims if IS_K else slots
        count: tl.constexpr = HEAD_DIM if IS_K else BLOCK
        place = (page + scale_at).to(tl.pointer_type(tl.uint16)) + index
        is_scale = is_there & (index < count)
        factor = from_bf16(tl.load(place, mask=is_scale, other=0))
        low = from_bf16(tl.load(place + count, mask=is_scale, other=0))
        data = tl.load(page + at // 2, mask=mask, other=0).to(tl.int32)
        whole = (data >> ((dims & 1) * 4)) & 0xF
        return whole.to(tl.float32) * factor + (low + offset)
    else:
        data = tl.load(page + at, mask=mask, other=0)
        if KIND == INT8:
            place = (page + scale_at).to(tl.pointer_type(tl.float32))
            scale = tl.load(place, mask=is_there, other=0.0)
            return decode_int8(data) * scale + offset
        else:
            code = tl.load(page + scale_at, mask=is_there, other=0).to(tl.int32)
            scale = (code << 23).to(tl.float32, bitcast=True)
            if KIND == E5M2:
                half = (data.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
                return half.to(tl.float32) * scale + offset
            else:
                return decode_fp8(data, KIND) * scale + offset


def page_arguments(
    packed: Tensor, exact: Tensor, layout: PageLayout, offsets: Offsets, layer: int
) -> tuple[Any, ...]:
    """Of every kernel that reads or writes pages, from `packed_ptr` to `sin_ptr`: where a layer's
    are. `packed` and `exact` are a pool's.
    """
    first_slice = layer * 2 * layout.num_kv_heads
    return (
        packed, layout.packed_page_bytes, exact, layout.exact_page_bytes, first_slice,
        layout.scales_offset, offsets.means, offsets.cos, offsets.sin,
    )  # fmt: skip


def page_constants(layout: PageLayout) -> dict[str, int]:
    """Of the same kernels: how pages are laid out."""
    k_scale, v_scale = layout.scale_bytes
    return {
        "KV_HEADS": layout.num_kv_heads,
        "BLOCK": layout.block_size,
        "HEAD_DIM": layout.head_dim,
        "WIDTH": triton.next_power_of_2(layout.head_dim),
        "EXACT_KIND": int(layout.codec.exact),
        "PACKED_KIND": int(layout.codec.packed),
        "K_SCALE": k_scale,
        "V_SCALE": v_scale,
    }
