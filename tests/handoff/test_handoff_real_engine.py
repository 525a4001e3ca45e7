"""Criterion: with fp8 pages, one prefill and one decode worker give, to the bit, the token ids of
one process that does both, for every chunk size and every edge, alone and among others.

The real engine with the demo model, twice in this process, on the in-process transport.
"""

import asyncio
import random
from typing import Any

import pytest

from commands.demo_model import prepare
from common.environment import home
from common.pages import PageKind
from common.types import Role, SamplingParams
from engine.config import EngineConfig
from engine.load import load_runner
from engine.pool_size import PoolSize
from engine.runner import ModelRunner
from tests.fakes.fleet import Fleet, Outputs, fleet
from tests.fakes.virtual_time import VirtualTimeLoop

BLOCK = 16
OUTPUT_TOKENS = 6


def real_runner(
    *, num_packed: int, num_exact: int, num_landing: int, block_size: int, incarnation: int
) -> ModelRunner:
    return load_runner(
        EngineConfig(
            model=prepare(home(), lambda text: None),
            kv_codec="fp8_e3m4",
            block_size=block_size,
            pool=PoolSize(num_packed=num_packed, num_exact=num_exact),
            landing=PoolSize(num_packed=num_landing, num_exact=num_landing),
            num_threads=2,
            incarnation=incarnation,
            max_num_tokens=600,
        )
    )


@pytest.fixture(scope="module")
def runners() -> dict[int, ModelRunner]:
    """One for each incarnation number: loaded once for all tests here."""
    return {}


def edges(chunk: int) -> list[int]:
    found = {1, BLOCK - 1, BLOCK, BLOCK + 1, chunk - 1, chunk, chunk + 1, 2 * BLOCK, 2 * chunk}
    return sorted(found)


def prompt_of(num_tokens: int, seed: int) -> list[int]:
    rng = random.Random(f"{num_tokens}/{seed}")
    return [rng.randrange(3, 49152) for _ in range(num_tokens)]


def sampling(seed: int) -> SamplingParams:
    """Greedy and seeded sampling in turn."""
    return SamplingParams(
        max_tokens=OUTPUT_TOKENS, temperature=0.0 if seed % 2 else 0.9, top_p=0.95, seed=seed
    )


async def run_all(
    f: Fleet, decode: str, prefill: str | None, prompts: list[list[int]], *, together: bool
) -> list[dict[int, list[int]]]:
    client = f.client(decode, prefill)

    async def one(number: int, prompt: list[int]) -> Outputs:
        return await client.generate(prompt, sampling(number), cache_salt=f"{decode}/{number}")

    if not together:
        return [(await one(number, prompt)).tokens for number, prompt in enumerate(prompts)]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(n, prompt)) for n, prompt in enumerate(prompts)]
    return [task.result().tokens for task in tasks]


@pytest.mark.parametrize(
    ("chunk", "lengths"),
    [
        (16, edges(16)),
        (64, edges(64)),
        (512, [511, 512, 513]),  # the shorter ones are one chunk, as with 64
        pytest.param(512, edges(512), marks=pytest.mark.slow),
    ],
)
def test_a_handoff_gives_the_ids_of_one_process_that_does_both(
    chunk: int, lengths: list[int], runners: dict[int, ModelRunner]
) -> None:
    def make(**sizes: Any) -> ModelRunner:
        number = sizes["incarnation"]
        if number not in runners:
            runners[number] = real_runner(**sizes)
        return runners[number]

    async def main() -> None:
        prompts = [prompt_of(num_tokens, seed) for seed, num_tokens in enumerate(lengths)]
        async with fleet(
            num_prefill=0,
            num_decode=0,
            num_packed=400,
            num_exact=64,
            runner=make,
            chunk_tokens=chunk,
        ) as f:
            p = f.add(Role.PREFILL, "p0")
            d = f.add(Role.DECODE, "d0")
            f.add(Role.COLOCATED, "c0", chunk_tokens=512)
            alone = await run_all(f, "c0", None, prompts, together=False)
            num_tokens = sum(len(prompt) for prompt in prompts)
            split = await run_all(f, "d0", "p0", prompts, together=True)
            assert split == alone
            assert all(len(tokens[0]) == OUTPUT_TOKENS for tokens in alone)
            assert p.device.num_tokens_computed == num_tokens
            assert p.metric("prompt_tokens_computed_total") == num_tokens
            assert d.device.num_tokens_computed == 0
            assert d.metric("prompt_tokens_computed_total") == 0
            await asyncio.sleep(2)
            f.check_at_rest()

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(main())


