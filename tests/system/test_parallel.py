"""Workers of several ranks as real processes, their pages moved by NIXL."""

import os
import shutil
import signal
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench.serving import Launched, serving, wait_for
from bench.shrunk_model import COPIED
from tests.engine.test_demo_model import MARGIN
from tests.engine.tiny_models import TinyModel, make_tiny_model
from tests.system.test_serve import check_the_capital_of_france

NUM_NEW = 12
REMOTE = ("--prefill-where", "remote")
COLOCATED = ("--prefill", "0", "--decode", "0", "--colocated", "1")


class Answer:
    """To the bit: tokens, and log-probabilities as they were written."""

    def __init__(self, choice: dict[str, Any]) -> None:
        self.tokens: list[int] = choice["token_ids"]
        self.logprobs: list[float] = choice["logprobs"]["token_logprobs"]

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Answer)
        return (self.tokens, self.logprobs) == (other.tokens, other.logprobs)

    __hash__ = None  # type: ignore[assignment]


def ask(served: Launched, prompt: Sequence[int], num_new: int = NUM_NEW) -> Answer:
    body = {
        "model": served.model,
        "prompt": list(prompt),
        "max_tokens": num_new,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 1,
        "return_token_ids": True,
    }
    answer = served.http.post("/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return Answer(answer.json()["choices"][0])


def ask_all(served: Launched, prompts: Sequence[Sequence[int]], at_once: int = 1) -> list[Answer]:
    with ThreadPoolExecutor(at_once) as threads:
        return list(threads.map(lambda prompt: ask(served, prompt), prompts))


def prompts_of(lengths: Sequence[int], vocab_size: int, seed: int = 0) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(0, vocab_size, length).tolist() for length in lengths]


def wide_model(path: Path, demo_model: Path, num_kv_heads: int, num_heads: int) -> TinyModel:
    """Random, with the demo model's tokenizer."""
    made = make_tiny_model(
        path,
        "llama",
        num_hidden_layers=2,
        num_key_value_heads=num_kv_heads,
        num_attention_heads=num_heads,
        vocab_size=49152,
    )
    for name in COPIED:
        if (demo_model / name).exists():
            shutil.copy(demo_model / name, path / name)
    return made


def followers(pid: int) -> list[int]:
    """Child processes of a worker."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_two_ranks_on_both_sides_answer() -> None:
    with serving("--tensor-parallel", "2", "--kv-blocks", "640", *REMOTE) as served:
        check_the_capital_of_france(served)
        assert served.metric("decode", "tandem_pull_pages_total") > 0
        for role in ("prefill", "decode"):
            held = [
                served.metric(role, "tandem_rank_memory_bytes", rank=str(rank), of="pages")
                for rank in range(2)
            ]
            assert held[0] == 2 * held[1] > 0  # two KV heads, and one
        served.wait_until_at_rest()
        pids = [child for worker in served.fleet() for child in followers(worker["pid"])]
        assert len(pids) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


PAIRS = [(1, 2, 8), (2, 1, 8), (4, 2, 8), (2, 4, 8), (3, 1, 8), (4, 2, 2), (1, 4, 2), (4, 1, 2)]


@pytest.mark.slow
@pytest.mark.parametrize(("num_prefill", "num_decode", "num_kv_heads"), PAIRS)
def test_two_sides_that_differ(
    tmp_path: Path, demo_model: Path, num_prefill: int, num_decode: int, num_kv_heads: int
) -> None:
    """The last ones have more ranks than heads. Fp32 pages, so that tokens are transformers'."""
    model = wide_model(tmp_path / "model", demo_model, num_kv_heads, 8)
    ranks = {
        "prefill": f"tensor-parallel = {num_prefill}\n",
        "decode": f"tensor-parallel = {num_decode}\n",
    }
    options = ("--model", str(model.path), "--kv-codec", "fp32", "--kv-blocks", "256")
    with serving(*options, *REMOTE, tables=ranks) as served:
        prompts = prompts_of((1, 15, 16, 17, 40, 100, 513), 49152)
        for answer, prompt in zip(ask_all(served, prompts, at_once=4), prompts, strict=True):
            check_greedy(model, prompt, answer.tokens)
        assert served.metric("decode", "tandem_prompt_tokens_computed_total") == 0
        again = ask_all(served, prompts)
        for answer, prompt in zip(again, prompts, strict=True):
            check_greedy(model, prompt, answer.tokens)
        assert served.metric("decode", "tandem_pages_refused_total") == 0
        served.wait_until_at_rest()


