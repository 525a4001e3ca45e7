"""The published comparison beside what we simulate and what we measure.

    make bench-table                       everything
    python -m bench.table --simulated      without the real fleet

bench/published.py says what was published and how it is simulated. **Measured**: the demo model on
this machine's CPU, one worker with all cores, 300 tokens in, 50 out, 64 at once; the same bytes of
KV on both sides.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.load import Seen, percentile, random_prompt, run_load
from bench.published import (
    AT_ONCE,
    GPU,
    NUM_RANKS,
    PUBLISHED,
    PUBLISHED_FEWER_SPIKES,
    PUBLISHED_WASTE,
    SPIKE,
    Column,
    System,
    deviations,
    exchange_share,
    fitted,
    kv_bytes,
    legacy_system,
    our_system,
    round_up,
    simulated,
    waste,
)
from bench.serving import serving
from commands.demo_model import NAME
from common.codecs import DEFAULT_KV_CODEC
from common.environment import home
from common.model_config import ModelConfig
from common.pages import PageKind
from engine.pool_size import pool_of, pool_within
from simulator.costs import BANDWIDTH_EFFICIENCY, COMPUTE_EFFICIENCY
from simulator.deployment import AUTO, page_layout

MEASURED_PROMPT, MEASURED_OUTPUT, NUM_MEASURED = 300, 50, 192
MEASURED_RESERVATION = 512
"""Tokens: the smallest power of two that holds a request."""


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


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.table", allow_abbrev=False)
    parser.add_argument("--simulated", action="store_true", help="leave the real fleet out")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers here")
    options = parser.parse_args()
    console = Console(width=170)
    shares = {"as planned": (COMPUTE_EFFICIENCY, BANDWIDTH_EFFICIENCY), "fitted": fitted()}
    pairs = {"published": PUBLISHED}
    for name, efficiencies in shares.items():
        pairs[f"{NUM_RANKS} ranks of {GPU}, {name}"] = (
            simulated(legacy_system(), *efficiencies),
            simulated(our_system(), *efficiencies),
        )
    simulated_pairs = dict(zip(shares, list(pairs.values())[1:], strict=True))
    if not options.simulated:
        first, second = (measured(system) for system in measured_systems())
        pairs["measured, CPU"] = (first, second)
    print_table(console, pairs)
    for name, pair in simulated_pairs.items():
        print_deviations(console, name, pair, shares[name])
    if options.json is not None:
        content: dict[str, Any] = {
            name: [asdict(column) for column in pair] for name, pair in pairs.items()
        }
        content["shares of peak compute and bandwidth"] = shares
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


def print_deviations(
    console: Console, name: str, pair: tuple[Column, Column], efficiencies: tuple[float, float]
) -> None:
    compute, bandwidth = efficiencies
    share = exchange_share(our_system(), compute, bandwidth)
    console.print(
        f"{name}: {compute:.1%} of peak compute, {bandwidth:.1%} of peak bandwidth; ranks exchange"
        f" sums for {share:.1%} of a step of {AT_ONCE} decodes"
    )
    for row, found, published in zip(("legacy", "ours"), pair, PUBLISHED, strict=True):
        console.print(f"  {row}, from published: " + ", ".join(deviations(found, published)))


if __name__ == "__main__":
    sys.exit(main())
