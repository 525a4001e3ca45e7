"""The main job on real processes: two workers, NIXL between them, the demo model, OpenAI's
client.
"""

import json
import random
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from bench.serving import Launched, wait_for

PARIS: list[ChatCompletionMessageParam] = [
    {"role": "user", "content": "What is the capital of France?"}
]


def client(served: Launched) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none")


def prompt_text(num_words: int, seed: int) -> str:
    rng = random.Random(seed)
    words = ["river", "stone", "garden", "letter", "window", "engine", "silver", "mountain"]
    return f"{seed}: " + " ".join(rng.choice(words) for _ in range(num_words))


def test_the_capital_of_france_streamed_through_two_workers(served: Launched) -> None:
    roles = sorted(worker["role"] for worker in served.fleet())
    assert roles == ["decode", "prefill"]
    assert len({worker["pid"] for worker in served.fleet()}) == 2
    before = served.metric("decode", "tandem_pull_pages_total")
    check_the_capital_of_france(served)
    assert served.metric("decode", "tandem_pull_pages_total") > before


def check_the_capital_of_france(served: Launched) -> None:
    """The answer as a whole and streamed; its prompt may be in the prefix cache by now."""
    whole = client(served).chat.completions.create(
        model=served.model, messages=PARIS, temperature=0, max_tokens=30
    )
    text = whole.choices[0].message.content
    assert text is not None
    assert "Paris" in text
    assert whole.choices[0].finish_reason == "stop"
    pieces = [
        chunk.choices[0].delta.content or ""
        for chunk in client(served).chat.completions.create(
            model=served.model, messages=PARIS, temperature=0, max_tokens=30, stream=True
        )
        if chunk.choices
    ]
    assert "".join(pieces) == text
    assert len(pieces) > 3


def test_the_prefill_worker_computes_every_prompt_token_and_bytes_add_up(served: Launched) -> None:
    names = (
        "tandem_prompt_tokens_computed_total",
        "tandem_pull_bytes_total",
        "tandem_pull_pages_total",
    )
    at_p, at_d = (served.metric(role, names[0]) for role in ("prefill", "decode"))
    num_bytes, pages = (served.metric("decode", name) for name in names[1:])
    answer = client(served).completions.create(
        model=served.model, prompt=prompt_text(400, seed=1), temperature=0, max_tokens=4
    )
    assert answer.usage is not None
    num_tokens = answer.usage.prompt_tokens
    served.wait_until_at_rest()
    assert served.metric("prefill", names[0]) - at_p == num_tokens
    assert served.metric("decode", names[0]) - at_d == 0
    num_blocks = -(-num_tokens // 16)
    assert served.metric("decode", names[2]) - pages == num_blocks
    num_exact = 1 + (num_tokens % 16 != 0)
    packed, exact = 30 * 2 * 3 * 16 * 64, 30 * 2 * 3 * 16 * 64 * 2
    payload = (num_blocks - num_exact) * packed + num_exact * exact
    # scales, tag and padding of a record, one for each of 3 KV heads: 60 + 4 + 64 bytes, exact 64
    more = 3 * (128 * (num_blocks - num_exact) + 64 * num_exact)
    assert served.metric("decode", names[1]) - num_bytes == payload + more


def test_200_requests_a_third_of_them_cancelled_leave_nothing_behind(served: Launched) -> None:
    rng = random.Random(20)

    def one(number: int, num_words: int, max_tokens: int, cancel_after_s: float | None) -> int:
        body = {
            "model": served.model,
            "prompt": prompt_text(num_words, seed=1000 + number),
            "max_tokens": max_tokens,
            "temperature": 0.8,
            "seed": number,
            "stream": True,
            "ignore_eos": True,
            "stream_options": {"include_usage": True},
        }
        lines: list[str] = []
        with (
            httpx.Client(base_url=served.url, timeout=60) as http,
            http.stream("POST", "/v1/completions", json=body) as response,
        ):
            assert response.status_code == 200, response.read()
            deadline = None if cancel_after_s is None else time.monotonic() + cancel_after_s
            for line in response.iter_lines():
                if line.startswith("data: "):
                    lines.append(line)
                if deadline is not None and time.monotonic() > deadline:
                    return -1
        if lines[-1] != "data: [DONE]":
            return -1
        assert json.loads(lines[-2][6:])["usage"]["completion_tokens"] == max_tokens
        return max_tokens

    jobs = [
        (
            number,
            rng.randrange(1, 60),
            rng.randrange(1, 24),
            rng.random() * 1.5 if number % 3 == 0 else None,
        )
        for number in range(200)
    ]
    with ThreadPoolExecutor(24) as pool:
        results = list(pool.map(lambda job: one(*job), jobs))
    for job, result in zip(jobs, results, strict=True):
        assert result == job[2] or (result == -1 and job[3] is not None)
    served.wait_until_at_rest()
    check_the_capital_of_france(served)


def test_a_client_that_leaves_stops_the_prefill_worker(served: Launched) -> None:
    """B78: a long prompt is dropped after the chunk that is running."""
    before = served.metric("prefill", "tandem_prompt_tokens_computed_total")
    body = {"model": served.model, "prompt": prompt_text(4000, seed=3), "max_tokens": 50}
    with httpx.Client(base_url=served.url) as http, pytest.raises(httpx.ReadTimeout):
        http.post("/v1/completions", json=body, timeout=0.7)
    served.wait_until_at_rest()
    computed = served.metric("prefill", "tandem_prompt_tokens_computed_total") - before
    assert computed <= 3 * 512


def test_the_log_names_the_link_and_its_speed(served: Launched) -> None:
    client(served).completions.create(model=served.model, prompt="Hello", max_tokens=2)
    assert wait_for(lambda: any("is up:" in line and "GB/s" in line for line in served.log), 5)


def test_t13_the_fleet_is_shown_as_it_is_after_each_request(served: Launched) -> None:
    """A random mix, one after another; what the router knows is right a moment after each of
    them (tests/handoff/test_told_load.py has the bound, on virtual time).
    """
    rng = random.Random(13)
    late = []

    def at_rest() -> bool:
        names = ("running", "waiting", "queued_tokens", "decodes", "context_tokens")
        return all(
            worker["blocks"]["held"] == 0 and not any(worker[name] for name in names)
            for worker in served.fleet()
        )

    assert wait_for(at_rest, 10)
    for number in range(30):
        body = {
            "prompt": [rng.randrange(1000, 40_000) for _ in range(rng.choice([1, 40, 300, 900]))],
            "max_tokens": rng.choice([1, 1, 2, 12]),
            "temperature": 0,
            "ignore_eos": True,
            "stream": number % 3 == 0,
        }
        with served.http.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200
            if number % 6:
                answer.read()
            else:
                next(answer.iter_lines())  # and leaves
        if not wait_for(at_rest, 0.2):
            late.append(number)
            assert wait_for(at_rest, 2.0), served.fleet()
    assert len(late) <= 3, late
