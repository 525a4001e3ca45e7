"""The demo model answers with the tokens that transformers picks in fp32."""

import argparse
import heapq
import inspect
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers

from tests.engine.conftest import make_runner
from tests.engine.driver import Driver

NUM_NEW = 64
MARGIN = 1e-3
"""Where the reference's two best logits are closer than this, either may win."""

LENGTHS = (
    1,
    2,
    15,
    16,
    17,
    33,
    64,
    100,
    128,
    200,
    256,
    300,
    400,
    511,
    512,
    513,
    700,
    1000,
    1500,
    2000,
)
FEW = (1, 16, 17, 100, 300, 700)


@pytest.fixture(scope="module")
def reference(demo_model: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32)


def prompts(directory: Path, lengths: tuple[int, ...]) -> dict[int, list[int]]:
    """Python and prose from the standard library, each prompt starting elsewhere."""
    tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    text = "\n".join(inspect.getsource(module) for module in (textwrap, heapq, argparse))
    ids = tokenizer.encode(text).ids
    starts = {length: 37 * length % (len(ids) - length) for length in lengths}
    return {length: ids[start : start + length] for length, start in starts.items()}


def check(demo_model: Path, reference: Any, lengths: tuple[int, ...]) -> None:
    driver = Driver(make_runner(demo_model, codec="fp32", num_blocks=700))
    given = prompts(demo_model, lengths)
    for length, prompt in given.items():
        assert len(prompt) == length
        driver.add(str(length), prompt, max_tokens=NUM_NEW)
    driver.run(chunk_tokens=512)
    for length, prompt in given.items():
        tokens = driver.tokens[str(length)]
        with torch.no_grad():
            fed = torch.tensor([prompt + tokens[:-1]])
            logits = reference(fed, logits_to_keep=NUM_NEW).logits[0]
        best = logits.topk(2, dim=1)
        differs = best.indices[:, 0].numpy() != np.array(tokens)
        is_clear = (best.values[:, 0] - best.values[:, 1]).numpy() > MARGIN
        assert not (differs & is_clear).any(), f"{length} tokens in"


def test_greedy_ids_equal_transformers(demo_model: Path, reference: Any) -> None:
    """Fed with our own tokens, the reference picks each of them: then its greedy run is ours."""
    check(demo_model, reference, FEW)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_greedy_ids_equal_transformers_for_twenty_prompts(demo_model: Path, reference: Any) -> None:
    check(demo_model, reference, LENGTHS)


def test_two_threads_answer_as_one(demo_model: Path) -> None:
    given = prompts(demo_model, (100,))[100]
    answers = []
    for num_threads in (1, 2):
        driver = Driver(make_runner(demo_model, num_threads=num_threads))
        driver.add("a", given, max_tokens=24)
        driver.run(chunk_tokens=64)
        answers.append((driver.tokens["a"], np.stack(driver.logits["a"]).tobytes()))
    assert answers[0] == answers[1]
