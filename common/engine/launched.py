"""A step that the device works on, and how long it takes there.

launched = runner.launch(plan)     # on the device thread
result = launched.result()         # in whatever thread: waits for the device, not for later steps
"""

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from common.engine.outputs import Sampling
from common.engine.sampler import Choice, Sampled
from common.scheduling.plan import StepResult
from common.types import OutputKey, PromptLogprobs


class StepClock:
    """Measures on the device's own clock where it has one: beside another step, the time between
    launch and result would count that one too.
    """

    def __init__(self, *, is_cuda: bool) -> None:
        self._is_cuda = is_cuda
        self._begin, self._end = self._now(), None

    @classmethod
    def start(cls, *, is_cuda: bool) -> "StepClock":
        return cls(is_cuda=is_cuda)

    def stop(self) -> None:
        """When all of the step is launched."""
        self._end = self._now()

    def seconds(self) -> float:
        """Waits until the device gets there."""
        assert self._end is not None
        if not self._is_cuda:
            return float(self._end - self._begin)
        self._end.synchronize()
        return float(self._begin.elapsed_time(self._end)) / 1e3

    def _now(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


@dataclass(eq=False)
class LaunchedStep:
    step: int
    clock: StepClock
    scores: tuple[tuple[OutputKey, PromptLogprobs], ...] = ()
    keys: tuple[OutputKey, ...] = ()
    sampling: Sampling | None = None
    """None where no token was wanted."""
    _choice: Choice | None = None
    _failed: dict[OutputKey, str] = field(default_factory=dict)

    def chosen(
        self,
        keys: tuple[OutputKey, ...],
        choice: Choice,
        sampling: Sampling,
        failed: dict[OutputKey, str],
    ) -> None:
        """`keys` of the tokens, in their order; `failed` are those whose grammar gave up."""
        self.keys, self._choice, self.sampling, self._failed = keys, choice, sampling, failed

    @property
    def token_ids(self) -> torch.Tensor | None:
        """[len(keys)] int64, on the device."""
        return None if self._choice is None else self._choice.token_ids

    def sampled(self) -> Sampled:
        """Waits. Rows that are not finite mean nothing. May be called by any thread."""
        assert self._choice is not None
        sampled = self._choice.sampled()
        if not self._failed:
            return sampled
        is_good = np.array([key not in self._failed for key in self.keys])
        return Sampled(
            token_ids=sampled.token_ids,
            is_finite=sampled.is_finite & is_good,
            logprobs=sampled.logprobs,
        )

    def result(self) -> StepResult:
        """Waits. May be called by any thread."""
        if self._choice is None:
            return StepResult(
                step=self.step, prompt_logprobs=self.scores, duration_s=self.clock.seconds()
            )
        sampled = self.sampled()
        rows = list(zip(self.keys, sampled.token_ids.tolist(), sampled.logprobs, strict=True))
        bad: dict[OutputKey, None] = {}
        if not sampled.is_finite.all():
            is_finite = sampled.is_finite.tolist()
            bad = {key: None for (key, _, _), good in zip(rows, is_finite, strict=True) if not good}
            rows = [row for row, good in zip(rows, is_finite, strict=True) if good]
        return StepResult(
            step=self.step,
            keys=tuple(key for key, _, _ in rows),
            token_ids=tuple(token_id for _, token_id, _ in rows),
            logprobs=tuple(logprobs for _, _, logprobs in rows),
            failed=tuple(bad),
            failed_grammars=tuple(self._failed.items()),
            prompt_logprobs=self.scores,
            duration_s=self.clock.seconds(),
        )
