"""Checksums of pages: the sum modulo 2^64 of a record's words times odd factors of their places.

One program per page; the sum does not depend on order. See `common.pages.checksum`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

WORDS_AT_ONCE = 1024


@triton.jit
def word_factors(index):
    spread = (index + 1).to(tl.int64) * -7046029254386353131
    return spread ^ ((spread >> 32) & 0xFFFFFFFF) | 1


@triton.jit
def checksum_kernel(pages_ptr, page_words, sums_ptr, WORDS: tl.constexpr):
    page = tl.program_id(0)
    words = pages_ptr + page.to(tl.int64) * page_words
    sums = tl.zeros([WORDS], tl.int64)
    for first in range(0, page_words - 1, WORDS):
        index = first + tl.arange(0, WORDS)
        word = tl.load(words + index, mask=index < page_words - 1, other=0)
        sums += word * word_factors(index)
    tl.store(sums_ptr + page, tl.sum(sums, axis=0))


def checksums(pages: Tensor) -> Tensor:
    """int64 [num_pages] (the bits of the unsigned sums) of pages [num_pages, page_bytes] uint8."""
    assert pages.dtype == torch.uint8
    assert pages.is_contiguous()
    assert pages.shape[1] % 8 == 0
    words = pages.view(torch.int64)
    sums = torch.empty(len(pages), dtype=torch.int64, device=pages.device)
    if len(pages):
        checksum_kernel[(len(pages),)](words, words.shape[1], sums, WORDS=WORDS_AT_ONCE)
    return sums
