"""Pages copied inside one process, with faults that a test can program.

`MemoryFabric` stands for the network: transports register their pools with it, one for each rank.
Copies happen when the event loop runs the read, or when the test lets them: `hold` stops reads of a
source (a frozen peer) until `resume`, `kill` ends them as disconnected, `alter` changes the next
pages that are read. Used by tests.
"""

import asyncio
import contextlib
import dataclasses
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from common.errors import PullFailed
from common.handoff_messages import LinkReply, PoolAddress
from common.pages import PageKind
from common.ranks import Ownership
from kvtransfer.descriptors import Cut, Region
from kvtransfer.rank_reads import PartRead, PlannedReads, plan_reads
from kvtransfer.transport import PageRead, ReadEnd

Alter = Callable[[Any], None]
"""Changes a page, given as a row of bytes, where it has landed."""


@dataclasses.dataclass(slots=True)
class _Member:
    pools: dict[int, Any] = dataclasses.field(default_factory=dict)
    """By rank."""
    is_alive: bool = True
    may_read: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)


class MemoryFabric:
    """All pools of a process, by incarnation."""

    def __init__(self) -> None:
        self._members: dict[str, _Member] = {}
        self._alterations: deque[Alter] = deque()
        self.num_pages = 0
        self.num_bytes = 0

    def join(self, incarnation: str, pool: Any, rank: int = 0) -> None:
        member = self._members.setdefault(incarnation, _Member())
        member.may_read.set()
        member.pools[rank] = pool

    def member(self, incarnation: str) -> _Member | None:
        return self._members.get(incarnation)

    def hold(self, incarnation: str) -> None:
        self._members[incarnation].may_read.clear()

    def resume(self, incarnation: str) -> None:
        self._members[incarnation].may_read.set()

    def kill(self, incarnation: str) -> None:
        self._members[incarnation].is_alive = False
        self._members[incarnation].may_read.set()

    def alter(self, num_pages: int, change: Alter) -> None:
        """The next pages that are read arrive changed."""
        self._alterations.extend([change] * num_pages)

    def arrived(self, row: Any) -> None:
        if self._alterations:
            self._alterations.popleft()(row)


class MemoryRead:
    def __init__(self, task: "asyncio.Task[ReadEnd]") -> None:
        self._task = task

    async def wait(self) -> ReadEnd:
        return await asyncio.shield(self._task)


class MemoryTransport:
    """`pool` and `landing` have tensors `packed` and `exact` of pages as rows, each of a record for
    each head that rank `rank` of a worker holds whose ranks hold `held`.
    """

    def __init__(
        self,
        fabric: MemoryFabric,
        incarnation: str,
        pool: Any,
        landing: Any,
        held: Ownership = ((0,),),
        rank: int = 0,
        landing_of: Callable[[str], Any] | None = None,
    ) -> None:
        self._held = held
        self._rank = rank
        self._fabric = fabric
        self._incarnation = incarnation
        self._pool = pool
        self._landing = landing
        self._landing_of = landing_of
        self._linked: dict[str, tuple[PlannedReads, Any]] = {}
        self._tasks: set[asyncio.Task[ReadEnd]] = set()
        fabric.join(incarnation, pool, rank)

    async def open(self) -> None:
        pass

    def describe(self) -> tuple[PoolAddress, ...]:
        return (
            PoolAddress(
                agent_name=self._incarnation,
                agent_metadata=b"",
                pages=_sizes_of(self._pool),
                heads=self._held[self._rank],
            ),
        )

    async def link(self, source: LinkReply) -> None:
        if self._fabric.member(source.incarnation) is None:
            raise PullFailed(f"{source.incarnation} is not in this process")
        landing = self._landing
        if self._landing_of is not None and source.facts is not None:
            landing = self._landing_of(source.facts.codec)
        sizes = _sizes_of(landing)
        planned = plan_reads(self._held, self._rank, source.ranks, sizes)
        self._linked[source.incarnation] = planned, landing

    def unlink(self, incarnation: str) -> None:
        self._linked.pop(incarnation, None)

    def read(self, incarnation: str, pages: Sequence[PageRead]) -> MemoryRead:
        member = self._fabric.member(incarnation)
        link = self._linked.get(incarnation)
        if link is None or member is None or not member.is_alive:
            raise PullFailed(f"{incarnation} is not linked")
        planned, landing = link
        parts = planned.of(pages)
        task = asyncio.ensure_future(self._copy(member, landing, parts, tuple(pages)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return MemoryRead(task)

    async def _copy(
        self, member: _Member, landing: Any, parts: list[PartRead], pages: tuple[PageRead, ...]
    ) -> ReadEnd:
        await member.may_read.wait()
        if not member.is_alive:
            return ReadEnd.DISCONNECTED
        for part in parts:
            for source, target in zip(part.remote, part.local, strict=True):
                row = _row(member.pools[part.rank], part.there, source)
                _row(landing, part.here, target)[:] = row
                self._fabric.num_bytes += len(row)
        for page in pages:
            self._fabric.num_pages += 1
            self._fabric.arrived(_rows(landing, page.slot[0])[page.slot[1]])
        return ReadEnd.DONE

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for task in list(self._tasks):
            with contextlib.suppress(asyncio.CancelledError):
                await task


def _rows(arena: Any, kind: PageKind) -> Any:
    return arena.packed if kind is PageKind.PACKED else arena.exact


def _row(arena: Any, cut: Cut, number: int) -> Any:
    """Row `number` of an arena whose pages are cut so."""
    page, index = divmod(number, len(cut.places))
    num_packed = len(arena.packed)
    row = arena.packed[page] if page < num_packed else arena.exact[page - num_packed]
    return row.reshape(cut.num, -1)[cut.places[index]]


def _sizes_of(arena: Any) -> tuple[Region, ...]:
    return tuple((0, rows.shape[1], len(rows)) for rows in (arena.packed, arena.exact))
