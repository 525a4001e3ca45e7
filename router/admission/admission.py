"""How much the router takes on: a bound on what waits, and the switch that ends it all.

A request waits from its arrival until a decode worker has admitted it, and takes one slot per
output. Pure counting; `service` calls it.
"""

import asyncio

from common.errors import Draining, Overloaded
from router.admission.keys import Key

_RETRY_AFTER_S = 1.0


class Admission:
    def __init__(self, max_queued: int) -> None:
        self._max_queued = max_queued
        self.num_waiting = 0
        self.num_running = 0
        self.is_draining = False
        self.drained = asyncio.Event()
        """Set once the router drains and has nothing left."""

    def check_open(self) -> None:
        """Raises Draining."""
        if self.is_draining:
            raise Draining("the router is shutting down", retry_after_s=_RETRY_AFTER_S)

    def enter(self, num_outputs: int, key: Key | None = None) -> "Ticket":
        """Raises Overloaded or Draining. An idle router takes a request of any size."""
        self.check_open()
        if self.num_waiting and self.num_waiting + num_outputs > self._max_queued:
            raise Overloaded(
                f"{self.num_waiting} outputs are waiting already; the limit is {self._max_queued}",
                retry_after_s=_RETRY_AFTER_S,
            )
        if key is not None:
            key.take(num_outputs)
        self.num_waiting += num_outputs
        return Ticket(self, num_outputs, key)

    @property
    def is_idle(self) -> bool:
        return self.num_waiting == 0 and self.num_running == 0

    def drain(self) -> None:
        """From now on nothing enters."""
        self.is_draining = True
        self.left()

    def left(self) -> None:
        if self.is_draining and self.is_idle:
            self.drained.set()

    def check_invariants(self) -> None:
        assert min(self.num_waiting, self.num_running) >= 0


class Ticket:
    """One request's place. `start` and `leave` may be called any number of times, in any order."""

    def __init__(self, admission: Admission, num_outputs: int, key: Key | None) -> None:
        self._key = key
        self._admission = admission
        self._num_outputs = num_outputs
        self._is_waiting = True
        self._has_left = False

    def start(self) -> None:
        if self._is_waiting and not self._has_left:
            self._is_waiting = False
            self._admission.num_waiting -= self._num_outputs
            self._admission.num_running += self._num_outputs

    def leave(self) -> None:
        if self._has_left:
            return
        self._has_left = True
        if self._key is not None:
            self._key.give_back(self._num_outputs)
        if self._is_waiting:
            self._admission.num_waiting -= self._num_outputs
        else:
            self._admission.num_running -= self._num_outputs
        self._admission.left()
