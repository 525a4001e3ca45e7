"""A closed-loop load of streamed completions, and what its clients saw."""

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import httpx

VOCAB_SIZE = 49152


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One request: instants of the machine's monotonic clock."""

    sent: float
    tokens: tuple[float, ...]

    @property
    def ttft_s(self) -> float:
        return self.tokens[0] - self.sent

    @property
    def gaps_s(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.tokens)]


def random_prompt(num_tokens: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(100, VOCAB_SIZE) for _ in range(num_tokens)]


def run_load(
    url: str, model: str, prompts: Sequence[Sequence[int]], output_tokens: int, concurrency: int
) -> tuple[list[Seen], float]:
    """Every request, and how long all of them took. Raises when one fails or is cut short."""
    return asyncio.run(_run(url, model, prompts, output_tokens, concurrency))


async def _run(
    url: str, model: str, prompts: Sequence[Sequence[int]], output_tokens: int, concurrency: int
) -> tuple[list[Seen], float]:
    places = asyncio.Semaphore(concurrency)
    # llama-server closes connections that a client would use again
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as http:

        async def one(prompt: Sequence[int]) -> Seen:
            async with places:
                return await stream_one(http, model, prompt, output_tokens)

        started = time.monotonic()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(prompt)) for prompt in prompts]
        return [task.result() for task in tasks], time.monotonic() - started


async def stream_one(
    http: httpx.AsyncClient,
    model: str,
    prompt: Sequence[int],
    output_tokens: int,
    times: list[float] | None = None,
) -> Seen:
    """`times` is filled while the tokens come."""
    body = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    times = [] if times is None else times
    usage = None
    sent = time.monotonic()
    async with http.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise RuntimeError((await response.aread()).decode())
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line[6:])
            if chunk.get("usage"):
                usage = chunk["usage"]
            elif chunk["choices"]:
                times.append(time.monotonic())
    if usage is None or usage["completion_tokens"] != output_tokens:
        raise RuntimeError(f"cut short: {usage}")
    return Seen(sent=sent, tokens=tuple(times))


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value with at least that share of all values at or below it."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -(-int(share * 1000) * len(ordered) // 1000) - 1))]
