"""Int8 weights on CPU: exactly the model with the values that they stand for, and how near those
are.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from common.errors import ConfigError, UnsupportedModel
from engine.config import EngineConfig
from engine.int8_weights import int8_panels, int8_values
from engine.kernels.cpu.int8_weights import GROUP
from engine.load import load_gpu
from engine.offsets import open_offsets
from engine.pool_size import NO_PAGES
from engine.ranks.collective import Alone
from tests.engine.conftest import MakeRunner, make_runner
from tests.engine.driver import Driver
from tests.engine.test_same_bits import Outcome, in_batch, prompt_of
from tests.engine.tiny_models import TinyModel, make_tiny_model
from worker.config import WorkerConfig
from worker.main import layout_text

SIZES: dict[str, Any] = {"hidden_size": 80, "intermediate_size": 624}
"""A group of half the size at the end of a row, and rows of several slices."""


def requantised(folder: Path, weights_path: Path) -> None:
    """A copy of a model whose matrices hold what int8 leaves of them."""
    folder.mkdir()
    for path in weights_path.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    weights = load_file(folder / "model.safetensors")
    values = {name: int8_values(w) if w.ndim == 2 else w for name, w in weights.items()}
    save_file(values, folder / "model.safetensors")


@pytest.mark.parametrize("is_tied", [False, True])
def test_int8_computes_the_bits_of_fp32_weights_of_the_same_values(
    tmp_path: Path, is_tied: bool
) -> None:
    """Chunks of all sizes and batches of 1 to 11: tiles of few rows, and of many in two blocks."""
    model = make_tiny_model(tmp_path / "model", "qwen2", tie_word_embeddings=is_tied, **SIZES)
    requantised(tmp_path / "values", model.path)
    wanted = in_batch(Driver(make_runner(tmp_path / "values")), LENGTHS, chunk=512)
    for chunk in (16, 512):
        driver = Driver(make_runner(model.path, weight_dtype="int8", num_threads=2))
        for length, found in in_batch(driver, LENGTHS, chunk).items():
            found.assert_equals(wanted[length], f"{length} tokens in chunks of {chunk}")
        for length in LENGTHS[-2:]:
            found = in_batch(driver, [length], chunk)[length]
            found.assert_equals(wanted[length], f"{length} tokens alone")


LENGTHS = [1, 2, 3, 4, 5, 6, 7, 8, 13, 97, 150]


@pytest.mark.parametrize("num_rows", range(1, 18))
def test_steps_of_every_size_give_the_bits_of_steps_of_one(tiny: TinyModel, num_rows: int) -> None:
    driver = Driver(make_runner(tiny.path, weight_dtype="int8"))
    keys = [str(n) for n in range(num_rows)]
    for key in keys:
        driver.add(key, prompt_of(5, 331), max_tokens=3)
    driver.run(chunk_tokens=16)
    alone = Driver(make_runner(tiny.path, weight_dtype="int8"))
    alone.add("a", prompt_of(5, 331), max_tokens=3)
    alone.run(chunk_tokens=16)
    for key in keys:
        Outcome(driver, key).assert_equals(Outcome(alone, "a"), f"{num_rows} rows")


def test_the_self_test_runs_on_int8(tiny_runner: MakeRunner) -> None:
    tiny_runner(weight_dtype="int8").self_test()


@pytest.mark.parametrize("width", [16, 32, 80, 576])
def test_values_are_within_half_a_step(width: int) -> None:
    """A step is the group's largest value by 127, in bf16; tiny and zero groups are kept too."""
    generator = torch.Generator().manual_seed(width)
    weights = torch.randn((24, width), generator=generator)
    weights *= torch.logspace(-37, 30, 24)[:, None]
    weights[3] = 0
    found = int8_values(weights)
    for start in range(0, width, GROUP):
        part, values = weights[:, start : start + GROUP], found[:, start : start + GROUP]
        largest = part.abs().amax(1, keepdim=True)
        bound = (largest / 127 * (0.5 + 0.25 + 2**-8)).where(largest > 1e-34, largest)
        assert ((part - values).abs() <= bound).all()
    assert found[3].eq(0).all()


def test_panels_are_a_quarter_of_fp32_and_a_factor_for_each_group() -> None:
    panels = int8_panels(torch.randn(40, 80))
    assert panels.shape == (3, 80 * 16 + 3 * 32)  # 40 columns in 3 panels, 80 inputs in 3 groups
    assert panels.dtype == torch.uint8


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_refused(value: float) -> None:
    weights = torch.ones(16, 32)
    weights[3, 4] = value
    with pytest.raises(UnsupportedModel, match="not finite"):
        int8_panels(weights)


def test_int8_comes_near_fp32_and_is_another_layout(tiny: TinyModel) -> None:
    def logits(weight_dtype: str) -> tuple[NDArray[np.float32], bytes]:
        driver = Driver(make_runner(tiny.path, weight_dtype=weight_dtype, kv_codec="fp32"))
        driver.add("a", prompt_of(40, 331), max_tokens=1)
        driver.run(chunk_tokens=64)
        return driver.logits["a"][0], driver.runner.layout_fingerprint

    (exact, plain), (near, other) = logits("auto"), logits("int8")
    assert plain != other
    assert 0 < np.abs(near - exact).max() < 0.03 * np.abs(exact).max()


def test_workers_say_how_they_keep_weights(tiny: TinyModel, tiny_runner: MakeRunner) -> None:
    """In what a refused hand-off names of both sides, beside another fingerprint."""
    plain, int8 = (
        layout_text(
            WorkerConfig(role="decode", model=str(tiny.path), weight_dtype=weights),
            tiny_runner(weight_dtype=weights),
        )
        for weights in ("auto", "int8")
    )
    assert "weights auto" in plain
    assert "weights int8" in int8
    assert plain.split()[-1] != int8.split()[-1]


def test_int8_is_refused_on_a_gpu(tiny: TinyModel, tiny_runner: MakeRunner) -> None:
    runner = tiny_runner()
    offsets, _ = open_offsets(tiny.path, runner.config, runner.layout)
    config = EngineConfig(model=tiny.path, weight_dtype="int8", device="cuda", pool=NO_PAGES)
    with pytest.raises(ConfigError, match="int8 is for CPUs; on a GPU choose fp8"):
        load_gpu(config, runner.config, offsets, Alone())
