"""A step that the device works on, and how long it takes there.

launched = runner.launch(plan)     # on the device thread
result = launched.result()         # in whatever thread: waits for the device, not for later steps
"""

import time
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

import numpy as np
import torch

from common.scheduling.plan import StepResult
from common.types import OutputKey, PromptLogprobs
from engine.outputs import Sampling
from engine.sampler import Choice, Sampled


class StepClock:
    """Measures on the device's own clock where it has one: beside another step, the time between
    launch and result would count that one too. Begins when it is made.
    """

    def __init__(self, *, is_cuda: bool) -> None:
        self._is_cuda = is_cuda
        self._begin, self._end = self._now(), None

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
    slow_masks: tuple[tuple[OutputKey, float], ...] = ()
    mask_wait_s: float = 0.0

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
        good = sampled.is_finite.tolist()
        bad = compress(self.keys, (~sampled.is_finite).tolist())
        return StepResult(
            step=self.step,
            keys=tuple(compress(self.keys, good)),
            token_ids=tuple(compress(sampled.token_ids.tolist(), good)),
            logprobs=tuple(compress(sampled.logprobs, good)),
            failed=tuple(dict.fromkeys(bad)),
            failed_grammars=tuple(self._failed.items()),
            prompt_logprobs=self.scores,
            slow_masks=self.slow_masks,
            mask_wait_s=self.mask_wait_s,
            duration_s=self.clock.seconds(),
        )
