"""`python -m bench [TARGET ...]`: tables on stdout, the same as JSON with --json.

Exit code 1 when a bound is missed.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import handoff, hostile, interference, router, scheduler, serve, simulator_tables

DEFAULT = ("serve", "handoff", "router", "scheduler")
CHECKED = ("scheduler", "interference", "plan-speed", "prediction", "grid")
TARGETS = (*DEFAULT, *CHECKED[1:])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", allow_abbrev=False)
    parser.add_argument(
        "targets", nargs="*", choices=[*TARGETS, []], help=f"default: {' '.join(DEFAULT)}"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers here")
    parser.add_argument(
        "--hostile", action="store_true", help="router: beside requests that ask for far too much"
    )
    options = parser.parse_args()
    if options.hostile:
        if options.targets != ["router"]:
            parser.error("--hostile is of the target router")
        options.targets = ["hostile"]
    results: dict[str, Any] = {}
    console = Console(width=120)
    for target in options.targets or DEFAULT:
        results[target] = PRINTERS[target](console)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    has_held = all(check["holds"] for check in results.get("handoff", []))
    checked = (*CHECKED, "hostile")
    has_held &= all(results[name]["holds"] for name in checked if name in results)
    return 0 if has_held else 1


def print_serve(console: Console) -> list[dict[str, Any]]:
    title = (
        f"{serve.NUM_REQUESTS} requests, {serve.PROMPT_TOKENS} tokens in, "
        f"{serve.OUTPUT_TOKENS} out, {serve.CONCURRENCY} at a time"
    )
    table = Table(title=title)
    for name in (
        "fleet",
        "wall s",
        "requests/s",
        "output tokens/s",
        "TTFT s",
        "ITL ms",
        "exposed transfer ms",
    ):
        table.add_column(name, justify="left" if name == "fleet" else "right")
    rows = serve.run()
    for row in rows:
        exposed = "-" if row.exposed_s is None else pair(row.exposed_s, 1000)
        table.add_row(
            row.fleet,
            f"{row.wall_s:.1f}",
            f"{row.requests_per_s:.2f}",
            f"{row.output_tokens_per_s:.1f}",
            pair(row.ttft_s, 1),
            pair(row.itl_s, 1000),
            exposed,
        )
    console.print(table)
    console.print("pairs are median / p99")
    return [asdict(row) for row in rows]


def print_handoff(console: Console) -> list[dict[str, Any]]:
    table = Table(
        title=f"a prompt of {handoff.PROMPT_TOKENS} tokens, chunks of {handoff.CHUNK_TOKENS}"
    )
    for name in ("", "measured", "bound", "holds"):
        table.add_column(name, justify="left" if not name else "right")
    checks = handoff.run()
    for check in checks:
        table.add_row(
            check.name,
            f"{check.measured:.4g}{check.unit}",
            f"{check.bound:g}{check.unit}",
            "yes" if check.holds else "NO",
        )
    console.print(table)
    return [{**asdict(check), "holds": check.holds} for check in checks]


def print_router(console: Console) -> list[dict[str, Any]]:
    table = Table(title=f"the router alone, {router.CONCURRENCY} streams")
    for name in ("", "tokens", "tokens/s", "tokens/s per core", "added ms"):
        table.add_column(name, justify="left" if not name else "right")
    rows = router.run()
    for row in rows:
        table.add_row(
            row.name,
            f"{row.tokens:,}",
            f"{row.tokens_per_s:,.0f}",
            f"{row.tokens_per_core_s:,.0f}",
            "-" if row.added_ms is None else pair(row.added_ms, 1),
        )
    console.print(table)
    return [asdict(row) for row in rows]


def print_scheduler(console: Console) -> dict[str, Any]:
    table = Table(title="decisions of a step, microseconds")
    for name in (
        "waiting",
        "blocks",
        "admit",
        "plan",
        "plan p99",
        "apply",
        "plan (prefill worker)",
    ):
        table.add_column(name, justify="right")
    report = scheduler.run()
    for row in report.rows:
        times = (row.admit_s, row.plan_s, row.worst_plan_s, row.apply_s, row.prefill_plan_s)
        table.add_row(
            f"{row.num_waiting:,}",
            f"{row.num_blocks:,}",
            *(f"{1e6 * value:.1f}" for value in times),
        )
    console.print(table)
    console.print(
        f"{scheduler.NUM_RUNNING} running in the large pool, half of that in the small one; plan "
        f"with {scheduler.WAITING[-1]:,} waiting against none: {report.plan_ratio:.2f} times "
        f"(bound {scheduler.MAX_PLAN_RATIO}), at most {1e6 * scheduler.MAX_PLAN_S:.0f} us: "
        f"{'holds' if report.holds else 'DOES NOT HOLD'}"
    )
    per_pool = ", ".join(f"{1e6 * v:.2f} us of {k:,}" for k, v in report.allocate_s.items())
    console.print(f"allocating a block, all cached: {per_pool}")
    return {**asdict(report), "holds": report.holds}


def print_interference(console: Console) -> dict[str, Any]:
    table = Table(
        title=f"{interference.NUM_STREAMS} streams of {interference.OUTPUT_TOKENS} tokens, with "
        f"prompts of {interference.PROMPT_TOKENS} tokens one after the other; median of "
        f"{interference.NUM_RUNS} runs"
    )
    names = (
        "fleet",
        "quiet ITL ms",
        "ITL p50 ms",
        "p99 ms",
        "max ms",
        "p99 / quiet",
        "max / quiet",
    )
    for name in (*names, "prompts' TTFT s"):
        table.add_column(name, justify="left" if name == "fleet" else "right")
    report = interference.run()
    for row in report.rows:
        times = (row.quiet_s, row.itl_s, row.p99_s, row.max_s)
        table.add_row(
            row.fleet,
            *(f"{1e3 * value:.1f}" for value in times),
            f"{row.p99_s / row.quiet_s:.2f}",
            f"{row.max_s / row.quiet_s:.2f}",
            f"{row.ttft_s:.2f}",
        )
    console.print(table)
    console.print(
        f"disaggregated: p99 at most {interference.MAX_P99:g} and max at most "
        f"{interference.MAX_MAX:g} times the quiet median: "
        f"{'holds' if report.holds else 'DOES NOT HOLD'}"
    )
    return {**asdict(report), "holds": report.holds}


def print_hostile(console: Console) -> dict[str, Any]:
    table = Table(
        title=f"{hostile.NUM_STREAMS} streams beside requests that ask for far too much; medians "
        f"of {hostile.NUM_RUNS} runs"
    )
    for name in ("kind", "gap ms", "without", "times", "/health ms", "stall ms", "answers"):
        table.add_column(name, justify="left" if name in ("kind", "answers") else "right")
    report = hostile.run()
    for row in report.rows:
        table.add_row(
            row.kind,
            f"{1e3 * row.attack.gap_s:.0f}",
            f"{1e3 * row.base.gap_s:.0f}",
            f"{row.ratio:.2f}",
            f"{1e3 * row.attack.health_s:.0f}",
            f"{1e3 * row.attack.stall_s:.0f}",
            row.statuses,
        )
    console.print(table)
    ended = ", ".join(report.dead) or "nothing"
    console.print(
        f"killed under {hostile.ADDRESS_SPACE / 1e9:g} GB of address space for the router: "
        f"{ended}; "
        f"gaps at most {hostile.MAX_RATIO:g} times, /health within {hostile.MAX_HEALTH_S:g} s: "
        f"{'holds' if report.holds else 'DOES NOT HOLD'}"
    )
    return {**asdict(report), "holds": report.holds}


PRINTERS: dict[str, Callable[[Console], Any]] = {
    "plan-speed": simulator_tables.print_plan_speed,
    "prediction": simulator_tables.print_prediction,
    "grid": simulator_tables.print_grid,
    "serve": print_serve,
    "handoff": print_handoff,
    "router": print_router,
    "hostile": print_hostile,
    "scheduler": print_scheduler,
    "interference": print_interference,
}


def pair(values: tuple[float, float], scale: float) -> str:
    return " / ".join(f"{value * scale:.3g}" for value in values)


if __name__ == "__main__":
    sys.exit(main())
