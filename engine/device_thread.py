"""The one thread that owns the device. Event loops hand it work and await the outcome; nobody
polls.

    with DeviceThread("engine") as device:
        result = await device.run(runner.execute, plan)

Jobs run in order of arrival; `run_first` goes ahead of the jobs that still wait (landing must not
queue behind steps). A job that was handed in always runs to its end: cancelling the awaiting task
only drops the answer.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class DeviceThread:
    def __init__(self, name: str = "device") -> None:
        self._jobs: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._wake = threading.Condition()
        self._is_closing = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Finish the jobs that were handed in, then end the thread. Blocks until it has ended."""
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        self._thread.join()

    async def run(self, fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        return await self._outcome(self._submit(lambda: fn(*args, **kwargs), ahead=False))

    async def run_first(self, fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """As `run`, but before everything that has not begun yet."""
        return await self._outcome(self._submit(lambda: fn(*args, **kwargs), ahead=True))

    def _submit(self, job: Callable[[], R], *, ahead: bool) -> Future[R]:
        future: Future[R] = Future()
        future.set_running_or_notify_cancel()  # a cancelled waiter cannot cancel the job now
        with self._wake:
            if self._is_closing:
                raise RuntimeError("the device thread is closed")
            if ahead:
                self._jobs.appendleft((future, job))
            else:
                self._jobs.append((future, job))
            self._wake.notify()
        return future

    @staticmethod
    async def _outcome(future: Future[R]) -> R:
        return await asyncio.wrap_future(future)

    def _work(self) -> None:
        while (job := self._next()) is not None:
            _perform(*job)

    def _next(self) -> tuple[Future[Any], Callable[[], Any]] | None:
        with self._wake:
            while not self._jobs and not self._is_closing:
                self._wake.wait()
            return self._jobs.popleft() if self._jobs else None


def _perform(future: Future[Any], job: Callable[[], Any]) -> None:
    try:
        outcome = job()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(outcome)
