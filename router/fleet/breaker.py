"""What a router remembers of failures: of each worker, and of the fleet's retries. Pure; time is an
argument.

    CLOSED --failures--> OPEN --its time is over--> HALF_OPEN --self-test passed--> CLOSED
                           ^------self-test failed------|

Failures add up, successes take a tenth each away, and the rest fades with time: a worker is taken
out at the third failure in a row, or when it fails more than every eleventh request. What goes to a
half-open worker is its own self-test, never a request. One that fails again after that stays out
for longer each time.
"""

from enum import StrEnum

OPEN_AT = 3.0
SUCCESS = 0.1
HALF_LIFE_S = 60.0
FIRST_OPEN_S, LONGER, MAX_OPEN_S = 10.0, 6.0, 600.0
FORGIVEN_AT = 0.5
"""With so little left, earlier times out are forgotten."""


class State(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class Breaker:
    def __init__(self) -> None:
        self.state = State.CLOSED
        self.probe_at = 0.0
        """When an open worker is to be tested."""
        self._score = 0.0
        self._scored_at = 0.0
        self._num_opened = 0

    def failed(self, now: float, weight: float = 1.0) -> bool:
        """True when that takes the worker out."""
        self._score = self.score(now) + weight
        self._scored_at = now
        # a third of a failure may have faded between three of them
        if self.state is not State.CLOSED or self._score < OPEN_AT - 0.25:
            return False
        self._open(now)
        return True

    def forgive(self, now: float, weight: float) -> None:
        """It was not the worker's fault after all."""
        self._lower(now, weight)

    def succeeded(self, now: float) -> None:
        self._lower(now, SUCCESS)

    def probe_begun(self) -> None:
        assert self.state is State.OPEN
        self.state = State.HALF_OPEN

    def probe_ended(self, now: float, *, has_passed: bool) -> None:
        assert self.state is State.HALF_OPEN
        if not has_passed:
            self._open(now)
            return
        self.state = State.CLOSED
        self._score, self._scored_at = OPEN_AT - 1.0, now

    def score(self, now: float) -> float:
        left = self._score * 0.5 ** ((now - self._scored_at) / HALF_LIFE_S)
        if self.state is State.CLOSED and left < FORGIVEN_AT:
            self._num_opened = 0
        return float(left)

    def _lower(self, now: float, weight: float) -> None:
        self._score = max(0.0, self.score(now) - weight)
        self._scored_at = now

    def _open(self, now: float) -> None:
        self.state = State.OPEN
        self.probe_at = now + min(MAX_OPEN_S, FIRST_OPEN_S * LONGER**self._num_opened)
        self._num_opened += 1


class RetryBudget:
    """Retries after internal errors, for the whole fleet: a tenth of what is accepted, and some
    more for fleets with little to do. When everything fails, retries do not double the load.
    """

    def __init__(self, *, share: float = 0.1, most: float = 20.0, per_second: float = 0.5) -> None:
        self._share = share
        self._most = most
        self._per_second = per_second
        self._left = most
        self._at = 0.0

    def accepted(self) -> None:
        self._left = min(self._most, self._left + self._share)

    def take(self, now: float) -> bool:
        self._left = min(self._most, self._left + self._per_second * max(0.0, now - self._at))
        self._at = now
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True
