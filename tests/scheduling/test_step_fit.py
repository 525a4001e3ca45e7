"""The fit of step times: known coefficients are found again in noise with outliers, predictions are
near, and a load that never varies spoils nothing.
"""

import random
from collections.abc import Callable
from dataclasses import asdict

import pytest

from common.scheduling.step_fit import MIN_STEPS, WINDOW, StepFit
from common.scheduling.step_time import StepShape, StepTimes, num_pairs

NOISE = 0.03
OUTLIER_SHARE, OUTLIER = 0.05, 20.0

CPU = StepTimes(
    fixed_s=8e-3, prefill_token_s=1.5e-3, pair_s=3e-7, decode_s=2e-3, context_token_s=4e-7
)
GPU = StepTimes(
    fixed_s=8e-3, prefill_token_s=4e-5, pair_s=2e-9, decode_s=3e-5, context_token_s=1e-8
)
Load = Callable[[random.Random, int], StepShape]


def mixed(rng: random.Random, number: int) -> StepShape:
    num_tokens = rng.choice([0, 0, 16, 64, 256, 512])
    num_decodes = rng.randrange(0 if num_tokens else 1, 17)
    return StepShape(
        num_prefill_tokens=num_tokens,
        num_pairs=num_pairs(rng.randrange(4000), num_tokens),
        num_decodes=num_decodes,
        num_context_tokens=num_decodes * rng.randrange(10, 2000),
    )


def steady(rng: random.Random, number: int) -> StepShape:
    """16 streams that grow, and are replaced by short ones every 200 steps."""
    return StepShape(num_decodes=16, num_context_tokens=16 * (1000 + number % 200))


def observe(fit: StepFit, true: StepTimes, load: Load, count: int, seed: int) -> StepFit:
    rng = random.Random(seed)
    for number in range(count):
        shape = load(rng, number)
        duration_s = true.step_s(shape) * rng.gauss(1.0, NOISE)
        if rng.random() < OUTLIER_SHARE:
            duration_s *= OUTLIER
        fit.observe(shape, duration_s)
    return fit


def fitted(fit: StepFit) -> StepTimes:
    assert fit.times is not None
    return fit.times


def errors(found: StepTimes, true: StepTimes) -> dict[str, float]:
    wanted = asdict(true)
    return {name: abs(value / wanted[name] - 1) for name, value in asdict(found).items()}


@pytest.mark.parametrize("seed", range(8))
def test_coefficients_are_found_in_noise_with_outliers(seed: int) -> None:
    found = errors(fitted(observe(StepFit(), CPU, mixed, WINDOW, seed)), CPU)
    assert max(found["fixed_s"], found["prefill_token_s"], found["decode_s"]) < 0.05
    assert found["pair_s"] < 0.08
    assert found["context_token_s"] < 0.12


@pytest.mark.parametrize("true", [CPU, GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize(("count", "bound"), [(32, 0.15), (WINDOW, 0.04), (4 * WINDOW, 0.04)])
def test_predictions_are_near(true: StepTimes, count: int, bound: float) -> None:
    """Also where a coefficient hardly counts and so cannot be known."""
    rng = random.Random(99)
    shapes = [mixed(rng, number) for number in range(50)]
    for seed in range(4):
        found = fitted(observe(StepFit(), true, mixed, count, seed))
        assert max(abs(found.step_s(s) / true.step_s(s) - 1) for s in shapes) < bound


def test_it_is_silent_until_a_few_steps_were_seen() -> None:
    fit = observe(StepFit(), CPU, mixed, MIN_STEPS - 1, seed=0)
    assert fit.times is None
    observe(fit, CPU, mixed, 1, seed=1)
    assert fit.times is not None


def test_a_pause_of_the_machine_changes_nothing() -> None:
    """Three steps in a row take 50 times as long."""
    fit = observe(StepFit(), CPU, mixed, WINDOW, seed=3)
    shape = StepShape(num_decodes=8, num_context_tokens=4000)
    before = fitted(fit).step_s(shape)
    for _ in range(3):
        fit.observe(shape, 50 * CPU.step_s(shape))
    observe(fit, CPU, mixed, 16, seed=4)
    assert fitted(fit).step_s(shape) == pytest.approx(before, rel=0.03)


def test_a_load_that_never_varies_leaves_what_it_does_not_show_as_it_was() -> None:
    fit = observe(StepFit(), CPU, mixed, 2 * WINDOW, seed=1)
    before = fitted(fit)
    observe(fit, CPU, steady, 20 * WINDOW, seed=2)
    after = fitted(fit)
    assert (after.prefill_token_s, after.pair_s) == (before.prefill_token_s, before.pair_s)
    assert max(errors(after, CPU).values()) < 0.15


def test_a_machine_that_slows_down_for_good_is_followed() -> None:
    slow = StepTimes(**{name: 2 * value for name, value in asdict(CPU).items()})
    fit = observe(StepFit(), CPU, mixed, WINDOW, seed=5)
    observe(fit, slow, mixed, 2 * WINDOW, seed=6)
    shape = StepShape(num_prefill_tokens=256, num_pairs=num_pairs(512, 256), num_decodes=4)
    assert fitted(fit).step_s(shape) == pytest.approx(slow.step_s(shape), rel=0.05)


def test_work_never_seen_costs_what_its_twin_costs() -> None:
    found = fitted(observe(StepFit(), CPU, steady, WINDOW, seed=7))
    assert found.prefill_token_s == max(found.decode_s, found.fixed_s / 64)
    assert found.pair_s == found.context_token_s
    assert min(asdict(found).values()) >= 0
    # up to 16 decodes cost this device the same
    padded = StepFit()
    for number in range(WINDOW):
        padded.observe(StepShape(num_decodes=1 + number % 16, num_context_tokens=number % 7), 0.032)
    assert fitted(padded).decode_s < 1e-5
    assert fitted(padded).prefill_token_s == pytest.approx(0.0005, rel=0.05)


def test_nothing_is_negative_whatever_is_measured() -> None:
    """Durations that fall while the load grows."""
    fit = StepFit()
    for number in range(WINDOW):
        num_tokens = 16 * (1 + number % 32)
        fit.observe(
            StepShape(num_prefill_tokens=num_tokens, num_pairs=num_pairs(0, num_tokens)),
            1.0 / num_tokens,
        )
    assert min(asdict(fitted(fit)).values()) >= 0


def test_the_same_steps_give_the_same_bits() -> None:
    one = observe(StepFit(), CPU, mixed, 100, seed=8)
    other = observe(StepFit(), CPU, mixed, 100, seed=8)
    assert one.times == other.times
