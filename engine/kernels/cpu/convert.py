"""Landing of pages in another form: records of exact elements, checked as they are, become records
of this worker's own pages, by the same code that seals what it computes itself.
"""

import numpy as np
from numba import njit, types
from numpy.typing import NDArray
from torch import Tensor

from common.codecs import ElementKind
from common.pages import TAG_BYTES, PageKind
from engine.kernels.cpu.pages import (
    Pages,
    block_offset,
    bytes_of,
    checksum_of,
    exact_slice,
    load_exact,
    seal,
    store_exact,
    zero_bytes,
)
from engine.kernels.cpu.simd import get_u64, load, round_bf16, store
from engine.kernels.cpu.sources import source_hash

FP32 = int(ElementKind.FP32)


@njit(nogil=True)
def _pages(p):
    return Pages(
        p[0], p[1], p[2], p[3], p[4], p[5], p[6], p[7], p[8], p[9], p[10], p[11], p[12], p[13],
        p[14], p[15], p[16],
    )  # fmt: skip


@njit(nogil=True)
def _is_wanted(record, num_bytes, tag, total):
    """Whether the record ends with this tag, apart from its checksum, and with that checksum."""
    is_same = get_u64(record + num_bytes - 8) == total
    for word in range(0, TAG_BYTES - 8, 8):
        is_same &= get_u64(record + num_bytes - TAG_BYTES + word) == get_u64(tag + word)
    return is_same


@njit(nogil=True)
def _store_rows(rows, pages, at):
    """fp32 rows of a block into an exact page's slice."""
    size = pages.block_size * pages.head_dim
    if pages.exact_kind != FP32:
        for i in range(0, size, 8):
            store(rows + i * 4, round_bf16(load(rows + i * 4)))
    for t in range(pages.block_size):
        row = rows + t * pages.head_dim * 4
        to = at + bytes_of(t * pages.head_dim, pages.exact_kind)
        store_exact(row, pages.head_dim, to, pages.exact_kind)


@njit(nogil=True)
def _convert_record(record, kind, num_layers, page, head, block, is_packed, pages, scratch):
    size = pages.block_size * pages.head_dim
    for number in range(2 * num_layers):
        index = number * pages.num_heads + head
        load_exact(record + bytes_of(number * size, kind), size, kind, scratch)
        if is_packed:
            offset = block_offset(pages, index, block, scratch + size * 4)
            seal(scratch, pages.head_dim * 4, pages, page, index, offset)
        else:
            _store_rows(scratch, pages, exact_slice(page, index, pages))


@njit(nogil=True)
def _land(
    source, num_bytes, kind, num_layers, moves, tags, is_packed, page_fields, scratch, sums,
    accepted,
):  # fmt: skip
    pages = _pages(page_fields)
    for i in range(len(moves)):
        record, tag = source + moves[i, 0] * num_bytes, tags + i * TAG_BYTES
        sums[i] = checksum_of(record, num_bytes)
        accepted[i] = _is_wanted(record, num_bytes, tag, sums[i])
        if not accepted[i]:
            continue
        head, block = moves[i, 2], moves[i, 3]
        page, end = pages.exact + moves[i, 1] * pages.exact_bytes, pages.exact_record
        if is_packed:
            page, end = pages.packed + moves[i, 1] * pages.packed_bytes, pages.packed_record
        _convert_record(record, kind, num_layers, page, head, block, is_packed, pages, scratch)
        zero_bytes(page + (head + 1) * end - TAG_BYTES, TAG_BYTES)


SIGNATURE = types.void(
    types.int64, types.int64, types.int64, types.int64, types.int64[:, ::1], types.int64,
    types.boolean, types.int64[::1], types.int64, types.uint64[::1], types.boolean[::1],
)  # fmt: skip


def _compiled(sources):
    """As in forward.py."""

    @njit(SIGNATURE, nogil=True, cache=True)
    def land_all(
        source, num_bytes, kind, num_layers, moves, tags, is_packed, page_fields, scratch, sums,
        accepted,
    ):  # fmt: skip
        if sources != 0:
            _land(
                source, num_bytes, kind, num_layers, moves, tags, is_packed, page_fields, scratch,
                sums, accepted,
            )  # fmt: skip

    return land_all


_land_all = _compiled(source_hash())


def land_converted(
    source: Tensor,
    element: ElementKind,
    kind: PageKind,
    moves: NDArray[np.int64],
    tags: NDArray[np.uint8],
    page_fields: NDArray[np.int64],
) -> tuple[NDArray[np.bool_], NDArray[np.uint64]]:
    """Records source[moves[:, 0]] of exact elements `element`, where they are those that `tags`
    [num_moves, TAG_BYTES] want (as in `engine.kernels.cpu.landing.land`), become records of pages
    of kind `kind`: `moves` [num_moves, 4] int64 has the record, the page, the place of the head in
    it, and the number of the block among its request's. `page_fields` are the numbers of the
    target's `Pages`.

    Which were, and the checksums of all.
    """
    assert element in (ElementKind.FP32, ElementKind.BF16)
    assert source.is_contiguous()
    assert tags.flags.c_contiguous
    assert len(tags) == len(moves)
    pages = Pages(*page_fields.tolist())
    size = pages.block_size * pages.head_dim
    num_layers = (source.shape[1] - TAG_BYTES) * 8 // (element.num_bits * 2 * size)
    scratch = np.empty(size + pages.head_dim, dtype=np.float32)
    sums, accepted = np.zeros(len(moves), dtype=np.uint64), np.zeros(len(moves), dtype=np.bool_)
    _land_all(
        source.data_ptr(), source.shape[1], int(element), num_layers, moves, tags.ctypes.data,
        kind == PageKind.PACKED, page_fields, scratch.ctypes.data, sums, accepted,
    )  # fmt: skip
    return accepted, sums
