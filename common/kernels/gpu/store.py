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


@triton.jit
def encode_e4m3(x):
    """Bytes of x [..] fp32: nearest, ties to even, saturating at 448; not finite becomes NaN."""
    bits = x.to(tl.uint32, bitcast=True)
    size = bits & 0x7FFFFFFF
    is_bad = size >= 0x7F800000
    size = tl.minimum(size, 0x43E00000)
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960
    steps = size.to(tl.float32, bitcast=True) * 512.0 + 12582912.0
    subnormal = steps.to(tl.uint32, bitcast=True) & 0xF
    code = tl.where(size < 0x3C800000, subnormal, normal)
    code = tl.where(is_bad, 0x7F, code | ((bits >> 24) & 0x80))
    return code.to(tl.uint8)


@triton.jit
def scale_code(amax):
    """E8M0 code of the smallest power of two s with amax / s <= 448."""
    bits = amax.to(tl.int32, bitcast=True)
    code = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    code = tl.minimum(tl.maximum(code, 1), 237)
    return tl.where(bits == 0, 127, code)


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
    EXACT_KIND: tl.constexpr, PACKED_KIND: tl.constexpr,
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
            size = tl.abs(block)
            is_counted = is_dim & (size < float("inf"))
            amax = tl.max(tl.max(tl.where(is_counted, size, 0.0), axis=1), axis=0)
            code = scale_code(amax)
            inverse = ((254 - code) << 23).to(tl.float32, bitcast=True)
            tl.store(page + slice_at, encode_e4m3(block * inverse), mask=is_dim)
            tl.store(page + scales_offset + slice_index, code.to(tl.uint8))


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
    )  # fmt: skip
