"""Who a worker is and how it is: what routers are told on Watch streams."""

import asyncio
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

import anyio

from common.errors import MalformedMessage
from common.layout_facts import LayoutFacts
from common.messages import PROTOCOL_VERSION, PoolLoad, RefusedLink, Watch, WorkerState
from common.rpc import Stream
from common.scheduling.cache_events import CacheFeed
from common.scheduling.step_time import StepTimes
from common.types import Role

WATCH_INTERVAL_S = 0.05
"""Changes closer together than this are told together."""
WATCH_PATIENCE_S = 0.025
"""How long a change that can wait does so."""
HEARTBEAT_S = 2.0
"""Without changes something is said that often: gRPC's own pings show that the process is there,
this shows that its loop turns.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Fixed for one life of a worker process. `numeric_incarnation` is the form that page tags
    carry.
    """

    role: Role
    incarnation: str
    metrics: str
    model_fingerprint: bytes
    layout: str
    layout_fingerprint: bytes
    facts: LayoutFacts
    """What `layout` says in words and `layout_fingerprint` in short."""
    block_size: int
    max_model_len: int
    vocab_size: int
    num_ranks: int = 1

    @property
    def numeric_incarnation(self) -> int:
        return int(self.incarnation, 16)


def new_incarnation() -> str:
    """64 random bits: address, name and process id can all repeat after a restart, this does
    not.
    """
    return f"{secrets.randbits(64):016x}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    blocks: PoolLoad
    running: int
    waiting: int
    num_queued_tokens: int
    max_prompt_tokens: int
    num_decodes: int = 0
    num_context_tokens: int = 0
    chunk_tokens: int = 0
    step_times: StepTimes | None = None
    handoff_s: float = 0.0


@dataclass(slots=True, eq=False)
class _Watcher:
    """One Watch stream's view of what has changed."""

    any: asyncio.Event = field(default_factory=asyncio.Event)
    now: asyncio.Event = field(default_factory=asyncio.Event)

    async def wait(self) -> None:
        """Until there is something to tell, a heartbeat at least."""
        with anyio.move_on_after(HEARTBEAT_S):
            await self._either()
        self.any.clear()
        self.now.clear()

    async def _either(self) -> None:
        if not self.now.is_set():
            await self.any.wait()
            with anyio.move_on_after(WATCH_PATIENCE_S):
                await self.now.wait()


class WatchService:
    """Tells routers who this worker is, its load whenever that changes, and what comes into its
    prefix cache and goes out of it.
    """

    def __init__(
        self,
        identity: Identity,
        load: Callable[[], Load],
        feed: Callable[[], CacheFeed],
        refused_links: Callable[[], tuple[RefusedLink, ...]] = lambda: (),
    ) -> None:
        """`feed` begins a new reading of the prefix cache."""
        self._identity = identity
        self._load = load
        self._feed = feed
        self._refused_links = refused_links
        self._watchers: set[_Watcher] = set()
        self.is_draining = False
        self.fault = ""
        """Why this worker wants no requests, though it answers."""

    def set_fault(self, fault: str) -> None:
        self.fault = fault
        self.changed()

    def changed(self, *, can_wait: bool = False) -> None:
        """Tells it at once or, what `can_wait`, together with a change that follows soon: what a
        step brings (pages that the next turn of a chat will ask for) must not stand behind news of
        the request that began before it.
        """
        for watcher in self._watchers:
            watcher.any.set()
            if not can_wait:
                watcher.now.set()

    def drain(self) -> None:
        self.is_draining = True
        self.changed()

    async def serve(self, stream: Stream) -> None:
        """Handler of a Watch stream."""
        message = await stream.receive()
        if not isinstance(message, Watch):
            raise MalformedMessage("a Watch stream starts with Watch")
        if message.protocol != PROTOCOL_VERSION:
            raise MalformedMessage(
                f"protocol {message.protocol}, this worker speaks {PROTOCOL_VERSION}"
            )
        watcher = _Watcher()
        watcher.now.set()
        self._watchers.add(watcher)
        feed = self._feed()
        try:
            while True:
                await watcher.wait()
                await stream.send(self.state())
                for events in feed.take():
                    await stream.send(events)
                await anyio.sleep(WATCH_INTERVAL_S)
        finally:
            self._watchers.discard(watcher)

    def state(self) -> WorkerState:
        identity, load = self._identity, self._load()
        return WorkerState(
            role=identity.role,
            incarnation=identity.incarnation,
            pid=os.getpid(),
            metrics=identity.metrics,
            model_fingerprint=identity.model_fingerprint.hex(),
            layout=identity.layout,
            block_size=identity.block_size,
            max_model_len=identity.max_model_len,
            max_prompt_tokens=load.max_prompt_tokens,
            draining=self.is_draining,
            blocks=load.blocks,
            running=load.running,
            waiting=load.waiting,
            num_queued_tokens=load.num_queued_tokens,
            num_decodes=load.num_decodes,
            num_context_tokens=load.num_context_tokens,
            chunk_tokens=load.chunk_tokens,
            step_times=load.step_times,
            handoff_s=load.handoff_s,
            shares_parameters=True,
            unhealthy=self.fault,
            heartbeat_s=HEARTBEAT_S,
            facts=identity.facts,
            num_ranks=identity.num_ranks,
            refused_links=self._refused_links(),
        )
