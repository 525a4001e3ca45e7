"""How often, and how soon, a process that has failed is started again. Pure; time is an argument.

delay_s = restarts.after_failure(now)      None: too often, it stays down
"""

from collections import deque

MAX_RESTARTS, WITHIN_S = 5, 600.0
FIRST_DELAY_S, MAX_DELAY_S = 1.0, 30.0


class Restarts:
    """Of one process."""

    def __init__(self) -> None:
        self._failures: deque[float] = deque()

    @property
    def num_recent(self) -> int:
        return len(self._failures)

    def after_failure(self, now: float) -> float | None:
        """Twice as long as the last time; all is forgotten after `WITHIN_S`."""
        while self._failures and now - self._failures[0] >= WITHIN_S:
            self._failures.popleft()
        if len(self._failures) >= MAX_RESTARTS:
            return None
        delay_s = min(MAX_DELAY_S, FIRST_DELAY_S * float(2 ** len(self._failures)))
        self._failures.append(now)
        return delay_s
