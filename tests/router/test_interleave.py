"""The router's chunk budgets: from a worker's state to what the worker does with it."""

import asyncio
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from common.errors import TandemError
from common.messages import ChunkBudget, Hello, PoolLoad, WorkerState
from common.scheduling.chunk_budget import STRETCH
from common.scheduling.step_time import StepTimes
from common.types import Role, SamplingParams
from router.fleet.interleave import Interleave
from tests.fakes.fleet import Fleet, fleet
from tests.fakes.hash_model import expected_tokens
from tests.fakes.virtual_time import VirtualTimeLoop
from tests.router.fake_worker import FakeWorker
from tests.router.stack import Stack

TIMES = StepTimes(
    fixed_s=0.01, prefill_token_s=0.001, pair_s=0.0, decode_s=0.002, context_token_s=0.0
)


def state(**fields: Any) -> WorkerState:
    values: dict[str, Any] = {
        "role": Role.COLOCATED,
        "incarnation": "one",
        "pid": 1,
        "metrics": "",
        "model_fingerprint": "",
        "layout": "",
        "block_size": 16,
        "max_model_len": 1000,
        "max_prompt_tokens": 1000,
        "draining": False,
        "blocks": PoolLoad(total=1, free=1, cached=0, held=0),
        "running": 0,
        "waiting": 0,
        "num_queued_tokens": 0,
        "step_times": TIMES,
    }
    return WorkerState(**{**values, **fields})


def test_a_budget_follows_the_target_and_the_streams() -> None:
    interleave = Interleave(itl_target_s=0.1)
    assert interleave.budget(state()) == 80  # 100 - 10 - 2 ms
    assert interleave.budget(state(num_decodes=20)) == 48
    assert interleave.budget(state(num_decodes=200)) == 16
    assert interleave.budget(state(step_times=None)) is None
    assert Interleave().budget(state(num_decodes=4)) is None, "workers have a rule of their own"


def test_a_budget_is_sent_when_it_has_changed_noticeably() -> None:
    interleave = Interleave(itl_target_s=0.5)
    sent: list[int] = []
    interleave.observed(state(num_decodes=10))
    assert sent == [], "there is no session yet"
    interleave.session_opened(state(num_decodes=10), sent.append)
    for num_decodes in (11, 20, 60, 60, 0):
        interleave.observed(state(num_decodes=num_decodes))
    interleave.observed(state(num_decodes=60, incarnation="another"))
    assert sent == [464, 368, 480]
    interleave.session_closed("one")
    interleave.observed(state(num_decodes=200))
    interleave.session_opened(state(num_decodes=0), sent.append)
    assert sent == [464, 368, 480, 480], "a new session knows nothing"


@pytest.fixture
def worker() -> FakeWorker:
    return FakeWorker(step_times=TIMES, num_decodes=20)


def test_the_option_reaches_the_worker(model_dir: Path, worker: FakeWorker) -> None:
    with Stack(model_dir, worker, itl_target=0.1) as stack:
        stack.until(lambda: worker.chunk_budgets == [48])
        stack.do(lambda: worker.set_state(num_decodes=60))
        stack.until(lambda: worker.chunk_budgets == [48, 16])


def virtual(main: Any) -> None:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(main())


async def budget_session(f: Fleet, max_tokens: int) -> Any:
    """What a second router would do: a session that only says its budget."""
    stream = f.network.connect_from("other")("c0").open("Session")
    await stream.send(Hello(router_id="other", incarnation=f.workers["c0"].identity.incarnation))
    await stream.send(ChunkBudget(max_tokens=max_tokens))
    return stream


def test_of_several_routers_the_smallest_budget_holds_and_it_dies_with_its_session() -> None:
    async def main() -> None:
        async with fleet(num_prefill=0, num_decode=0, is_chunk_auto=True) as f:
            worker = f.add(Role.COLOCATED, "c0", chunk_tokens=512, step_times=TIMES)
            client = f.client("c0", None)
            _, _, first, _ = await client.submit(range(20), SamplingParams(max_tokens=500))
            await first.wait()
            await asyncio.sleep(1.0)
            own = worker.scheduler.chunk_tokens
            one = await budget_session(f, 48)
            other = await budget_session(f, 16)
            await asyncio.sleep(0.1)
            assert worker.scheduler.chunk_tokens == 16
            assert worker.metric("chunk_tokens") == 16
            other.cancel()
            await asyncio.sleep(0.1)
            assert worker.scheduler.chunk_tokens == 48
            one.cancel()
            await asyncio.sleep(0.1)
            assert worker.scheduler.chunk_tokens == own == 32
            wrong = await budget_session(f, 0)
            with pytest.raises(TandemError, match="ChunkBudget in a session"):
                await wrong.receive()

    virtual(main)


def test_streams_keep_their_pace_beside_a_long_prompt_and_texts_stay() -> None:
    """Real services on virtual time: four streams, then 3,000 prompt tokens (3 s whole)."""

    async def main() -> None:
        settings: dict[str, Any] = {"num_packed": 600, "step_times": TIMES, "is_chunk_auto": True}
        async with fleet(num_prefill=0, num_decode=0, **settings) as f:
            worker = f.add(Role.COLOCATED, "c0", chunk_tokens=512)
            client = f.client("c0", None)
            sampling = SamplingParams(max_tokens=400, temperature=0)
            prompts = [[7 * number + k for k in range(20)] for number in range(4)]
            streams = [await client.submit(prompt, sampling) for prompt in prompts]
            await asyncio.sleep(1.5)
            assert worker.service.watch.state().step_times is not None
            long = [k % 900 for k in range(3000)]
            few = SamplingParams(max_tokens=2, temperature=0)
            began = asyncio.get_running_loop().time()
            answer = await client.generate(long, few)
            took = asyncio.get_running_loop().time() - began
            for prompt, (_, outputs, _, end) in zip(prompts, streams, strict=True):
                await end.wait()
                assert outputs.tokens[0] == expected_tokens(prompt, sampling)
                times = [t for t in outputs.times if t > 1.0]
                gaps = [later - earlier for earlier, later in pairwise(times)]
                assert max(gaps) <= STRETCH * 0.05 + 0.005
            assert answer.tokens[0] == expected_tokens(long, few)
            # 32 tokens fit beside four streams within 50 ms
            assert 4 < took < 7
            await asyncio.sleep(1)
            f.check_at_rest()

    virtual(main)
