"""One prefill and one decode worker in one process: the hand-off gives the tokens of an undisturbed
run.
"""

import asyncio
import random
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from common.types import FinishReason, Role, SamplingParams
from tests.fakes.fleet import Fleet, fleet, flip_a_byte
from tests.fakes.hash_model import VOCAB_SIZE, expected_tokens
from tests.fakes.virtual_time import VirtualTimeLoop


def virtual(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(main())


def prompt_of(num_tokens: int, seed: int = 0) -> list[int]:
    rng = random.Random(f"{num_tokens}/{seed}")
    return [rng.randrange(VOCAB_SIZE) for _ in range(num_tokens)]


async def settle() -> None:
    """Long enough for everything that ends by itself."""
    await asyncio.sleep(2.0)


EDGES = [1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 160, 1000]


@pytest.mark.parametrize("num_tokens", EDGES)
def test_tokens_through_a_handoff_are_those_of_an_undisturbed_run(num_tokens: int) -> None:
    async def main() -> None:
        async with fleet() as f:
            prompt = prompt_of(num_tokens)
            sampling = SamplingParams(max_tokens=40, temperature=0)
            outputs = await f.client().generate(prompt, sampling)
            assert outputs.tokens == {0: expected_tokens(prompt, sampling)}
            assert outputs.finish_reasons == {0: FinishReason.LENGTH}
            assert outputs.num_cached_tokens == 0
            assert f.workers["p0"].device.num_tokens_computed == num_tokens
            assert f.workers["d0"].device.num_tokens_computed == 0
            await settle()
            f.check_at_rest()

    virtual(main)


def test_many_requests_at_once_and_then_everything_is_free() -> None:
    async def main() -> None:
        async with fleet(num_packed=128, num_exact=40, num_landing=8) as f:
            client = f.client()
            sampling = SamplingParams(max_tokens=30, temperature=0)
            prompts = [prompt_of(n, seed=1) for n in (5, 16, 40, 100, 200, 64, 128, 300, 31, 33)]
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(client.generate(prompt, sampling)) for prompt in prompts]
            for prompt, task in zip(prompts, tasks, strict=True):
                assert task.result().tokens == {0: expected_tokens(prompt, sampling)}
            await settle()
            f.check_at_rest()

    virtual(main)


def test_several_outputs_are_one_handoff() -> None:
    async def main() -> None:
        async with fleet() as f:
            for num_tokens in (7, 16, 50, 64):
                prompt = prompt_of(num_tokens)
                sampling = SamplingParams(max_tokens=25, temperature=1.0, seed=5, n=3)
                outputs = await f.client().generate(prompt, sampling)
                assert outputs.tokens == {
                    index: expected_tokens(prompt, sampling, index) for index in range(3)
                }
            assert f.workers["p0"].device.num_tokens_computed == 7 + 16 + 50 + 64
            await settle()
            f.check_at_rest()

    virtual(main)


def test_one_token_needs_no_pull() -> None:
    async def main() -> None:
        async with fleet() as f:
            prompt = prompt_of(100)
            sampling = SamplingParams(max_tokens=1, temperature=0)
            before = f.fabric.num_pages
            outputs = await f.client().generate(prompt, sampling)
            assert outputs.tokens == {0: expected_tokens(prompt, sampling)}
            assert outputs.finish_reasons == {0: FinishReason.LENGTH}
            await settle()
            assert f.fabric.num_pages - before <= 32  # the link's self-test
            f.check_at_rest()

    virtual(main)


def test_a_repeated_prompt_is_found_at_the_decode_worker() -> None:
    async def main() -> None:
        async with fleet() as f:
            client = f.client()
            prompt = prompt_of(100)
            sampling = SamplingParams(max_tokens=20, temperature=0)
            first = await client.generate(prompt, sampling)
            again = await client.generate(prompt, sampling)
            assert first.tokens == again.tokens == {0: expected_tokens(prompt, sampling)}
            assert again.num_cached_tokens == 96
            # the rest is less than a block: computed where the prefix is
            assert f.workers["d0"].device.num_tokens_computed == 4
            longer = prompt + first.tokens[0] + prompt_of(30, seed=9)
            answer = await client.generate(longer, sampling)
            assert answer.tokens == {0: expected_tokens(longer, sampling)}
            await settle()
            f.check_at_rest()

    virtual(main)


