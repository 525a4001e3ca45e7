"""The simulation's clock and what is still to happen on it.

Events at one instant come in a fixed order: messages before ends of steps (so a message that
arrives in the very moment in which a step ends meets the worker with that step still in flight),
messages in the order in which they were sent, steps in the order of their workers. So the order
never depends on when an event was entered.
"""

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

MESSAGE, STEP_END = 0, 1

_Entry = tuple[float, int, int, int, Callable[..., None], tuple[Any, ...]]


class EventQueue:
    def __init__(self) -> None:
        self.now = 0.0
        self.num_events = 0
        self._heap: list[_Entry] = []
        self._number = 0

    def send(self, time: float, call: Callable[..., None], *arguments: Any) -> None:
        """`call(*arguments)` at `time`, as a message."""
        self._push((time, MESSAGE, 0, self._next(), call, arguments))

    def step_end(self, time: float, worker: int, call: Callable[..., None], life: int) -> None:
        """`call(life)` when a step of the `worker`-th worker ends."""
        self._push((time, STEP_END, worker, self._next(), call, (life,)))

    def run(self) -> None:
        """Until nothing is left to happen."""
        heap = self._heap
        while heap:
            time, _, _, _, call, arguments = heappop(heap)
            self.now = time
            self.num_events += 1
            call(*arguments)

    def _push(self, entry: _Entry) -> None:
        assert entry[0] >= self.now, "an event in the past"
        heappush(self._heap, entry)

    def _next(self) -> int:
        self._number += 1
        return self._number


class QueueTimer:
    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self._callback = None

    def ring(self) -> None:
        if self._callback is not None:
            self._callback()


class QueueClock:
    """The clock and the timers of parts that ask for the time themselves."""

    def __init__(self, events: EventQueue) -> None:
        self._events = events

    def now(self) -> float:
        return self._events.now

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> QueueTimer:
        timer = QueueTimer(callback)
        self._events.send(self._events.now + delay_s, timer.ring)
        return timer
