"""The landing zone's bookkeeping: slots that reads may write to.

Reads never have the pool as destination. A page lands in a slot here, is checked there, and is
copied into the pool. A slot is reused only when its read has really ended: a read that was given up
may still write, so its slots are quarantined until the transport reports its end. Slots of each
kind are handed out oldest first.
"""

from collections import deque
from collections.abc import Iterable

from common.pages import PageKind

Slot = tuple[PageKind, int]


class LandingZone:
    def __init__(self, *, num_packed: int, num_exact: int) -> None:
        self._num = {PageKind.PACKED: num_packed, PageKind.EXACT: num_exact}
        self._free = {kind: deque(range(num)) for kind, num in self._num.items()}
        self._in_use: set[Slot] = set()
        self._quarantined: set[Slot] = set()
        self._has_freed = False

    @property
    def num_quarantined(self) -> int:
        return len(self._quarantined)

    @property
    def num_in_use(self) -> int:
        return len(self._in_use)

    @property
    def is_exhausted(self) -> bool:
        """Every slot of some kind is quarantined: nothing can land until reads end (or the worker
        restarts).
        """
        return any(
            num > 0 and sum(1 for k, _ in self._quarantined if k is kind) == num
            for kind, num in self._num.items()
        )

    def take(self, kind: PageKind) -> Slot | None:
        """A slot to read into; None when all are in use or quarantined."""
        if not self._free[kind]:
            return None
        slot = (kind, self._free[kind].popleft())
        self._in_use.add(slot)
        return slot

    def give_back(self, slots: Iterable[Slot]) -> None:
        """Their reads have ended, and what landed is copied or not wanted."""
        for slot in slots:
            self._in_use.remove(slot)
            self._put_back(slot)

    def quarantine(self, slots: Iterable[Slot]) -> None:
        """Their read was given up and may still write."""
        for slot in slots:
            self._in_use.remove(slot)
            self._quarantined.add(slot)

    def read_ended(self, slots: Iterable[Slot]) -> None:
        """A quarantined read ended after all."""
        for slot in slots:
            self._quarantined.remove(slot)
            self._put_back(slot)

    def take_freed(self) -> bool:
        """Whether slots were given back since the last call: whoever waits for some may look."""
        has_freed, self._has_freed = self._has_freed, False
        return has_freed

    def _put_back(self, slot: Slot) -> None:
        self._free[slot[0]].append(slot[1])
        self._has_freed = True

    def check_invariants(self) -> None:
        for kind, num in self._num.items():
            free = list(self._free[kind])
            used = [n for k, n in self._in_use if k is kind]
            held = [n for k, n in self._quarantined if k is kind]
            assert sorted(free + used + held) == list(range(num)), (
                f"{kind}: a slot is lost or doubled"
            )
