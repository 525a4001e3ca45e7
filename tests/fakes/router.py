"""A router without its fronts, over the fleet in one process: real discovery, fleet, policy,
dispatcher and journeys.

    async with router(f) as r:
        answer = await r.generate(prompt, sampling)
"""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import anyio

from common.messages import GenerateRequest, pack_tokens
from common.types import SamplingParams
from router.fleet.discovery import Discovery
from router.fleet.dispatch import Dispatcher
from router.fleet.fleet import Fleet as RouterFleet
from router.fleet.journey import Inbox, Journey
from router.fleet.metrics import RouteTally
from router.fleet.reach import Reach
from router.fleet.routing import Predicting, RoutingPolicy
from tests.fakes.fleet import Fleet
from tests.fakes.virtual_time import LoopClock

SETTLE_S = 0.3
"""After this long at rest, everything workers have to tell is known."""


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    num_cached_tokens: int
    num_retries: int


class Router:
    def __init__(
        self, workers: Fleet, name: str = "router", policy: RoutingPolicy | None = None
    ) -> None:
        self.name = name
        self.workers = workers
        self.fleet = RouterFleet(LoopClock())
        self.tally = RouteTally()
        self.dispatcher = Dispatcher(
            self.fleet, policy or Predicting(), tally=self.tally, clock=LoopClock()
        )
        self._numbers = itertools.count()
        self.discovery = Discovery(
            [f"{address}:1" for address in workers.workers],
            fleet=self.fleet,
            dispatcher=self.dispatcher,
            reach=Reach(
                router_id=name,
                connect=workers.network.connect_from(name),
                resolve=_as_named,
            ),
            clock=LoopClock(),
        )

    async def ready(self) -> None:
        await asyncio.sleep(1.0)
        assert len(self.fleet.linked()) == len(self.workers.workers)
        assert self.fleet.is_ready()

    async def settle(self) -> None:
        await asyncio.sleep(SETTLE_S)

    async def generate(self, prompt: list[int], sampling: SamplingParams, **fields: Any) -> Answer:
        inbox = Inbox()
        journey = Journey(
            GenerateRequest(
                request_id=f"{self.name}-{next(self._numbers)}",
                token_ids=pack_tokens(prompt),
                num_prompt_tokens=len(prompt),
                sampling=sampling,
                **fields,
            ),
            prompt_index=0,
            inbox=inbox,
            dispatcher=self.dispatcher,
            clock=LoopClock(),
            on_admitted=lambda: None,
        )
        journey.start()
        tokens: list[int] = []
        try:
            while True:
                for _, _, token, reason, _ in await inbox.take():
                    tokens.append(token)
                    if reason is not None:
                        return Answer(tokens, journey.num_cached_tokens, journey.num_retries)
        finally:
            journey.stop()

    def known(self, address: str) -> set[bytes]:
        """Hashes the router thinks the worker holds."""
        worker = self.fleet.get(address)
        assert worker is not None
        return self.fleet.prefix_index.held(worker.order)

    def check(self) -> None:
        """At rest: the index is what the caches hold, and nothing counts as under way."""
        self.fleet.check_invariants()
        for address, worker in self.workers.workers.items():
            assert self.known(address) == set(worker.cache.named_hashes())
        for seen in self.fleet.linked():
            assert (seen.num_in_flight, seen.num_unseen_tokens) == (0, 0)


async def _as_named(host: str, port: int) -> list[str]:
    return [host]


@contextlib.asynccontextmanager
async def router(
    workers: Fleet, name: str = "router", policy: RoutingPolicy | None = None
) -> AsyncIterator[Router]:
    made = Router(workers, name, policy)
    async with anyio.create_task_group() as group:
        group.start_soon(made.discovery.run)
        await made.ready()
        yield made
        group.cancel_scope.cancel()
