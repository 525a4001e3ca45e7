"""Workloads: seeded draws, traces, and prompts that share exactly what they should."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simulator.workload import (
    MalformedTrace,
    closed_loop,
    fixed,
    lognormal,
    poisson,
    read_trace,
    uniform,
)


def write(path: Path, *entries: Any) -> Path:
    lines = [entry if isinstance(entry, str) else json.dumps(entry) for entry in entries]
    path.write_text("\n".join(lines) + "\n")
    return path


def entry(timestamp: float, prompt: int, output: int, *hash_ids: int) -> dict[str, Any]:
    return {
        "timestamp": timestamp,
        "input_length": prompt,
        "output_length": output,
        "hash_ids": list(hash_ids),
    }


def test_the_same_seed_draws_the_same_requests() -> None:
    def draw(seed: int) -> Any:
        return poisson(
            num_requests=50,
            rate=4.0,
            prompt=lognormal(500, 0.8, 4000),
            output=uniform(1, 100),
            seed=seed,
        )

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def test_arrivals_come_at_the_rate_and_lengths_have_the_mean() -> None:
    load = poisson(
        num_requests=20_000, rate=4.0, prompt=lognormal(500, 0.8, 10**6), output=fixed(7), seed=1
    )
    assert load.requests[-1].arrival_s == pytest.approx(5000, rel=0.03)
    assert np.mean([r.prompt_tokens for r in load.requests]) == pytest.approx(500, rel=0.03)


def test_prompts_share_the_common_prefix_and_nothing_else() -> None:
    load = closed_loop(
        num_requests=20,
        concurrency=2,
        prompt=uniform(10, 50),
        output=fixed(1),
        seed=1,
        shared_prefix=32,
    )
    seen: set[int] = set()
    for request in load.requests:
        tokens = request.token_ids()
        assert len(tokens) == request.prompt_tokens
        assert tokens[:32].tolist() == list(range(32))
        own = set(tokens[32:].tolist())
        assert not own & seen
        seen |= own


def test_a_trace_gives_equal_tokens_for_equal_hash_ids(tmp_path: Path) -> None:
    path = write(
        tmp_path / "trace.jsonl",
        entry(5000, 1200, 30, 4, 9, 17),
        entry(4000, 1300, 40, 4, 9, 900_000_000_001),
    )
    load = read_trace(path)
    assert [r.arrival_s for r in load.requests] == [0.0, 1.0]
    assert [r.output_tokens for r in load.requests] == [40, 30]
    one, two = (request.token_ids() for request in load.requests)
    assert (len(one), len(two)) == (1300, 1200)
    assert one[:1024].tolist() == two[:1024].tolist()
    assert not set(one[1024:].tolist()) & set(two[1024:].tolist())
    assert one.dtype == np.int32


GOOD = entry(0, 600, 5, 1, 2)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"timestamp": 1,', "not JSON"),
        ("[1, 2]", "not a JSON object"),
        ({**GOOD, "timestamp": "soon"}, "timestamp must be milliseconds"),
        ({**GOOD, "timestamp": -1}, "timestamp must be milliseconds"),
        ({**GOOD, "input_length": 0}, "input_length must be a positive integer, not 0"),
        ({**GOOD, "output_length": 1.5}, "output_length must be a positive integer, not 1.5"),
        ({**GOOD, "hash_ids": None}, "hash_ids must be a list"),
        ({**GOOD, "hash_ids": [1]}, "600 tokens are 2 blocks of 512, but there are 1 hash_ids"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: Any, reason: str) -> None:
    path = write(tmp_path / "trace.jsonl", GOOD, line)
    with pytest.raises(MalformedTrace) as error:
        read_trace(path)
    assert str(error.value).startswith(f"{path}, line 2: ")
    assert reason in str(error.value)


def test_a_trace_that_is_not_there_or_empty_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MalformedTrace, match="cannot read"):
        read_trace(tmp_path / "none.jsonl")
    with pytest.raises(MalformedTrace, match="holds no request"):
        read_trace(write(tmp_path / "empty.jsonl", ""))
