"""Products with fixed tiles: right for every shape, and the same bits for every number of rows."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.kernels.gpu.matmul import matmul
from engine.kernels.gpu.quantise import quantise_rows
from engine.kernels.gpu.tiles import matmul_tile_of
from engine.linear import Fp8Linear, InvariantLinear, PlainLinear, make_linear

# bf16 is left out: the interpreter multiplies its bits as integers
ROUNDING = {torch.float32: 2.0**-22, torch.float16: 2.0**-10}


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@given(
    st.sampled_from(list(ROUNDING)), st.integers(1, 40), st.integers(1, 90), st.integers(1, 90),
    st.booleans(), st.integers(0, 3), st.integers(0, 2**32 - 1),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_any_shape_gives_the_product(
    dtype: torch.dtype, rows: int, inputs: int, outputs: int, has_bias: bool, gap: int, seed: int
) -> None:
    x = normal(seed, rows, inputs + gap).to(dtype)[:, :inputs]
    weight = normal(seed + 1, outputs, inputs).to(dtype)
    bias = normal(seed + 2, outputs).to(dtype) if has_bias else None
    found = matmul(x, weight, bias)
    assert found.dtype is dtype
    exact = x.double() @ weight.double().T
    sizes = x.double().abs() @ weight.double().abs().T
    if bias is not None:
        exact, sizes = exact + bias.double(), sizes + bias.double().abs()
    bound = ROUNDING[dtype] * exact.abs() + inputs * ROUNDING[torch.float32] * sizes
    assert ((found.double() - exact).abs() <= bound).all()


@pytest.mark.usefixtures("ordered_dots")
@pytest.mark.parametrize("dtype", [*ROUNDING, torch.float8_e4m3fn])
def test_a_row_has_the_same_bits_among_any_number_and_at_any_place(dtype: torch.dtype) -> None:
    x, weight, bias = normal(0, 70, 20), normal(1, 33, 20), normal(2, 33)
    scales = torch.rand(70, 1, generator=torch.Generator().manual_seed(3))
    x, weight = x.to(dtype), weight.to(dtype)

    def product(which: slice | Tensor) -> Tensor:
        if dtype is not torch.float8_e4m3fn:
            return matmul(x[which], weight, bias.to(dtype))
        of_both = scales[which], scales[:33].T.contiguous()
        return matmul(x[which], weight, bias, scales=of_both, out_dtype=torch.float32)

    wanted = product(slice(70))
    for count in range(1, 71):
        assert torch.equal(product(slice(count)), wanted[:count])
        assert torch.equal(product(slice(count - 1, count)), wanted[count - 1 : count])
    order = torch.randperm(70, generator=torch.Generator().manual_seed(4))
    assert torch.equal(product(order), wanted[order])


@pytest.mark.parametrize("has_bias", [False, True])
def test_fp8_products_are_those_of_what_codes_stand_for(has_bias: bool) -> None:
    x, weight = normal(0, 21, 70), normal(1, 48, 70) * torch.logspace(-3, 1, 48)[:, None]
    x[4, 2], x[9] = torch.nan, 0.0
    bias = normal(2, 48) if has_bias else None
    (codes, scales), (w_codes, w_scales) = quantise_rows(x), quantise_rows(weight)
    found = matmul(
        codes, w_codes, bias, scales=(scales, w_scales.T.contiguous()), out_dtype=torch.float32
    )
    exact = (codes.double() * scales.double()) @ (w_codes.double() * w_scales.double()).T
    if bias is not None:
        exact += bias.double()
    good = torch.arange(21) != 4
    torch.testing.assert_close(found[good].double(), exact[good], rtol=1e-5, atol=1e-5)
    assert found[4].isnan().all()


def test_every_e4m3_byte_is_multiplied_as_torch_reads_it() -> None:
    one, scale = torch.full((1, 1), 1.0), torch.ones(1, 1)
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)[:, None]
    found = matmul(
        codes, one.to(torch.float8_e4m3fn), scales=(torch.ones(256, 1), scale),
        out_dtype=torch.float32,
    )  # fmt: skip
    torch.testing.assert_close(found, codes.float(), rtol=0, atol=0, equal_nan=True)


def test_the_option_chooses_the_product() -> None:
    weight = normal(0, 32, 16)
    assert isinstance(make_linear(weight, None, "auto"), PlainLinear)
    assert isinstance(make_linear(weight, None, "auto", is_invariant=True), InvariantLinear)
    fp8 = make_linear(weight, None, "fp8", is_invariant=True)
    assert isinstance(fp8, Fp8Linear)
    assert fp8.is_invariant


@pytest.mark.parametrize("kind", ["sm_80", "sm_90", "sm_100", "gfx942", "interpreter"])
def test_every_device_has_tiles(kind: str) -> None:
    for outputs in (96, 4096, 8192, 128_256):
        tile = matmul_tile_of(kind, outputs)
        assert tile.rows >= 16
        assert tile.columns >= 16
        assert tile.depth_bytes // 4 >= 16
