"""Store and seal: a step's K and V go into pages, and a block whose last token came is quantised.

One program per (item, KV head, K or V). An item is a request's tokens that fall into one block; see
`common.engine.batch.ITEM_FIELDS`. A block is sealed from values that already have the exact form.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.kernels.offsets import Offsets
from common.pages import PageLayout

MAGIC = tl.constexpr(12582912.0)
"""1.5 * 2^23: added to a small float, it leaves the nearest integer in the low mantissa bits."""
E4M3, E5M2, INT8, INT4 = (tl.constexpr(kind) for kind in (2, 3, 4, 5))


@triton.jit
def encode_fp8(x, KIND: tl.constexpr):
    """Bytes of x [..] fp32: nearest, ties to even, saturating; not finite becomes NaN."""
    mantissa: tl.constexpr = 3 if KIND == E4M3 else 2
    bias: tl.constexpr = 7 if KIND == E4M3 else 15
    most: tl.constexpr = 0x43E00000 if KIND == E4M3 else 0x47600000
    dropped: tl.constexpr = 23 - mantissa
    bits = x.to(tl.uint32, bitcast=True)
    size = bits & 0x7FFFFFFF
    is_bad = size >= 0x7F800000
    size = tl.minimum(size, most)
    half: tl.constexpr = (1 << (dropped - 1)) - 1
    normal = ((size + half + ((size >> dropped) & 1)) >> dropped) - ((127 - bias) << mantissa)
    per_one: tl.constexpr = 1 << (bias - 1 + mantissa)
    steps = size.to(tl.float32, bitcast=True) * per_one + MAGIC
    subnormal = steps.to(tl.uint32, bitcast=True) & 0xF
    code = tl.where(size < ((128 - bias) << 23), subnormal, normal)
    code = tl.where(is_bad, 0x7F, code | ((bits >> 24) & 0x80))
    return code.to(tl.uint8)


@triton.jit
def scale_code(amax, KIND: tl.constexpr):
    """E8M0 code of the smallest power of two s with amax / s <= the largest fp8 number."""
    exponent: tl.constexpr = 8 if KIND == E4M3 else 15
    bits = amax.to(tl.int32, bitcast=True)
    code = (bits >> 23) - exponent + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    code = tl.minimum(tl.maximum(code, 1), 237)
    return tl.where(bits == 0, 127, code)


@triton.jit
def round_bf16(x):
    bits = x.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return tl.where(x == x, rounded.to(tl.float32, bitcast=True), x)


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
    means_ptr, cos_ptr, sin_ptr, slice_index, is_k, block, dims, HEAD_DIM: tl.constexpr
):
    """Offset of a slice of block number `block`, at `dims`; see common/kernels/offsets.py."""
    half: tl.constexpr = HEAD_DIM // 2
    is_dim = dims < HEAD_DIM
    is_low = dims < half
    mean = means_ptr + slice_index * HEAD_DIM
    own = tl.load(mean + dims, mask=is_dim, other=0.0)
    other = tl.load(mean + tl.where(is_low, dims + half, dims - half), mask=is_dim, other=0.0)
    at = block * half + tl.where(is_low, dims, dims - half)
    cos = tl.load(cos_ptr + at, mask=is_dim, other=0.0)
    sin = tl.load(sin_ptr + at, mask=is_dim, other=0.0)
    a, b = own * cos, other * sin
    turned = tl.where(is_low, a - b, a + b)
    return tl.where(is_k, turned, own)


@triton.jit
def store_kernel(
    k_ptr, v_ptr, row_stride, items_ptr, packed_ptr, packed_bytes, exact_ptr, exact_bytes,
    first_slice, scales_offset, means_ptr, cos_ptr, sin_ptr,
    KV_HEADS: tl.constexpr, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
    EXACT_KIND: tl.constexpr, PACKED_KIND: tl.constexpr, K_SCALE: tl.constexpr,
    V_SCALE: tl.constexpr,
):  # fmt: skip
    item, head, which = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    fields = items_ptr + item * 6
    row, count, position = tl.load(fields), tl.load(fields + 1), tl.load(fields + 2)
    exact_page, packed_page = tl.load(fields + 3), tl.load(fields + 4)
    from_page = tl.load(fields + 5)
    offset = position % BLOCK
    slots, dims = tl.arange(0, BLOCK)[:, None], tl.arange(0, WIDTH)[None, :]
    is_dim = dims < HEAD_DIM
    is_new = (slots >= offset) & (slots < offset + count)
    rows = k_ptr if which == 0 else v_ptr
    at = (row + slots - offset) * row_stride + head * HEAD_DIM + dims
    block = tl.load(rows + at, mask=is_new & is_dim, other=0.0).to(tl.float32)
    slice_index = first_slice + which * KV_HEADS + head
    slice_at = slice_index * BLOCK * HEAD_DIM + slots * HEAD_DIM + dims

    if exact_page >= 0:
        page = exact_ptr + exact_page * exact_bytes
        fresh = is_new | (offset == 0)  # a page's first store zeroes the slots behind it
        if EXACT_KIND == 0:
            place = page.to(tl.pointer_type(tl.float32)) + slice_at
            if from_page != 0:
                block = tl.where(is_new, block, tl.load(place, mask=is_dim, other=0.0))
            tl.store(place, block, mask=fresh & is_dim)
        else:
            place = page.to(tl.pointer_type(tl.uint16)) + slice_at
            if from_page != 0:
                old = tl.load(place, mask=is_dim, other=0).to(tl.uint32) << 16
                block = tl.where(is_new, block, old.to(tl.float32, bitcast=True))
            half = (block.to(tl.uint32, bitcast=True) >> 16).to(tl.uint16)
            tl.store(place, half, mask=fresh & is_dim)

    if packed_page >= 0:
        page = packed_ptr + packed_page * packed_bytes
        if PACKED_KIND == 0:
            tl.store(page.to(tl.pointer_type(tl.float32)) + slice_at, block, mask=is_dim)
        elif PACKED_KIND == 1:
            half = (block.to(tl.uint32, bitcast=True) >> 16).to(tl.uint16)
            tl.store(page.to(tl.pointer_type(tl.uint16)) + slice_at, half, mask=is_dim)
        else:
            number = position // BLOCK
            block -= block_offset(
                means_ptr, cos_ptr, sin_ptr, slice_index, which == 0, number, dims, HEAD_DIM
            )
            scale_at = page + scales_offset + first_slice // 2 * (K_SCALE + V_SCALE)
            scale_at += tl.where(which == 0, head * K_SCALE, KV_HEADS * K_SCALE + head * V_SCALE)
            if PACKED_KIND == INT4:
                first = page + slice_index * BLOCK * HEAD_DIM // 2
                seal_int4(block, first, scale_at, which == 0, slots, dims, BLOCK, HEAD_DIM, WIDTH)
            else:
                size = tl.abs(block)
                is_counted = is_dim & (size < float("inf"))
                amax = tl.max(tl.max(tl.where(is_counted, size, 0.0), axis=1), axis=0)
                if PACKED_KIND == INT8:
                    seal_int8(block, amax, page + slice_at, scale_at, is_dim)
                else:
                    seal_fp8(block, amax, page + slice_at, scale_at, is_dim, PACKED_KIND)


def store(
    k: Tensor,
    v: Tensor,
    items: Tensor,
    packed: Tensor,
    exact: Tensor,
    layout: PageLayout,
    offsets: Offsets,
    layer: int,
) -> None:
    """Write k, v [num_rows, kv_heads, head_dim] fp32, rounded to the exact form, into pages.

    `items` [num_items, 6] int64; `packed` and `exact` are a pool's tensors. k and v may be views
    whose rows are far apart, but of the same stride.
    """
    assert k.dtype == v.dtype == torch.float32
    assert k.shape == v.shape
    assert k.shape[1:] == (layout.num_kv_heads, layout.head_dim)
    assert k.stride() == v.stride()
    assert k.stride(1) == layout.head_dim
    assert items.shape[1] == 6
    assert items.is_contiguous()
    store_kernel[(len(items), layout.num_kv_heads, 2)](
        k, v, k.stride(0), items, packed, layout.packed_page_bytes, exact,
        layout.exact_page_bytes, layer * 2 * layout.num_kv_heads, layout.scales_offset,
        offsets.means, offsets.cos, offsets.sin,
        KV_HEADS=layout.num_kv_heads, BLOCK=layout.block_size, HEAD_DIM=layout.head_dim,
        WIDTH=triton.next_power_of_2(layout.head_dim),
        EXACT_KIND=int(layout.codec.exact),
        PACKED_KIND=int(layout.codec.packed),
        K_SCALE=layout.scale_bytes[0],
        V_SCALE=layout.scale_bytes[1],
    )  # fmt: skip
