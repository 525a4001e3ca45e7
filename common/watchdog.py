"""Whether a process gets on with its work: does its loop turn, does its device move, does a peer
say something. Pure; time is an argument, looks come every `LOOK_EVERY_S`.

    job_began, job_ended, pinged, answered -> Watchdog.look(now) -> Verdict

Time in which nobody looked (a suspended machine, SIGSTOP, a starved thread) does not count. A job
carries the bound within which something must end: steps one that follows the fitted times
(worker/watched_device.py), loading and capturing at the start a generous one of their own. A
process that is no good for `EXIT_AFTER_S` ends itself (common/watch_thread.py).
"""

from dataclasses import dataclass, field

LOOK_EVERY_S = 0.5
LOOP_S = 5.0
"""A loop that answers nothing for so long hangs."""
EXIT_AFTER_S = 30.0
START_BOUND_S = 1800.0
"""For reading weights, compiling, capturing graphs and testing, together."""


@dataclass(frozen=True, slots=True)
class Verdict:
    fault: str = ""
    must_exit: bool = False


class Ticks:
    """Time between looks that came when they should: what is late counts as one look."""

    def __init__(self, now: float) -> None:
        self._looked_at = now

    def missed_s(self, now: float) -> float:
        """Call it at each look."""
        gap_s, self._looked_at = now - self._looked_at, now
        return gap_s - LOOK_EVERY_S if gap_s > 3 * LOOK_EVERY_S else 0.0


class Watchdog:
    def __init__(self, now: float) -> None:
        self._loop_s = START_BOUND_S
        self._ticks = Ticks(now)
        self._bounds: dict[int, float] = {}
        self._num_jobs = 0
        self._moved_at = now
        self._pinged_at: float | None = None
        self._faulty_since: float | None = None

    # --- facts

    def job_began(self, now: float, bound_s: float) -> int:
        """The device was handed something, which waits for what is there already."""
        if not self._bounds:
            self._moved_at = now
        self._num_jobs += 1
        self._bounds[self._num_jobs] = bound_s
        return self._num_jobs

    def job_ended(self, now: float, job: int) -> None:
        del self._bounds[job]
        self._moved_at = now

    def pinged(self, now: float) -> None:
        """The loop has been asked to call `answered`. One ping is under way at a time."""
        assert self._pinged_at is None
        self._pinged_at = now

    def answered(self) -> None:
        self._pinged_at = None

    def serves(self) -> None:
        """The start is over: from now on the loop must turn."""
        self._loop_s = LOOP_S

    @property
    def waits_for_loop(self) -> bool:
        return self._pinged_at is not None

    # --- decision

    def look(self, now: float) -> Verdict:
        missed_s = self._ticks.missed_s(now)
        self._moved_at += missed_s
        if self._pinged_at is not None:
            self._pinged_at += missed_s
        if self._faulty_since is not None:
            self._faulty_since += missed_s
        fault = self._fault(now)
        if not fault:
            self._faulty_since = None
            return Verdict()
        if self._faulty_since is None:
            self._faulty_since = now
        return Verdict(fault, must_exit=now - self._faulty_since >= EXIT_AFTER_S)

    def _fault(self, now: float) -> str:
        if self._pinged_at is not None and now - self._pinged_at > self._loop_s:
            return f"its event loop has not turned for {now - self._pinged_at:.1f} s"
        still_s = now - self._moved_at
        if self._bounds and still_s > max(self._bounds.values()):
            return (
                f"its device has not moved for {still_s:.1f} s; "
                f"at most {max(self._bounds.values()):.1f} s were expected"
            )
        return ""


@dataclass(slots=True)
class Silence:
    """Of a peer that promised to say something every `heartbeat_s`; 0: it promised nothing."""

    heartbeat_s: float
    now: float
    _ticks: Ticks = field(init=False)
    _heard_at: float = field(init=False)

    def __post_init__(self) -> None:
        self._ticks = Ticks(self.now)
        self._heard_at = self.now

    def heard(self, now: float) -> None:
        self._heard_at = now

    def is_too_long(self, now: float) -> bool:
        """Three times what was promised. To be asked every `LOOK_EVERY_S`."""
        self._heard_at += self._ticks.missed_s(now)
        return self.heartbeat_s > 0 and now - self._heard_at > 3 * self.heartbeat_s
