"""Pages copied inside one process, with faults that a test can program.

`MemoryFabric` stands for the network: transports register their pools with it. Copies happen when
the event loop runs the read, or when the test lets them: `hold` stops reads of a source (a frozen
peer) until `resume`, `kill` ends them as disconnected, `alter` changes the next pages that are
read. Used by tests.
"""

import asyncio
import contextlib
import dataclasses
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from common.errors import PullFailed
from common.handoff_messages import LinkReply
from common.pages import PageKind
from kvtransfer.transport import PageRead, PoolAddress, ReadEnd

Alter = Callable[[Any], None]
"""Changes a page, given as a row of bytes, where it has landed."""


@dataclasses.dataclass(slots=True)
class _Member:
    pool: Any
    is_alive: bool = True
    may_read: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)


class MemoryFabric:
    """All pools of a process, by incarnation."""

    def __init__(self) -> None:
        self._members: dict[str, _Member] = {}
        self._alterations: deque[Alter] = deque()
        self.num_pages = 0
        self.num_bytes = 0

    def join(self, incarnation: str, pool: Any) -> None:
        member = _Member(pool)
        member.may_read.set()
        self._members[incarnation] = member

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
    """`pool` and `landing` have tensors `packed` and `exact` of pages as rows, each of so many
    records.
    """

    def __init__(
        self, fabric: MemoryFabric, incarnation: str, pool: Any, landing: Any, num_heads: int = 1
    ) -> None:
        self._num_heads = num_heads
        self._fabric = fabric
        self._incarnation = incarnation
        self._landing = landing
        self._linked: set[str] = set()
        self._tasks: set[asyncio.Task[ReadEnd]] = set()
        fabric.join(incarnation, pool)

    def describe(self) -> PoolAddress:
        return PoolAddress(agent_name=self._incarnation, agent_metadata=b"", pages=())

    async def link(self, source: LinkReply) -> None:
        if self._fabric.member(source.incarnation) is None:
            raise PullFailed(f"{source.incarnation} is not in this process")
        self._linked.add(source.incarnation)

    def unlink(self, incarnation: str) -> None:
        self._linked.discard(incarnation)

    def read(self, incarnation: str, pages: Sequence[PageRead]) -> MemoryRead:
        member = self._fabric.member(incarnation)
        if incarnation not in self._linked or member is None or not member.is_alive:
            raise PullFailed(f"{incarnation} is not linked")
        task = asyncio.ensure_future(self._copy(member, tuple(pages)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return MemoryRead(task)

    async def _copy(self, member: _Member, pages: tuple[PageRead, ...]) -> ReadEnd:
        await member.may_read.wait()
        if not member.is_alive:
            return ReadEnd.DISCONNECTED
        for page in pages:
            self._fabric.num_pages += 1
            source = _rows(member.pool, page.kind)[page.block_id]
            target = _rows(self._landing, page.kind)[page.slot[1]]
            heads = page.heads or range(self._num_heads)
            records, places = (row.reshape(self._num_heads, -1) for row in (source, target))
            for head in heads:
                self._fabric.num_bytes += records.shape[1]
                places[head] = records[head]
            self._fabric.arrived(target)
        return ReadEnd.DONE

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for task in list(self._tasks):
            with contextlib.suppress(asyncio.CancelledError):
                await task


def _rows(arena: Any, kind: PageKind) -> Any:
    return arena.packed if kind is PageKind.PACKED else arena.exact
