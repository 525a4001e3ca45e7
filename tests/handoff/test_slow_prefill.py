"""T10: prompts that a prefill worker does not get on with hold nobody else up."""

import asyncio

from common.types import SamplingParams
from decode_worker.admission import PLACE_S
from tests.fakes.fleet import fleet
from tests.fakes.hash_model import expected_tokens
from tests.handoff.test_handoff_in_process import prompt_of, settle, virtual

SAMPLING = SamplingParams(max_tokens=20, temperature=0)


def test_four_prompts_at_a_hung_prefill_worker_leave_four_places_to_others() -> None:
    async def main() -> None:
        async with fleet(max_num_seqs=4) as f:
            loop = asyncio.get_running_loop()
            f.workers["p0"].device.may_run.clear()
            remote, local = f.client(), f.client(prefill=None)
            stuck = [await remote.submit(prompt_of(50, seed=n), SAMPLING) for n in range(4)]
            await asyncio.sleep(0.1)
            began = loop.time()
            answers = await asyncio.gather(
                *(local.generate(prompt_of(40, seed=100 + n), SAMPLING) for n in range(10))
            )
            for number, answer in enumerate(answers):
                expected = expected_tokens(prompt_of(40, seed=100 + number), SAMPLING)
                assert answer.tokens == {0: expected}
            assert loop.time() - began < PLACE_S + 4.0
            f.workers["d0"].check()
            f.workers["p0"].device.may_run.set()
            for number, (_, outputs, _, end) in enumerate(stuck):
                await end.wait()
                assert outputs.tokens == {0: expected_tokens(prompt_of(50, seed=number), SAMPLING)}
            await settle()
            f.check_at_rest()

    virtual(main)


def test_prompts_that_come_late_run_before_anybody_new() -> None:
    """Four local streams have the places when the four late prompts land; six more wait."""

    async def main() -> None:
        async with fleet(max_num_seqs=4) as f:
            f.workers["p0"].device.may_run.clear()
            remote, local = f.client(), f.client(prefill=None)
            late = [await remote.submit(prompt_of(50, seed=n), SAMPLING) for n in range(4)]
            long = SamplingParams(max_tokens=200, temperature=0)
            others = [await local.submit(prompt_of(20, seed=50 + n), long) for n in range(10)]
            await asyncio.sleep(PLACE_S + 1.0)
            f.workers["p0"].device.may_run.set()
            for _, outputs, _, end in late:
                await end.wait()
                assert len(outputs.tokens[0]) == SAMPLING.max_tokens
            f.workers["d0"].check()
            assert sum(end.is_set() for *_, end in others) == 4, "nobody new came in between"
            for _, outputs, _, end in others:
                await end.wait()
                assert len(outputs.tokens[0]) == 200
            await settle()
            f.check_at_rest()

    virtual(main)
