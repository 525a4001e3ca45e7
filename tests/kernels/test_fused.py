"""Fused kernels, interpreted, against plain torch: norms, SwiGLU, rotary with store."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from common.codecs import codec_named
from common.pages import PageLayout
from engine.kernels import reference
from engine.kernels.gpu.norm import rms_norm
from engine.kernels.gpu.store import rotate_and_store
from engine.kernels.gpu.swiglu import swiglu
from engine.kernels.offsets import Offsets
from engine.pools import PageArena

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ONE_STEP = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
"""A last place: sums are taken in another order."""


def normal(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


@settings(print_blob=True, deadline=None, max_examples=20)
@given(
    st.integers(0, 2**32 - 1), st.sampled_from(DTYPES), st.sampled_from([1, 16, 72, 576]),
    st.integers(1, 3), st.sampled_from([1e-3, 1.0, 1e3]), st.booleans(),
)  # fmt: skip
def test_rms_norm(
    seed: int, dtype: torch.dtype, width: int, rows: int, scale: float, has_residual: bool
) -> None:
    x, weight = normal(seed, rows, width, scale=scale).to(dtype), normal(1, width).to(dtype)
    residual = normal(seed + 1, rows, width, scale=scale).to(dtype) if has_residual else None
    normed, total = rms_norm(x, weight, 1e-5, residual)
    wanted, wanted_total = reference.rms_norm(x, weight, 1e-5, residual)
    assert normed.dtype == total.dtype == dtype
    assert torch.equal(total, wanted_total)
    torch.testing.assert_close(normed, wanted, rtol=ONE_STEP[dtype], atol=1e-6)


def test_a_row_is_normed_the_same_alone_and_in_company() -> None:
    x, weight = normal(0, 4, 576), normal(1, 576)
    together, _ = rms_norm(x, weight, 1e-5)
    for row in range(4):
        alone, _ = rms_norm(x[row : row + 1], weight, 1e-5)
        assert torch.equal(alone[0], together[row])


@settings(print_blob=True, deadline=None, max_examples=15)
@given(
    st.integers(0, 2**32 - 1), st.sampled_from(DTYPES), st.sampled_from([1, 96, 1100]),
    st.sampled_from([0.1, 10.0]),
)  # fmt: skip
def test_swiglu(seed: int, dtype: torch.dtype, width: int, scale: float) -> None:
    gate_up = normal(seed, 2, 2 * width, scale=scale).to(dtype)
    found, wanted = swiglu(gate_up), reference.swiglu(gate_up)
    assert found.dtype == dtype
    step = 2 * ONE_STEP[dtype]  # the exponentials are two
    torch.testing.assert_close(found, wanted, rtol=step, atol=1e-6)


@pytest.mark.parametrize(
    ("codec", "dtype", "head_dim", "has_norms"),
    [
        ("fp8_e3m4", torch.bfloat16, 16, False),
        ("int4", torch.float32, 24, False),
        ("bf16", torch.bfloat16, 16, True),
        ("fp32", torch.float32, 16, True),
    ],
)
def test_rotary_and_store_in_one_pass(
    codec: str, dtype: torch.dtype, head_dim: int, has_norms: bool
) -> None:
    """A chunk over blocks 1 and 2 (one full, one a tail), a decode that seals, one in block 0."""
    kv_heads, group, block = 2, 2, 16
    layout = PageLayout(2, kv_heads, block, head_dim, codec_named(codec))
    angles = torch.outer(torch.arange(64.0), 10 ** -torch.linspace(0, 4, head_dim // 2))
    cos, sin = angles.cos(), angles.sin()
    offsets = Offsets.of(normal(4, 2, 2, kv_heads, head_dim), cos, sin, block)
    items = torch.tensor([
        [0, 16, 16, -1, 3, 0], [16, 5, 32, 2, -1, 0], [21, 1, 63, 4, 5, 1], [22, 1, 7, 1, -1, 1],
        [0, 0, 0, -1, -1, 1],
    ])  # fmt: skip
    heads = normal(2, 23, kv_heads * (group + 2), head_dim, scale=3.0).to(dtype)
    norms = (normal(5, head_dim).to(dtype), normal(6, head_dim).to(dtype)) if has_norms else None
    results = []
    for run in (rotate_and_store, reference.rotate_and_store):
        pool = PageArena(layout, 6, 5)
        reference.exact_slices(pool.exact, layout).copy_(normal(8, 5, 2, 2, kv_heads, 16, head_dim))
        rest = heads, norms, 1e-5, cos, sin, items, pool.packed, pool.exact, layout, offsets, 1
        results.append((*run(*rest), pool))
    (q, k, v, pool), (wanted_q, wanted_k, wanted_v, wanted) = results
    chunk = slice(0, 21)
    if not has_norms:
        assert torch.equal(q, wanted_q)
        assert torch.equal(k[chunk].float(), wanted_k[chunk])
        assert torch.equal(v[chunk].float(), wanted_v[chunk])
        assert torch.equal(pool.exact, wanted.exact)
        assert torch.equal(pool.packed, wanted.packed)
        return
    # a head's squares are summed in another order, which may cost a last place
    torch.testing.assert_close(q, wanted_q, rtol=2 * ONE_STEP[dtype], atol=0.1 * ONE_STEP[dtype])
    pages = reference.exact_slices(pool.exact, layout).float()
    wanted_pages = reference.exact_slices(wanted.exact, layout).float()
    step = 2 * max(ONE_STEP[dtype], 2**-7 if codec != "fp32" else 0.0)
    torch.testing.assert_close(pages, wanted_pages, rtol=step, atol=1e-2 * step)
    torch.testing.assert_close(k[chunk].float(), wanted_k[chunk], rtol=step, atol=1e-2 * step)
    assert torch.equal(v[chunk].float(), wanted_v[chunk])
