"""What an answer is made of, with the real model behind one prefill and one decode worker:
log-probabilities against transformers, and answers that a grammar has formed.
"""

import asyncio
import dataclasses
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from tokenizers import Tokenizer

from commands.demo_model import prepare
from common.environment import home
from common.messages import Failed
from common.types import FinishReason, PromptLogprobs, Role, SamplingParams, TokenLogprobs
from engine.config import EngineConfig
from engine.load import load_runner
from engine.pool_size import PoolSize
from engine.runner import ModelRunner
from router.grammar.grammars import json_grammar
from tests.fakes.fleet import Client, Fleet, fleet
from tests.fakes.virtual_time import VirtualTimeLoop

EOS = 2
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "color": {"enum": ["red", "green", "blue"]},
        "sizes": {"type": "array", "items": {"enum": [1, 2, 3]}, "maxItems": 3},
    },
    "required": ["name", "color", "sizes"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def model_dir() -> Path:
    return prepare(home(), lambda text: None)


@pytest.fixture(scope="module")
def make_runner(model_dir: Path) -> Callable[..., ModelRunner]:
    """fp32 pages; one runner for each incarnation number, loaded once for all tests here."""
    runners: dict[int, ModelRunner] = {}

    def make(
        *, num_packed: int, num_exact: int, num_landing: int, block_size: int, incarnation: int
    ) -> ModelRunner:
        if incarnation not in runners:
            runners[incarnation] = load_runner(
                EngineConfig(
                    model=model_dir,
                    kv_codec="fp32",
                    block_size=block_size,
                    pool=PoolSize(num_packed=num_packed, num_exact=num_exact),
                    landing=PoolSize(num_packed=num_landing, num_exact=num_landing),
                    num_threads=2,
                    incarnation=incarnation,
                )
            )
        return runners[incarnation]

    return make


def in_a_fleet(
    make_runner: Callable[..., ModelRunner], work: Callable[[Fleet], Awaitable[None]], **sizes: int
) -> None:
    async def main() -> None:
        async with fleet(num_prefill=0, num_decode=0, runner=make_runner, **sizes) as f:
            f.add(Role.PREFILL, "p0")
            f.add(Role.DECODE, "d0")
            await work(f)
            await asyncio.sleep(2)
            f.check_at_rest()

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(main())


def reference(model_dir: Path, token_ids: list[int]) -> NDArray[np.float32]:
    """[num_tokens, vocab] log-probabilities by transformers, in fp32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([token_ids])).logits[0]
    return torch.log_softmax(logits, dim=-1).numpy()


def test_logprobs_equal_those_of_transformers(
    model_dir: Path, make_runner: Callable[..., ModelRunner]
) -> None:
    text = "The llama is a domesticated South American camelid, widely used as a meat and pack " * 3
    prompt = Tokenizer.from_file(str(model_dir / "tokenizer.json")).encode(text).ids
    sampling = SamplingParams(max_tokens=8, temperature=0.0, logprobs=5, prompt_logprobs=5)
    found: list[tuple[list[int], list[TokenLogprobs], PromptLogprobs]] = []

    async def work(f: Fleet) -> None:
        client = f.client()
        await client.generate(prompt, SamplingParams(max_tokens=1))  # its blocks are no help
        outputs = await client.generate(prompt, sampling)
        assert outputs.num_cached_tokens == 0
        assert outputs.prompt_logprobs is not None
        found.append((outputs.tokens[0], outputs.logprobs[0], outputs.prompt_logprobs))

    in_a_fleet(make_runner, work, chunk_tokens=32)
    ((tokens, logprobs, scores),) = found
    expected = reference(model_dir, prompt + tokens)
    rows = np.arange(len(prompt) - 1)
    own = np.frombuffer(scores.logprobs, dtype="<f4")
    assert np.abs(own - expected[rows, prompt[1:]]).max() < 1e-4
    ranks = (expected[rows] > expected[rows, prompt[1:]][:, None]).sum(axis=1) + 1
    assert (np.frombuffer(scores.ranks, dtype="<i4") == ranks).mean() > 0.98  # near ties
    top_ids = np.frombuffer(scores.top_ids, dtype="<i4").reshape(-1, 5)
    top = np.frombuffer(scores.top_logprobs, dtype="<f4").reshape(-1, 5)
    assert np.abs(top - np.take_along_axis(expected[rows], top_ids, axis=1)).max() < 1e-4
    assert np.abs(top - -np.sort(-expected[rows], axis=1)[:, :5]).max() < 1e-4
    for step, (token, entry) in enumerate(zip(tokens, logprobs, strict=True)):
        row = expected[len(prompt) - 1 + step]
        assert abs(entry.logprob - row[token]) < 1e-4
        assert np.abs(np.array(entry.top_logprobs) - row[list(entry.top_ids)]).max() < 1e-4


def formed(seed: int, *, temperature: float = 1.0, max_tokens: int = 100) -> SamplingParams:
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        stop_token_ids=(EOS,),
        grammar=json_grammar(SCHEMA),
    )


def check_answer(tokenizer: Tokenizer, tokens: list[int], reason: FinishReason) -> None:
    assert reason is FinishReason.STOP
    value = json.loads(tokenizer.decode(tokens))
    assert set(value) == {"name", "color", "sizes"}
    assert len(value["name"]) <= 8
    assert value["color"] in ("red", "green", "blue")
    assert len(value["sizes"]) <= 3


@pytest.mark.parametrize(
    "count", [10, pytest.param(100, marks=pytest.mark.slow)], ids=["some", "hundred"]
)
def test_every_answer_is_json_of_its_schema(
    model_dir: Path, make_runner: Callable[..., ModelRunner], count: int
) -> None:
    """Also its first token, which the prefill worker samples."""
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    prompt = tokenizer.encode("Describe a toy as JSON: ").ids

    async def work(f: Fleet) -> None:
        client = f.client()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(client.generate(prompt, formed(s))) for s in range(count)]
        for task in tasks:
            outputs = task.result()
            check_answer(tokenizer, outputs.tokens[0], outputs.finish_reasons[0])
        assert len({tuple(task.result().tokens[0]) for task in tasks}) > count // 2

    in_a_fleet(make_runner, work, max_num_seqs=32, max_waiting=200)


def test_n_answers_of_one_prompt_are_json(
    model_dir: Path, make_runner: Callable[..., ModelRunner]
) -> None:
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    prompt = tokenizer.encode("JSON, please: ").ids
    sampling = formed(5)

    async def work(f: Fleet) -> None:
        outputs = await f.client().generate(prompt, dataclasses.replace(sampling, n=4))
        assert len(outputs.tokens) == 4
        for index in range(4):
            check_answer(tokenizer, outputs.tokens[index], outputs.finish_reasons[index])

    in_a_fleet(make_runner, work)


def test_an_answer_goes_on_after_a_loss(
    model_dir: Path, make_runner: Callable[..., ModelRunner]
) -> None:
    """Resubmitted with its tokens so far (as after a lost worker or an eviction), it is the same
    answer, whatever the grammar's state was.
    """
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    prompt = tokenizer.encode("Describe a toy as JSON: ").ids

    async def work(f: Fleet) -> None:
        client = f.client()
        whole = (await client.generate(prompt, formed(0))).tokens[0]
        cuts = (1, 2, 9)
        async with asyncio.TaskGroup() as group:
            rests = [group.create_task(resumed(client, prompt, whole[:cut], 0)) for cut in cuts]
        for cut, rest in zip(cuts, rests, strict=True):
            assert whole[:cut] + rest.result() == whole

    in_a_fleet(make_runner, work)


async def resumed(client: Client, prompt: list[int], so_far: list[int], seed: int) -> list[int]:
    outputs = await client.generate(prompt + so_far, formed(seed), num_prompt_tokens=len(prompt))
    assert not isinstance(outputs.error, Failed), outputs.error
    return outputs.tokens[0]
