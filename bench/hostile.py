"""`python -m bench router --hostile`: requests that ask for far too much, beside 16 streams.

A router, a prefill and a decode worker as processes (the demo model cut to 2 layers), the router
with 4 GB of address space. Each kind of attack is run five times, by turns with the same streams
beside ordinary calls of as many prompts and tokens, or beside nothing. What is told: the streams'
longest gap in both, the longest answer of /health, and the router's longest stall: how much longer
than the median a /health asked every 20 ms took.
"""

import asyncio
import resource
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import httpx

from bench.attacks import KINDS, Attack, Target, ask
from bench.cluster import Cluster, cluster
from bench.load import random_prompt, stream_one
from bench.shrunk_model import shrunk_model

NUM_STREAMS = 16
NUM_RUNS = 5
PROMPT_TOKENS = 40
OUTPUT_TOKENS = 400
PROBE_S = 0.02
MAX_RATIO = 2.0
MAX_HEALTH_S = 0.5
ADDRESS_SPACE = 4 * 10**9
WORKERS = ("p0", "d0")


@dataclass(frozen=True, slots=True)
class Seen:
    """In one run: seconds."""

    gap_s: float
    health_s: float
    stall_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    kind: str
    attack: Seen
    base: Seen
    statuses: str
    """Of the attack's answers, with their numbers."""

    @property
    def ratio(self) -> float:
        return self.attack.gap_s / self.base.gap_s

    @property
    def holds(self) -> bool:
        return self.ratio <= MAX_RATIO and self.attack.health_s <= MAX_HEALTH_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    rows: tuple[Row, ...]
    dead: tuple[str, ...]
    """Processes that have ended."""

    @property
    def holds(self) -> bool:
        return not self.dead and all(row.holds for row in self.rows)


def run(kinds: Sequence[str] = tuple(KINDS)) -> Report:
    with tempfile.TemporaryDirectory() as directory:
        model = shrunk_model(Path(directory, "two-layers"))
        options = ("--kv-blocks", "2048", "--log-level", "warning")
        with cluster(Path(directory), model, *WORKERS, options=options) as c:
            router = c.processes["router"].pid
            resource.prlimit(router, resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
            target = Target.of(c.url, c.addresses["p0"], model.name)
            asyncio.run(_streams(c, target, ()))  # warm
            rows = tuple(_row(c, target, kind) for kind in kinds)
            dead = tuple(n for n, p in c.processes.items() if p.poll() is not None)
    return Report(rows=rows, dead=dead)


def _row(c: Cluster, target: Target, kind: str) -> Row:
    attack, base = KINDS[kind]
    seen: dict[str, list[Seen]] = {"attack": [], "base": []}
    statuses: dict[str, int] = {}
    for number in range(NUM_RUNS):
        for name, calls in (("attack", attack(number)), ("base", base(number))):
            found, answers = asyncio.run(_streams(c, target, calls))
            seen[name].append(found)
            if name == "attack":
                for answer in answers:
                    statuses[answer] = statuses.get(answer, 0) + 1
    return Row(
        kind=kind,
        attack=_median(seen["attack"]),
        base=_median(seen["base"]),
        statuses=", ".join(f"{count} x {status}" for status, count in sorted(statuses.items())),
    )


def _median(runs: Sequence[Seen]) -> Seen:
    return Seen(
        statistics.median(run.gap_s for run in runs),
        max(run.health_s for run in runs),
        statistics.median(run.stall_s for run in runs),
    )


async def _streams(c: Cluster, target: Target, calls: Sequence[Attack]) -> tuple[Seen, list[str]]:
    """The streams, and the calls once all of them have begun."""
    times: list[list[float]] = [[] for _ in range(NUM_STREAMS)]
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=c.url, timeout=600, limits=limits) as http:
        tasks = [
            asyncio.create_task(
                stream_one(
                    http, target.model, random_prompt(PROMPT_TOKENS, n), OUTPUT_TOKENS, times[n]
                )
            )
            for n in range(NUM_STREAMS)
        ]
        while not all(times):  # noqa: ASYNC110 - lists that others fill
            await asyncio.sleep(0.01)
        began = time.monotonic()
        with _probing(target) as probe:
            answers = await asyncio.gather(
                *(asyncio.to_thread(ask, target, call) for call in calls)
            )
            await asyncio.gather(*tasks)
    gaps = [
        later - max(earlier, began)
        for one in times
        for earlier, later in pairwise(one)
        if later > began
    ]
    health_s = max(probe, default=0.0)
    stall_s = health_s - statistics.median(probe) if probe else 0.0
    return Seen(max(gaps), health_s, stall_s), list(answers)


@contextmanager
def _probing(target: Target) -> Iterator[list[float]]:
    """How long each /health took, asked by a thread on one connection."""
    found: list[float] = []
    stop = threading.Event()

    def probe() -> None:
        with httpx.Client(base_url=target.url, timeout=120) as http:
            while not stop.wait(PROBE_S):
                began = time.monotonic()
                assert http.get("/health").status_code == 200
                found.append(time.monotonic() - began)

    thread = threading.Thread(target=probe, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        stop.set()
        thread.join()
