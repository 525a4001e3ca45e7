"""What long prompts do to running streams: 4 streams of 600 tokens, and a prompt of 4,000 tokens
whenever the last one has ended. One thread per worker, no pinning.

Three fleets: 1 prefill + 1 decode worker, every prompt handed off; one colocated worker with
`--chunk-tokens auto`; and one that computes whole prompts in one step, as servers without chunking
do. Gaps between tokens are the client's; the quiet median is of the same streams without prompts.
"""

import asyncio
import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, pairwise
from math import inf
from statistics import median

import httpx

from bench.load import percentile, random_prompt, stream_one
from bench.serve import ONE_DEVICE
from bench.serving import serving

NUM_STREAMS, OUTPUT_TOKENS, STREAM_PROMPT_TOKENS = 4, 600, 64
QUIET_TOKENS = 200
PROMPT_TOKENS, PROMPT_OUTPUT_TOKENS = 4000, 4
NUM_RUNS = 3
HEAD_START_S = 2.0
"""Of the streams; gaps count from then on."""
MAX_RUN_S = 60.0
"""Whole prompts leave streams so little that their end is not waited for."""
MAX_P99, MAX_MAX = 2.0, 3.0

FLEETS = {
    "1 prefill + 1 decode": ("--prefill", "1", "--decode", "1", "--prefill-where", "remote"),
    "1 colocated, auto chunks": ONE_DEVICE,
    "1 colocated, whole prompts": (*ONE_DEVICE, "--chunk-tokens", "8192"),
}
BLOCKS = ("--threads", "1", "--kv-blocks", "2048")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Gaps between tokens of the running streams, and the prompts' time to first token. Medians of
    the runs.
    """

    fleet: str
    quiet_s: float
    itl_s: float
    p99_s: float
    max_s: float
    ttft_s: float
    """Infinite when none of the prompts got that far."""
    num_prompts: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    rows: list[Row]

    @property
    def holds(self) -> bool:
        first = self.rows[0]
        return first.p99_s <= MAX_P99 * first.quiet_s and first.max_s <= MAX_MAX * first.quiet_s


def run(*arguments: str) -> Report:
    return Report(
        rows=[measure(name, (*fleet, *BLOCKS, *arguments)) for name, fleet in FLEETS.items()]
    )


def measure(name: str, arguments: tuple[str, ...]) -> Row:
    with serving(*arguments) as served:
        seeds = count(1)
        runs = [asyncio.run(_run(served.url, served.model, name, seeds)) for _ in range(NUM_RUNS)]
    columns = (
        median(getattr(row, field) for row in runs)
        for field in ("quiet_s", "itl_s", "p99_s", "max_s", "ttft_s", "num_prompts")
    )
    quiet_s, itl_s, p99_s, max_s, ttft_s, num_prompts = columns
    return Row(
        fleet=name,
        quiet_s=quiet_s,
        itl_s=itl_s,
        p99_s=p99_s,
        max_s=max_s,
        ttft_s=ttft_s,
        num_prompts=num_prompts,
    )


async def _run(url: str, model: str, name: str, seeds: Iterator[int]) -> Row:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as http:
        await _prompt(http, model, next(seeds))  # links; and the workers measure a long prompt
        quiet = [
            gap
            for times in await _streams(http, model, seeds, QUIET_TOKENS)
            for gap in _gaps(times)
        ]
        ttfts: list[float] = []
        streams: list[list[float]] = [[] for _ in range(NUM_STREAMS)]
        async with asyncio.TaskGroup() as group:
            running = group.create_task(_streams(http, model, seeds, OUTPUT_TOKENS, streams))
            await asyncio.sleep(HEAD_START_S)
            began = time.monotonic()
            prompts = group.create_task(_prompts(http, model, seeds, ttfts))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(running), MAX_RUN_S)
            running.cancel()
            prompts.cancel()
        gaps = [gap for times in streams for gap in _gaps([t for t in times if t >= began])]
    return Row(
        fleet=name,
        quiet_s=median(quiet),
        itl_s=median(gaps),
        p99_s=percentile(gaps, 0.99),
        max_s=max(gaps),
        ttft_s=median(ttfts or [inf]),
        num_prompts=len(ttfts),
    )


async def _streams(
    http: httpx.AsyncClient,
    model: str,
    seeds: Iterator[int],
    num_tokens: int,
    times: list[list[float]] | None = None,
) -> list[list[float]]:
    """When each token of each stream came; `times` is filled meanwhile."""
    times = [[] for _ in range(NUM_STREAMS)] if times is None else times
    async with asyncio.TaskGroup() as group:
        for own in times:
            prompt = random_prompt(STREAM_PROMPT_TOKENS, next(seeds))
            group.create_task(stream_one(http, model, prompt, num_tokens, own))
    return times


async def _prompts(
    http: httpx.AsyncClient, model: str, seeds: Iterator[int], ttfts: list[float]
) -> None:
    while True:
        ttfts.append(await _prompt(http, model, next(seeds)))


async def _prompt(http: httpx.AsyncClient, model: str, seed: int) -> float:
    prompt = random_prompt(PROMPT_TOKENS, seed)
    return (await stream_one(http, model, prompt, PROMPT_OUTPUT_TOKENS)).ttft_s


def _gaps(times: list[float]) -> list[float]:
    return [later - earlier for earlier, later in pairwise(times)]
