"""FP8 weights: codes, scales and products against the plain definition."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from common.errors import ConfigError
from engine.backend import check_fp8
from engine.kernels import reference
from engine.kernels.gpu.quantise import quantise_rows
from engine.linear import Fp8Linear, PlainLinear, make_linear
from engine.offsets import open_offsets
from engine.triton_model import TritonModel
from engine.weights import Checkpoint
from tests.engine.conftest import MakeRunner, make_runner
from tests.engine.driver import Driver
from tests.engine.tiny_models import make_tiny_model


@pytest.mark.parametrize("width", [16, 1024, 1040])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_quantised_as_the_reference_does(width: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn((7, 2 * width), generator=generator)
    x *= torch.tensor([1e-3, 1.0, 300.0, 1e-38, 0.0, 5e37, 7.0])[:, None]
    rows = x.to(dtype)[:, :width]  # rows that lie apart
    codes, scales = quantise_rows(rows)
    wanted, wanted_scales = reference.quantise_rows(rows)
    assert torch.equal(scales, wanted_scales)
    assert torch.equal(codes.view(torch.uint8), wanted.view(torch.uint8))
    assert codes[4].float().eq(0).all()
    assert codes[1].float().abs().max() == 448


def test_a_row_that_is_not_finite_stays_so_and_leaves_the_others_alone() -> None:
    x = torch.ones((3, 32), dtype=torch.bfloat16)
    x[0, 3], x[2, 5] = torch.nan, torch.inf
    y = Fp8Linear.of(torch.ones((16, 32), dtype=torch.bfloat16))(x)
    assert not y[0].isfinite().any()
    assert not y[2].isfinite().any()
    assert y[1].eq(32).all()


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 5, 64])
def test_products_are_those_of_the_dequantised_operands(num_rows: int, has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    weight = torch.randn((48, 96), generator=generator) * torch.logspace(-3, 1, 48)[:, None]
    bias = torch.randn(48, generator=generator).bfloat16() if has_bias else None
    x = torch.randn((num_rows, 96), generator=generator).bfloat16()
    linear = Fp8Linear.of(weight.bfloat16(), bias)
    codes, scales = reference.quantise_rows(x)
    wide = (codes.double() * scales.double()) @ (
        linear.weight.double() * linear.scales.T.double()
    ).T
    if bias is not None:
        wide += bias.double()
    found = linear(x)
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found.double(), wide, rtol=2**-7, atol=1e-6)
    exact = PlainLinear(weight.double(), None if bias is None else bias.double())(x.double())
    sizes = x.double().abs() @ weight.double().abs().T
    # 2**-4 for each operand, a little more where they are rounded to bf16 too
    assert ((found.double() - exact).abs() <= 0.15 * sizes + 2**-7 * exact.abs()).all()


def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    generator = torch.Generator().manual_seed(0)
    linear = Fp8Linear.of(torch.randn((32, 64), generator=generator).bfloat16())
    x = torch.randn((9, 64), generator=generator).bfloat16()
    codes, scales = quantise_rows(x)
    one, its_scale = quantise_rows(x[4:5])
    assert torch.equal(codes[4:5].view(torch.uint8), one.view(torch.uint8))
    assert torch.equal(scales[4:5], its_scale)
    assert linear.weight.float().abs().amax(1).eq(448).all()


def test_sizes_that_fp8_products_do_not_take_are_refused() -> None:
    with pytest.raises(ConfigError, match="multiples of 16"):
        make_linear(torch.zeros((24, 32)), None, "fp8")


@pytest.mark.parametrize("capability", [None, (8, 0), (8, 6)])
def test_fp8_weights_need_a_gpu_that_multiplies_them(capability: tuple[int, int] | None) -> None:
    with pytest.raises(ConfigError, match=r"8\.9"):
        check_fp8(torch.bfloat16, capability)


def dequantised(linear: Fp8Linear, x: Tensor) -> Tensor:
    """The plain definition: a product of the values that codes and scales stand for."""
    codes, scales = reference.quantise_rows(x)
    out = (codes.float() * scales) @ (linear.weight.float() * linear.scales.T).T
    return (out if linear.bias is None else out + linear.bias).to(x.dtype)


def test_a_model_with_fp8_weights_computes_with_what_its_codes_stand_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 32}
    path = make_tiny_model(tmp_path, "qwen2", num_hidden_layers=1, **sizes).path
    logits = []
    # in fp32: Triton's interpreter multiplies the bits of bf16 operands as integers
    for kind in ("auto", "fp8", "fp8, batch-invariant", "fp8, as defined"):
        if kind == "fp8, as defined":
            monkeypatch.setattr(Fp8Linear, "__call__", dequantised)
        runner = make_runner(path, num_blocks=16, num_exact=4, kv_codec="bf16")
        offsets, _ = open_offsets(path, runner.config, runner.layout)
        checkpoint = Checkpoint.open(path)
        runner.backend = TritonModel(
            runner.config, checkpoint, runner.pool, offsets, torch.float32, kind.split(",")[0],
            is_batch_invariant=kind == "fp8, batch-invariant",
        )  # fmt: skip
        driver = Driver(runner)
        driver.add("a", list(range(3, 8)), max_tokens=1)
        driver.run()
        logits.append(torch.from_numpy(driver.logits["a"][0]))
    plain, fp8, invariant, defined = logits
    for found in (fp8, invariant):
        torch.testing.assert_close(found, defined, rtol=1e-4, atol=1e-4)
    assert 0.99 < float(torch.cosine_similarity(fp8, plain, dim=0)) < 0.9999


def test_fp8_weights_are_refused_on_a_cpu(tiny_runner: MakeRunner) -> None:
    with pytest.raises(ConfigError, match="there is none here"):
        tiny_runner(weight_dtype="fp8")


def test_fp8_weights_compute_in_bfloat16() -> None:
    check_fp8(torch.bfloat16, (8, 9))
    with pytest.raises(ConfigError, match="--dtype bfloat16"):
        check_fp8(torch.float16, (9, 0))
