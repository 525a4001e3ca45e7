"""Row kernels: RMSNorm with residual, SiLU * up, rotary embedding with optional QK-norm, bias.

All work on one row given by address. Lengths are multiples of 8; the order of every sum is fixed.
"""

import math

import numpy as np
from numba import njit

from engine.kernels.cpu.simd import (
    add,
    div,
    exp,
    fma,
    load,
    maximum,
    mul,
    round_bf16,
    splat,
    store,
    sub,
    total,
)


@njit(nogil=True)
def inverse_rms(x, n, eps):
    """1 / sqrt(mean(x^2) + eps) of the n floats at x."""
    squares = splat(np.float32(0.0))
    for i in range(0, n * 4, 32):
        v = load(x + i)
        squares = fma(v, v, squares)
    return np.float32(1.0) / np.float32(math.sqrt(total(squares) / np.float32(n) + eps))


@njit(nogil=True)
def rms_norm(x, weight, n, eps, out):
    """out = x / rms(x) * weight."""
    factor = splat(inverse_rms(x, n, eps))
    for i in range(0, n * 4, 32):
        store(out + i, mul(mul(load(x + i), factor), load(weight + i)))


@njit(nogil=True)
def add_row(x, delta, bias, n):
    """x += delta (+ bias, when there is one)."""
    for i in range(0, n * 4, 32):
        v = load(delta + i)
        if bias:
            v = add(v, load(bias + i))
        store(x + i, add(load(x + i), v))


@njit(nogil=True)
def silu_mul(gate, up, n, out):
    """out = gate / (1 + exp(-gate)) * up."""
    one, lowest, zero = splat(np.float32(1.0)), splat(np.float32(-88.0)), splat(np.float32(0.0))
    for i in range(0, n * 4, 32):
        g = load(gate + i)
        e = exp(sub(zero, maximum(lowest, g)))
        store(out + i, mul(div(g, add(one, e)), load(up + i)))


@njit(nogil=True)
def add_bias(x, bias, n):
    for i in range(0, n * 4, 32):
        store(x + i, add(load(x + i), load(bias + i)))


@njit(nogil=True)
def rotate_head(x, cos, sin, head_dim, norm, eps, scale):
    """One head in place: norm (when its weight's address is not 0), rotary, times `scale`."""
    if norm:
        rms_norm(x, norm, head_dim, eps, x)
    half = head_dim * 2
    factor = splat(scale)
    for i in range(0, half, 32):
        a, b, c, s = load(x + i), load(x + half + i), load(cos + i), load(sin + i)
        store(x + i, mul(sub(mul(a, c), mul(b, s)), factor))
        store(x + half + i, mul(add(mul(b, c), mul(a, s)), factor))


@njit(nogil=True)
def round_row(x, n):
    """Each float of the row to the nearest bf16."""
    for i in range(0, n * 4, 32):
        store(x + i, round_bf16(load(x + i)))
