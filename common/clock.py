"""Time as an argument: shells read a `Clock` and pass instants on; nothing else knows what time it
is.

A clock also has timers, so that whoever has one needs no other notion of time: what waits on the
machine's clock in a process waits on virtual time in tests and in the simulator.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

import anyio


class Timer(Protocol):
    def cancel(self) -> None:
        """Its callback is not called any more; nothing if it has been."""
        ...


class Timers(Protocol):
    """What pure code on virtual time needs; see `Clock`."""

    def now(self) -> float:
        """Seconds since an arbitrary origin; never goes back."""
        ...

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Timer: ...


class Clock(Timers, Protocol):
    def deadline(self, after_s: float | None) -> anyio.CancelScope:
        """A scope that is left that many seconds from now, without an error; None: never."""
        ...

    async def sleep(self, seconds: float) -> None: ...


class LoopTimers:
    """Timers of the running event loop."""

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Timer:
        return asyncio.get_running_loop().call_later(delay_s, callback)

    def deadline(self, after_s: float | None) -> anyio.CancelScope:
        return anyio.move_on_after(after_s)

    async def sleep(self, seconds: float) -> None:
        await anyio.sleep(seconds)


class MonotonicClock(LoopTimers):
    def now(self) -> float:
        return time.monotonic()