def check_greedy(model: TinyModel, prompt: list[int], tokens: list[int]) -> None:
    logits = model.logits(prompt + tokens[:-1])[-len(tokens) :]
    best = torch.topk(logits, 2, dim=1)
    differs = best.indices[:, 0].numpy() != np.array(tokens)
    is_clear = (best.values[:, 0] - best.values[:, 1]).numpy() > MARGIN
    assert not (differs & is_clear).any(), f"{len(prompt)} tokens in"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_split_and_colocated_groups_give_the_same_bits(demo_model: Path) -> None:
    """The default codec; chunks of three sizes, alone and at once, prompts cached and not."""
    prompts = prompts_of((1, 16, 33, 64, 200, 513), 49152)
    two = ("--tensor-parallel", "2", "--kv-blocks", "640", "--model", str(demo_model))
    with serving(*two, *COLOCATED, "--chunk-tokens", "512") as served:
        wanted = ask_all(served, prompts)
    for chunk in ("16", "64", "512"):
        with serving(*two, *REMOTE, "--chunk-tokens", chunk) as served:
            assert ask_all(served, prompts, at_once=6) == wanted, f"chunks of {chunk}"
            assert ask_all(served, prompts) == wanted, f"chunks of {chunk}, cached"
            assert served.metric("decode", "tandem_prompt_tokens_cached_total") > 0
            served.wait_until_at_rest()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_preempted_groups_give_the_same_bits(demo_model: Path) -> None:
    prompts = prompts_of((120,) * 6, 49152)
    two = ("--tensor-parallel", "2", "--model", str(demo_model))
    with serving(*two, *COLOCATED, "--kv-blocks", "640") as served:
        wanted = [ask(served, prompt, 100) for prompt in prompts]
    with serving(*two, *REMOTE, "--kv-blocks", "64") as served:
        with ThreadPoolExecutor(6) as threads:
            found = list(threads.map(lambda prompt: ask(served, prompt, 100), prompts))
        assert served.metric("decode", "tandem_preemptions_total") > 0
        assert found == wanted
        served.wait_until_at_rest()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda n: n.name)
def test_a_stream_survives_the_loss_of_a_rank(demo_model: Path, number: signal.Signals) -> None:
    """A follower of the decode worker that has the request, killed or frozen: the other decode
    worker goes on, and no token is lost, doubled or other.
    """
    [prompt] = prompts_of((300,), 49152)
    two = ("--tensor-parallel", "2", "--kv-blocks", "640", "--model", str(demo_model))
    with serving(*two, "--prefill", "1", "--decode", "2", *REMOTE) as served:
        assert wait_for(lambda: len(served.fleet()) == 3, 60)
        wanted = ask(served, prompt, 400)
        served.wait_until_at_rest()  # else the fleet's view may still name that worker as busy
        with ThreadPoolExecutor(1) as thread:
            found = thread.submit(ask, served, prompt, 400)
            busy: list[dict[str, Any]] = []

            def looks() -> bool:
                busy[:] = [w for w in served.fleet() if w["role"] == "decode" and w["running"]]
                return bool(busy)

            assert wait_for(looks, 30)
            [follower] = followers(busy[0]["pid"])
            os.kill(follower, number)
            assert found.result(timeout=150) == wanted
        assert wait_for(lambda: len(served.fleet()) == 2, 90)
        served.wait_until_at_rest()
        assert ask(served, prompt, 400) == wanted
    assert not Path(f"/proc/{follower}").exists()
