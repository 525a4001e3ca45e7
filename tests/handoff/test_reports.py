"""Public reports of other servers about hand-off, cancellation and caching, tried on ours
(docs/cases.md).
"""

import asyncio
import random

import pytest

from common.errors import MalformedMessage, PullFailed
from common.handoff_messages import LinkReply, LinkRequest
from common.messages import Cancel
from common.rpc import Stream
from common.types import Role, SamplingParams
from tests.fakes.fleet import STEP_S, Outputs, fleet
from tests.fakes.hash_model import expected_tokens
from tests.handoff.test_handoff_in_process import prompt_of, settle, virtual

GREEDY_20 = SamplingParams(max_tokens=20, temperature=0)


def right(outputs: Outputs, prompt: list[int], sampling: SamplingParams) -> bool:
    return outputs.error is None and outputs.tokens == {0: expected_tokens(prompt, sampling)}


def test_b47_aborted_in_the_very_step_that_finishes_the_prompt() -> None:
    """The peer may have seen the first token or not; either way nothing crashes, nothing stays
    held.
    """

    async def main() -> None:
        async with fleet(chunk_tokens=64) as f:
            client = f.client()
            await client.generate(prompt_of(20), GREEDY_20)
            for number, delay in enumerate(n * STEP_S / 4 for n in range(2, 14)):
                request_id, *_ = await client.submit(prompt_of(100, seed=number), GREEDY_20)
                await asyncio.sleep(delay)
                await client.cancel(request_id)
                for worker in f.workers.values():
                    worker.check()
            await settle()
            f.check_at_rest()
            assert right(await client.generate(prompt_of(50), GREEDY_20), prompt_of(50), GREEDY_20)

    virtual(main)


def test_b48_requests_aborted_while_they_wait_give_everything_back() -> None:
    """A pool for two requests, six more waiting: 20 rounds of aborting the six."""

    async def main() -> None:
        async with fleet(num_packed=16, num_exact=6) as f:
            client = f.client()
            for round_number in range(20):
                sampling = SamplingParams(max_tokens=30, temperature=0)
                submitted = [
                    await client.submit(prompt_of(90, seed=8 * round_number + n), sampling)
                    for n in range(8)
                ]
                await asyncio.sleep(0.3)
                for request_id, outputs, _, end in submitted:
                    if not outputs.tokens and not end.is_set():
                        await client.cancel(request_id)
                for _, _, _, end in submitted:
                    await end.wait()
                await settle()
                f.check_at_rest()

    virtual(main)


def test_b54_what_the_decode_worker_refuses_never_reaches_a_prefill_worker() -> None:
    async def main() -> None:
        async with fleet(num_packed=8) as f:
            outputs = await f.client().generate(prompt_of(300), GREEDY_20)
            assert outputs.error is not None
            assert outputs.error.code == "prompt_too_large_for_pool"
            assert f.workers["p0"].device.num_tokens_computed == 0
            f.check_at_rest()

    virtual(main)


def test_b55_b71_a_frozen_source_and_an_aborted_load() -> None:
    """Blocks go back at once; only the landing slots of the unfinished read stay away until it
    ends.
    """

    async def main() -> None:
        async with fleet() as f:
            client = f.client()
            await client.generate(prompt_of(20), GREEDY_20)
            f.fabric.hold(f.workers["p0"].identity.incarnation)
            request_id, *_ = await client.submit(prompt_of(120), GREEDY_20)
            await asyncio.sleep(0.5)
            await client.cancel(request_id)
            await asyncio.sleep(0.1)
            assert f.workers["d0"].cache.load.held == 0
            zone = f.workers["d0"].zone
            assert zone is not None
            assert zone.num_quarantined > 0
            f.kill("p0")
            await settle()
            assert zone.num_quarantined == 0, "a dead source writes nothing any more"
            f.check_at_rest()

    virtual(main)


