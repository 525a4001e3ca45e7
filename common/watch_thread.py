"""The watchdog's thread: it asks the loop to answer, looks every half second, tells the loop what
it finds, and ends the process when that does not pass.
"""

import asyncio
import contextlib
import faulthandler
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self

from common.clock import Clock, Timers
from common.watchdog import LOOK_EVERY_S, Silence, Watchdog

log = logging.getLogger(__name__)

UNFIT = 3
"""Exit code of a process that took itself out: another start may help."""


class WatchThread:
    """`with WatchThread(...)` inside the loop that it watches."""

    def __init__(self, clock: Timers) -> None:
        self._watchdog = Watchdog(clock.now())
        self._clock = clock
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._phase = "it is starting"
        self.fault = ""
        """What is wrong now; may be read by any thread."""
        self._on_fault: Callable[[str], None] = lambda fault: None

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._closing.set()
        self._thread.join()

    @contextlib.contextmanager
    def job(self, bound_s: float) -> Iterator[None]:
        """Something that the device does: it moves at least once within the bound."""
        with self._lock:
            job = self._watchdog.job_began(self._clock.now(), bound_s)
        try:
            yield
        finally:
            with self._lock:
                self._watchdog.job_ended(self._clock.now(), job)

    def serves(self, on_fault: Callable[[str], None]) -> None:
        """The start is over. `on_fault` is called in the loop, once it turns, with what is wrong
        and with "" when that has passed.
        """
        self._on_fault = on_fault
        self._phase = ""
        with self._lock:
            self._watchdog.serves()

    @property
    def not_ready(self) -> str:
        return self.fault or self._phase

    def drains(self) -> None:
        self._phase = "it is draining"

    def _run(self) -> None:
        assert self._loop is not None
        while not self._closing.wait(LOOK_EVERY_S) and not self._loop.is_closed():
            with self._lock:
                now = self._clock.now()
                verdict = self._watchdog.look(now)
                must_ping = not self._watchdog.waits_for_loop
                if must_ping:
                    self._watchdog.pinged(now)
            if must_ping:
                self._call(self._answered)
            before, self.fault = self.fault, verdict.fault
            if verdict.fault and not before:
                log.error("this process hangs: %s", verdict.fault)
            if bool(verdict.fault) != bool(before):
                self._call(self._on_fault, verdict.fault)
            if verdict.must_exit:
                self._exit()

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop has just been closed
            self._loop.call_soon_threadsafe(function, *arguments)

    def _answered(self) -> None:
        with self._lock:
            self._watchdog.answered()

    def _exit(self) -> None:
        log.critical("it does not recover (%s): exit code %d; all threads:", self.fault, UNFIT)
        faulthandler.dump_traceback(sys.stderr)
        os._exit(UNFIT)


async def until_silent(silence: Silence, clock: Clock) -> None:
    """Returns when a peer has said nothing for too long. (It looks again and again since time in
    which nobody looks does not count.)
    """
    while not silence.is_too_long(clock.now()):
        await clock.sleep(LOOK_EVERY_S)
