"""Work beside the event loop: what takes long and waits for nothing, such as reading a large
request.
"""

from collections.abc import Callable
from typing import TypeVar

import anyio
import anyio.to_thread

from common.errors import TandemError

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

        def result() -> tuple[T] | TandemError:
            try:
                return (work(),)
            except TandemError as error:
                # with its traceback it would hold the request until the next full collection
                return error.with_traceback(None)

        found = await anyio.to_thread.run_sync(result, limiter=self._limiter)
        if isinstance(found, TandemError):
            raise found
        return found[0]

    async def run_if(self, is_large: bool, work: Callable[[], T]) -> T:
        """In a thread only where that is worth it."""
        return await self.run(work) if is_large else work()
