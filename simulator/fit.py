"""A linear model of step times from measured steps, and its file.

{"fixed_s": ..., "prefill_token_s": ..., "pair_s": ..., "decode_s": ..., "context_token_s": ...}
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from common.errors import ConfigError
from common.scheduling.step_time import StepShape, StepTimes, num_pairs
from simulator.costs import CostModel, FittedCosts


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    shape: StepShape
    seconds: float


def fit(samples: Sequence[Sample]) -> StepTimes:
    """Least squares of relative errors, without negative coefficients."""
    assert samples
    rows = np.array([_columns(sample.shape) for sample in samples])
    seconds = np.array([sample.seconds for sample in samples])
    relative = rows / seconds[:, None]
    coefficients = _non_negative(relative, np.ones(len(samples)))
    return StepTimes(**dict(zip(_names(), map(float, coefficients), strict=True)))


def _columns(shape: StepShape) -> tuple[float, ...]:
    return (
        1.0,
        shape.num_prefill_tokens,
        shape.num_pairs,
        shape.num_decodes,
        shape.num_context_tokens,
    )


def _names() -> list[str]:
    return [entry.name for entry in fields(StepTimes)]


def _non_negative(rows: NDArray[np.float64], values: NDArray[np.float64]) -> NDArray[np.float64]:
    """argmin |rows x - values| over x >= 0, by coordinate descent on scaled columns; columns of
    zeros get 0.
    """
    scale = np.linalg.norm(rows, axis=0)
    used = scale > 0
    unit = rows[:, used] / scale[used]
    gram, target = unit.T @ unit, unit.T @ values
    x = np.zeros(len(target))
    for _ in range(20_000):
        before = x.copy()
        for index in range(len(x)):
            gradient = gram[index] @ x - target[index]
            x[index] = max(0.0, x[index] - gradient)
        if np.abs(x - before).max() < 1e-12:
            break
    found = np.zeros(len(scale))
    found[used] = x / scale[used]
    return found


def linear_of(costs: CostModel, max_context: int = 8192) -> StepTimes:
    """The linear model that a worker with these costs would have fitted to its steps: the nearest
    one over steps of all sizes.
    """
    if isinstance(costs, FittedCosts):
        return costs.times
    shapes = [
        StepShape(
            num_prefill_tokens=chunk,
            num_pairs=num_pairs(start, chunk),
            num_decodes=decodes,
            num_context_tokens=decodes * context,
        )
        for chunk in (0, 128, 512, 2048)
        for start in ((0,) if chunk == 0 else (0, max_context // 2, max_context))
        for decodes in (0, 1, 8, 32, 128)
        for context in ((0,) if decodes == 0 else (256, max_context // 2, max_context))
        if chunk or decodes
    ]
    return fit([Sample(shape=shape, seconds=costs.step_s(shape)) for shape in shapes])


def relative_errors(times: StepTimes, samples: Sequence[Sample]) -> list[float]:
    return [times.step_s(sample.shape) / sample.seconds - 1.0 for sample in samples]


def save(costs: FittedCosts, path: Path) -> None:
    content = asdict(costs)
    content |= content.pop("times")
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def load(path: Path) -> FittedCosts:
    """Raises ConfigError naming what is wrong with the file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read step times from {path}: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} does not hold a JSON object")
    times = {name: _seconds(path, content, name) for name in _names()}
    rest = {
        entry.name: _seconds(path, content, entry.name)
        for entry in fields(FittedCosts)
        if entry.name != "times" and entry.name in content
    }
    unknown = set(content) - set(times) - set(rest)
    if unknown:
        raise ConfigError(f"{path}: unknown keys {', '.join(sorted(unknown))}")
    return FittedCosts(times=StepTimes(**times), **rest)


def _seconds(path: Path, content: dict[str, object], name: str) -> float:
    value = content.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e9:
        raise ConfigError(f"{path}: {name} must be a number of seconds, not {value!r}")
    return float(value)
