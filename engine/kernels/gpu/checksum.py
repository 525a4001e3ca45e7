"""Checksums of pages: the sum modulo 2^64 of a record's words times odd factors of their places.

Several programs work on one page, since a page of a large model is a megabyte; sums are modulo
2^64, so their order does not matter. See `common.pages.checksum`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

WORDS_AT_ONCE = 1024
SHARES = 16
"""Programs of one page; fewer for a page that has fewer pieces."""


@triton.jit
def word_factors(index):
    spread = (index + 1).to(tl.int64) * -7046029254386353131
    return spread ^ ((spread >> 32) & 0xFFFFFFFF) | 1


@triton.jit
def checksum_kernel(pages_ptr, page_words, which_ptr, shares_ptr, WORDS: tl.constexpr):
    row, share, num_shares = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    words = pages_ptr + tl.load(which_ptr + row) * page_words
    sums = tl.zeros([WORDS], tl.int64)
    for first in range(share * WORDS, page_words - 1, num_shares * WORDS):
        index = first + tl.arange(0, WORDS)
        word = tl.load(words + index, mask=index < page_words - 1, other=0)
        sums += word * word_factors(index)
    tl.store(shares_ptr + row * num_shares + share, tl.sum(sums, axis=0))


def share_sums(pages: Tensor, which: Tensor) -> Tensor:
    """int64 [len(which), shares]: parts of the sums of pages [num_pages, page_bytes] uint8."""
    assert pages.dtype == torch.uint8
    assert pages.is_contiguous()
    assert pages.shape[1] % 8 == 0
    words = pages.view(torch.int64)
    num_shares = min(SHARES, triton.cdiv(words.shape[1], WORDS_AT_ONCE))
    sums = torch.empty((len(which), num_shares), dtype=torch.int64, device=pages.device)
    if len(which):
        checksum_kernel[tuple(sums.shape)](words, words.shape[1], which, sums, WORDS=WORDS_AT_ONCE)
    return sums


def checksums(pages: Tensor, which: Tensor | None = None) -> Tensor:
    """int64 [len(which)] (the bits of the unsigned sums) of pages [num_pages, page_bytes] uint8;
    `which` int64 are their numbers, all of them by default.
    """
    if which is None:
        which = torch.arange(len(pages), device=pages.device)
    return share_sums(pages, which).sum(dim=1)
