"""The seam between workers and what executes their plans: the engine on its thread, or a model."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from common.scheduling.plan import LandingMove, LandingResult, StepPlan, StepResult
from common.types import BlockId


def self_test_tokens(block_size: int) -> int:
    """Length of the prompt that a worker tests itself with (engine/self_test.py)."""
    return max(48, 2 * block_size)


class Device(Protocol):
    """The seam to whatever executes plans: the engine on its thread, or a model of it."""

    async def execute(
        self, plan: StepPlan, on_stored: Callable[[], None] | None = None
    ) -> StepResult:
        """`on_stored` is called in the loop before this returns, once the step's pages are complete
        and tagged: its samples come later.
        """
        ...

    async def land(self, moves: Sequence[LandingMove]) -> LandingResult:
        """Goes ahead of steps that wait."""
        ...

    async def prepare(self, grammar: str) -> None:
        """Compiles a grammar beside the steps, before a request that has it is in one."""
        ...

    async def self_test(self, block_ids: tuple[BlockId, ...], tail: BlockId) -> None:
        """In these pages, between two steps. Raises InternalError when the numbers are wrong."""
        ...


class LoopCall:
    """Something to be called in this loop, from whatever thread. What it raises is not lost:
    `check` raises it.
    """

    def __init__(self, function: Callable[[], object]) -> None:
        self._loop = asyncio.get_running_loop()
        self._function = function
        self._error: Exception | None = None

    def __call__(self) -> None:
        self._loop.call_soon_threadsafe(self._run)

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._function()
        except Exception as error:
            self._error = error
