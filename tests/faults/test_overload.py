"""Too many requests for the pool, and too many for the workers: slower, never wrong, never
stuck.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from common.errors import TandemError
from common.types import Role, SamplingParams
from router.fleet.journey import Inbox
from tests.fakes.fleet import STEP_S, fleet
from tests.fakes.hash_model import expected_tokens
from tests.fakes.virtual_time import VirtualTimeLoop
from tests.faults.cells import Router

SAMPLING = SamplingParams(max_tokens=60, temperature=0)


def virtual(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(main())


def prompt(number: int, num_tokens: int = 40) -> list[int]:
    return [(number * 7 + k) % 1000 for k in range(num_tokens)]


def test_b74_a_pool_for_two_and_a_half_requests_serves_six_with_the_right_text() -> None:
    """Growing past the pool preempts the youngest; the router resubmits it, and everybody ends."""

    async def main() -> None:
        async with fleet(num_prefill=0, num_decode=0, num_packed=16, num_exact=12) as workers:
            workers.add(Role.PREFILL, "p0:1", num_packed=64)
            workers.add(Role.PREFILL, "p1:1", num_packed=64)
            workers.add(Role.DECODE, "d0:1")
            router = Router(workers, "router")
            workers.group.start_soon(router.run)
            await asyncio.sleep(1.0)
            async with asyncio.timeout(60):
                answers = await asyncio.gather(
                    *(router.generate(prompt(n), SAMPLING) for n in range(6))
                )
            assert answers == [expected_tokens(prompt(n), SAMPLING) for n in range(6)]
            assert workers.workers["d0:1"].metric("preemptions_total") > 0
            await asyncio.sleep(2)
            workers.check_at_rest()

    virtual(main)


def test_goodput_at_three_times_capacity_stays_above_nine_tenths() -> None:
    """30 s at capacity against 30 s at 3 times that. What cannot be taken is refused at once."""

    async def main() -> None:
        at_capacity = await goodput(offered=1.0)
        overloaded = await goodput(offered=3.0)
        assert overloaded.num_done >= 0.9 * at_capacity.num_done
        assert overloaded.num_refused > 0
        assert overloaded.refusals == {"decode_full"}
        assert overloaded.slowest_s < 3 * at_capacity.slowest_s + 5.0

    virtual(main)


class Goodput:
    def __init__(self) -> None:
        self.num_done = 0
        self.num_refused = 0
        self.refusals: set[str] = set()
        self.slowest_s = 0.0


NUM_OUTPUT = 20
CAPACITY_PER_S = 16 / (NUM_OUTPUT * STEP_S)
"""16 outputs at once, a step for each token."""


async def goodput(offered: float) -> Goodput:
    """Requests arrive evenly for 30 s; an answer counts when it comes in time to be counted."""
    found = Goodput()
    sampling = SamplingParams(max_tokens=NUM_OUTPUT, temperature=0)
    loop = asyncio.get_running_loop()
    async with fleet(
        num_prefill=0, num_decode=0, num_packed=512, num_exact=256, max_waiting=16
    ) as workers:
        for name in ("p0:1", "p1:1"):
            workers.add(Role.PREFILL, name, chunk_tokens=512)
        workers.add(Role.DECODE, "d0:1")
        router = Router(workers, "router")
        workers.group.start_soon(router.run)
        await asyncio.sleep(1.0)
        end = loop.time() + 30

        async def one(number: int) -> None:
            started = loop.time()
            try:
                tokens = await router.generate(prompt(number % 200, 24), sampling)
            except TandemError as error:
                found.num_refused += 1
                found.refusals.add(error.code)
                assert loop.time() - started < 1.0, "a refusal comes at once"
                return
            assert tokens == expected_tokens(prompt(number % 200, 24), sampling)
            found.slowest_s = max(found.slowest_s, loop.time() - started)
            found.num_done += loop.time() <= end

        async with asyncio.TaskGroup() as group:
            number = 0
            while loop.time() < end:
                group.create_task(one(number))
                number += 1
                await asyncio.sleep(1 / (offered * CAPACITY_PER_S))
        await asyncio.sleep(2)
        workers.check_at_rest()
    return found


def test_a_reader_that_never_reads_holds_up_nobody() -> None:
    """What waits for a slow reader is bounded by its own max_tokens; the others do not notice."""

    async def main() -> None:
        async with fleet(num_prefill=0, num_decode=0) as workers:
            workers.add(Role.PREFILL, "p0:1")
            workers.add(Role.DECODE, "d0:1")
            router = Router(workers, "router")
            workers.group.start_soon(router.run)
            await asyncio.sleep(1.0)
            unread = Inbox()
            journey = router.journey(unread, prompt(1), SAMPLING)
            journey.start()
            started = asyncio.get_running_loop().time()
            answers = await asyncio.gather(
                *(router.generate(prompt(n), SAMPLING) for n in range(2, 6))
            )
            assert answers == [expected_tokens(prompt(n), SAMPLING) for n in range(2, 6)]
            assert asyncio.get_running_loop().time() - started < 3.0
            await asyncio.sleep(2)
            assert len(await unread.take()) == SAMPLING.max_tokens
            workers.check_at_rest()

    virtual(main)
