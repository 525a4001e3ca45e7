"""What every process of Tandem does alike: ends on a signal."""

import os
import signal
from collections.abc import Callable

import anyio


async def until_signal(on_first: Callable[[], None]) -> None:
    """Calls `on_first` at the first SIGTERM or SIGINT; a second one exits the process at once."""
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for _ in signals:
            on_first()
            break
        async for _ in signals:
            os._exit(1)
