"""An event loop whose time is virtual: it jumps to the next deadline instead of waiting for it.

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(main())                        # hours of sleeps and timeouts pass in no time

Everything that takes its time from the loop (asyncio, anyio) is deterministic on it, as long as no
thread and no socket takes part. When nothing can ever happen any more, `Deadlock` is raised instead
of hanging.
"""

import asyncio
import selectors
from typing import Any

from common.clock import LoopTimers


class Deadlock(Exception):
    """Every task waits and no deadline is left."""


class _JumpingSelector(selectors.SelectSelector):
    """Never blocks; reports how long the loop was willing to."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        events = super().select(0)
        if not events:
            if timeout is None:
                raise Deadlock("nothing is left to wait for")
            self.now += max(0.0, timeout)
        return events


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


class LoopClock(LoopTimers):
    """The `Clock` of code that runs on a loop."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()
