"""A soak on virtual time: many requests, some of which leave, while workers are killed and frozen
at random. No token is wrong, lost or doubled, and nothing is left.

(`python -m bench.soak` does it with processes.)
"""

import asyncio
import itertools
import random
from collections import Counter

import anyio
import pytest

from common.errors import TandemError
from common.types import Role, SamplingParams
from router.fleet.journey import Inbox
from tests.fakes.fleet import Fleet, fleet
from tests.fakes.hash_model import expected_tokens
from tests.fakes.virtual_time import VirtualTimeLoop
from tests.faults.cells import Router

ADDRESSES = {"p0:1": Role.PREFILL, "p1:1": Role.PREFILL, "d0:1": Role.DECODE, "d1:1": Role.DECODE}
NUM_REQUESTS = 400
CONCURRENCY = 12


class Soak:
    def __init__(self, workers: Fleet, seed: int) -> None:
        self.workers = workers
        self.random = random.Random(seed)
        self.router = Router(workers, "router")
        self.outcomes: Counter[str] = Counter()

    def request(self) -> tuple[list[int], SamplingParams]:
        r = self.random
        kind = r.randrange(40)
        rng = random.Random(kind)
        prompt = [rng.randrange(900) for _ in range(r.choice([3, 16, 17, 60, 200, 330]))]
        sampling = SamplingParams(
            max_tokens=r.choice([1, 2, 8, 24, 60]),
            temperature=r.choice([0.0, 1.0]),
            seed=kind,
            n=r.choice([1, 1, 1, 2]),
        )
        return prompt, sampling

    async def client(self) -> None:
        prompt, sampling = self.request()
        leave_after = self.random.randrange(1, 6) if self.random.random() < 0.2 else None
        inbox = Inbox()
        journey = self.router.journey(inbox, prompt, sampling)
        tokens: dict[int, list[int]] = {n: [] for n in range(sampling.n)}
        num_running = sampling.n
        try:
            journey.start()
            while num_running:
                for _, index, token, reason, _ in await inbox.take():
                    tokens[index].append(token)
                    num_running -= reason is not None
                if leave_after is not None and sum(map(len, tokens.values())) >= leave_after:
                    journey.stop()
                    break
            self.outcomes["left" if num_running else "done"] += 1
        except TandemError as error:
            self.outcomes[error.code] += 1
            num_running = -1
        for index, found in tokens.items():
            whole = expected_tokens(prompt, sampling, index)
            assert found == (whole if num_running == 0 else whole[: len(found)])

    async def hurt(self) -> None:
        """Kills and freezes, one at a time; a killed worker is back at once."""
        while True:
            await asyncio.sleep(self.random.uniform(0.1, 0.5))
            address = self.random.choice(sorted(ADDRESSES))
            if self.random.random() < 0.7:
                self.workers.kill(address)
                self.workers.add(ADDRESSES[address], address)
                self.outcomes["kills"] += 1
            else:
                self.workers.freeze(address)
                await asyncio.sleep(self.random.choice([0.5, 3.0]))
                self.workers.resume(address)

    async def restart_in_turn(self, drain_s: float) -> None:
        """Rolling restarts without end, as a deployment does them: each worker drains, tells who is
        left that it leaves, ends, and is back.
        """
        for address in itertools.cycle(sorted(ADDRESSES)):
            worker = self.workers.workers[address]
            with anyio.move_on_after(drain_s) as bound:
                await worker.service.drained()
            if bound.cancelled_caught:
                self.outcomes["cut drains"] += 1
                await worker.service.leave()
            await asyncio.sleep(0.2)
            self.workers.kill(address)
            self.workers.add(ADDRESSES[address], address)
            self.outcomes["restarts"] += 1
            await asyncio.sleep(0.5)

    async def run(self) -> None:
        numbers = iter(range(NUM_REQUESTS))

        async def one_after_the_other() -> None:
            for _ in numbers:
                await self.client()
                await asyncio.sleep(self.random.uniform(0.0, 0.1))

        async with anyio.create_task_group() as hurting:
            hurting.start_soon(self.hurt)
            async with anyio.create_task_group() as group:
                for _ in range(CONCURRENCY):
                    group.start_soon(one_after_the_other)
            hurting.cancel_scope.cancel()


@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_wrong_or_left_after_kills_at_random(seed: int) -> None:
    async def main() -> None:
        async with fleet(
            num_prefill=0,
            num_decode=0,
            num_packed=128,
            num_exact=64,
            max_num_seqs=8,
            overlaps_steps=seed % 2 == 1,
        ) as workers:
            for address, role in ADDRESSES.items():
                workers.add(role, address)
            soak = Soak(workers, seed)
            workers.group.start_soon(soak.router.run)
            await soak.router.ready()
            await soak.run()
            await asyncio.sleep(10)
            workers.check_at_rest()
            num_requests = soak.outcomes.total() - soak.outcomes["kills"]
            assert num_requests == NUM_REQUESTS
            assert soak.outcomes["done"] > 0.7 * NUM_REQUESTS, soak.outcomes
            assert soak.outcomes["kills"] > 3

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(main())


@pytest.mark.parametrize("seed", range(2))
def test_rolling_restarts_lose_nothing_though_streams_last_longer_than_all_drains(
    seed: int,
) -> None:
    """T14: each stream of some 30 s goes through about nine restarts of drains of 1.5 s."""
    num_streams = 8

    async def main() -> None:
        async with fleet(num_prefill=0, num_decode=0, num_packed=1024, num_exact=64) as workers:
            for address, role in ADDRESSES.items():
                workers.add(role, address)
            soak = Soak(workers, seed)
            workers.group.start_soon(soak.router.run)
            await soak.router.ready()

            async def stream(number: int) -> None:
                prompt = [(31 * number + k) % 900 for k in range(20 + 40 * number)]
                sampling = SamplingParams(max_tokens=1500, temperature=1.0, seed=number)
                found = await soak.router.generate(prompt, sampling)
                assert found == expected_tokens(prompt, sampling)
                soak.outcomes["right"] += 1

            async with anyio.create_task_group() as restarting:
                restarting.start_soon(soak.restart_in_turn, 1.5)
                async with anyio.create_task_group() as group:
                    for number in range(num_streams):
                        group.start_soon(stream, number)
                restarting.cancel_scope.cancel()
            await asyncio.sleep(10)
            assert soak.outcomes["right"] == num_streams
            assert soak.outcomes["restarts"] >= 12, soak.outcomes
            assert soak.outcomes["cut drains"] >= 4, soak.outcomes

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(main())
