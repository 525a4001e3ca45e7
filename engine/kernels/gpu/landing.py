"""Landing: pages that a pull has brought are checked and copied into the pool, in two launches.

    share_sums      sums of each page's shares of words (`engine/kernels/gpu/checksum.py`)
    copy_kernel     compares tag and checksum, and copies the share where both are right

The host waits once, for what was accepted.
"""

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from common.pages import TAG_BYTES
from engine.kernels.gpu.checksum import SHARES, WORDS_AT_ONCE, share_sums


@triton.jit
def copy_kernel(
    source_ptr, target_ptr, page_words, slots_ptr, blocks_ptr, tags_ptr, shares_ptr, outcome_ptr,
    WORDS: tl.constexpr, SHARES: tl.constexpr, TAG_WORDS: tl.constexpr,
):  # fmt: skip
    move, share, num_shares = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    words = source_ptr + tl.load(slots_ptr + move) * page_words
    shares = tl.arange(0, SHARES)
    place = shares_ptr + move * num_shares + shares
    checksum = tl.sum(tl.load(place, mask=shares < num_shares, other=0), axis=0)
    of_tag = tl.arange(0, TAG_WORDS)
    found = tl.load(words + page_words - TAG_WORDS + of_tag)
    wanted = tl.load(tags_ptr + move * TAG_WORDS + of_tag)
    wanted = tl.where(of_tag == TAG_WORDS - 1, checksum, wanted)
    is_accepted = tl.sum((found != wanted).to(tl.int32), axis=0) == 0
    if share == 0:
        tl.store(outcome_ptr + move * 2, is_accepted.to(tl.int64))
        tl.store(outcome_ptr + move * 2 + 1, checksum)
    if is_accepted:
        target = target_ptr + tl.load(blocks_ptr + move) * page_words
        for first in range(share * WORDS, page_words, num_shares * WORDS):
            index = first + tl.arange(0, WORDS)
            word = tl.load(words + index, mask=index < page_words - TAG_WORDS, other=0)
            tl.store(target + index, word, mask=index < page_words)


def land(
    source: Tensor,
    target: Tensor,
    slots: NDArray[np.int64],
    block_ids: NDArray[np.int64],
    tags: NDArray[np.uint8],
) -> tuple[NDArray[np.bool_], NDArray[np.uint64]]:
    """As `engine.kernels.cpu.landing.land`, of pages on the device."""
    assert source.is_contiguous()
    assert target.is_contiguous()
    assert source.shape[1] == target.shape[1]
    assert len(tags) == len(slots) == len(block_ids)
    count, page_words = len(slots), source.shape[1] // 8
    if not count:
        return np.zeros(0, dtype=np.bool_), np.zeros(0, dtype=np.uint64)
    sent = np.concatenate([slots, block_ids, tags.reshape(-1).view(np.int64)])
    numbers = torch.from_numpy(sent).to(source.device)
    on_device = numbers[:count], numbers[count : 2 * count], numbers[2 * count :]
    shares = share_sums(source, on_device[0])
    outcome = torch.empty((count, 2), dtype=torch.int64, device=source.device)
    source, target = source.view(torch.int64), target.view(torch.int64)
    copy_kernel[tuple(shares.shape)](
        source, target, page_words, *on_device, shares, outcome,
        WORDS=WORDS_AT_ONCE, SHARES=SHARES, TAG_WORDS=TAG_BYTES // 8,
    )  # fmt: skip
    found = outcome.cpu().numpy()
    return found[:, 0] == 1, np.ascontiguousarray(found[:, 1]).view(np.uint64)
