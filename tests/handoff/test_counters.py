"""T35: what workers and router count adds up to what clients saw (docs/metrics.md says what each
counter means).
"""

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest

from common.errors import DeadlineExceeded, TandemError
from common.types import FinishReason, Role, SamplingParams
from router.fleet.journey import Inbox, Journey
from tests.fakes.fleet import Worker, fleet
from tests.faults.cells import Router
from tests.handoff.test_handoff_in_process import prompt_of, settle, virtual

ADDRESSES = {"p0:1": Role.PREFILL, "d0:1": Role.DECODE, "d1:1": Role.DECODE}


@dataclass
class Seen:
    """What all clients saw."""

    num_tokens: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    num_cached_tokens: int = 0
    num_retries: int = 0
    num_preemptions: int = 0


class Client:
    def __init__(self, router: Router, seen: Seen) -> None:
        self.router = router
        self.seen = seen

    async def call(
        self,
        prompt: list[int],
        sampling: SamplingParams,
        *,
        leaves_after: int | None = None,
        stops_after: int | None = None,
        deadline_s: float | None = None,
    ) -> None:
        inbox = Inbox()
        journey = self.router.journey(inbox, prompt, sampling)
        journey._request = replace(journey._request, deadline_s=deadline_s or 600.0)
        journey.start()
        try:
            outcome = await self._read(inbox, journey, sampling.n, leaves_after, stops_after)
        except TandemError as error:
            outcome = error.code
        self.seen.outcomes[outcome] += 1
        self.seen.num_cached_tokens += journey.num_cached_tokens
        self.seen.num_retries += journey.num_retries
        self.seen.num_preemptions += journey.num_preemptions

    async def _read(
        self,
        inbox: Inbox,
        journey: Journey,
        n: int,
        leaves_after: int | None,
        stops_after: int | None,
    ) -> str:
        reasons: dict[int, FinishReason | str] = {}
        counts: Counter[int] = Counter()
        while True:
            for _, index, _, reason, _ in await inbox.take():
                self.seen.num_tokens += 1
                counts[index] += 1
                if reason is not None:
                    reasons[index] = reason
                if stops_after == counts[index] and index not in reasons:
                    reasons[index] = "stop"
                    journey.finish_output(index)
                if len(reasons) == n:
                    return "stop" if "stop" in reasons.values() else "length"
                if leaves_after == counts.total():
                    journey.stop()
                    return "abort"


def total(workers: list[Worker], name: str, **labels: str) -> float:
    return sum(worker.metric(name, labels) for worker in workers)


@pytest.mark.parametrize("seed", range(2))
def test_counters_of_a_mixed_run_add_up(seed: int) -> None:
    rng = random.Random(seed)

    async def main() -> None:
        async with fleet(num_prefill=0, num_decode=0, num_packed=26, num_exact=16) as f:
            f.add(Role.PREFILL, "p0:1", num_packed=256, num_exact=64)
            for address in ("d0:1", "d1:1"):
                f.add(Role.DECODE, address)
            workers = list(f.workers.values())
            decoders = workers[1:]
            router = Router(f, "router", tuple(ADDRESSES))
            f.group.start_soon(router.run)
            await asyncio.sleep(1.0)
            seen = Seen()
            client = Client(router, seen)
            num_calls = 120

            async def one(number: int) -> None:
                await asyncio.sleep(number * rng.choice([0.002, 0.01]))
                prompt = prompt_of(rng.choice([5, 40, 90, 130]), seed=number % 17)
                n = rng.choice([1, 1, 2])
                long = rng.choice([1, 6, 60])
                sampling = SamplingParams(max_tokens=long, temperature=1.0, seed=number, n=n)
                match rng.randrange(5):
                    case 0:
                        await client.call(prompt, sampling, leaves_after=rng.randrange(1, 8))
                    case 1:
                        await client.call(prompt, sampling, stops_after=rng.randrange(1, 5))
                    case 2 if number % 3 == 0:
                        await client.call(prompt, sampling, deadline_s=0.05)
                    case _:
                        await client.call(prompt, sampling)

            long = SamplingParams(max_tokens=150, temperature=0)
            burst = [client.call(prompt_of(90, seed=50 + n), long) for n in range(8)]
            await asyncio.gather(*(one(number) for number in range(num_calls - 8)), *burst)
            f.network.drop("d0:1", "Session")
            await settle()
            f.check_at_rest()

            assert seen.outcomes.total() == num_calls
            assert {"length", "stop", "abort", "deadline_exceeded"} <= set(seen.outcomes)
            assert seen.num_preemptions > 0
            # how requests ended: each placement ends once
            ended = {
                reason: total(decoders, "requests_finished_total", reason=reason)
                for reason in ("length", "stop", "abort", "error", "preempted")
            }
            gone = seen.outcomes["abort"] + seen.outcomes["deadline_exceeded"]
            assert ended["preempted"] == seen.num_preemptions
            assert ended["error"] == 0
            # who leaves at the last token may find that it has ended by itself
            assert seen.outcomes["length"] <= ended["length"] <= seen.outcomes["length"] + 5
            assert seen.outcomes["stop"] - 5 <= ended["stop"] <= seen.outcomes["stop"]
            assert gone - 5 <= ended["abort"] <= gone
            assert ended["length"] + ended["stop"] + ended["abort"] == num_calls
            assert total(decoders, "preemptions_total") == seen.num_preemptions
            assert total(decoders, "errors_total", code="preempted") == 0
            assert sum(ended.values()) == num_calls + seen.num_retries + seen.num_preemptions
            # tokens: sampled once each, wherever that was; some were on their way to who had left
            sampled = total(workers, "output_tokens_total")
            assert sampled >= seen.num_tokens
            late = 2 * 2 * (gone + seen.outcomes["stop"])
            assert sampled <= seen.num_tokens + late

    virtual(main)


