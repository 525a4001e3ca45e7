"""The device that workers hold: plans and landings go to the one thread that owns it."""

import asyncio
import logging
from collections.abc import Callable, Sequence

import anyio

from common.device import LoopCall
from common.errors import InternalError
from common.scheduling.plan import LandingMove, LandingResult, StepPlan, StepResult
from common.types import BlockId
from engine.device_thread import DeviceThread
from engine.runner import Runner

log = logging.getLogger(__name__)


class EngineDevice:
    """Executes plans and landings of one runner on its thread."""

    def __init__(
        self, thread: DeviceThread, runner: Runner, *, overlaps_steps: bool = False
    ) -> None:
        """`overlaps_steps`: a plan may be handed in while another one is executed. On a GPU it is
        launched before that one's tokens are read.
        """
        self._thread = thread
        self._runner = runner
        self.overlaps_steps = overlaps_steps

    async def execute(
        self, plan: StepPlan, on_stored: Callable[[], None] | None = None
    ) -> StepResult:
        if on_stored is None and self.overlaps_steps:
            launched = await self._thread.run(self._runner.launch, plan)
            return await anyio.to_thread.run_sync(launched.result)
        if on_stored is None:
            return await self._thread.run(self._runner.execute, plan)
        told = LoopCall(on_stored)
        result = await self._thread.run(self._runner.execute, plan, told)
        told.check()
        return result

    async def land(self, moves: Sequence[LandingMove]) -> LandingResult:
        return await self._thread.run_first(self._runner.land, moves)

    async def prepare(self, grammar: str) -> None:
        try:
            await asyncio.wrap_future(self._runner.prepare(grammar))
        except Exception as error:  # the library's own: a tokenizer that it cannot read, say
            log.error("a grammar cannot be compiled: %s", error)
            raise InternalError("a grammar cannot be compiled; see the worker's log") from None

    async def self_test(self, block_ids: tuple[BlockId, ...], tail: BlockId) -> None:
        await self._thread.run(self._runner.self_test_on, block_ids, tail)
