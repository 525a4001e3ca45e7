"""T13: routers know a worker's load within a tenth of a second of every change, however long its
steps take.
"""

import asyncio
import random
from dataclasses import dataclass, field

import pytest

from common.messages import Watch, WorkerState
from common.types import Role, SamplingParams
from router.fleet.routing import Predicting
from tests.fakes.fleet import Fleet, Worker, fleet
from tests.faults.cells import Router
from tests.handoff.test_handoff_in_process import prompt_of, virtual
from worker.watch import HEARTBEAT_S

WITHIN_S, LOOK_S = 0.1, 0.01


@dataclass
class Listener:
    """One Watch stream, and for how long the worker's own state has been what it is."""

    worker: Worker
    told: WorkerState | None = None
    real: WorkerState | None = None
    since: float = 0.0
    num_states: int = 0
    seen: set[tuple[int, int]] = field(default_factory=set)

    async def listen(self, f: Fleet) -> None:
        stream = f.network.connect_from("router")(self.worker.address).open("Watch")
        await stream.send(Watch())
        while True:
            message = await stream.receive()
            if isinstance(message, WorkerState):
                self.told = message
                self.num_states += 1

    def look(self, now: float) -> None:
        state = self.worker.service.watch.state()
        if state != self.real:
            self.real, self.since = state, now
        self.seen.add((state.running, state.waiting))
        if now - self.since > WITHIN_S + LOOK_S / 2:
            assert self.told == state


async def look_for_ever(listeners: list[Listener]) -> None:
    loop = asyncio.get_running_loop()
    while True:
        for listener in listeners:
            listener.look(loop.time())
        await asyncio.sleep(LOOK_S)


@pytest.mark.parametrize("step_s", [0.02, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_every_change_is_told_within_a_tenth_of_a_second(step_s: float, seed: int) -> None:
    rng = random.Random(seed)

    async def main() -> None:
        async with fleet(num_colocated=1, step_s=step_s, num_packed=40, num_exact=16) as f:
            listeners = [Listener(worker) for worker in f.workers.values()]
            for listener in listeners:
                f.group.start_soon(listener.listen, f)
            f.group.start_soon(look_for_ever, listeners)
            clients = [f.client("d0"), f.client("c0"), f.client("d0", prefill=None)]
            for number in range(60):
                client = rng.choice(clients)
                sampling = SamplingParams(
                    max_tokens=rng.choice([1, 1, 3, 20]), temperature=0, n=rng.choice([1, 1, 2])
                )
                prompt = prompt_of(rng.choice([5, 40, 150]), seed=number)
                request_id, _, first, end = await client.submit(prompt, sampling)
                match rng.randrange(4):
                    case 0:
                        await asyncio.sleep(rng.random() * step_s)
                        await client.cancel(request_id)
                    case 1:
                        await first.wait()
                        await client.cancel(request_id)
                    case 2:
                        await end.wait()
            await asyncio.sleep(100 * step_s + 2)
            for listener in listeners:
                assert listener.told is not None
                assert (listener.told.running, listener.told.waiting) == (0, 0)
                assert listener.told.blocks.held == 0
                assert listener.told.num_queued_tokens == 0
                assert len(listener.seen) > 2, "nothing ever changed"

    virtual(main)


def test_a_quiet_worker_says_that_it_is_there_and_nothing_else() -> None:
    async def main() -> None:
        async with fleet() as f:
            listener = Listener(f.workers["d0"])
            f.group.start_soon(listener.listen, f)
            await f.client().generate(prompt_of(40), SamplingParams(max_tokens=5, temperature=0))
            await asyncio.sleep(1.0)
            before = listener.num_states
            await asyncio.sleep(600.0)
            assert listener.num_states - before == pytest.approx(600.0 / HEARTBEAT_S, abs=10)

    virtual(main)


@pytest.mark.parametrize("seed", range(3))
def test_two_idle_workers_share_a_random_mix_evenly(seed: int) -> None:
    """Requests one after another, 0.2 s apart: the router's table is right at each of them."""
    rng = random.Random(seed)

    async def main() -> None:
        async with fleet(num_prefill=0, num_decode=0) as f:
            addresses = ("c0:1", "c1:1")
            workers = [f.add(Role.COLOCATED, address) for address in addresses]
            router = Router(f, "router", addresses, Predicting())
            f.group.start_soon(router.run)
            await router.ready()
            for number in range(100):
                sampling = SamplingParams(max_tokens=rng.choice([1, 1, 4, 25]), temperature=0)
                await router.generate(prompt_of(rng.choice([3, 40, 300]), seed=number), sampling)
                await asyncio.sleep(0.2)
                for worker in workers:
                    known = router.fleet.get(worker.address)
                    assert known is not None
                    assert known.state == worker.service.watch.state()
            served = [
                worker.metric("requests_finished_total", {"reason": "length"}) for worker in workers
            ]
            assert sum(served) == 100
            assert 40 <= served[0] <= 60, served

    virtual(main)