def test_b59_b60_a_worker_that_comes_back_on_its_address_is_linked_anew() -> None:
    async def main() -> None:
        async with fleet() as f:
            client = f.client()
            for life in range(5):
                for number in range(3):
                    prompt = prompt_of(70, seed=10 * life + number)
                    assert right(await client.generate(prompt, GREEDY_20), prompt, GREEDY_20)
                f.kill("p0")
                f.add(Role.PREFILL, "p0")
                await asyncio.sleep(0.5)
            f.kill("d0")
            f.add(Role.DECODE, "d0")
            prompt = prompt_of(90)
            assert right(await f.client().generate(prompt, GREEDY_20), prompt, GREEDY_20)
            await settle()
            f.check_at_rest()

    virtual(main)


async def silent(stream: Stream) -> None:
    await asyncio.Event().wait()


async def garbage(stream: Stream) -> None:
    await stream.receive()
    await stream.send(Cancel(request_id="nonsense"))


async def old_version(stream: Stream) -> None:
    await stream.receive()
    await stream.send(
        LinkReply(
            incarnation="x",
            numeric_incarnation=1,
            layout="",
            layout_fingerprint=b"",
            agent_name="",
            agent_metadata=b"",
            pages=(),
            protocol=99,
        )
    )


async def closes(stream: Stream) -> None:
    await stream.receive()


async def refuses(stream: Stream) -> None:
    message = await stream.receive()
    assert isinstance(message, LinkRequest)
    raise MalformedMessage("I do not link")


@pytest.mark.parametrize("link", [silent, garbage, old_version, closes, refuses])
def test_b63_a_side_channel_that_misbehaves_hurts_one_request_only(link: object) -> None:
    async def main() -> None:
        async with fleet() as f:
            f.network.serve("bad", {"Link": link})  # type: ignore[dict-item]
            good, bad = f.client("d0", "p0"), f.client("d0", "bad")
            prompt = prompt_of(60)
            async with asyncio.TaskGroup() as group:
                failing = group.create_task(bad.generate(prompt_of(80), GREEDY_20))
                working = group.create_task(good.generate(prompt, GREEDY_20))
            assert failing.result().error is not None
            assert right(working.result(), prompt, GREEDY_20)
            await settle()
            f.check_at_rest()

    virtual(main)


def test_b68_a_prefill_worker_with_a_smaller_limit_answers_with_its_own_error() -> None:
    async def main() -> None:
        async with fleet(num_prefill=0) as f:
            f.add(Role.PREFILL, "p0", num_packed=8)
            outputs = await f.client().generate(prompt_of(300), GREEDY_20)
            assert outputs.error is not None
            assert outputs.error.code == "prompt_too_large_for_pool"
            assert outputs.tokens == {}
            assert f.workers["d0"].device.num_tokens_computed == 0
            await settle()
            f.check_at_rest()

    virtual(main)


def test_b72_one_read_of_eight_fails_and_the_other_seven_are_untouched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        async with fleet() as f:
            client = f.client()
            await client.generate(prompt_of(20), GREEDY_20)
            d = f.workers["d0"]
            transport = d.transport
            real_read, counter = transport.read, iter(range(100))

            def read(incarnation: str, pages: object) -> object:
                if next(counter) == 3:
                    raise PullFailed("the network said no")
                return real_read(incarnation, pages)

            monkeypatch.setattr(transport, "read", read)
            prompts = [prompt_of(40, seed=n) for n in range(8)]
            started = asyncio.get_running_loop().time()
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(client.generate(p, GREEDY_20)) for p in prompts]
            failed = [t.result().error for t in tasks if t.result().error is not None]
            assert [error.code for error in failed if error] == ["pull_failed"]
            for prompt, task in zip(prompts, tasks, strict=True):
                if task.result().error is None:
                    assert right(task.result(), prompt, GREEDY_20)
            assert asyncio.get_running_loop().time() - started < 2.0
            await settle()
            f.check_at_rest()

    virtual(main)


