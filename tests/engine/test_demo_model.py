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

from tests.engine.conftest import make_runner
from tests.engine.driver import Driver

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
FEW = (1, 16, 17, 100, 300)


def prompts(directory: Path, lengths: tuple[int, ...]) -> dict[int, list[int]]:
    """Python and prose from the standard library, each prompt starting elsewhere."""
    tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    text = "\n".join(inspect.getsource(module) for module in (textwrap, heapq, argparse))
    ids = tokenizer.encode(text).ids
    starts = {length: 37 * length % (len(ids) - length) for length in lengths}
    return {length: ids[start : start + length] for length, start in starts.items()}


def check(
    demo_model: Path, reference: Any, lengths: tuple[int, ...], *, num_new: int, chunk_tokens: int
) -> None:
    driver = Driver(make_runner(demo_model, kv_codec="fp32", num_blocks=700))
    given = prompts(demo_model, lengths)
    for length, prompt in given.items():
        assert len(prompt) == length
        driver.add(str(length), prompt, max_tokens=num_new)
    driver.run(chunk_tokens=chunk_tokens)
    for length, prompt in given.items():
        tokens = driver.tokens[str(length)]
        with torch.no_grad():
            fed = torch.tensor([prompt + tokens[:-1]])
            logits = reference(fed, logits_to_keep=num_new).logits[0]
        best = logits.topk(2, dim=1)
        differs = best.indices[:, 0].numpy() != np.array(tokens)
        is_clear = (best.values[:, 0] - best.values[:, 1]).numpy() > MARGIN
        assert not (differs & is_clear).any(), f"{length} tokens in"


def test_greedy_ids_equal_transformers(demo_model: Path, reference: Any) -> None:
    """Fed with our own tokens, the reference picks each of them: then its greedy run is ours."""
    check(demo_model, reference, FEW, num_new=32, chunk_tokens=128)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_greedy_ids_equal_transformers_for_twenty_prompts(demo_model: Path, reference: Any) -> None:
    check(demo_model, reference, LENGTHS, num_new=64, chunk_tokens=512)