def test_tokens_and_hits_are_counted_once_and_retries_apart() -> None:
    """Nothing ends early here, so the sums are exact."""

    async def main() -> None:
        async with fleet(num_prefill=0, num_decode=0) as f:
            workers = [f.add(role, address) for address, role in ADDRESSES.items()]
            router = Router(f, "router", tuple(ADDRESSES))
            f.group.start_soon(router.run)
            await asyncio.sleep(1.0)
            seen = Seen()
            client = Client(router, seen)
            sampling = SamplingParams(max_tokens=9, temperature=0)
            prompts = [prompt_of(100, seed=n) for n in range(3)]
            for round_number in range(4):
                for prompt in prompts:
                    more = [round_number] * (5 * round_number)
                    await client.call(prompt + more, replace(sampling, n=1 + round_number % 2))
                    await asyncio.sleep(0.3)
            num_tokens = 9 * 3 * (1 + 2 + 1 + 2)
            assert seen.num_tokens == num_tokens
            assert total(workers, "output_tokens_total") == num_tokens
            assert seen.outcomes == {"length": 12}
            assert seen.num_cached_tokens > 500
            assert total(workers, "prompt_tokens_cached_total") == seen.num_cached_tokens
            computed = total(workers, "prompt_tokens_computed_total")
            asked = sum(100 + 5 * n for n in range(4)) * 3
            assert computed == asked - seen.num_cached_tokens
            assert total(workers[:1], "requests_finished_total", reason="abort") == 0
            assert total(workers[:1], "requests_finished_total", reason="error") == 0

            # a worker is lost under way: a retry is no preemption, and no token is counted twice
            before = total(workers, "output_tokens_total")
            call = asyncio.ensure_future(
                client.call(prompt_of(20, seed=9), replace(sampling, max_tokens=50))
            )
            await asyncio.sleep(0.5)
            busy = next(w for w in workers[1:] if w.scheduler.num_running)
            f.kill(busy.address)
            await call
            assert (seen.num_retries, seen.num_preemptions) == (1, 0)
            assert seen.num_tokens == num_tokens + 50
            sampled = total(workers, "output_tokens_total") - before
            assert 50 <= sampled <= 51, "one may have been on its way when the worker was lost"

    virtual(main)


def test_an_ended_deadline_is_an_abort_for_the_worker_and_an_error_for_the_client() -> None:
    async def main() -> None:
        async with fleet(num_prefill=0, num_decode=0) as f:
            worker = f.add(Role.COLOCATED, "c0:1")
            router = Router(f, "router", ("c0:1",))
            f.group.start_soon(router.run)
            await asyncio.sleep(1.0)
            seen = Seen()
            sampling = SamplingParams(max_tokens=500, temperature=0)
            await Client(router, seen).call(prompt_of(20), sampling, deadline_s=0.5)
            await settle()
            assert seen.outcomes == {DeadlineExceeded.code: 1}
            assert worker.metric("requests_finished_total", {"reason": "abort"}) == 1

    virtual(main)
