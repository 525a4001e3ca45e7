"""A line of waiting items that is fair between clients. Used by both schedulers.

Higher priority goes first. Within a priority, clients take turns by the tokens they were served;
within a client, items go by an order of their own that is fixed when they join, so they never
change places.

Between clients this is the virtual token counter of Sheng et al., "Fairness in Serving Large
Language Models" (OSDI 2024), which is start-time fair queueing (Goyal et al., 1996) with tokens as
work. Each client has a counter of tokens charged to it, and the client with the lowest is served.
One that joins is lifted to the lowest counter of those in line: idle time earns nothing, and a
flood of one client delays another by about one item, however long the flood is. The line never
holds anything back, so throughput is that of any other order, and nobody starves: the counters of
all others grow with every item they are served, that of a waiting client does not.

A tag by arrival time instead (`now * rate + tokens queued`) would need a rate equal to the true
service rate: if the worker is slower, the waiting items of a flood age faster than they are served,
and end up before everything that comes later.

`add`, `remove` and `charge` cost O(log n) comparisons; looking at the first k items costs
O(k log k), however many wait.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Generic, Protocol, TypeVar

MAX_IDLE = 64
"""Counters of clients without items that are kept before the useless ones are forgotten."""


class Waiting(Protocol):
    """What the line looks at. None of it may change while the item is in line."""

    @property
    def client(self) -> str: ...

    @property
    def priority(self) -> int: ...

    @property
    def place(self) -> tuple[float, int]:
        """Order among the items of one client; unique."""
        ...

    @property
    def cost(self) -> int:
        """Tokens that serving it takes, about."""
        ...


T = TypeVar("T", bound=Waiting)


@dataclass(slots=True, eq=False)
class _Client(Generic[T]):
    tag: tuple[float, int]
    """(tokens served, order of joining): lowest goes first."""
    items: list[T] = field(default_factory=list)


class FairLine(Generic[T]):
    def __init__(self) -> None:
        self._levels: dict[int, _Level[T]] = {}
        self._order: list[int] = []
        self._num_items = 0

    def __len__(self) -> int:
        return self._num_items

    def __iter__(self) -> Iterator[T]:
        """In the order of service. The line may not change meanwhile."""
        for key in self._order:
            yield from self._levels[key]

    def add(self, item: T) -> None:
        level = self._levels.get(-item.priority)
        if level is None:
            level = self._levels[-item.priority] = _Level()
            insort(self._order, -item.priority)
        level.add(item)
        self._num_items += 1

    def remove(self, item: T) -> None:
        level = self._levels[-item.priority]
        level.remove(item)
        self._num_items -= 1
        if not level.clients:
            # nobody waits, so nobody is owed anything
            del self._levels[-item.priority]
            self._order.remove(-item.priority)

    def charge(self, client: str, priority: int, num_tokens: int) -> None:
        """The client was served that many tokens, or is about to be."""
        level = self._levels.get(-priority)
        if level is not None:
            level.charge(client, num_tokens)

    def check_invariants(self) -> None:
        assert self._order == sorted(self._levels)
        assert self._num_items == sum(1 for _ in self)
        for level in self._levels.values():
            level.check_invariants()


class _Level(Generic[T]):
    """Clients of one priority."""

    def __init__(self) -> None:
        self.clients: dict[str, _Client[T]] = {}
        self._by_tag: list[tuple[tuple[float, int], _Client[T]]] = []
        self._idle: dict[str, float] = {}
        self._joined = 0
        self._virtual = 0.0

    def __iter__(self) -> Iterator[T]:
        num_opened = 0
        opened: list[tuple[tuple[float, int], int, _Client[T]]] = []
        while num_opened < len(self._by_tag) or opened:
            if num_opened < len(self._by_tag) and (
                not opened or self._by_tag[num_opened][0] <= opened[0][0]
            ):
                tag, client = self._by_tag[num_opened]
                heappush(opened, (tag, 0, client))
                num_opened += 1
                continue
            (served, joined), index, client = heappop(opened)
            item = client.items[index]
            yield item
            if index + 1 < len(client.items):
                heappush(opened, ((served + item.cost, joined), index + 1, client))

    def add(self, item: T) -> None:
        client = self.clients.get(item.client)
        if client is None:
            if self._by_tag:
                self._virtual = max(self._virtual, self._by_tag[0][0][0])
            self._joined += 1
            served = max(self._virtual, self._idle.pop(item.client, 0.0))
            client = self.clients[item.client] = _Client(tag=(served, self._joined))
            insort(self._by_tag, (client.tag, client), key=_tag)
        insort(client.items, item, key=_place)

    def remove(self, item: T) -> None:
        client = self.clients[item.client]
        index = bisect_left(client.items, item.place, key=_place)
        assert client.items[index] is item
        del client.items[index]
        if not client.items:
            self._take_out(client)
            del self.clients[item.client]
            self._keep(item.client, client.tag[0])

    def charge(self, name: str, num_tokens: int) -> None:
        client = self.clients.get(name)
        if client is not None:
            self._take_out(client)
            client.tag = (client.tag[0] + num_tokens, client.tag[1])
            insort(self._by_tag, (client.tag, client), key=_tag)
        elif name in self._idle:
            self._idle[name] += num_tokens

    def _take_out(self, client: _Client[T]) -> None:
        index = bisect_left(self._by_tag, client.tag, key=_tag)
        assert self._by_tag[index][1] is client
        del self._by_tag[index]

    def _keep(self, name: str, served: float) -> None:
        """Whoever had more than the others still has when it comes back."""
        self._idle[name] = served
        if self._by_tag:
            self._virtual = max(self._virtual, self._by_tag[0][0][0])
        if len(self._idle) > MAX_IDLE:
            self._idle = {name: s for name, s in self._idle.items() if s > self._virtual}

    def check_invariants(self) -> None:
        assert [tag for tag, _ in self._by_tag] == sorted(c.tag for c in self.clients.values())
        assert not self.clients.keys() & self._idle.keys()
        for client in self.clients.values():
            places = [item.place for item in client.items]
            assert places
            assert places == sorted(set(places))


def _tag(entry: tuple[tuple[float, int], object]) -> tuple[float, int]:
    return entry[0]


def _place(item: Waiting) -> tuple[float, int]:
    return item.place
