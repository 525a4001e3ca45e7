"""Futures of a loop, settled by another thread. One that was cancelled, or whose loop is gone,
stays as it is.
"""

import asyncio
from collections.abc import Callable
from typing import Any


def resolve(future: "asyncio.Future[Any]", value: Any) -> None:
    def settle() -> None:
        if not future.done():
            future.set_result(value)

    _from_thread(future, settle)


def reject(future: "asyncio.Future[Any]", error: Exception) -> None:
    def settle() -> None:
        if not future.done():
            future.set_exception(error)

    _from_thread(future, settle)


def _from_thread(future: "asyncio.Future[Any]", callback: Callable[[], None]) -> None:
    loop = future.get_loop()
    if not loop.is_closed():
        loop.call_soon_threadsafe(callback)
