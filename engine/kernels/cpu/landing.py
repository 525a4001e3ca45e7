"""Landing: pages that a pull has brought are checked and copied into the pool, all in one call."""

import numpy as np
from numba import njit, types
from numpy.typing import NDArray
from torch import Tensor

from common.pages import TAG_BYTES
from engine.kernels.cpu.pages import checksum_of, copy_bytes, zero_bytes
from engine.kernels.cpu.simd import get_u64

NUMBERS = types.int64[::1]
SIGNATURE = types.void(
    types.int64, types.int64, types.int64, NUMBERS, NUMBERS, types.int64, types.uint64[::1],
    types.boolean[::1],
)  # fmt: skip


@njit(SIGNATURE, nogil=True, cache=True)
def _land(source, target, page_bytes, slots, block_ids, tags, sums, accepted):
    payload = page_bytes - TAG_BYTES
    for i in range(len(slots)):
        page, wanted = source + slots[i] * page_bytes, tags + i * TAG_BYTES
        sums[i] = checksum_of(page, page_bytes)
        is_same = get_u64(page + page_bytes - 8) == sums[i]
        for word in range(0, TAG_BYTES - 8, 8):
            is_same &= get_u64(page + payload + word) == get_u64(wanted + word)
        accepted[i] = is_same
        if is_same:
            place = target + block_ids[i] * page_bytes
            copy_bytes(page, place, payload)
            zero_bytes(place + payload, TAG_BYTES)


def land(
    source: Tensor,
    target: Tensor,
    slots: NDArray[np.int64],
    block_ids: NDArray[np.int64],
    tags: NDArray[np.uint8],
) -> tuple[NDArray[np.bool_], NDArray[np.uint64]]:
    """Copy pages source[slots] to target[block_ids], without their tags, where the tag is the
    wanted one of `tags` [num_moves, TAG_BYTES] and the checksum (left out of `tags`) is right.

    Which were, and the checksums of all.
    """
    assert source.is_contiguous()
    assert target.is_contiguous()
    assert tags.flags.c_contiguous
    assert len(tags) == len(slots) == len(block_ids)
    accepted, sums = np.zeros(len(slots), dtype=np.bool_), np.zeros(len(slots), dtype=np.uint64)
    _land(
        source.data_ptr(), target.data_ptr(), source.shape[1], slots, block_ids, tags.ctypes.data,
        sums, accepted,
    )  # fmt: skip
    return accepted, sums
