"""Pages moved by NIXL: one-sided READs of another process's pool, over RDMA, shared memory or TCP
as UCX finds.

One thread owns the agent. Everything is a job for it; it sleeps on a condition while no read is in
flight, else it polls (50 us, backing off to 1 ms), since NIXL has no other way to tell. Descriptor
*i* of a pool is packed page *i*, the exact pages follow; a read is two lists of integers over lists
prepared once.

A read that was given up is polled until NIXL reports its end, because until then it may write.
Other errors than a remote disconnect say nothing about that and are reported as `ReadEnd.UNKNOWN`.
"""

import asyncio
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

# NIXL reads these when it is first imported; its own INFO lines are not for our users
os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")

import torch

if torch.version.cuda is not None and torch.version.cuda.startswith("13"):
    import nixl_cu13._bindings as bindings
    from nixl_cu13._api import nixl_agent, nixl_agent_config
else:
    import nixl_cu12._bindings as bindings
    from nixl_cu12._api import nixl_agent, nixl_agent_config

from common.errors import ConfigError, PullFailed
from common.handoff_messages import LinkReply
from common.pages import PageKind
from kvtransfer.descriptors import Region, record_numbers, records_of, regions_of, rows_of
from kvtransfer.thread_futures import reject, resolve
from kvtransfer.transport import PageRead, PoolAddress, ReadEnd

log = logging.getLogger(__name__)

MIN_POLL_S = 50e-6
MAX_POLL_S = 1e-3
PROGRESS_PAUSE_US = 100


@dataclass(slots=True)
class _Source:
    """A linked pool."""

    incarnation: str
    agent_name: str
    descriptors: Any
    num_packed: int
    num_exact: int
    regions: Sequence[Region]
    records: Any = None
    """Descriptors of records; None until some are wanted."""
    is_gone: bool = False
    is_unlinked: bool = False
    num_reading: int = 0


@dataclass(slots=True, eq=False)
class NixlRead:
    """Resolved by the NIXL thread."""

    end: "asyncio.Future[ReadEnd]"
    source: _Source
    local: list[int]
    remote: list[int]
    of_records: bool = False
    """The numbers are those of records, not of pages."""
    handle: Any = None

    async def wait(self) -> ReadEnd:
        return await asyncio.shield(self.end)


@dataclass(slots=True)
class _State:
    """What the NIXL thread owns."""

    sources: dict[str, _Source] = field(default_factory=dict)
    reads: list[NixlRead] = field(default_factory=list)


