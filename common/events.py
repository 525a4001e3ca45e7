"""Life-cycle events of requests and pages: one JSON line each, in a file the operator names.

Instants are the machine's monotonic clock, so lines of processes on one machine can be merged.
Without a file events cost one call and are dropped.
"""

import json
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import IO

from common.clock import Timers
from common.errors import ConfigError


def open_events(path: str | None) -> AbstractContextManager[IO[str] | None]:
    """The file to append to; without a path, none. Raises ConfigError."""
    if path is None:
        return nullcontext()
    try:
        return Path(path).open("a", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--event-log {path}: {error.strerror}") from error


class EventLog:
    def __init__(self, clock: Timers, file: IO[str] | None = None, **constant: object) -> None:
        self._clock = clock
        self._file = file
        self._constant = constant

    def record(self, event: str, **fields: object) -> None:
        if self._file is not None:
            line = {"time": self._clock.now(), "event": event, **self._constant, **fields}
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
