"""Pages of one layout into pages of another: block size, codec, and which KV heads they hold.

One program per (move, KV head, layer, K or V). A *move* makes one page of the target from the one
or two pages of the source that hold its tokens; what they read as is quantised anew. A slice's
scales are its own, so heads may be split among workers or joined without touching each other.

What is converted reads as before, to the bit, when
- codec and block size are the same (bytes are copied), or
- the target's elements are fp32, or bf16 and the source's are bf16 (what was quantised is rounded
  to bf16 in a bf16 page, just as queries in bf16 see it), or
- both pages are of the same fp8 elements, blocks are cut in halves, and the offsets are the same:
  V's always are, K's where its mean is zero. (A block's scale is at most that of the block it was
  cut from, and a power of two.)
Everything else loses what quantising the source's values in the target's way loses: joined fp8
blocks the low bits of the half with the smaller scale, cut K blocks whose offsets differ, and
integers with their new scale, up to half a step of the target.

Tags and padding of the target are left alone: tag a page when all its heads are there.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.errors import LayoutMismatch
from common.pages import PageKind, PageLayout
from engine.kernels.gpu.codec import block_offset, load_exact, load_packed, round_bf16, seal
from engine.kernels.offsets import Offsets

MOVE_FIELDS = 6
"""Target page, its block number, whether it is exact, first and second source page (the second -1
unless blocks are joined), whether these are exact: 1 the first, 2 the second, 3 both."""


@triton.jit
def convert_kernel(
    moves_ptr, source_packed_ptr, source_packed_bytes, source_exact_ptr, source_exact_bytes,
    target_packed_ptr, target_packed_bytes, target_exact_ptr, target_exact_bytes,
    source_scales_offset, target_scales_offset, source_head, target_head,
    source_means_ptr, source_cos_ptr, source_sin_ptr,
    target_means_ptr, target_cos_ptr, target_sin_ptr,
    SOURCE_HEADS: tl.constexpr, TARGET_HEADS: tl.constexpr, SOURCE_BLOCK: tl.constexpr,
    TARGET_BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
    SOURCE_EXACT: tl.constexpr, SOURCE_PACKED: tl.constexpr, TARGET_EXACT: tl.constexpr,
    TARGET_PACKED: tl.constexpr, SOURCE_K_SCALE: tl.constexpr, SOURCE_V_SCALE: tl.constexpr,
    TARGET_K_SCALE: tl.constexpr, TARGET_V_SCALE: tl.constexpr, IS_K: tl.constexpr,
):  # fmt: skip
    move, head, layer = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    fields = moves_ptr + move * 6
    target_page, block, is_exact = tl.load(fields), tl.load(fields + 1), tl.load(fields + 2)
    kinds = tl.load(fields + 5)
    slots, dims = tl.arange(0, TARGET_BLOCK)[:, None], tl.arange(0, WIDTH)[None, :]
    is_dim = dims < HEAD_DIM
    which: tl.constexpr = 0 if IS_K else 1

    positions = block * TARGET_BLOCK + slots
    source_block = positions // SOURCE_BLOCK
    part = source_block - block * TARGET_BLOCK // SOURCE_BLOCK
    pages = tl.load(fields + 3 + part)
    is_there = pages >= 0
    from_exact = ((kinds >> part) & 1) == 1
    slot = positions % SOURCE_BLOCK
    slice_index = (layer * 2 + which) * SOURCE_HEADS + source_head + head
    number = layer * 2 + which
    at = number * SOURCE_BLOCK * HEAD_DIM + slot * HEAD_DIM + dims
    scale_at = source_scales_offset + layer * (SOURCE_K_SCALE + SOURCE_V_SCALE)
    scale_at += which * SOURCE_K_SCALE
    source_exact_ptr += (source_head + head) * (source_exact_bytes // SOURCE_HEADS)
    source_packed_ptr += (source_head + head) * (source_packed_bytes // SOURCE_HEADS)
    exact = load_exact(
        source_exact_ptr + pages * source_exact_bytes, at, is_there & from_exact & is_dim,
        SOURCE_EXACT,
    )  # fmt: skip
    is_packed = is_there & (from_exact == 0)
    packed = load_packed(
        source_packed_ptr + pages * source_packed_bytes, at, is_packed & is_dim, is_packed,
        scale_at, 0.0, slot, dims, SOURCE_PACKED, IS_K, SOURCE_BLOCK, HEAD_DIM,
    )  # fmt: skip
    values = tl.where(from_exact, exact, packed)

    shift = tl.zeros([TARGET_BLOCK, WIDTH], tl.float32)
    if SOURCE_PACKED >= 2:
        offset = block_offset(
            source_means_ptr, source_cos_ptr, source_sin_ptr, slice_index, IS_K, source_block,
            is_packed, dims, HEAD_DIM,
        )  # fmt: skip
        shift += tl.where(is_packed, offset, 0.0)
    target_slice = (layer * 2 + which) * TARGET_HEADS + target_head + head
    if (TARGET_PACKED >= 2) & (is_exact == 0):
        shift -= block_offset(
            target_means_ptr, target_cos_ptr, target_sin_ptr, target_slice, IS_K, block, True,
            dims, HEAD_DIM,
        )  # fmt: skip
    values = tl.where(is_there, values + shift, 0.0)

    if is_exact != 0:
        if TARGET_EXACT == 1:
            values = round_bf16(values)
        page = target_exact_ptr + target_page * target_exact_bytes
        page += (target_head + head) * (target_exact_bytes // TARGET_HEADS)
        seal(
            values, page, number, 0, IS_K, slots, dims,
            TARGET_EXACT, TARGET_BLOCK, HEAD_DIM, WIDTH,
        )  # fmt: skip
    else:
        if TARGET_PACKED == 1:
            values = round_bf16(values)
        scale_at = target_scales_offset + layer * (TARGET_K_SCALE + TARGET_V_SCALE)
        scale_at += which * TARGET_K_SCALE
        page = target_packed_ptr + target_page * target_packed_bytes
        page += (target_head + head) * (target_packed_bytes // TARGET_HEADS)
        seal(
            values, page, number, scale_at, IS_K, slots, dims,
            TARGET_PACKED, TARGET_BLOCK, HEAD_DIM, WIDTH,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class PageSet:
    """Pages of both kinds (rows of a pool's tensors) and how they are laid out."""

    packed: Tensor
    exact: Tensor
    layout: PageLayout
    offsets: Offsets


def block_moves(
    source_table: Sequence[int],
    target_table: Sequence[int],
    source_block_size: int,
    target_block_size: int,
) -> Tensor:
    """Moves [num_blocks, MOVE_FIELDS] int64 of all full blocks of a request, by its block tables on
    both sides; block 0 is exact on both.
    """
    num_blocks = len(source_table) * source_block_size // target_block_size
    moves = []
    for block, target_page in enumerate(target_table[:num_blocks]):
        first = block * target_block_size // source_block_size
        is_joined = target_block_size > source_block_size
        second = source_table[first + 1] if is_joined else -1
        moves.append([target_page, block, block == 0, source_table[first], second, first == 0])
    return torch.tensor(moves, dtype=torch.int64).view(-1, MOVE_FIELDS)


def convert_pages(
    source: PageSet,
    target: PageSet,
    moves: Tensor,
    source_head: int = 0,
    target_head: int = 0,
    num_heads: int | None = None,
) -> None:
    """Write heads [target_head, target_head + num_heads) of the target's pages from as many of the
    source's, from source_head on; all of the source's by default.

    `moves` [num_moves, MOVE_FIELDS] int64, on the pages' device. See the module for what is lost.
    Raises LayoutMismatch where layers, head sizes or heads do not fit.
    """
    a, b = source.layout, target.layout
    count = a.num_kv_heads if num_heads is None else num_heads
    if (a.num_layers, a.head_dim) != (b.num_layers, b.head_dim):
        raise LayoutMismatch(
            f"pages of {a.num_layers} layers and heads of {a.head_dim} cannot become pages of "
            f"{b.num_layers} layers and heads of {b.head_dim}: both sides need the same model"
        )
    for side, first, heads in (("source", source_head, a), ("target", target_head, b)):
        if first < 0 or count < 1 or first + count > heads.num_kv_heads:
            raise LayoutMismatch(
                f"heads {first} to {first + count - 1} are not among the {heads.num_kv_heads} KV "
                f"heads of the {side}"
            )
    assert moves.shape[1] == MOVE_FIELDS
    assert moves.is_contiguous()
    if not len(moves):
        return
    ranges = slice(source_head, source_head + count), slice(target_head, target_head + count)
    if a.codec == b.codec and a.block_size == b.block_size:
        means = source.offsets.means[:, :, ranges[0]], target.offsets.means[:, :, ranges[1]]
        if torch.equal(*means):
            _copy(source, target, moves, *ranges)
            return
    for is_k in (True, False):
        convert_kernel[(len(moves), count, a.num_layers)](
            moves, source.packed, a.packed_page_bytes, source.exact, a.exact_page_bytes,
            target.packed, b.packed_page_bytes, target.exact, b.exact_page_bytes,
            a.scales_offset, b.scales_offset, source_head, target_head,
            source.offsets.means, source.offsets.cos, source.offsets.sin,
            target.offsets.means, target.offsets.cos, target.offsets.sin,
            SOURCE_HEADS=a.num_kv_heads, TARGET_HEADS=b.num_kv_heads, SOURCE_BLOCK=a.block_size,
            TARGET_BLOCK=b.block_size, HEAD_DIM=a.head_dim,
            WIDTH=triton.next_power_of_2(a.head_dim),
            SOURCE_EXACT=int(a.codec.exact), SOURCE_PACKED=int(a.codec.packed),
            TARGET_EXACT=int(b.codec.exact), TARGET_PACKED=int(b.codec.packed),
            SOURCE_K_SCALE=a.scale_bytes[0], SOURCE_V_SCALE=a.scale_bytes[1],
            TARGET_K_SCALE=b.scale_bytes[0], TARGET_V_SCALE=b.scale_bytes[1],
            IS_K=is_k,
        )  # fmt: skip


def _copy(source: PageSet, target: PageSet, moves: Tensor, heads: slice, to_heads: slice) -> None:
    """Bytes as they are, where layouts differ in heads at most."""
    for kind, is_kind in ((PageKind.EXACT, moves[:, 2] != 0), (PageKind.PACKED, moves[:, 2] == 0)):
        to_pages, from_pages = moves[is_kind, 0], moves[is_kind, 3]
        given, place = _contents(source, kind), _contents(target, kind)
        place[to_pages, to_heads] = given[from_pages, heads]


def _contents(pages: PageSet, kind: PageKind) -> Tensor:
    """View [num_pages, kv_heads, bytes] of what records hold before their padding and tags."""
    layout = pages.layout
    data = pages.exact if kind is PageKind.EXACT else pages.packed
    end = layout.payload_bytes(kind) // layout.num_kv_heads
    if kind is PageKind.PACKED:
        end += layout.scales_bytes
    return data.unflatten(1, (layout.num_kv_heads, -1))[:, :, :end]
