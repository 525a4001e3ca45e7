"""Pages moved by NIXL: one-sided READs of another process's pool, over RDMA, shared memory or TCP
as UCX finds.

One thread owns the agent. Everything is a job for it; it sleeps on a condition while no read is in
flight, else it polls (50 us, backing off to 1 ms), since NIXL has no other way to tell. Row *i* of
a pool is packed page *i*, the exact pages follow; a transfer is two lists of integers over lists of
rows prepared once. A read is one transfer for each rank of the source that it needs
(kvtransfer/rank_reads.py), one where this rank has a twin there, and ends when all have.

A read that was given up is polled until NIXL reports its end, because until then it may write.
Other errors than a remote disconnect say nothing about that and are reported as `ReadEnd.UNKNOWN`.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from common.errors import PullFailed
from common.handoff_messages import LinkReply, PoolAddress
from common.ranks import Ownership
from kvtransfer.descriptors import regions_of
from kvtransfer.nixl_agent import (
    OURSELVES,
    Disconnected,
    Rows,
    add_remote,
    address_of,
    open_agent,
    register,
)
from kvtransfer.rank_reads import PartRead, PlannedReads, plan_reads
from kvtransfer.thread_futures import reject, resolve
from kvtransfer.transport import PageRead, ReadEnd

log = logging.getLogger(__name__)

MIN_POLL_S = 50e-6
MAX_POLL_S = 1e-3


@dataclass(slots=True)
class _Source:
    """A linked worker: what is read from which of its ranks."""

    incarnation: str
    planned: PlannedReads
    slots: Rows
    """Where its pages land."""
    rows: dict[int, Rows]
    """Of the pools of these ranks."""
    is_gone: bool = False
    is_unlinked: bool = False
    num_reading: int = 0


@dataclass(slots=True, eq=False)
class NixlRead:
    """Resolved by the NIXL thread."""

    end: "asyncio.Future[ReadEnd]"
    source: _Source
    parts: list[PartRead]
    num_open: int
    """Parts that have not ended, and one until all have been started."""
    worst: ReadEnd = ReadEnd.DONE

    async def wait(self) -> ReadEnd:
        return await asyncio.shield(self.end)


@dataclass(slots=True, eq=False)
class _Transfer:
    """The part of a read that one rank of the source has; in flight."""

    read: NixlRead
    handle: Any


@dataclass(slots=True)
class _State:
    """What the NIXL thread owns."""

    sources: dict[str, _Source] = field(default_factory=dict)
    transfers: list[_Transfer] = field(default_factory=list)


class NixlTransport:
    """`pool` and `landing` are page arenas: uint8 tensors `packed` [n, page_bytes] and `exact` [m,
    page_bytes], each page of a record for each head that rank `rank` of a worker holds whose ranks
    hold `held`.
    """

    def __init__(
        self,
        incarnation: str,
        pool: Any,
        landing: Any,
        held: Ownership = ((0,),),
        rank: int = 0,
        landing_of: Callable[[str], Any] | None = None,
    ) -> None:
        """`landing_of` gives the arena that pages of a codec land in, if that is not always
        `landing`.
        """
        self._name = f"{incarnation}.{rank}" if rank else incarnation
        self._pool = pool
        self._landing = landing
        self._landing_of = landing_of
        self._held = held
        self._rank = rank
        self._jobs: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._is_closed = False
        self._state = _State()
        self._address: PoolAddress
        self._agent: Any
        self._slots: dict[int, Rows] = {}
        """Of the arenas that pages land in."""
        self._known: dict[str, _Source] = {}
        self._thread = threading.Thread(target=self._run, name="nixl", daemon=True)

    async def open(self) -> None:
        """Creates the agent and registers the memory. Raises ConfigError when UCX has no lane that
        works.
        """
        self._thread.start()
        await self._call(self._create)

    def describe(self) -> tuple[PoolAddress, ...]:
        return (self._address,)

    async def link(self, source: LinkReply) -> None:
        if source.incarnation in self._known:
            return
        arena = self._landing
        if self._landing_of is not None and source.facts is not None:
            arena = self._landing_of(source.facts.codec)
        planned = plan_reads(self._held, self._rank, source.ranks, regions_of(arena))
        self._known[source.incarnation] = await self._call(
            lambda: self._add(source, planned, arena)
        )

    def unlink(self, incarnation: str) -> None:
        source = self._known.pop(incarnation, None)
        if source is not None:
            self._submit(lambda: self._remove(source))

    def read(self, incarnation: str, pages: Sequence[PageRead]) -> NixlRead:
        source = self._known.get(incarnation)
        if source is None or source.is_gone:
            raise PullFailed(f"the prefill worker {incarnation} is not linked")
        parts = source.planned.of(pages)
        end = asyncio.get_running_loop().create_future()
        read = NixlRead(end=end, source=source, parts=parts, num_open=1 + len(parts))
        self._submit(lambda: self._start(read))
        return read

    async def close(self) -> None:
        """Ends the thread. Reads still in flight are reported as of unknown end."""
        if not self._thread.is_alive():
            return
        with self._wake:
            self._is_closed = True
            self._wake.notify()
        await asyncio.get_running_loop().run_in_executor(None, self._thread.join)

    # --- on the NIXL thread -----------------------------------------------------------------------

    def _create(self) -> None:
        self._agent = open_agent(self._name, (self._pool, self._landing))
        self._slots[id(self._landing)] = self._rows_of(self._landing)
        heads = self._held[self._rank]
        metadata = self._agent.get_agent_metadata()
        self._address = address_of(self._pool, heads, self._name, metadata)

    def _rows_of(self, arena: Any) -> Rows:
        heads = self._held[self._rank]
        return Rows(self._agent, OURSELVES, address_of(arena, heads, OURSELVES, b""))

    def _slots_of(self, arena: Any) -> Rows:
        slots = self._slots.get(id(arena))
        if slots is None:
            register(self._agent, arena)
            slots = self._slots[id(arena)] = self._rows_of(arena)
        return slots

    def _add(self, reply: LinkReply, planned: PlannedReads, arena: Any) -> _Source:
        known = self._state.sources.get(reply.incarnation)
        if known is not None:
            return known
        source = None
        try:
            source = _Source(reply.incarnation, planned, self._slots_of(arena), {})
            for part in planned.sources:
                rows = source.rows[part.rank] = add_remote(self._agent, reply.ranks[part.rank])
                here, there = planned.cuts(part)
                source.slots.prepared(here)
                rows.prepared(there)
        except Exception as error:
            if source is not None:
                _forget(source)
            raise PullFailed(f"cannot link to {reply.incarnation}: {error}") from error
        self._state.sources[reply.incarnation] = source
        return source

    def _remove(self, source: _Source) -> None:
        source.is_unlinked = True
        self._remove_if_idle(source)

    def _remove_if_idle(self, source: _Source) -> None:
        """An agent is removed only when no read needs it: NIXL forgets reads of an agent it does
        not know.
        """
        if (
            source.is_unlinked
            and source.num_reading == 0
            and source.incarnation in self._state.sources
        ):
            del self._state.sources[source.incarnation]
            _forget(source)

    def _start(self, read: NixlRead) -> None:
        read.source.num_reading += 1
        for part in read.parts:
            self._start_part(read, part)
        self._part_ended(read, ReadEnd.DONE)

    def _start_part(self, read: NixlRead, part: PartRead) -> None:
        transfer = _Transfer(read, None)
        try:
            local = read.source.slots.prepared(part.here)
            remote = read.source.rows[part.rank].prepared(part.there)
            transfer.handle = self._agent.make_prepped_xfer(
                "READ", local, part.local, remote, part.remote
            )
            state = self._agent.transfer(transfer.handle)
        except Exception as error:
            self._end(transfer, self._end_of(error, read))
            return
        if state == "PROC":
            self._state.transfers.append(transfer)
        else:
            self._end(transfer, ReadEnd.DONE if state == "DONE" else ReadEnd.UNKNOWN)

    def _poll(self) -> bool:
        """Whether any transfer ended."""
        ended: list[tuple[_Transfer, ReadEnd]] = []
        for transfer in self._state.transfers:
            try:
                state = self._agent.check_xfer_state(transfer.handle)
            except Exception as error:
                ended.append((transfer, self._end_of(error, transfer.read)))
                continue
            if state != "PROC":
                ended.append((transfer, ReadEnd.DONE if state == "DONE" else ReadEnd.UNKNOWN))
        for transfer, end in ended:
            self._state.transfers.remove(transfer)
            self._end(transfer, end)
        return bool(ended)

    def _end_of(self, error: Exception, read: NixlRead) -> ReadEnd:
        log.warning("a read from %s failed: %s", read.source.incarnation, error)
        if isinstance(error, Disconnected):
            read.source.is_gone = True
            return ReadEnd.DISCONNECTED
        return ReadEnd.UNKNOWN

    def _end(self, transfer: _Transfer, end: ReadEnd) -> None:
        if transfer.handle is not None and end is not ReadEnd.UNKNOWN:
            try:
                self._agent.release_xfer_handle(transfer.handle)
            except Exception as error:
                log.info("releasing a read: %s", error)
        self._part_ended(transfer.read, end)

    def _part_ended(self, read: NixlRead, end: ReadEnd) -> None:
        read.worst = max(read.worst, end)
        read.num_open -= 1
        if read.num_open == 0:
            read.source.num_reading -= 1
            self._remove_if_idle(read.source)
            resolve(read.end, read.worst)

    def _run(self) -> None:
        pause = MIN_POLL_S
        while True:
            with self._wake:
                while not (self._jobs or self._state.transfers or self._is_closed):
                    self._wake.wait()
                jobs = list(self._jobs)
                self._jobs.clear()
                if self._is_closed and not jobs:
                    break
            for job in jobs:
                job()
            if jobs or self._poll():
                pause = MIN_POLL_S
            elif self._state.transfers:
                time.sleep(pause)
                pause = min(2 * pause, MAX_POLL_S)
        for transfer in self._state.transfers:
            resolve(transfer.read.end, ReadEnd.UNKNOWN)

    def _submit(self, job: Callable[[], None]) -> None:
        with self._wake:
            self._jobs.append(job)
            self._wake.notify()

    async def _call(self, function: Callable[[], Any]) -> Any:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def job() -> None:
            try:
                resolve(future, function())
            except Exception as error:
                reject(future, error)

        self._submit(job)
        return await future


def _forget(source: _Source) -> None:
    for rows in source.rows.values():
        rows.remove()