class NixlTransport:
    """`pool` and `landing` are page arenas: uint8 tensors `packed` [n, page_bytes] and `exact` [m,
    page_bytes], each page of `num_heads` records.
    """

    def __init__(self, incarnation: str, pool: Any, landing: Any, num_heads: int = 1) -> None:
        self._num_heads = num_heads
        self._incarnation = incarnation
        self._pool = pool
        self._landing = landing
        self._jobs: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._is_closed = False
        self._state = _State()
        self._address: PoolAddress
        self._agent: Any
        self._local: Any
        self._local_records: Any = None
        self._known: dict[str, _Source] = {}
        self._thread = threading.Thread(target=self._run, name="nixl", daemon=True)

    async def open(self) -> None:
        """Creates the agent and registers the memory. Raises ConfigError when UCX has no lane that
        works.
        """
        self._thread.start()
        await self._call(self._create)

    def describe(self) -> PoolAddress:
        return self._address

    async def link(self, source: LinkReply) -> None:
        if source.incarnation not in self._known:
            self._known[source.incarnation] = await self._call(lambda: self._add(source))

    def unlink(self, incarnation: str) -> None:
        source = self._known.pop(incarnation, None)
        if source is not None:
            self._submit(lambda: self._remove(source))

    def read(self, incarnation: str, pages: Sequence[PageRead]) -> NixlRead:
        source = self._known.get(incarnation)
        if source is None or source.is_gone:
            raise PullFailed(f"the prefill worker {incarnation} is not linked")
        limits = {PageKind.PACKED: source.num_packed, PageKind.EXACT: source.num_exact}
        if any(not 0 <= page.block_id < limits[page.kind] for page in pages):
            raise PullFailed("a page was announced that is not in the prefill worker's pool")
        offset = {PageKind.PACKED: 0, PageKind.EXACT: source.num_packed}
        num_slots = self._landing.packed.shape[0]
        local = [page.slot[1] + (num_slots if page.kind is PageKind.EXACT else 0) for page in pages]
        remote = [page.block_id + offset[page.kind] for page in pages]
        of_records = any(page.heads for page in pages)
        if of_records:
            local, remote = (
                record_numbers(numbers, pages, self._num_heads) for numbers in (local, remote)
            )
        read = NixlRead(
            end=asyncio.get_running_loop().create_future(),
            source=source,
            local=local,
            remote=remote,
            of_records=of_records,
        )
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
        try:
            self._agent = _PacedAgent(self._incarnation, nixl_agent_config(backends=["UCX"]))
            for arena in (self._pool, self._landing):
                for tensor in (arena.packed, arena.exact):
                    if tensor.numel():
                        self._agent.register_memory([tensor])
            if self._landing.packed.shape[0]:
                self._local = self._prepare(
                    "NIXL_INIT_AGENT", regions_of(self._landing), self._landing.packed
                )
        except Exception as error:
            raise ConfigError(
                f"NIXL cannot start: {error} (UCX_TLS is {os.environ.get('UCX_TLS', 'not set')}). "
                "Allow a lane that reports peer failure, for example UCX_TLS=tcp,self"
            ) from error
        self._address = PoolAddress(
            agent_name=self._incarnation,
            agent_metadata=self._agent.get_agent_metadata(),
            pages=regions_of(self._pool),
        )

    def _prepare(self, agent_name: str, regions: Sequence[Region], like: torch.Tensor) -> Any:
        """A prepared list with one descriptor for each row of the regions, in order."""
        device = like.get_device() if like.is_cuda else 0
        memory = "VRAM" if like.is_cuda else "DRAM"
        return self._agent.prep_xfer_dlist(agent_name, rows_of(regions, device), mem_type=memory)

    def _add(self, reply: LinkReply) -> _Source:
        known = self._state.sources.get(reply.incarnation)
        if known is not None:
            return known
        (_, _, num_packed), (_, _, num_exact) = reply.pages
        try:
            name = self._agent.add_remote_agent(reply.agent_metadata)
            descriptors = self._prepare(_text(name), reply.pages, self._pool.packed)
        except Exception as error:
            raise PullFailed(f"cannot link to {reply.incarnation}: {error}") from error
        source = _Source(
            reply.incarnation, _text(name), descriptors, num_packed, num_exact, reply.pages
        )
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
            try:
                source.descriptors.release()
                if source.records is not None:
                    source.records.release()
                self._agent.remove_remote_agent(source.agent_name)
            except Exception as error:
                log.info("removing %s: %s", source.agent_name, error)

    def _start(self, read: NixlRead) -> None:
        read.source.num_reading += 1
        try:
            local, remote = self._descriptors(read)
            read.handle = self._agent.make_prepped_xfer(
                "READ", local, read.local, remote, read.remote
            )
            state = self._agent.transfer(read.handle)
        except Exception as error:
            self._end(read, self._end_of(error, read))
            return
        if state == "PROC":
            self._state.reads.append(read)
        else:
            self._end(read, ReadEnd.DONE if state == "DONE" else ReadEnd.UNKNOWN)

    def _descriptors(self, read: NixlRead) -> tuple[Any, Any]:
        """Of records they are made when they are wanted first: after a refusal, which is rare."""
        if not read.of_records:
            return self._local, read.source.descriptors
        heads = self._num_heads
        if self._local_records is None:
            regions = records_of(regions_of(self._landing), heads)
            self._local_records = self._prepare("NIXL_INIT_AGENT", regions, self._landing.packed)
        source = read.source
        if source.records is None:
            regions = records_of(source.regions, heads)
            source.records = self._prepare(source.agent_name, regions, self._pool.packed)
        return self._local_records, source.records

    def _poll(self) -> bool:
        """Whether any read ended."""
        ended: list[tuple[NixlRead, ReadEnd]] = []
        for read in self._state.reads:
            try:
                state = self._agent.check_xfer_state(read.handle)
            except Exception as error:
                ended.append((read, self._end_of(error, read)))
                continue
            if state != "PROC":
                ended.append((read, ReadEnd.DONE if state == "DONE" else ReadEnd.UNKNOWN))
        for read, end in ended:
            self._state.reads.remove(read)
            self._end(read, end)
        return bool(ended)

    def _end_of(self, error: Exception, read: NixlRead) -> ReadEnd:
        log.warning("a read from %s failed: %s", read.source.incarnation, error)
        if isinstance(error, bindings.nixlRemoteDisconnectError):
            read.source.is_gone = True
            return ReadEnd.DISCONNECTED
        return ReadEnd.UNKNOWN

    def _end(self, read: NixlRead, end: ReadEnd) -> None:
        if read.handle is not None and end is not ReadEnd.UNKNOWN:
            try:
                self._agent.release_xfer_handle(read.handle)
            except Exception as error:
                log.info("releasing a read: %s", error)
        read.source.num_reading -= 1
        self._remove_if_idle(read.source)
        resolve(read.end, end)

    def _run(self) -> None:
        pause = MIN_POLL_S
        while True:
            with self._wake:
                while not (self._jobs or self._state.reads or self._is_closed):
                    self._wake.wait()
                jobs = list(self._jobs)
                self._jobs.clear()
                if self._is_closed and not jobs:
                    break
            for job in jobs:
                job()
            if jobs or self._poll():
                pause = MIN_POLL_S
            elif self._state.reads:
                time.sleep(pause)
                pause = min(2 * pause, MAX_POLL_S)
        for read in self._state.reads:
            resolve(read.end, ReadEnd.UNKNOWN)

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


class _PacedAgent(nixl_agent):  # type: ignore[misc,unused-ignore]
    """An agent whose progress thread pauses between rounds.

    NIXL's Python class fixes the pause at 0, with which that thread keeps one core busy for ever,
    also in a worker that has nothing to do. At 100 us it takes 3 %. (The thread itself is needed:
    without it a source does not answer when somebody connects.)
    """

    def __init__(self, name: str, config: nixl_agent_config) -> None:
        create = bindings.nixlAgent

        def create_paced(agent_name: str, agent_config: Any) -> Any:
            agent_config.pthrDelay = PROGRESS_PAUSE_US
            return create(agent_name, agent_config)

        bindings.nixlAgent = create_paced
        try:
            super().__init__(name, config)
        finally:
            bindings.nixlAgent = create


def _text(name: Any) -> str:
    return name.decode() if isinstance(name, bytes) else str(name)