def test_b75_cached_tokens_are_hits_and_never_more_than_the_prompt() -> None:
    async def main() -> None:
        async with fleet(num_decode=2) as f:
            prompt = prompt_of(100)
            cold = await f.client("d0").generate(prompt, GREEDY_20)
            assert cold.num_cached_tokens == 0, "what came over the wire is no hit"
            warm = await f.client("d1").generate(prompt, GREEDY_20)
            assert warm.num_cached_tokens == 96, "hits at the prefill worker"
            again = await f.client("d1").generate(prompt, GREEDY_20)
            assert again.num_cached_tokens == 96, "hits on both sides are not added up"

    virtual(main)


def test_b76_a_burst_of_first_requests_makes_one_link() -> None:
    async def main() -> None:
        async with fleet() as f:
            client = f.client()
            links = 0
            transport = f.workers["d0"].transport
            real_link = transport.link

            async def link(reply: LinkReply) -> None:
                nonlocal links
                links += 1
                await real_link(reply)

            transport.link = link
            prompts = [prompt_of(30, seed=n) for n in range(16)]
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(client.generate(p, GREEDY_20)) for p in prompts]
            assert all(right(t.result(), p, GREEDY_20) for p, t in zip(prompts, tasks, strict=True))
            assert links == 1

    virtual(main)


def test_b77_pages_of_a_pending_handoff_are_never_reclaimed() -> None:
    """A pull is frozen while the prefill worker's pool, nearly full of cached blocks, serves 20
    others.
    """

    async def main() -> None:
        async with fleet(num_prefill=1, num_decode=2, num_packed=24, num_exact=12) as f:
            slow, others = f.client("d0"), f.client("d1")
            await slow.generate(prompt_of(20), GREEDY_20)
            f.fabric.hold(f.workers["p0"].identity.incarnation)
            prompt = prompt_of(150)
            _, outputs, _, end = await slow.submit(prompt, GREEDY_20)
            await asyncio.sleep(0.5)
            waiting = [
                asyncio.ensure_future(others.generate(prompt_of(90, seed=n), GREEDY_20))
                for n in range(20)
            ]
            await asyncio.sleep(3.0)
            f.fabric.resume(f.workers["p0"].identity.incarnation)
            await end.wait()
            assert right(outputs, prompt, GREEDY_20)
            for number, task in enumerate(waiting):
                assert right(await task, prompt_of(90, seed=number), GREEDY_20)
            await settle()
            f.check_at_rest()

    virtual(main)


def test_b78_a_prompt_that_nobody_wants_stops_after_the_running_chunk() -> None:
    async def main() -> None:
        async with fleet(chunk_tokens=64) as f:
            client = f.client()
            request_id, *_ = await client.submit(prompt_of(64 * 6), GREEDY_20)
            await asyncio.sleep(1.5 * STEP_S)
            await client.cancel(request_id)
            await settle()
            assert f.workers["p0"].device.num_tokens_computed <= 2 * 64
            f.check_at_rest()

    virtual(main)


def test_b95_b96_answers_under_eviction_pressure_are_those_of_solo_runs() -> None:
    """A pool for three requests, ten prefixes of one to six blocks, random suffixes, one abort
    in ten.
    """

    async def main() -> None:
        rng = random.Random(96)
        prefixes = [prompt_of(16 * (1 + n % 6), seed=500 + n) for n in range(10)]
        async with fleet(num_packed=40, num_exact=16) as f:
            client = f.client()
            finished: list[int] = []

            async def one(number: int) -> None:
                prompt = rng.choice(prefixes) + prompt_of(rng.randrange(1, 40), seed=number)
                request_id, outputs, _, end = await client.submit(prompt, GREEDY_20)
                if number % 10 == 0:
                    await asyncio.sleep(rng.random())
                    await client.cancel(request_id)
                    return
                await end.wait()
                assert right(outputs, prompt, GREEDY_20), outputs.error
                finished.append(number)

            for burst in range(38):
                async with asyncio.TaskGroup() as group:
                    for number in range(8):
                        group.create_task(one(8 * burst + number))
                for worker in f.workers.values():
                    worker.check()
            assert len(finished) == 8 * 38 - 31
            await settle()
            f.check_at_rest()

    virtual(main)
