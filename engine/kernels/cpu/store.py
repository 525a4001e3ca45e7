"""Store and seal: a step's K and V go into pages, and a block whose last token came is quantised.

An `Item` is a request's tokens that fall into one block. The engine calls `store_item` for one KV
head at a time, from many threads: no two items share a page.
"""

from typing import NamedTuple

import numpy as np
from numba import njit
from torch import Tensor

from common.pages import PageLayout
from engine.kernels.cpu.pages import (
    Pages,
    block_offset,
    bytes_of,
    exact_slice,
    load_exact,
    pages_of,
    seal,
    store_exact,
    zero_bytes,
)
from engine.kernels.offsets import Offsets


class Item(NamedTuple):
    """As `engine.batch.ITEM_FIELDS`."""

    row: int
    num_tokens: int
    position: int
    exact_page: int
    packed_page: int
    from_page: int


@njit(nogil=True)
def item_at(items, index):
    i = items[index]
    return Item(i[0], i[1], i[2], i[3], i[4], i[5])


@njit(nogil=True)
def _store_slice(rows, row_bytes, item, slice_at, pages):
    """K or V rows of one head into an exact page's slice; a fresh slice is zeroed behind them."""
    slot_bytes = bytes_of(pages.head_dim, pages.exact_kind)
    offset = item.position % pages.block_size
    for t in range(item.num_tokens):
        at = slice_at + (offset + t) * slot_bytes
        store_exact(rows + t * row_bytes, pages.head_dim, at, pages.exact_kind)
    if offset == 0:
        behind = slice_at + item.num_tokens * slot_bytes
        zero_bytes(behind, (pages.block_size - item.num_tokens) * slot_bytes)


@njit(nogil=True)
def _store_rows(rows, row_bytes, item, slice_index, pages, scratch):
    """K or V of one head, whose number in a page is `slice_index`: store, and seal a full block.

    `scratch` has room for a block and an offset.
    """
    size = pages.block_size * pages.head_dim
    exact_page = pages.exact + item.exact_page * pages.exact_bytes
    exact_at = exact_slice(exact_page, slice_index, pages)
    if item.exact_page >= 0:
        _store_slice(rows, row_bytes, item, exact_at, pages)
    if item.packed_page < 0:
        return
    page = pages.packed + item.packed_page * pages.packed_bytes
    block = item.position // pages.block_size
    offset = block_offset(pages, slice_index, block, scratch + size * 4)
    if item.from_page:
        load_exact(exact_at, size, pages.exact_kind, scratch)
        seal(scratch, pages.head_dim * 4, pages, page, slice_index, offset)
    else:
        seal(rows, row_bytes, pages, page, slice_index, offset)


@njit(nogil=True)
def store_item(k_rows, v_rows, row_bytes, item, layer, head, pages, scratch):
    """An item's K and V of one head; rows start at these addresses, `row_bytes` apart."""
    slice_index = layer * 2 * pages.num_heads + head
    _store_rows(k_rows, row_bytes, item, slice_index, pages, scratch)
    _store_rows(v_rows, row_bytes, item, slice_index + pages.num_heads, pages, scratch)


@njit(nogil=True)
def _store_all(k, v, row_bytes, items, layer, pages, scratch):
    for index in range(len(items)):
        item = item_at(items, index)
        for head in range(pages.num_heads):
            at = item.row * row_bytes + head * pages.head_dim * 4
            store_item(k + at, v + at, row_bytes, item, layer, head, pages, scratch)


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

    `items` [num_items, 6] int64; `packed` and `exact` are a pool's tensors.
    """
    assert k.is_contiguous()
    assert v.is_contiguous()
    pages: Pages = pages_of(packed, exact, layout, offsets)
    scratch = np.empty((layout.block_size + 1) * layout.head_dim, dtype=np.float32)
    row_bytes = layout.num_kv_heads * layout.head_dim * 4
    _store_all(
        k.data_ptr(), v.data_ptr(), row_bytes, items.numpy(), layer, pages, scratch.ctypes.data
    )
