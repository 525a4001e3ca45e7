"""Fits `StepTimes` to the steps that a worker runs.

    fit.observe(shape, duration_s) after every step        fit.times -> StepTimes or None

The last `WINDOW` steps are fitted again every `EVERY` of them, by least squares of the relative
error with Huber's weights: a step that took 20 times as long (a paused machine) pulls no more than
one that is a little late. A load that never varies says nothing about how its time divides among
the coefficients; they are held to their values of one window ago with a weight of `HOLD`, so that
such directions follow the noise of many windows, not that of one. Coefficients are never negative.
A unit of work that was never seen is taken to cost as much as its twin: a prompt token as much as
a decode (and at least `LEAST_ROW` of the fixed time: devices take several rows in the time of one),
a pair as much as a token of context.

Pure and deterministic: below 1 ms per fit. Used by both kinds of worker.
"""

from collections import deque

import numpy as np
from numpy.typing import NDArray

from common.scheduling.step_time import StepShape, StepTimes

WINDOW = 256
EVERY = 16
MIN_STEPS = 12
HOLD = 0.02
"""Of the window's own weight."""

LEAST_ROW = 1 / 64

_FIRST_HOLD = np.array([1e-4, 1e-3, 1e-2, 1e-3, 1e-3])
"""What cannot be told apart yet is mostly fixed (weights are read once for all rows), and rows
rather than pairs.
"""
_FIRST_ROUNDS = 10
_ROUNDS = 4
_HUBER = 1.345
_MIN_SPREAD = 0.002
_TWINS = (None, 3, 4, 1, 2)
_Floats = NDArray[np.float64]


class StepFit:
    def __init__(self) -> None:
        self._steps: deque[tuple[StepShape, float]] = deque(maxlen=WINDOW)
        self._num_steps = 0
        self._values: _Floats | None = None
        self._held: _Floats | None = None
        self._was_seen = np.zeros(5, dtype=bool)
        self._was_seen[0] = True
        self.times: StepTimes | None = None
        """None until `MIN_STEPS` steps were observed."""

    def observe(self, shape: StepShape, duration_s: float) -> None:
        """A step took `duration_s` (> 0; others are ignored)."""
        if duration_s <= 0 or not (shape.num_prefill_tokens or shape.num_decodes):
            return
        self._steps.append((shape, duration_s))
        self._num_steps += 1
        is_due = self._num_steps % (EVERY if self._num_steps > 2 * EVERY else 4) == 0
        if self._num_steps >= MIN_STEPS and is_due:
            self._fit()
        if self._num_steps % WINDOW == 0:
            self._held = self._values

    def _fit(self) -> None:
        rows = np.array([_row(shape) for shape, _ in self._steps], dtype=np.float64)
        durations = np.array([duration_s for _, duration_s in self._steps], dtype=np.float64)
        self._was_seen |= rows.any(axis=0)
        # weights of the relative error; at first by what was measured, which plays late steps down
        is_early = self._values is None or len(durations) < WINDOW
        before = durations if self._values is None else _expected(rows, self._values)
        expected = durations if is_early else before
        late = np.zeros(len(durations))
        for _ in range(_FIRST_ROUNDS if is_early else _ROUNDS):
            scaled = rows / expected[:, None]
            spread = max(_MIN_SPREAD, 1.4826 * float(np.median(np.abs(late - np.median(late)))))
            weights = np.minimum(1.0, _HUBER * spread / np.maximum(np.abs(late), 1e-12))
            values = self._solve(scaled, durations / expected, weights)
            expected = _expected(rows, values)
            late = durations / expected - 1.0
        self._values = values
        self.times = self._named(values)

    def _solve(self, scaled: _Floats, wanted: _Floats, weights: _Floats) -> _Floats:
        """Not negative; columns without any entry keep their value."""
        gram = scaled.T @ (scaled * weights[:, None])
        right = scaled.T @ (wanted * weights)
        held, hold = self._held, np.full(5, HOLD)
        if held is None:
            held, hold = np.zeros(5), _FIRST_HOLD
        own = np.diag(gram).copy()
        gram[np.diag_indices(5)] += hold * own
        right += hold * own * held
        values = held.copy()
        free = np.flatnonzero(own > 0)
        values[free] = 0.0
        while len(free):
            # one unit in every column: numbers of very different sizes stay well conditioned
            unit = np.sqrt(own[free])
            found = np.linalg.solve(
                gram[np.ix_(free, free)] / np.outer(unit, unit), right[free] / unit
            )
            if found.min() >= 0:
                values[free] = found / unit
                break
            free = np.delete(free, int(found.argmin()))
        return values

    def _named(self, values: _Floats) -> StepTimes:
        found = [
            float(values[i] if seen or twin is None else values[twin])
            for i, (seen, twin) in enumerate(zip(self._was_seen, _TWINS, strict=True))
        ]
        if not self._was_seen[1]:
            found[1] = max(found[1], LEAST_ROW * found[0])
        return StepTimes(
            fixed_s=found[0],
            prefill_token_s=found[1],
            pair_s=found[2],
            decode_s=found[3],
            context_token_s=found[4],
        )


def _row(shape: StepShape) -> tuple[int, int, int, int, int]:
    return (
        1,
        shape.num_prefill_tokens,
        shape.num_pairs,
        shape.num_decodes,
        shape.num_context_tokens,
    )


def _expected(rows: _Floats, values: _Floats) -> _Floats:
    expected: _Floats = rows @ values
    return np.maximum(expected, 1e-6)
