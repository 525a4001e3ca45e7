"""The published comparison of legacy serving with chunked prefill and paged FP8 KV, beside what we
simulate and what we measure.

    make bench-table                       everything
    python -m bench.table --simulated      without the real fleet

**Published**: Llama-3-70B on four GPUs, 3,000 tokens in, 500 out, 64 at once.

**Simulated**: the same load (answers of 250 to 750 tokens) on one worker of four H100, with the
real schedulers in both rows. Legacy is a configuration: bf16 pages, at most as many requests as
contiguous reservations of the maximum length fit the KV memory, chunks as long as the prompt. The
KV memory (18 x 4.8 GB) and the reservation (4.8 GB) are the published baseline's. Two constants,
the shares of peak compute and of memory bandwidth that are reached, are fitted to the baseline's
TTFT and throughput; nothing is fitted to the other row.

TTFT counts from the moment a request is given a place: with 18 places, 64 at once and 142 tokens/s
requests wait for minutes, so the published 4.8 s cannot contain that. Nor can it be one prompt's
time, which would bound throughput at 104 tokens/s. It can be the end of a rush of 18 prompts, 0.27
s each: that four H100 can do, while four A100 would need more than their peak.

**Measured**: the demo model on this machine's CPU, one worker with all cores, 300 tokens in, 50
out, 64 at once; the same bytes of KV on both sides.
"""

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.load import Seen, percentile, random_prompt, run_load
from bench.serving import serving
from commands.demo_model import NAME
from common.codecs import DEFAULT_KV_CODEC
from common.environment import home
from common.model_config import ModelConfig
from common.pages import PageKind, PageLayout
from common.scheduling.kv_cache import KvCache
from engine.pool_size import PoolSize, pool_of, pool_within
from simulator.costs import Roofline
from simulator.deployment import AUTO, Deployment, page_layout, worker_setups
from simulator.hardware import gpu_named, model_named
from simulator.records import Gaps, Record
from simulator.simulation import Simulation
from simulator.workload import closed_loop, fixed, uniform

GPU, TP = "h100", 4
PROMPT, OUTPUT, AT_ONCE = 3000, 500, 64
NUM_SIMULATED = 320
CHUNK = 1024
LEGACY_PLACES, LEGACY_BYTES = 18, 4.8e9

MEASURED_PROMPT, MEASURED_OUTPUT, NUM_MEASURED = 300, 50, 192
MEASURED_RESERVATION = 512
"""Tokens: the smallest power of two that holds a request."""

