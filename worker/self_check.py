"""A worker in doubt tests itself: asked by a router that saw it fail, or because its own output was
not finite. One that fails the test takes itself out.

    outputs not finite -> Doubts -> self-test -> goes on | takes itself out
    SelfTest stream    -----------> self-test -> SelfTestDone

A test is a short prompt through all layers in pages held for it (engine/self_test.py),
between two steps; streams feel it as one more prompt.
"""

import asyncio
import logging
import re
from collections.abc import Callable

import anyio

from common.clock import Clock
from common.device import Device, self_test_tokens
from common.errors import MalformedMessage, TandemError
from common.messages import SelfTest, SelfTestDone
from common.rpc import Stream
from common.scheduling.kv_cache import KvCache
from common.scheduling.plan import StepResult
from common.types import OutputKey
from worker.watch import WatchService

log = logging.getLogger(__name__)

MAX_NOT_FINITE = 2
"""Requests whose output is not finite before the worker doubts itself."""
TEST_AGAIN_S = 30.0
"""A worker that has passed is not tested again before that, whatever its requests come to: some
prompts may overflow a model that is as it should be.
"""


class Doubts:
    """When a worker has reason to test itself. Pure."""

    def __init__(self) -> None:
        self._request_ids: set[str] = set()
        self._passed_at: float | None = None

    def not_finite(self, keys: tuple[OutputKey, ...], now: float) -> bool:
        """These outputs were not finite. True when that is once too often."""
        # resubmissions and hand-offs of a request have names of their own
        self._request_ids |= {re.split("[~#/]", key, maxsplit=1)[0] for key in keys}
        return len(self._request_ids) >= MAX_NOT_FINITE and not (
            self._passed_at is not None and now - self._passed_at < TEST_AGAIN_S
        )

    def passed(self, now: float) -> None:
        self._request_ids.clear()
        self._passed_at = now


class SelfCheck:
    def __init__(
        self,
        *,
        device: Device,
        cache: KvCache,
        clock: Clock,
        watch: WatchService,
        give_up: Callable[[str], None],
    ) -> None:
        self._device = device
        self._cache = cache
        self._clock = clock
        self._watch = watch
        self._num_tokens = self_test_tokens(cache.block_size)
        self._give_up = give_up
        self._doubts = Doubts()
        self._is_in_doubt = asyncio.Event()
        self._one_at_a_time = anyio.Lock()

    def saw(self, result: StepResult) -> None:
        """A step's result."""
        keys = result.not_finite
        if keys and self._doubts.not_finite(keys, self._clock.now()):
            self._is_in_doubt.set()

    async def run(self) -> None:
        while True:
            await self._is_in_doubt.wait()
            log.error("output of %d requests was not finite: testing this worker", MAX_NOT_FINITE)
            fault = await self._test()
            if fault:
                self._give_up(f"not fit to serve: {fault}")
                return
            log.warning("the self-test finds nothing: going on")
            self._doubts.passed(self._clock.now())
            self._is_in_doubt.clear()

    async def serve(self, stream: Stream) -> None:
        """Handler of a SelfTest stream."""
        if not isinstance(await stream.receive(), SelfTest):
            raise MalformedMessage("a SelfTest stream starts with SelfTest")
        fault = await self._test()
        await stream.send(SelfTestDone(fault=fault))
        if fault:
            self._give_up(f"not fit to serve: {fault}")

    async def _test(self) -> str:
        """What is wrong; empty when nothing is."""
        async with self._one_at_a_time:
            # one token short of full blocks: the last one is open, and has a tail
            table = self._cache.start((), self._num_tokens - 1, self._cache.pages_for(0))
            if table is None:
                return ""  # it is full of requests that it serves
            assert table.tail is not None
            try:
                await self._device.self_test(tuple(table.block_ids), table.tail)
            except TandemError as error:
                return error.message
            finally:
                self._cache.free(table)
                self._watch.changed()
        return ""
