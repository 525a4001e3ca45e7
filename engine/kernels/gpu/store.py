"""From the product that holds q, k and v to pages, in one pass: head norms, rotary, store and seal.

One program per (item, KV head, K or V or the queries of the group). An item is a request's tokens
that fall into one block, see `engine.batch.ITEM_FIELDS`; every row of a step belongs to one.
K and V go from registers into their pages, and a block whose last token came is quantised on the
way, from values that already have the exact form. Only rows of chunks are written a second time, in
the exact form, since queries of the same step read their own blocks from there.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.codecs import ElementKind
from common.pages import PageLayout
from engine.kernels.gpu.codec import (
    block_offset,
    load_exact,
    page_arguments,
    page_constants,
    round_bf16,
    rounded,
    seal,
    store_exact,
)
from engine.kernels.gpu.tiles import device_kind, tiles_of
from engine.kernels.offsets import Offsets

EXACT_DTYPES = {ElementKind.BF16: torch.bfloat16, ElementKind.FP32: torch.float32}


@triton.jit
def rotated(
    rows_ptr, at, other_at, mask, norm_ptr, eps, cos, sin, dims,
    HEAD_DIM: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """Rows of one head [tokens, width], normed and turned by their angles, in fp32.

    `other_at` are the places of each channel's partner, half a head away.
    """
    dtype = rows_ptr.dtype.element_ty
    half: tl.constexpr = HEAD_DIM // 2
    is_low = dims < half
    own = tl.load(rows_ptr + at, mask=mask, other=0.0).to(tl.float32)
    other = tl.load(rows_ptr + other_at, mask=mask, other=0.0).to(tl.float32)
    if HAS_NORM:
        other_dims = tl.where(is_low, dims + half, dims - half)
        is_dim = dims < HEAD_DIM
        weight = tl.load(norm_ptr + dims, mask=is_dim, other=0.0).to(tl.float32)
        other_weight = tl.load(norm_ptr + other_dims, mask=is_dim, other=0.0).to(tl.float32)
        factor = tl.rsqrt(tl.sum(own * own, axis=1) / HEAD_DIM + eps)[:, None]
        own = rounded(rounded(own * factor, dtype).to(tl.float32) * weight, dtype).to(tl.float32)
        other = rounded(other * factor, dtype).to(tl.float32) * other_weight
        other = rounded(other, dtype).to(tl.float32)
    a, b = own * cos, other * sin
    return tl.where(is_low, a - b, a + b)


@triton.jit
def store_kernel(
    heads_ptr, row_stride, q_norm_ptr, k_norm_ptr, eps, cos_ptr, sin_ptr, q_ptr, q_scale, k_ptr,
    v_ptr, items_ptr, packed_ptr, packed_bytes, exact_ptr, exact_bytes, first_slice, scales_offset,
    means_ptr, block_cos_ptr, block_sin_ptr,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr, HAS_NORM: tl.constexpr, EXACT_KIND: tl.constexpr,
    PACKED_KIND: tl.constexpr, K_SCALE: tl.constexpr, V_SCALE: tl.constexpr,
):  # fmt: skip
    item, head, which = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    fields = items_ptr + item * 6
    row, count, position = tl.load(fields), tl.load(fields + 1), tl.load(fields + 2)
    exact_page, packed_page = tl.load(fields + 3), tl.load(fields + 4)
    from_page = tl.load(fields + 5)
    offset = position % BLOCK
    slots, dims = tl.arange(0, BLOCK)[:, None], tl.arange(0, WIDTH)[None, :]
    half: tl.constexpr = HEAD_DIM // 2
    is_dim = dims < HEAD_DIM
    is_new = (slots >= offset) & (slots < offset + count)
    mask = is_new & is_dim
    tokens = row + slots - offset
    other_dims = tl.where(dims < half, dims + half, dims - half)

    if which == 2:
        at = (position - offset + slots) * half + tl.where(dims < half, dims, dims - half)
        cos = tl.load(cos_ptr + at, mask=mask, other=0.0)
        sin = tl.load(sin_ptr + at, mask=mask, other=0.0)
        for q_head in range(head * GROUP, head * GROUP + GROUP):
            first = tokens * row_stride + q_head * HEAD_DIM
            q = rotated(
                heads_ptr, first + dims, first + other_dims, mask, q_norm_ptr, eps, cos, sin, dims,
                HEAD_DIM, HAS_NORM,
            )  # fmt: skip
            place = q_ptr + (tokens * (KV_HEADS * GROUP) + q_head) * HEAD_DIM + dims
            tl.store(place, rounded(q * q_scale, q_ptr.dtype.element_ty), mask=mask)
        return

    first = tokens * row_stride + (KV_HEADS * (GROUP + which) + head) * HEAD_DIM
    if which == 0:
        at = (position - offset + slots) * half + tl.where(dims < half, dims, dims - half)
        cos = tl.load(cos_ptr + at, mask=mask, other=0.0)
        sin = tl.load(sin_ptr + at, mask=mask, other=0.0)
        block = rotated(
            heads_ptr, first + dims, first + other_dims, mask, k_norm_ptr, eps, cos, sin, dims,
            HEAD_DIM, HAS_NORM,
        )  # fmt: skip
    else:
        block = tl.load(heads_ptr + first + dims, mask=mask, other=0.0).to(tl.float32)
    if EXACT_KIND == 1:
        block = round_bf16(block)
    if from_page == 0:
        rows_ptr = k_ptr if which == 0 else v_ptr
        place = rows_ptr + (tokens * KV_HEADS + head) * HEAD_DIM + dims
        tl.store(place, block.to(k_ptr.dtype.element_ty), mask=mask)

    slice_index = first_slice + which * KV_HEADS + head
    number = first_slice // KV_HEADS + which
    if exact_page >= 0:
        page = exact_ptr + exact_page * exact_bytes + head * (exact_bytes // KV_HEADS)
        at = number * BLOCK * HEAD_DIM + slots * HEAD_DIM + dims
        if from_page != 0:
            block = tl.where(
                is_new, block, load_exact(page, at, is_dim & (slots < offset), EXACT_KIND)
            )
        fresh = is_new | (offset == 0)  # a page's first store zeroes the slots behind it
        store_exact(page, at, block, fresh & is_dim, EXACT_KIND)

    if packed_page >= 0:
        if PACKED_KIND >= 2:
            block -= block_offset(
                means_ptr, block_cos_ptr, block_sin_ptr, slice_index, which == 0,
                position // BLOCK, True, dims, HEAD_DIM,
            )  # fmt: skip
        scale_at = scales_offset + number // 2 * (K_SCALE + V_SCALE) + which * K_SCALE
        page = packed_ptr + packed_page * packed_bytes + head * (packed_bytes // KV_HEADS)
        seal(
            block, page, number, scale_at, which == 0, slots, dims,
            PACKED_KIND, BLOCK, HEAD_DIM, WIDTH,
        )  # fmt: skip


def rotate_and_store(
    heads: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    items: Tensor,
    packed: Tensor,
    exact: Tensor,
    layout: PageLayout,
    offsets: Offsets,
    layer: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Write K and V of heads [num_rows, heads + 2 * kv_heads, head_dim] (q, k, v) into pages.

    `norms` are the RMSNorm weights [head_dim] of q and k, where the model has them; cos, sin
    [num_positions, head_dim / 2] fp32; `items` [num_items, 6] int64; `packed`, `exact` a pool's.

    q rotated and scaled, like heads; k and v [num_rows, kv_heads, head_dim] in the exact form, of
    which only rows of items sealed from the rows are written.
    """
    num_rows, num_all, head_dim = heads.shape
    kv_heads = layout.num_kv_heads
    group = num_all // kv_heads - 2
    assert num_all == kv_heads * (group + 2)
    assert head_dim == layout.head_dim
    assert heads.stride(1) == head_dim
    assert heads.stride(2) == 1
    assert items.shape[1] == 6
    assert items.is_contiguous()
    q_norm, k_norm = (heads, heads) if norms is None else norms
    assert norms is None or q_norm.dtype == k_norm.dtype
    q = torch.empty((num_rows, kv_heads * group, head_dim), dtype=heads.dtype, device=heads.device)
    k, v = torch.empty(
        (2, num_rows, kv_heads, head_dim),
        dtype=EXACT_DTYPES[layout.codec.exact],
        device=heads.device,
    )
    if len(items):
        store_kernel[(len(items), kv_heads, 3)](
            heads, heads.stride(0), q_norm, k_norm, eps, cos, sin, q, head_dim**-0.5, k, v, items,
            *page_arguments(packed, exact, layout, offsets, layer),
            **page_constants(layout),
            GROUP=group,
            HAS_NORM=norms is not None,
            num_warps=tiles_of(device_kind(heads.device), head_dim).store.num_warps,
        )  # fmt: skip
    return q, k, v