SPIKE = 2.0
"""A gap so many times as long as its own row's median is a spike: a batch of 64 takes longer steps
than one of 18, which is no spike."""
FIT_ROUNDS, FIT_PRECISION = 40, 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One system under one load. Clients cannot see when a real worker gives a place; output
    tokens/s of a real worker are those of its whole run. `spikes` is the share of gaps, `waste`
    that of the KV bytes held without need.
    """

    ttft_p99_s: float | None
    ttft_steady_p99_s: float | None
    ttft_arrival_p99_s: float | None
    output_tokens_per_s: float
    concurrent: int
    kv_bytes: float
    itl_p50_s: float | None
    itl_p99_s: float | None
    spikes: float | None
    waste: float | None


PUBLISHED = (
    Column(
        ttft_p99_s=4.82,
        ttft_steady_p99_s=None,
        ttft_arrival_p99_s=None,
        output_tokens_per_s=142,
        concurrent=18,
        kv_bytes=4.8e9,
        itl_p50_s=None,
        itl_p99_s=None,
        spikes=None,
        waste=None,
    ),
    Column(
        ttft_p99_s=1.15,
        ttft_steady_p99_s=None,
        ttft_arrival_p99_s=None,
        output_tokens_per_s=385,
        concurrent=64,
        kv_bytes=2.1e9,
        itl_p50_s=None,
        itl_p99_s=None,
        spikes=None,
        waste=None,
    ),
)
PUBLISHED_FEWER_SPIKES, PUBLISHED_WASTE = 0.75, 0.04


# --- simulated ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """One worker: how it is configured, and what its KV memory holds."""

    codec: str
    chunk: str
    places: int
    layout: PageLayout
    pool: PoolSize
    reserved_tokens: int | None
    """For each request from the start; None: pages as they are needed."""


def legacy_system() -> System:
    model = model_named("llama-3-70b")
    layout = page_layout(model, "bf16")
    token_bytes = layout.payload_bytes(PageKind.EXACT) / layout.block_size
    pool = pool_within(int(LEGACY_PLACES * LEGACY_BYTES), layout, LEGACY_PLACES)
    assert pool is not None
    return System(
        codec="bf16",
        chunk=str(round_up(PROMPT + LEGACY_PLACES, layout.block_size)),
        places=LEGACY_PLACES,
        layout=layout,
        pool=pool,
        reserved_tokens=int(LEGACY_BYTES / token_bytes),
    )


def our_system() -> System:
    layout = page_layout(model_named("llama-3-70b"), DEFAULT_KV_CODEC)
    pool = pool_within(int(LEGACY_PLACES * LEGACY_BYTES), layout, 256)
    assert pool is not None
    return System(
        codec=DEFAULT_KV_CODEC,
        chunk=str(CHUNK),
        places=256,
        layout=layout,
        pool=pool,
        reserved_tokens=None,
    )


def simulated(system: System, compute: float, bandwidth: float) -> Column:
    model = replace(model_named("llama-3-70b"), max_position_embeddings=131072)
    costs = Roofline(
        gpu=gpu_named(GPU),
        model=model,
        layout=system.layout,
        tp=TP,
        compute_efficiency=compute,
        bandwidth_efficiency=bandwidth,
    )
    from simulator.fit import linear_of

    workers = worker_setups(
        Deployment(colocated=1, chunk=system.chunk, codec=system.codec),
        model=model,
        costs=costs,
        step_times=linear_of(costs),
        layout=system.layout,
        pool=system.pool,
        max_num_seqs=system.places,
        gpus_per_worker=TP,
    )
    load = closed_loop(
        num_requests=NUM_SIMULATED,
        concurrency=AT_ONCE,
        prompt=fixed(PROMPT),
        output=uniform(OUTPUT // 2, OUTPUT + OUTPUT // 2),
        seed=0,
    )
    outcome = Simulation(workers, load, keep_tokens=True).run()
    assert len(outcome.finished) == NUM_SIMULATED
    # neither the rush at the beginning nor the emptying at the end
    steady = outcome.records[AT_ONCE : NUM_SIMULATED - AT_ONCE]
    begin, end = steady[0].arrival_s, outcome.records[-1].arrival_s
    times = [t for record in outcome.records for t in record.token_times or [] if begin <= t <= end]
    p50 = outcome.gaps.percentile(0.5)
    return Column(
        ttft_p99_s=percentile([after_place_s(record) for record in outcome.records], 0.99),
        ttft_steady_p99_s=percentile([after_place_s(record) for record in steady], 0.99),
        ttft_arrival_p99_s=percentile([record.ttft_s for record in outcome.records], 0.99),
        output_tokens_per_s=len(times) / (end - begin),
        concurrent=outcome.workers[0].peak_running,
        kv_bytes=kv_bytes(system, PROMPT + OUTPUT),
        itl_p50_s=p50,
        itl_p99_s=outcome.gaps.percentile(0.99),
        spikes=share_above(outcome.gaps, SPIKE * p50),
        waste=waste(system, PROMPT, OUTPUT),
    )


def after_place_s(record: Record) -> float:
    assert record.admitted_s is not None
    return record.ttft_s - (record.admitted_s - record.arrival_s)


def fitted() -> tuple[float, float]:
    """(compute, bandwidth): shares of the peaks with which the legacy row comes out as published.

    TTFT follows compute and throughput, mostly, bandwidth; each is moved by its own error until
    both are right.
    """
    compute, bandwidth = 0.3, 0.15
    system, goal = legacy_system(), PUBLISHED[0]
    for _ in range(FIT_ROUNDS):
        found = simulated(system, compute, bandwidth)
        assert found.ttft_p99_s is not None
        assert goal.ttft_p99_s is not None
        late = found.ttft_p99_s / goal.ttft_p99_s
        slow = goal.output_tokens_per_s / found.output_tokens_per_s
        if max(abs(late - 1), abs(slow - 1)) < FIT_PRECISION:
            break
        compute = min(1.0, compute * late**0.8)
        bandwidth = min(1.0, bandwidth * slow**0.8)
    return compute, bandwidth


def kv_bytes(system: System, num_tokens: int) -> float:
    """Held for a request of that length."""
    if system.reserved_tokens is not None:
        token_bytes = system.layout.payload_bytes(PageKind.EXACT) / system.layout.block_size
        return system.reserved_tokens * token_bytes
    cache = KvCache(num_packed=1, num_exact=1, block_size=system.layout.block_size)
    pages = cache.pages_for(num_tokens)
    return sum(count * system.layout.page_bytes(kind) for kind, count in pages.items())


def waste(system: System, prompt: int, output: int) -> float:
    """Mean share, while the answer grows, of the bytes held beyond those of its elements."""
    packed = system.layout.payload_bytes(PageKind.PACKED) / system.layout.block_size
    shares = [
        1 - num_tokens * packed / kv_bytes(system, num_tokens)
        for num_tokens in range(prompt, prompt + output)
    ]
    return mean(shares)


def share_above(gaps: Gaps, bound_s: float) -> float:
    return gaps.num_above(bound_s) / max(1, gaps.total)


# --- measured -------------------------------------------------------------------------------------


def measured_systems() -> tuple[System, System]:
    """Ours has pages for all requests at once; legacy the same bytes."""
    model = ModelConfig.load(home() / "models" / NAME)
    ours, legacy = page_layout(model, DEFAULT_KV_CODEC), page_layout(model, "bf16")
    longest = MEASURED_PROMPT + MEASURED_OUTPUT
    pool = pool_of(AT_ONCE * -(-longest // ours.block_size), AT_ONCE)
    budget = pool.num_bytes(ours)
    token_bytes = legacy.payload_bytes(PageKind.EXACT) / legacy.block_size
    places = int(budget / (MEASURED_RESERVATION * token_bytes))
    legacy_pool = pool_within(budget, legacy, places)
    assert legacy_pool is not None
    return (
        System(
            codec="bf16",
            chunk=str(round_up(MEASURED_PROMPT + places, legacy.block_size)),
            places=places,
            layout=legacy,
            pool=legacy_pool,
            reserved_tokens=MEASURED_RESERVATION,
        ),
        System(
            codec=DEFAULT_KV_CODEC,
            chunk=AUTO,
            places=AT_ONCE,
            layout=ours,
            pool=pool,
            reserved_tokens=None,
        ),
    )


def measured(system: System) -> Column:
    prompts = [random_prompt(MEASURED_PROMPT, seed) for seed in range(NUM_MEASURED)]
    with tempfile.TemporaryDirectory() as directory:
        config = Path(directory, "tandem.toml")
        config.write_text(f"[decode]\nmax-num-seqs = {system.places}\n")
        arguments = (
            *("--config", str(config), "--prefill", "0", "--decode", "0", "--colocated", "1"),
            *("--kv-codec", system.codec, "--chunk-tokens", system.chunk),
            *("--kv-blocks", str(system.pool.num_packed)),
        )
        with serving(*arguments) as served:
            run_load(served.url, served.model, [random_prompt(32, 999)], 4, 1)
            seen, _ = run_load(served.url, served.model, prompts, MEASURED_OUTPUT, AT_ONCE)
    return column_of(system, seen)


def column_of(system: System, seen: Sequence[Seen]) -> Column:
    seen = sorted(seen, key=lambda request: request.sent)
    steady = seen[AT_ONCE:]
    gaps = [gap for request in seen for gap in request.gaps_s]
    ends = [(request.tokens[0], 1) for request in seen]
    ends += [(request.tokens[-1], -1) for request in seen]
    at_once = peak = 0
    for _, change in sorted(ends):
        at_once += change
        peak = max(peak, at_once)
    bound = SPIKE * median(gaps)
    num_tokens = sum(len(request.tokens) for request in seen)
    wall_s = max(request.tokens[-1] for request in seen) - seen[0].sent
    return Column(
        ttft_p99_s=None,
        ttft_steady_p99_s=percentile([request.ttft_s for request in steady], 0.99),
        ttft_arrival_p99_s=percentile([request.ttft_s for request in seen], 0.99),
        output_tokens_per_s=num_tokens / wall_s,
        concurrent=peak,
        kv_bytes=kv_bytes(system, MEASURED_PROMPT + MEASURED_OUTPUT),
        itl_p50_s=median(gaps),
        itl_p99_s=percentile(gaps, 0.99),
        spikes=sum(gap > bound for gap in gaps) / len(gaps),
        waste=waste(system, MEASURED_PROMPT, MEASURED_OUTPUT),
    )


# --- the table ------------------------------------------------------------------------------------


def print_table(console: Console, pairs: dict[str, tuple[Column, Column]]) -> None:
    table = Table(title="legacy -> ours (change)")
    table.add_column("")
    for name in pairs:
        table.add_column(name, justify="right")
    rows: list[tuple[str, str, float, str]] = [
        ("TTFT p99 after a place is given, ms", "ttft_p99_s", 1e3, ",.0f"),
        (
            "the same (measured: from arrival) without the first rush, ms",
            "ttft_steady_p99_s",
            1e3,
            ",.0f",
        ),
        ("TTFT p99 from arrival, ms", "ttft_arrival_p99_s", 1e3, ",.0f"),
        ("output tokens/s", "output_tokens_per_s", 1, ",.0f"),
        ("concurrent requests, same memory", "concurrent", 1, ".0f"),
        ("KV memory per request, MB", "kv_bytes", 1e-6, ",.1f"),
        ("ITL p50, ms", "itl_p50_s", 1e3, ",.1f"),
        ("ITL p99, ms", "itl_p99_s", 1e3, ",.1f"),
        ("ITL spikes, of 1,000 gaps", "spikes", 1e3, ",.2f"),
        ("KV bytes held in vain, %", "waste", 100, ".1f"),
    ]
    for title, field, scale, form in rows:
        table.add_row(title, *(cell(pair, field, scale, form) for pair in pairs.values()))
    console.print(table)
    console.print(
        f"published besides: {PUBLISHED_FEWER_SPIKES:.0%} fewer p99 spikes, fragmentation below"
        f" {PUBLISHED_WASTE:.0%}"
    )


def cell(pair: tuple[Column, Column], field: str, scale: float, form: str) -> str:
    before, after = (getattr(column, field) for column in pair)
    if before is None or after is None:
        return "-"
    change = f" ({100 * (after / before - 1):+.1f} %)" if before else ""
    return f"{format(before * scale, form)} -> {format(after * scale, form)}{change}"


def errors(predicted: Column, published: Column) -> list[str]:
    rows = (
        ("TTFT p99", "ttft_p99_s"),
        ("output tokens/s", "output_tokens_per_s"),
        ("concurrent requests", "concurrent"),
        ("KV memory per request", "kv_bytes"),
    )
    return [
        f"{title}: {100 * (getattr(predicted, field) / getattr(published, field) - 1):+.0f} %"
        for title, field in rows
    ]


def round_up(value: int, multiple: int) -> int:
    return math.ceil(value / multiple) * multiple


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.table", allow_abbrev=False)
    parser.add_argument("--simulated", action="store_true", help="leave the real fleet out")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers here")
    options = parser.parse_args()
    console = Console(width=150)
    compute, bandwidth = fitted()
    legacy = simulated(legacy_system(), compute, bandwidth)
    ours = simulated(our_system(), compute, bandwidth)
    pairs = {"published": PUBLISHED, f"simulated, {TP} x {GPU}": (legacy, ours)}
    if not options.simulated:
        first, second = (measured(system) for system in measured_systems())
        pairs["measured, CPU"] = (first, second)
    print_table(console, pairs)
    console.print(
        f"fitted to the published legacy row: {compute:.1%} of peak compute, {bandwidth:.1%} of"
        " peak bandwidth"
    )
    console.print("error of the legacy row: " + ", ".join(errors(legacy, PUBLISHED[0])[:2]))
    console.print("error of our row, predicted: " + ", ".join(errors(ours, PUBLISHED[1])))
    if options.json is not None:
        content: dict[str, Any] = {
            name: [asdict(column) for column in pair] for name, pair in pairs.items()
        }
        content["fitted"] = {"compute": compute, "bandwidth": bandwidth}
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
