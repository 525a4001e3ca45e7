"""A worker of which one thread stops when it is told to, until the order is taken back; or whose
weights are damaged while it serves.

    python -m tests.system.hanging_worker FOLDER prefill|decode OPTIONS

A file `PID.device` or `PID.loop` in FOLDER stops the device's thread before its next step, or the
event loop. Every other thread runs on, gRPC's too. `PID.sick` makes a weight of the last layer NaN.
"""

import asyncio
import os
import sys
import threading
from pathlib import Path
from typing import Any

import tandem
from commands.table import parse
from common.watch_thread import WatchThread
from engine.runner import ModelRunner

LOOK_S = 0.02


def wait_while(path: Path) -> None:
    pause = threading.Event()
    while path.exists():
        pause.wait(LOOK_S)


def stop_loop(loop: asyncio.AbstractEventLoop, path: Path) -> None:
    pause = threading.Event()
    while True:
        if path.exists():
            loop.call_soon_threadsafe(wait_while, path)
            wait_while(path)
        pause.wait(LOOK_S)


def install(folder: Path) -> None:
    launch, enter = ModelRunner.launch, WatchThread.__enter__
    names = ("device", "loop", "sick")
    device, loop, sick = (folder / f"{os.getpid()}.{name}" for name in names)

    def stopping_launch(self: ModelRunner, *arguments: Any) -> Any:
        wait_while(device)
        if sick.exists():
            sick.unlink()
            # the last four: this layer's `down`, embedding, head, final norm
            self.backend.weights.tensors[-4].view(-1)[7] = float("nan")  # type: ignore[attr-defined]
        return launch(self, *arguments)

    def stopping_enter(self: WatchThread) -> WatchThread:
        arguments = (asyncio.get_running_loop(), loop)
        threading.Thread(target=stop_loop, args=arguments, daemon=True).start()
        return enter(self)

    ModelRunner.launch = stopping_launch  # type: ignore[method-assign, assignment]
    WatchThread.__enter__ = stopping_enter  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    install(Path(sys.argv[1]))
    sys.exit(tandem.run(parse(sys.argv[2:])))
