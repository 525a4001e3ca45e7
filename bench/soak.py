"""`python -m bench.soak`: thousands of requests while workers are killed at random. Nothing may
be wrong or left.

Two prefill and two decode workers, each a process, with the demo model cut to 2 layers. Clients
send requests whose answers are known from an undisturbed run; some leave early. Every few
seconds a random worker gets SIGKILL and is started again. At the end: no wrong, lost or doubled
token, pools at rest, and the router with no more descriptors and threads and hardly more memory
than after warming up. Then the killing stops, and the workers are held to the same: after another
tenth of the requests, none of them has more of anything than before.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from bench.cluster import Cluster, cluster
from bench.load import random_prompt
from bench.shrunk_model import shrunk_model

CONCURRENCY = 16
NUM_KINDS = 48
KILL_EVERY_S = 12.0
MAX_GROWTH_MB = 48.0
MAX_MORE = 8
"""Descriptors and threads that come and go: connections of clients, a pool's threads."""


@dataclass(slots=True)
class Report:
    outcomes: Counter[str] = field(default_factory=Counter)
    num_kills: int = 0
    wrong: list[str] = field(default_factory=list)
    growth: dict[str, dict[str, float]] = field(default_factory=dict)
    """Descriptors, threads and megabytes that a process has gained."""

    @property
    def is_good(self) -> bool:
        return not self.wrong and all(
            figures["megabytes"] <= MAX_GROWTH_MB
            and figures["descriptors"] <= MAX_MORE
            and figures["threads"] <= MAX_MORE
            for figures in self.growth.values()
        )


def body(kind: int, model: str) -> dict[str, Any]:
    rng = random.Random(kind)
    return {
        "model": model,
        "prompt": random_prompt(rng.choice([3, 16, 60, 200, 700]), kind),
        "max_tokens": rng.choice([1, 2, 8, 24, 60]),
        "temperature": rng.choice([0.0, 0.9]),
        "seed": kind,
        "n": rng.choice([1, 1, 1, 2]),
        "ignore_eos": True,
        "stream": True,
    }


async def ask(http: httpx.AsyncClient, request: dict[str, Any], leave_after: int | None) -> Any:
    """Text by output index, an error object, or None when it left."""
    texts: dict[int, str] = {}
    async with http.stream("POST", "/v1/completions", json=request) as response:
        if response.status_code != 200:
            return json.loads(await response.aread())
        count = 0
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                return texts
            if not line.startswith("data: "):
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                return chunk
            for choice in chunk["choices"]:
                texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
            count += 1
            if leave_after is not None and count >= leave_after:
                return None
    return {"error": {"code": "connection_closed"}}


async def soak(c: Cluster, num_requests: int, seed: int) -> Report:
    report = Report()
    rng = random.Random(seed)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=c.url, timeout=120, limits=limits) as http:
        kinds = [body(kind, c.model.name) for kind in range(NUM_KINDS)]
        expected = [await ask(http, kind, None) for kind in kinds]
        assert all("error" not in answer for answer in expected), expected
        before = footprint(c.processes["router"].pid)
        done = asyncio.Event()

        async def client(numbers: Iterator[int]) -> None:
            for _ in numbers:
                kind = rng.randrange(NUM_KINDS)
                leave_after = rng.randrange(1, 6) if rng.random() < 0.2 else None
                answer = await ask(http, kinds[kind], leave_after)
                judge(report, kind, answer, expected[kind])

        async def killer() -> None:
            while not done.is_set():
                await asyncio.sleep(KILL_EVERY_S * (0.5 + rng.random()))
                name = rng.choice(sorted(c.addresses))
                await asyncio.to_thread(c.kill, name)
                c.start(name)
                report.num_kills += 1

        async def load(num_requests: int) -> None:
            numbers = iter(range(num_requests))
            await asyncio.gather(*(client(numbers) for _ in range(CONCURRENCY)))

        async def rest() -> None:
            await asyncio.to_thread(c.wait_for_workers, len(c.addresses))
            with c.served() as served:
                served.wait_until_at_rest(within_s=20)

        async with asyncio.TaskGroup() as group:
            kills = group.create_task(killer())
            await load(num_requests)
            done.set()
            kills.cancel()
        await rest()
        report.growth["router"] = grown(c, "router", before)
        await load(num_requests // 20)  # workers that were just started warm up
        await rest()
        quiet = {name: footprint(c.processes[name].pid) for name in c.processes}
        await load(num_requests // 10)
        await rest()
        for name, figures in quiet.items():
            report.growth[f"{name}, in peace"] = grown(c, name, figures)
    return report


def grown(c: Cluster, name: str, before: dict[str, float]) -> dict[str, float]:
    after = footprint(c.processes[name].pid)
    return {key: after[key] - before[key] for key in after}


def judge(report: Report, kind: int, answer: Any, expected: Any) -> None:
    if answer is None:
        report.outcomes["left early"] += 1
    elif "error" in answer:
        report.outcomes[f"error {answer['error']['code']}"] += 1
    elif answer == expected:
        report.outcomes["right"] += 1
    else:
        report.outcomes["WRONG"] += 1
        report.wrong.append(f"kind {kind}: {answer} instead of {expected}"[:500])


def footprint(pid: int) -> dict[str, float]:
    status = Path(f"/proc/{pid}/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines())
    return {
        "descriptors": len(list(Path(f"/proc/{pid}/fd").iterdir())),
        "threads": int(fields["Threads"]),
        "megabytes": int(fields["VmRSS"].split()[0]) / 1024,
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.soak", allow_abbrev=False)
    parser.add_argument("--requests", type=int, default=10_000, metavar="N")
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model = shrunk_model(Path(directory, "two-layers"))
        workers = ("p0", "p1", "d0", "d1")
        sizes = ("--kv-blocks", "1024", "--log-level", "warning")
        with cluster(Path(directory), model, *workers, options=sizes) as c:
            started = time.monotonic()
            report = asyncio.run(soak(c, options.requests, options.seed))
            print(f"{options.requests} requests in {time.monotonic() - started:.0f} s")
    print(f"{report.num_kills} kills; seed {options.seed}")
    for outcome, count in sorted(report.outcomes.items()):
        print(f"  {outcome}: {count}")
    for line in report.wrong[:5]:
        print(line)
    for name, figures in report.growth.items():
        more = ", ".join(f"{value:+.0f} {key}" for key, value in figures.items())
        print(f"  {name}: {more}")
    print("nothing is wrong or left" if report.is_good else "NOT GOOD")
    return 0 if report.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
