"""A worker's device as the watchdog sees it: what it is handed, and how long that may take."""

import contextlib
from collections.abc import Callable, Sequence

from common.device import Device, self_test_tokens
from common.scheduling.plan import LandingMove, LandingResult, StepPlan, StepResult
from common.scheduling.step_time import StepShape, StepTimes
from common.types import BlockId

LEAST_BOUND_S = 5.0
"""No step is said to hang before that."""

_LATE, _LATE_UNFITTED = 5.0, 3.0
"""Times longer than expected: by the fit, or by the self-test at the start."""
_COMPILING_S = 60.0
"""A GPU's first steps may compile kernels."""


class StepBounds:
    """When a step is too long under way. `self_test_s` is what a short prompt took at the start;
    before steps are fitted, it says what they may take.
    """

    def __init__(
        self,
        times: Callable[[], StepTimes | None],
        num_context_tokens: Callable[[], int],
        *,
        block_size: int,
        self_test_s: float,
        may_compile: bool,
    ) -> None:
        self._times = times
        self._num_context_tokens = num_context_tokens
        self._per_tokens = self_test_tokens(block_size)
        self._self_test_s = self_test_s
        self._least_unfitted_s = _COMPILING_S if may_compile else LEAST_BOUND_S

    def of(self, plan: StepPlan) -> float:
        times = self._times()
        if times is None:
            num_parts = -(-plan.num_tokens // self._per_tokens)
            return max(self._least_unfitted_s, _LATE_UNFITTED * self._self_test_s * num_parts)
        shape = StepShape.of(plan, self._num_context_tokens())
        return max(LEAST_BOUND_S, _LATE * times.step_s(shape))

    def of_test(self) -> float:
        return max(LEAST_BOUND_S, _LATE * self._self_test_s)


class WatchedDevice:
    """A worker's device; what it is handed is reported to the watchdog."""

    def __init__(
        self,
        device: Device,
        job: Callable[[float], contextlib.AbstractContextManager[None]],
        bounds: StepBounds,
    ) -> None:
        self._device = device
        self._job = job
        self._bounds = bounds

    async def execute(
        self, plan: StepPlan, on_stored: Callable[[], None] | None = None
    ) -> StepResult:
        with self._job(self._bounds.of(plan)):
            return await self._device.execute(plan, on_stored)

    async def land(self, moves: Sequence[LandingMove]) -> LandingResult:
        with self._job(self._bounds.of_test()):
            return await self._device.land(moves)

    async def prepare(self, grammar: str) -> None:
        await self._device.prepare(grammar)  # not the device thread's: a step goes on beside it

    async def self_test(self, block_ids: tuple[BlockId, ...], tail: BlockId) -> None:
        with self._job(self._bounds.of_test()):
            await self._device.self_test(block_ids, tail)