@pytest.mark.parametrize("num_tokens", [16, 32, 48, 160])
def test_b80_whole_blocks_cached_and_still_a_token_to_compute(num_tokens: int) -> None:
    async def main() -> None:
        async with fleet() as f:
            client = f.client()
            prompt = prompt_of(num_tokens)
            sampling = SamplingParams(max_tokens=16, temperature=0)
            for _ in range(3):
                outputs = await client.generate(prompt, sampling)
                assert outputs.tokens == {0: expected_tokens(prompt, sampling)}
                assert outputs.num_cached_tokens is not None
                assert outputs.num_cached_tokens <= num_tokens - 1
            longer = prompt + prompt_of(5 * 16, seed=3)
            await client.generate(longer, sampling)
            again = await client.generate(longer, sampling)
            assert again.tokens == {0: expected_tokens(longer, sampling)}
            assert again.num_cached_tokens == len(longer) - 16
            f.check_at_rest()

    virtual(main)


def test_cancelled_at_any_moment_frees_everything() -> None:
    async def main() -> None:
        rng = random.Random(11)
        async with fleet(num_packed=96, num_exact=40, num_landing=6) as f:
            client = f.client()
            for number in range(200):
                prompt = prompt_of(rng.randrange(1, 300), seed=number)
                sampling = SamplingParams(
                    max_tokens=rng.randrange(1, 40),
                    temperature=1.0,
                    seed=number,
                    n=rng.choice([1, 1, 3]),
                )
                request_id, outputs, _, end = await client.submit(prompt, sampling)
                if rng.random() < 0.4:
                    await asyncio.sleep(rng.random() * 0.4)
                    if not end.is_set():
                        await client.cancel(request_id)
                elif rng.random() < 0.5:
                    await end.wait()
                    assert outputs.error is None, outputs.error
                    assert outputs.tokens == {
                        index: expected_tokens(prompt, sampling, index)
                        for index in range(sampling.n)
                    }
                for worker in f.workers.values():
                    worker.check()
            await asyncio.sleep(60)
            f.check_at_rest()
            assert f.workers["d0"].runner.num_outputs == 0
            assert f.workers["p0"].runner.num_outputs == 0

    virtual(main)


def test_a_broken_session_frees_everything() -> None:
    async def main() -> None:
        async with fleet() as f:
            client = f.client()
            for number in range(8):
                await client.submit(
                    prompt_of(150, seed=number), SamplingParams(max_tokens=500, temperature=0)
                )
            await asyncio.sleep(0.3)
            assert f.workers["d0"].cache.load.held > 0
            client.stream.cancel()
            await settle()
            f.check_at_rest()

    virtual(main)


def test_preemption_ends_with_an_error_that_says_try_again() -> None:
    async def main() -> None:
        async with fleet(num_packed=12, num_exact=16) as f:
            client = f.client()
            sampling = SamplingParams(max_tokens=100, temperature=0)
            prompts = [prompt_of(60, seed=number) for number in range(3)]
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(client.generate(prompt, sampling)) for prompt in prompts]
            results = [task.result() for task in tasks]
            assert results[0].tokens == {0: expected_tokens(prompts[0], sampling)}
            codes = [result.error.code for result in results if result.error is not None]
            assert set(codes) == {"preempted"}
            for prompt, result in zip(prompts, results, strict=True):
                if result.error is None:
                    assert result.tokens == {0: expected_tokens(prompt, sampling)}
            await settle()
            f.check_at_rest()

    virtual(main)


def test_a_corrupt_page_is_fetched_again_and_the_answer_is_right() -> None:
    async def main() -> None:
        async with fleet() as f:
            client = f.client()
            sampling = SamplingParams(max_tokens=30, temperature=0)
            await client.generate(prompt_of(20), sampling)  # the link is up
            f.fabric.alter(2, flip_a_byte)
            prompt = prompt_of(150)
            outputs = await client.generate(prompt, sampling)
            assert outputs.tokens == {0: expected_tokens(prompt, sampling)}
            assert f.workers["d0"].metric("pages_refused_total") == 2
            await settle()
            f.check_at_rest()

    virtual(main)


