"""Draws tokens without sorting the vocabulary: temperature, min_p, top_k, top_p, one number a row.

`engine.sampler` says what is drawn: weights are doubles, 1 for the most likely token; tokens
stand in falling order of weight, equal ones by id; top_k and then top_p keep the first so many of
them; the draw takes the token at whose weight the running sum passes `chance` times the sum of all
that are kept. (Without top_k and top_p, tokens stand by id.)

Every such place in the order is found by its *level*, the weight that stands there. A level is
searched by the bits of a token's distance to the best logit, which order tokens as their weights
do: 8 passes of 4 bits each, every pass summing what lies below 15 thresholds. A tile whose tokens
are all behind the thresholds adds nothing and is not summed, so after two or three passes only
tiles with likely tokens are. Two more passes sum what stands before the level and count the tokens
at it. One program per row; sums run in one order, so a row never depends on another.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.gpu.tiles import device_kind, sample_tile_of

SIDES = 16
"""Parts that one pass of a search divides its range in."""


@triton.jit
def weights_of(logits, top, temperature, min_p):
    weights = tl.exp((logits - top).to(tl.float64) / temperature)
    return tl.where(weights < min_p, 0.0, weights)


@triton.jit
def search(
    row_ptr, vocab, top, temperature, min_p, goal,
    COUNTS: tl.constexpr, REACHES: tl.constexpr, TILE: tl.constexpr, SIDES: tl.constexpr,
):  # fmt: skip
    """The smallest key up to which the sum of weights (or, COUNTS, the number of tokens) is more
    than `goal`; REACHES: or equal to it.
    """
    low = tl.zeros([], tl.int32)
    sides = tl.arange(0, SIDES)[None, :]
    for turn in range(8):
        step = tl.where(turn < 7, 1 << (27 - 4 * tl.minimum(turn, 6)), 1)
        ends = low + (sides + 1) * step - 1
        sums = tl.zeros([TILE, SIDES], tl.float64)
        for first in range(0, vocab, TILE):
            ids = first + tl.arange(0, TILE)
            logits = tl.load(row_ptr + ids, mask=ids < vocab, other=float("-inf"))
            keys = tl.abs(logits - top).to(tl.int32, bitcast=True)
            if tl.min(keys, axis=0) - low < (SIDES - 1) * step:
                if COUNTS:
                    each = (ids < vocab).to(tl.float64)
                else:
                    each = weights_of(logits, top, temperature, min_p)
                is_below = (keys[:, None] <= ends) & (sides < SIDES - 1)
                sums += tl.where(is_below, each[:, None], 0.0)
        total = tl.sum(sums, axis=0)[None, :]
        is_short = (total < goal) if REACHES else (total <= goal)
        low += tl.sum((is_short & (sides < SIDES - 1)).to(tl.int32)) * step
    return low


@triton.jit
def level_of(row_ptr, vocab, top, temperature, min_p, key, TILE: tl.constexpr):
    """The weight of the tokens with this key; 0 where there are none."""
    found = tl.zeros([TILE], tl.float64)
    for first in range(0, vocab, TILE):
        ids = first + tl.arange(0, TILE)
        logits = tl.load(row_ptr + ids, mask=ids < vocab, other=float("-inf"))
        is_there = tl.abs(logits - top).to(tl.int32, bitcast=True) == key
        if tl.max(is_there.to(tl.int32), axis=0) > 0:
            weights = weights_of(logits, top, temperature, min_p)
            found = tl.maximum(found, tl.where(is_there, weights, 0.0))
    return tl.max(found, axis=0)


@triton.jit
def around(row_ptr, vocab, top, temperature, min_p, level, TILE: tl.constexpr):
    """Sum and number of the weights above a level, number of those at it (as doubles)."""
    above = tl.zeros([TILE], tl.float64)
    num_above = tl.zeros([TILE], tl.float64)
    num_at = tl.zeros([TILE], tl.float64)
    for first in range(0, vocab, TILE):
        ids = first + tl.arange(0, TILE)
        logits = tl.load(row_ptr + ids, mask=ids < vocab, other=float("-inf"))
        weights = weights_of(logits, top, temperature, min_p)
        above += tl.where(weights > level, weights, 0.0)
        num_above += (weights > level).to(tl.float64)
        num_at += ((weights == level) & (ids < vocab)).to(tl.float64)
    return tl.sum(above, axis=0), tl.sum(num_above, axis=0), tl.sum(num_at, axis=0)


@triton.jit
def nth_at(row_ptr, vocab, top, temperature, min_p, level, nth, TILE: tl.constexpr):
    """Id of the nth token (from 0, a double) whose weight is `level`."""
    token = tl.zeros([], tl.int32)
    num_before = tl.zeros([], tl.float64)
    for first in range(0, vocab, TILE):
        ids = first + tl.arange(0, TILE)
        logits = tl.load(row_ptr + ids, mask=ids < vocab, other=float("-inf"))
        weights = weights_of(logits, top, temperature, min_p)
        is_at = (weights == level) & (ids < vocab)
        rank = num_before + tl.cumsum(is_at.to(tl.float64), axis=0) - 1.0
        token += tl.sum(tl.where(is_at & (rank == nth), ids, 0), axis=0)
        num_before += tl.sum(is_at.to(tl.float64), axis=0)
    return token


@triton.jit
def by_id(row_ptr, vocab, top, temperature, min_p, wanted, TILE: tl.constexpr):
    """The first token at which the running sum of weights, in order of ids, passes `wanted`."""
    token = tl.zeros([], tl.int32) + vocab
    last = tl.zeros([], tl.int32)
    before = tl.zeros([], tl.float64)
    for first in range(0, vocab, TILE):
        if token == vocab:
            ids = first + tl.arange(0, TILE)
            logits = tl.load(row_ptr + ids, mask=ids < vocab, other=float("-inf"))
            weights = weights_of(logits, top, temperature, min_p)
            passes = before + tl.cumsum(weights, axis=0) > wanted
            token = tl.min(tl.where(passes & (weights > 0.0), ids, vocab), axis=0)
            last = tl.maximum(last, tl.max(tl.where(weights > 0.0, ids, 0), axis=0))
            before += tl.sum(weights, axis=0)
    return tl.minimum(token, tl.where(token == vocab, last, token))


@triton.jit
def sample_kernel(
    logits_ptr, stride, temperature_ptr, min_p_ptr, top_k_ptr, top_p_ptr, chance_ptr, tokens_ptr,
    vocab,
    TILE: tl.constexpr, SIDES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    row_ptr = logits_ptr + row.to(tl.int64) * stride
    temperature, min_p = tl.load(temperature_ptr + row), tl.load(min_p_ptr + row)
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    chance = tl.load(chance_ptr + row)

    best = tl.full([TILE], float("-inf"), tl.float32)
    for first in range(0, vocab, TILE):
        ids = first + tl.arange(0, TILE)
        logits = tl.load(row_ptr + ids, mask=ids < vocab, other=float("-inf"))
        best = tl.maximum(best, logits)
    top = tl.max(best, axis=0)
    mass, _, _ = around(row_ptr, vocab, top, temperature, min_p, 0.0, TILE)

    if (top_k <= 0) & (top_p >= 1.0):
        token = by_id(row_ptr, vocab, top, temperature, min_p, chance * mass, TILE)
    else:
        last = tl.zeros([], tl.float64) - 1.0  # the level at which what is kept ends
        num_last = tl.zeros([], tl.float64)  # tokens kept of that level
        if (top_k > 0) & (top_k < vocab):
            wanted = top_k.to(tl.float64)
            key = search(row_ptr, vocab, top, temperature, min_p, wanted, True, True, TILE, SIDES)
            last = level_of(row_ptr, vocab, top, temperature, min_p, key, TILE)
            above, num_above, _ = around(row_ptr, vocab, top, temperature, min_p, last, TILE)
            num_last = wanted - num_above
            mass = above + num_last * last
        if top_p < 1.0:
            goal = top_p * mass
            key = search(row_ptr, vocab, top, temperature, min_p, goal, False, True, TILE, SIDES)
            level = level_of(row_ptr, vocab, top, temperature, min_p, key, TILE)
            level = tl.maximum(level, last)
            above, _, num_at = around(row_ptr, vocab, top, temperature, min_p, level, TILE)
            if level == last:
                num_at = num_last
            num_last = tl.ceil((goal - above) / tl.where(level > 0.0, level, 1.0))
            num_last = tl.minimum(tl.maximum(num_last, 1.0), num_at)
            last = level
            mass = above + num_last * last
        wanted = chance * mass
        key = search(row_ptr, vocab, top, temperature, min_p, wanted, False, False, TILE, SIDES)
        level = level_of(row_ptr, vocab, top, temperature, min_p, key, TILE)
        level = tl.maximum(level, last)
        above, _, num_at = around(row_ptr, vocab, top, temperature, min_p, level, TILE)
        if level == last:
            num_at = num_last
        nth = tl.floor((wanted - above) / tl.where(level > 0.0, level, 1.0))
        nth = tl.maximum(tl.minimum(nth, num_at - 1.0), 0.0)
        token = nth_at(row_ptr, vocab, top, temperature, min_p, level, nth, TILE)
    tl.store(tokens_ptr + row, token.to(tl.int64))


def sample_rows(
    logits: Tensor,
    temperature: Tensor,
    min_p: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    chance: Tensor,
) -> Tensor:
    """Token ids int64 [num_rows], one for each row of logits [num_rows, vocab] float32, drawn by
    `chance` in (0, 1).

    All others [num_rows]: temperature (above 0), min_p, top_p, chance float64; top_k int64, 0 for
    none. Rows may hold -inf, but no NaN and no +inf, and not -inf alone.
    """
    num_rows, vocab = logits.shape
    assert logits.dtype == torch.float32
    assert logits.stride(1) == 1
    assert temperature.dtype == min_p.dtype == top_p.dtype == chance.dtype == torch.float64
    assert top_k.dtype == torch.int64
    tile = sample_tile_of(device_kind(logits.device))
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows:
        sample_kernel[(num_rows,)](
            logits, logits.stride(0), temperature, min_p, top_k, top_p, chance, tokens, vocab,
            TILE=tile.tokens, SIDES=SIDES, num_warps=tile.num_warps,
        )  # fmt: skip
    return tokens