def turn(seed: int) -> SamplingParams:
    return SamplingParams(max_tokens=8, temperature=0.0 if seed % 2 else 0.9, top_p=0.95, seed=seed)


def test_a_second_turn_reuses_the_decode_workers_pages_to_the_bit(
    runners: dict[int, ModelRunner],
) -> None:
    """Prompt and answer of the first turn are a prefix that only the decode worker holds. The rest
    is computed there, or handed over by a prefill worker that computes again what it lacks; hits
    end inside a chunk and at its ends. The ids are those of a process that never saw the chat.
    """

    def make(**sizes: Any) -> ModelRunner:
        number = sizes["incarnation"]
        if number not in runners:
            runners[number] = real_runner(**sizes)
        return runners[number]

    async def main() -> None:
        async with fleet(
            num_prefill=0, num_decode=0, num_packed=400, num_exact=64, runner=make, chunk_tokens=64
        ) as f:
            p, d = f.add(Role.PREFILL, "p0"), f.add(Role.DECODE, "d0")
            f.add(Role.COLOCATED, "c0", chunk_tokens=512)
            handing_over, local = f.client("d0", "p0"), f.client("d0", None)
            alone = f.client("c0", None)
            for seed, (num_first, num_more) in enumerate([(75, 30), (108, 36)]):
                first = prompt_of(num_first, seed)
                answer = await handing_over.generate(first, turn(seed), cache_salt=str(seed))
                chat = first + answer.tokens[0]
                # the last token of an answer is never computed
                num_held = (len(chat) - 1) // BLOCK * BLOCK
                second = chat + prompt_of(num_more, 100 + seed)
                fresh = await alone.generate(second, turn(seed), cache_salt=f"{seed}/fresh")
                assert fresh.num_cached_tokens == 0

                before = (p.device.num_tokens_computed, d.device.num_tokens_computed)
                again = await local.generate(second, turn(seed), cache_salt=str(seed))
                assert again.tokens == fresh.tokens
                assert again.num_cached_tokens == num_held
                assert p.device.num_tokens_computed == before[0]
                assert d.device.num_tokens_computed - before[1] == len(second) - num_held

                third = chat + prompt_of(num_more + 40, 200 + seed)
                fresh = await alone.generate(third, turn(seed), cache_salt=f"{seed}/fresh3")
                at_d, pages = d.device.num_tokens_computed, f.fabric.num_pages
                over = await handing_over.generate(third, turn(seed), cache_salt=str(seed))
                assert over.tokens == fresh.tokens
                assert d.device.num_tokens_computed == at_d
                assert f.fabric.num_pages - pages == -(-len(third) // BLOCK) - len(chat) // BLOCK

                whole = await local.generate(third, turn(seed), cache_salt=str(seed))
                assert whole.tokens == fresh.tokens
                assert whole.num_cached_tokens == (len(third) - 1) // BLOCK * BLOCK
                other = await local.generate(third, turn(seed), cache_salt="another tenant's")
                assert (other.tokens, other.num_cached_tokens) == (fresh.tokens, 0)
            await asyncio.sleep(2)
            f.check_at_rest()

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(main())


def test_a_flipped_byte_costs_one_record_and_no_token(runners: dict[int, ModelRunner]) -> None:
    """A page has a record for each of the model's 3 KV heads: only the bad one is read again."""

    def make(**sizes: Any) -> ModelRunner:
        number = sizes["incarnation"]
        if number not in runners:
            runners[number] = real_runner(**sizes)
        return runners[number]

    def flip(row: Any) -> None:
        row[len(row) // 2] ^= 1

    async def main() -> None:
        async with fleet(
            num_prefill=0, num_decode=0, num_packed=400, num_exact=64, runner=make, chunk_tokens=64
        ) as f:
            f.add(Role.PREFILL, "p0")
            d = f.add(Role.DECODE, "d0")
            client, prompt = f.client("d0", "p0"), prompt_of(100, 5)
            wanted = await client.generate(prompt, turn(1), cache_salt="clean")
            at_first = f.fabric.num_bytes
            again = await client.generate(prompt, turn(1), cache_salt="clean too")
            whole = f.fabric.num_bytes - at_first
            f.fabric.alter(1, flip)
            found = await client.generate(prompt, turn(1), cache_salt="flipped")
            layout = d.runner.layout
            assert layout.num_kv_heads == 3
            assert again.tokens == found.tokens == wanted.tokens
            assert d.metric("pages_refused_total") == 1
            more = f.fabric.num_bytes - at_first - 2 * whole
            assert more == layout.record_bytes(PageKind.EXACT)  # the first page is block 0's
            await asyncio.sleep(2)
            f.check_at_rest()

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(main())