def test_pages_that_stay_corrupt_end_in_a_typed_error() -> None:
    async def main() -> None:
        async with fleet() as f:
            client = f.client()
            sampling = SamplingParams(max_tokens=30, temperature=0)
            await client.generate(prompt_of(20), sampling)
            f.fabric.alter(1000, flip_a_byte)
            outputs = await client.generate(prompt_of(150), sampling)
            assert outputs.error is not None
            assert outputs.error.code == "page_refused"
            await settle()
            f.check_at_rest()

    virtual(main)


def test_a_dead_prefill_worker_is_noticed() -> None:
    async def main() -> None:
        async with fleet() as f:
            client = f.client()
            sampling = SamplingParams(max_tokens=30, temperature=0)
            _, outputs, _, end = await client.submit(prompt_of(800), sampling)
            await asyncio.sleep(0.1)
            f.kill("p0")
            await end.wait()
            assert outputs.error is not None
            assert outputs.error.code == "prefill_lost"
            await settle()
            f.check_at_rest()

    virtual(main)


def test_different_layouts_are_refused_with_both_names() -> None:
    async def main() -> None:
        async with fleet(num_prefill=0) as f:
            from common.types import Role

            f.add(
                Role.PREFILL,
                "p0",
                layout_fingerprint=b"another layout--",
                layout="another layout",
            )
            outputs = await f.client().generate(prompt_of(40), SamplingParams(max_tokens=5))
            assert outputs.error is not None
            assert outputs.error.code == "layout_mismatch"
            assert "another layout at p0" in outputs.error.message
            assert "the test layout here" in outputs.error.message

    virtual(main)


def frozen_read(f: Fleet) -> None:
    f.fabric.hold(f.workers["p0"].identity.incarnation)


def test_a_read_given_up_keeps_its_slots_in_quarantine_until_it_ends() -> None:
    async def main() -> None:
        async with fleet(num_landing=16) as f:
            client = f.client()
            sampling = SamplingParams(max_tokens=30, temperature=0)
            await client.generate(prompt_of(20), sampling)
            frozen_read(f)
            request_id, *_ = await client.submit(prompt_of(150), sampling)
            await asyncio.sleep(1.0)
            await client.cancel(request_id)
            await settle()
            zone = f.workers["d0"].zone
            assert zone is not None
            assert zone.num_quarantined > 0
            assert f.workers["d0"].cache.load.held == 0
            f.fabric.resume(f.workers["p0"].identity.incarnation)
            prompt = prompt_of(90, seed=4)
            outputs = await client.generate(prompt, sampling)
            assert outputs.tokens == {0: expected_tokens(prompt, sampling)}
            await settle()
            f.check_at_rest()

    virtual(main)


def test_a_decode_worker_whose_landing_zone_is_lost_gives_up() -> None:
    async def main() -> None:
        async with fleet(num_landing=4) as f:
            client = f.client()
            sampling = SamplingParams(max_tokens=30, temperature=0)
            await client.generate(prompt_of(20), sampling)
            frozen_read(f)
            request_id, *_ = await client.submit(prompt_of(150), sampling)
            await asyncio.sleep(1.0)
            assert f.given_up == []
            await client.cancel(request_id)
            await settle()
            assert "quarantined" in f.given_up[0]

    virtual(main)


def test_a_decode_worker_counts_how_requests_ended() -> None:
    async def main() -> None:
        async with fleet(num_prefill=0, num_decode=0) as f:
            worker = f.add(Role.COLOCATED, "c0")
            client = f.client("c0", None)
            sampling = SamplingParams(max_tokens=5, temperature=0)
            first = (await client.generate(range(20), sampling)).tokens[0]
            stopping = replace(sampling, stop_token_ids=(first[1],))
            await client.generate(range(20), stopping)
            request_id, _, started, _ = await client.submit(
                range(20), replace(sampling, max_tokens=500)
            )
            await started.wait()
            await client.cancel(request_id)
            await asyncio.sleep(1)
            ended = {
                reason: worker.metric("requests_finished_total", {"reason": reason})
                for reason in ("length", "stop", "abort", "error")
            }
            assert ended == {"length": 1, "stop": 1, "abort": 1, "error": 0}

    virtual(main)
