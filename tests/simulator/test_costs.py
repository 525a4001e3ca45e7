"""Cost models: the roofline of known hardware, fits, and their file."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from common.codecs import codec_named
from common.errors import ConfigError
from common.pages import PageLayout
from common.scheduling.step_time import StepShape, StepTimes, num_pairs
from simulator.costs import FittedCosts, ModelSize, Roofline
from simulator.fit import Sample, fit, linear_of, load, relative_errors, save
from simulator.hardware import GPUS, MODELS, gpu_named, model_named
from tests.simulator.fleets import TIMES


def roofline(model: str, gpu: str, ranks: int = 1, codec: str = "bf16", **rates: Any) -> Roofline:
    config = model_named(model)
    layout = PageLayout(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        block_size=16,
        head_dim=config.head_dim,
        codec=codec_named(codec),
    )
    return Roofline(gpu=gpu_named(gpu), model=config, layout=layout, num_ranks=ranks, **rates)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("llama-3-8b", 8.03), ("llama-3-70b", 70.55), ("qwen3-32b", 32.76)],
)
def test_models_have_their_published_sizes(name: str, billions: float) -> None:
    assert ModelSize.of(model_named(name)).num_parameters / 1e9 == pytest.approx(billions, rel=2e-3)


def test_kv_of_a_token_is_as_large_as_published() -> None:
    # 2 x 80 layers x 8 heads x 128 x 2 bytes; a tag of 64 bytes is shared by 16 tokens
    assert roofline("llama-3-70b", "h100").kv_token_bytes == pytest.approx(327_680, rel=1e-4)
    packed = roofline("llama-3-70b", "h100", codec="fp8_e3m4").kv_token_bytes
    assert packed == pytest.approx(163_840, rel=1e-3)


def test_a_decode_step_is_bound_by_reading_the_weights() -> None:
    costs = roofline("llama-3-8b", "h100", bandwidth_efficiency=1.0, compute_efficiency=1.0)
    one = costs.step_s(StepShape(num_decodes=1))
    read = (ModelSize.of(model_named("llama-3-8b")).num_parameters - 128256 * 4096) * 2 / 3350e9
    assert one == pytest.approx(read + 1e-3, rel=1e-6)
    assert costs.step_s(StepShape(num_decodes=64)) == pytest.approx(one)


def test_a_long_chunk_is_bound_by_compute_and_grows_with_its_context() -> None:
    costs = roofline("llama-3-8b", "h100", bandwidth_efficiency=1.0, compute_efficiency=1.0)

    def chunk(start: int) -> float:
        return costs.step_s(StepShape(num_prefill_tokens=2048, num_pairs=num_pairs(start, 2048)))

    size = ModelSize.of(model_named("llama-3-8b"))
    products = 2 * size.linear_parameters * 2048 / 989.5e12
    attention = 4 * 32 * 4096 * num_pairs(0, 2048) / 989.5e12
    assert chunk(0) == pytest.approx(products + attention + 1e-3)
    assert chunk(30_000) > 1.5 * chunk(0)


def test_more_gpus_are_faster_but_pay_for_all_reduces() -> None:
    shape = StepShape(num_prefill_tokens=2048, num_pairs=num_pairs(0, 2048))
    one, four = (roofline("llama-3-70b", "h100", ranks).step_s(shape) for ranks in (1, 4))
    assert one / 4 < four < one / 2.5


@pytest.mark.parametrize("gpu", list(GPUS))
@pytest.mark.parametrize("model", list(MODELS))
def test_every_gpu_runs_every_model_in_plausible_time(gpu: str, model: str) -> None:
    costs = roofline(model, gpu, 4)
    assert 1e-3 < costs.step_s(StepShape(num_decodes=8, num_context_tokens=8000)) < 0.1
    assert 0 < costs.transfer_s(1e9) < 0.1
    assert 0 < costs.land_s(1e9) < 0.01


def test_unknown_names_are_answered_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a100, h100, h200, b200, mi300x"):
        gpu_named("v100")
    with pytest.raises(ConfigError, match="llama-3-8b, llama-3-70b"):
        model_named("gpt-2")
    config = {**MODELS["llama-3-8b"], "num_hidden_layers": 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert model_named(str(tmp_path)).num_layers == 3


def test_a_fit_finds_the_times_that_made_its_samples() -> None:
    seed = random.SystemRandom().randrange(2**31)
    print("seed", seed)  # noqa: T201
    rng = random.Random(seed)
    samples = []
    for _ in range(300):
        tokens, decodes = rng.choice([0, 64, 256, 512]), rng.randrange(1, 32)
        shape = StepShape(
            num_prefill_tokens=tokens,
            num_pairs=num_pairs(rng.randrange(4000), tokens),
            num_decodes=decodes,
            num_context_tokens=decodes * rng.randrange(10, 4000),
        )
        noise = rng.gauss(1.0, 0.01)
        samples.append(Sample(shape=shape, seconds=TIMES.step_s(shape) * noise))
    found = fit(samples)
    for name in ("fixed_s", "prefill_token_s", "pair_s", "decode_s", "context_token_s"):
        assert getattr(found, name) == pytest.approx(getattr(TIMES, name), rel=0.1)
    assert max(map(abs, relative_errors(found, samples))) < 0.06


def test_what_was_never_seen_costs_nothing_and_nothing_is_negative() -> None:
    samples = [
        Sample(shape=StepShape(num_decodes=n, num_context_tokens=100 * n), seconds=0.02 - 1e-4 * n)
        for n in range(1, 20)
    ]
    found = fit(samples)
    assert found.prefill_token_s == found.pair_s == 0.0
    assert min(found.fixed_s, found.decode_s, found.context_token_s) >= 0


def test_the_line_nearest_to_a_roofline_is_near() -> None:
    costs = roofline("llama-3-70b", "h100", 4, "fp8_e3m4")
    times = linear_of(costs)
    for shape in (
        StepShape(num_decodes=32, num_context_tokens=32 * 2000),
        StepShape(num_prefill_tokens=1024, num_pairs=num_pairs(2048, 1024), num_decodes=16),
    ):
        assert times.step_s(shape) == pytest.approx(costs.step_s(shape), rel=0.3)


def test_times_survive_their_file_and_a_bad_file_is_explained(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    costs = FittedCosts(times=TIMES, read_s=1e-4, read_byte_s=1e-9, land_byte_s=1e-10)
    save(costs, path)
    assert load(path) == costs
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "pair_s": -1}))
    with pytest.raises(ConfigError, match="pair_s must be a number of seconds, not -1"):
        load(path)
    path.write_text(json.dumps({**content, "colour": 1}))
    with pytest.raises(ConfigError, match="unknown keys colour"):
        load(path)
    path.write_text("[]")
    with pytest.raises(ConfigError, match="does not hold a JSON object"):
        load(path)
    with pytest.raises(ConfigError, match="cannot read"):
        load(tmp_path / "none.json")


def test_fitted_costs_are_their_own_line() -> None:
    assert linear_of(FittedCosts(times=TIMES)) is TIMES
    assert isinstance(TIMES, StepTimes)
