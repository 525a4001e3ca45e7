"""Plans that are under way, and tables that were given up while something may name their pages.

A plan names pages from the moment it is made until it is applied, a landing from `pin` to `unpin`.
A table given up meanwhile is dead: its pages go back to the pool when the last of these is over.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NewType

from common.scheduling.kv_cache import BlockTable, KvCache
from common.scheduling.plan import StepPlan
from common.scheduling.step_time import StepShape
from common.types import OutputKey
from decode_worker.entries import Entry, Output

MAX_IN_FLIGHT = 2

Pin = NewType("Pin", int)
"""Of one landing that writes to a request's pages."""


@dataclass(slots=True, eq=False)
class Flight:
    """A plan that has not been applied yet. `decodes` are its outputs, `dead` tables that were
    given up since: it, or one before it, may name their pages.
    """

    plan: StepPlan
    shape: StepShape
    decodes: dict[OutputKey, Output]
    dead: list[BlockTable] = field(default_factory=list)


class Flights:
    def __init__(self, cache: KvCache) -> None:
        self._cache = cache
        self._flights: deque[Flight] = deque()
        self._pinned: dict[Pin, Entry] = {}
        self._num_pins = 0

    def __len__(self) -> int:
        return len(self._flights)

    @property
    def latest(self) -> dict[OutputKey, Output]:
        """Outputs of the latest plan under way: each has a token that nobody has read."""
        return self._flights[-1].decodes if self._flights else {}

    @property
    def hold_pages(self) -> bool:
        """Whether pages will come free although nobody holds them."""
        return bool(self._pinned or any(flight.dead for flight in self._flights))

    def begin(
        self, plan: StepPlan, num_context_tokens: int, decodes: dict[OutputKey, Output]
    ) -> None:
        assert len(self._flights) < MAX_IN_FLIGHT
        self._flights.append(Flight(plan, StepShape.of(plan, num_context_tokens), decodes))

    def end(self, plan: StepPlan) -> Flight:
        """The oldest one, which must be that plan's."""
        flight = self._flights.popleft()
        assert plan is flight.plan
        for table in flight.dead:
            self._cache.free(table)
        return flight

    def pin(self, entry: Entry) -> Pin:
        self._num_pins += 1
        pin = Pin(self._num_pins)
        self._pinned[pin] = entry
        entry.num_pins += 1
        return pin

    def unpin(self, pin: Pin) -> None:
        entry = self._pinned.pop(pin)
        entry.num_pins -= 1
        if entry.num_pins == 0:
            for table in entry.dead_tables:
                self._free(table)
            entry.dead_tables.clear()

    def give_up(self, output: Output) -> None:
        """Its table is not needed any more."""
        if output.entry.num_pins:
            output.entry.dead_tables.append(output.table)
        else:
            self._free(output.table)

    def _free(self, table: BlockTable) -> None:
        if self._flights:
            self._flights[-1].dead.append(table)
        else:
            self._cache.free(table)

    def dead_tables(self) -> Iterator[BlockTable]:
        for flight in self._flights:
            yield from flight.dead
        for entry in {id(entry): entry for entry in self._pinned.values()}.values():
            yield from entry.dead_tables
