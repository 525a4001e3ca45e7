"""Chats, prefixes and places of prefill through a router and real schedulers, in virtual time.

The model is a hash of the KV it finds (tests/fakes/hash_model.py): one wrong, stale or foreign page
gives other tokens.
"""

import asyncio
import itertools
import random
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from common.messages import KvEvents
from common.scheduling.cache_events import CacheFeed
from common.scheduling.step_time import StepTimes
from common.types import Role, SamplingParams
from router.fleet.routing import Predicting
from tests.fakes.fleet import Fleet, fleet
from tests.fakes.hash_model import VOCAB_SIZE, expected_tokens
from tests.fakes.router import Router, router
from tests.fakes.virtual_time import VirtualTimeLoop

BLOCK = 16
GREEDY = SamplingParams(max_tokens=24, temperature=0)
TIMES = StepTimes(
    fixed_s=0.01, prefill_token_s=2e-4, pair_s=0.0, decode_s=2e-4, context_token_s=0.0
)


def virtual(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(main())


def prompt_of(num_tokens: int, seed: int = 0) -> list[int]:
    rng = random.Random(f"{num_tokens}/{seed}")
    return [rng.randrange(VOCAB_SIZE) for _ in range(num_tokens)]


def computed(f: Fleet) -> dict[str, int]:
    return {address: worker.device.num_tokens_computed for address, worker in f.workers.items()}


async def ask(
    r: Router, prompt: list[int], sampling: SamplingParams = GREEDY, **fields: Any
) -> Any:
    answer = await r.generate(prompt, sampling, **fields)
    assert answer.tokens == expected_tokens(prompt, sampling)
    return answer


async def warm_up(r: Router, num_prompts: int = 16) -> dict[str, int]:
    """Links are up and steps of many sizes measured; what each worker has computed so far."""
    for number in range(num_prompts):
        await ask(r, prompt_of(40 * number + 10, seed=1000 + number))
    await r.settle()
    return computed(r.workers)


async def chat(routers: list[Router], seed: int, num_turns: int) -> list[tuple[int, int]]:
    """(prompt tokens, cached tokens) of each turn; turns go to the routers by turns."""
    rng = random.Random(seed)
    prompt = prompt_of(rng.randrange(300, 500), seed)
    turns = []
    for number in range(num_turns):
        r = routers[number % len(routers)]
        answer = await ask(r, prompt)
        turns.append((len(prompt), answer.num_cached_tokens))
        prompt = prompt + answer.tokens + prompt_of(rng.randrange(20, 200), seed + number)
        await asyncio.sleep(0.1 + rng.random())
    return turns


def full_blocks(num_tokens: int) -> int:
    return num_tokens - num_tokens % BLOCK


# --- chats ----------------------------------------------------------------------------------------


def test_a_chat_stays_with_its_pages_and_only_what_is_new_is_computed() -> None:
    async def main() -> None:
        async with fleet(num_prefill=2, num_decode=3, step_times=TIMES) as f, router(f) as r:
            before = await warm_up(r)
            turns = await chat([r], seed=1, num_turns=6)
            now = {address: count - before[address] for address, count in computed(f).items()}
            for (before_it, _), (num_tokens, cached) in itertools.pairwise(turns):
                # the last token of an answer is never computed
                assert cached == full_blocks(before_it + GREEDY.max_tokens - 1)
                assert cached < num_tokens
            assert sum(now.values()) == sum(num - cached for num, cached in turns)
            decoders = [address for address in ("d0", "d1", "d2") if now[address]]
            assert len(decoders) == 1, "turns after the first are computed where the pages are"
            assert sorted(now.values())[:3] == [0, 0, 0]
            assert now["p0"] + now["p1"] == turns[0][0]
            await r.settle()
            r.check()
            f.check_at_rest()

    virtual(main)


def test_b114_turns_that_go_through_different_routers_find_their_pages() -> None:
    """20 sessions of 4 turns, alternately through two routers that know nothing of each other."""

    async def main() -> None:
        slow = replace(TIMES, prefill_token_s=1e-3)  # hits are worth more than an even load
        async with (
            fleet(num_prefill=2, num_decode=3, step_times=slow, num_packed=4000) as f,
            router(f, "one") as one,
            router(f, "two") as two,
        ):
            await warm_up(one)
            async with asyncio.TaskGroup() as group:
                chats = [
                    group.create_task(chat([one, two], seed=10 * n, num_turns=4)) for n in range(20)
                ]
            turns = [turn for each in chats for turn in itertools.pairwise(each.result())]
            hits = [
                cached == full_blocks(before_it + GREEDY.max_tokens - 1)
                for (before_it, _), (_, cached) in turns
            ]
            assert len(hits) == 60
            assert sum(hits) >= 57, hits
            await one.settle()
            one.check()
            two.check()

    virtual(main)


def test_chats_spread_over_decode_workers() -> None:
    async def main() -> None:
        async with fleet(num_prefill=2, num_decode=4, step_times=TIMES) as f, router(f) as r:
            await warm_up(r)
            before = {
                address: f.workers[address].metric("output_tokens_total") for address in f.workers
            }
            async with asyncio.TaskGroup() as group:
                for number in range(16):
                    group.create_task(chat([r], seed=10 * number, num_turns=3))
            served = [
                f.workers[a].metric("output_tokens_total") - before[a]
                for a in ("d0", "d1", "d2", "d3")
            ]
            assert min(served) >= 0.5 * sum(served) / 4, served

    virtual(main)


# --- hits, to the bit -----------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["auto", "remote"])
@pytest.mark.parametrize("num_tokens", [2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1, 3 * BLOCK, 129])
def test_b80_b81_full_hits_and_longer_prompts_after_them(num_tokens: int, where: str) -> None:
    async def main() -> None:
        policy = Predicting(always_remote=where == "remote")
        async with fleet() as f, router(f, policy=policy) as r:
            prompt = prompt_of(num_tokens)
            for repeat in range(3):
                answer = await ask(r, prompt)
                expected = full_blocks(num_tokens - 1) if repeat else 0
                assert answer.num_cached_tokens == expected
                await r.settle()
            longer = prompt + prompt_of(5 * BLOCK, seed=3)
            first, again = await ask(r, longer), await ask(r, longer)
            assert first.num_cached_tokens >= full_blocks(num_tokens)
            assert again.num_cached_tokens == full_blocks(len(longer) - 1)
            await r.settle()
            r.check()
            f.check_at_rest()

    virtual(main)


@pytest.mark.parametrize("where", ["auto", "remote"])
@pytest.mark.parametrize("num_shared", [BLOCK, 3 * BLOCK, 4 * BLOCK, 5 * BLOCK + 7, 9 * BLOCK])
def test_hits_that_end_inside_a_chunk(num_shared: int, where: str) -> None:
    """Chunks are 64 tokens; what is shared ends before, at and behind their ends."""

    async def main() -> None:
        policy = Predicting(always_remote=where == "remote")
        async with fleet(chunk_tokens=64) as f, router(f, policy=policy) as r:
            shared = prompt_of(num_shared)
            await ask(r, shared + prompt_of(40, seed=1))
            for number, num_more in enumerate((1, 15, 16, 17, 63, 64, 65, 200)):
                await r.settle()
                prompt = shared + prompt_of(num_more, seed=10 + number)
                answer = await ask(r, prompt)
                assert answer.num_cached_tokens == min(
                    full_blocks(num_shared), full_blocks(len(prompt) - 1)
                )
            await r.settle()
            r.check()
            f.check_at_rest()

    virtual(main)


def test_a_salt_keeps_tenants_apart() -> None:
    async def main() -> None:
        async with fleet(num_prefill=2, num_decode=2) as f, router(f) as r:
            prompt = prompt_of(200)
            for salt in ("", "a", "b"):
                before = sum(computed(f).values())
                answer = await ask(r, prompt, cache_salt=salt)
                assert answer.num_cached_tokens == 0
                assert sum(computed(f).values()) - before == 200
                await r.settle()
            for salt in ("", "a", "b"):
                again = await ask(r, prompt, cache_salt=salt)
                assert again.num_cached_tokens == full_blocks(199)

    virtual(main)


@pytest.mark.parametrize("where", ["auto", "remote"])
def test_b95_b96_eviction_under_pressure_never_serves_a_wrong_page(where: str) -> None:
    """Pools for three requests, ten prefixes, random suffixes; what the router thinks is cached is
    often gone when the request arrives.
    """

    async def main() -> None:
        rng = random.Random(95)
        policy = Predicting(always_remote=where == "remote")
        pools = {"num_packed": 40, "num_exact": 12, "num_landing": 16}
        async with (
            fleet(num_prefill=2, num_decode=2, step_times=TIMES, **pools) as f,
            router(f, policy=policy) as r,
        ):
            prefixes = [prompt_of(BLOCK * rng.randrange(1, 7), seed=n) for n in range(10)]

            async def client(number: int) -> int:
                num_hits = 0
                for step in range(15):
                    prompt = rng.choice(prefixes) + prompt_of(
                        rng.randrange(1, 60), seed=100 * number + step
                    )
                    sampling = SamplingParams(max_tokens=rng.randrange(1, 17), temperature=0)
                    answer = await ask(r, prompt, sampling)
                    num_hits += answer.num_cached_tokens > 0
                    r.fleet.check_invariants()
                return num_hits

            async with asyncio.TaskGroup() as group:
                clients = [group.create_task(client(number)) for number in range(8)]
            assert sum(each.result() for each in clients) > 20
            await r.settle()
            r.check()
            f.check_at_rest()

    virtual(main)


# --- staying in step ------------------------------------------------------------------------------


class LossyFeed(CacheFeed):
    """Loses the message with one sequence number."""

    lost = 1

    def take(self) -> list[KvEvents]:
        return [message for message in super().take() if message.sequence != LossyFeed.lost]


def test_a_missed_event_is_noticed_and_made_up_for_and_requests_go_on() -> None:
    async def main() -> None:
        async with fleet() as f:
            cache = f.workers["d0"].cache
            LossyFeed.lost = 1
            f.workers["d0"].service.watch._feed = lambda: LossyFeed(
                cache._journal, cache.named_hashes
            )
            async with router(f) as r:
                session = r.dispatcher.session(f.workers["d0"].identity.incarnation)
                sampling = SamplingParams(max_tokens=200, temperature=0)
                running = asyncio.create_task(ask(r, prompt_of(100), sampling))
                await asyncio.sleep(1.0)
                assert r.known("d0") != set()
                LossyFeed.lost = -1
                answer = await running
                assert answer.num_retries == 0
                incarnation = f.workers["d0"].identity.incarnation
                assert r.dispatcher.session(incarnation) is session
                await r.settle()
                r.check()

    virtual(main)


def test_a_worker_that_tells_much_at_once_sends_a_snapshot_instead() -> None:
    async def main() -> None:
        async with fleet(num_packed=600, num_exact=40) as f:
            for worker in f.workers.values():
                journal = worker.cache._journal
                journal._changes = type(journal._changes)(maxlen=2)
            async with router(f) as r:
                for number in range(6):
                    await ask(r, prompt_of(400, seed=number))
                await r.settle()
                r.check()

    virtual(main)


def test_a_broken_watch_stream_is_opened_again_and_gives_everything() -> None:
    async def main() -> None:
        async with fleet() as f, router(f) as r:
            await ask(r, prompt_of(300))
            await r.settle()
            assert r.known("p0") != set()
            f.network.drop("p0", "Watch")
            await asyncio.sleep(0.01)
            assert r.known("p0") == set()
            r.fleet.check_invariants()
            await asyncio.sleep(1.0)
            r.check()
            assert len(r.known("p0")) == 300 // BLOCK

    virtual(main)


def test_a_restarted_worker_begins_with_nothing() -> None:
    async def main() -> None:
        async with fleet(num_prefill=1, num_decode=2) as f, router(f) as r:
            prompt = prompt_of(300)
            await ask(r, prompt)
            await r.settle()
            holder = next(a for a in ("d0", "d1") if r.known(a))
            size = len(r.fleet.prefix_index)
            f.kill(holder)
            await asyncio.sleep(0.1)
            assert len(r.fleet.prefix_index) == len(r.known("p0")) <= size
            f.add(Role.DECODE, holder)
            await asyncio.sleep(3.0)
            r.check()
            assert r.known(holder) == set()
            again = await ask(r, prompt)
            assert again.num_cached_tokens in (0, full_blocks(299))
            await r.settle()
            r.check()

    virtual(main)


def test_b120_workers_with_other_blocks_are_counted_in_their_own_size() -> None:
    async def main() -> None:
        async with fleet(num_prefill=0, num_decode=0) as f:
            f.add(Role.COLOCATED, "c0")
            f.add(Role.COLOCATED, "c1", block_size=32)
            async with router(f) as r:
                prompt = prompt_of(200)
                await asyncio.gather(ask(r, prompt), ask(r, prompt))
                await r.settle()
                assert (len(r.known("c0")), len(r.known("c1"))) == (13, 6)
                for _ in range(2):
                    answers = await asyncio.gather(ask(r, prompt), ask(r, prompt))
                    assert [answer.num_cached_tokens for answer in answers] == [192, 192]
                assert r.tally.num_hit_tokens["decode"] == 4 * 192
                r.check()

    virtual(main)


# --- places ---------------------------------------------------------------------------------------


def test_a_burst_uses_prefill_worker_and_decode_worker_together() -> None:
    """One prefill worker, twelve long prompts at once: waiting for it all would take as long as
    with no decode worker at all.
    """

    async def measured(where: str) -> tuple[float, dict[str, int]]:
        policy = Predicting(always_remote=where == "remote")
        async with (
            fleet(step_times=TIMES, num_packed=1000, num_exact=64) as f,
            router(f, policy=policy) as r,
        ):
            before = await warm_up(r)
            loop = asyncio.get_running_loop()
            started = loop.time()
            async with asyncio.TaskGroup() as group:
                for number in range(12):
                    one = SamplingParams(max_tokens=2, temperature=0)
                    group.create_task(ask(r, prompt_of(1000, seed=number), one))
            took_s = loop.time() - started
            now = {address: count - before[address] for address, count in computed(f).items()}
            await r.settle()
            r.check()
            f.check_at_rest()
            return took_s, now

    async def main() -> None:
        remote_s, remote = await measured("remote")
        auto_s, auto = await measured("auto")
        assert remote == {"p0": 12_000, "d0": 0}
        assert auto["p0"] + auto["d0"] == 12_000
        assert min(auto.values()) >= 4000
        assert auto_s < 0.7 * remote_s

    virtual(main)


def predictions(r: Router) -> tuple[float, float]:
    """How many there were, and the sum of their ratios."""
    found = {
        s.name: s.value for metric in r.tally.collect() for s in metric.samples if not s.labels
    }
    name = "tandem_router_ttft_prediction_ratio"
    return found[f"{name}_count"], found[f"{name}_sum"]


def test_a_free_prefill_worker_is_used_and_the_prediction_holds() -> None:
    async def main() -> None:
        async with (
            fleet(step_times=TIMES, num_packed=1000) as f,
            router(f) as r,
        ):
            before = await warm_up(r)
            count, total = predictions(r)
            for number in range(10):
                await ask(r, prompt_of(1000, seed=number))
                await r.settle()
            now = computed(f)
            assert (now["p0"] - before["p0"], now["d0"] - before["d0"]) == (10_000, 0)
            new_count, new_total = predictions(r)
            assert new_count - count == 10
            assert 0.9 < (new_total - total) / 10 < 1.1

    virtual(main)


def test_tokens_just_placed_are_seen_by_the_next_decision() -> None:
    """Nine prompts within a state's interval go three to each prefill worker."""

    async def main() -> None:
        policy = Predicting(always_remote=True)
        async with (
            fleet(num_prefill=3, step_times=TIMES, num_packed=1000) as f,
            router(f, policy=policy) as r,
        ):
            before = await warm_up(r)
            async with asyncio.TaskGroup() as group:
                for number in range(9):
                    group.create_task(ask(r, prompt_of(500, seed=number)))
            now = {address: count - before[address] for address, count in computed(f).items()}
            assert now == {"p0": 1500, "p1": 1500, "p2": 1500, "d0": 0}

    virtual(main)
