"""Life-cycle events of requests and pages: one JSON line each, in a file the operator names.

Instants are the machine's monotonic clock, so lines of processes on one machine can be merged.
Without a file events cost one call and are dropped.
"""

import json
from typing import IO

from common.clock import Clock


class EventLog:
    def __init__(self, clock: Clock, file: IO[str] | None = None, **constant: object) -> None:
        self._clock = clock
        self._file = file
        self._constant = constant

    def record(self, event: str, **fields: object) -> None:
        if self._file is not None:
            line = {"time": self._clock.now(), "event": event, **self._constant, **fields}
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
