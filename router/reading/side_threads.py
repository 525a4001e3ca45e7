"""Work beside the event loop: what takes long and waits for nothing, such as reading a large
request.
"""

from collections.abc import Callable
from typing import TypeVar

import anyio
import anyio.to_thread

T = TypeVar("T")

MAX_THREADS = 4


class SideThreads:
    """Few at a time, since they share the interpreter with the event loop."""

    def __init__(self, max_threads: int = MAX_THREADS) -> None:
        self._max_threads = max_threads
        self._limiter: anyio.CapacityLimiter | None = None

    async def run(self, work: Callable[[], T]) -> T:
        if self._limiter is None:
            self._limiter = anyio.CapacityLimiter(self._max_threads)
        return await anyio.to_thread.run_sync(work, limiter=self._limiter)

    async def run_if(self, is_large: bool, work: Callable[[], T]) -> T:
        """In a thread only where that is worth it."""
        return await self.run(work) if is_large else work()
