"""`python -m bench [serve] [handoff] [router]`: tables on stdout, the same as JSON with --json.

Exit code 1 when a bound is missed.
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import handoff, router, serve

TARGETS = ("serve", "handoff", "router")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", allow_abbrev=False)
    parser.add_argument(
        "targets", nargs="*", choices=[*TARGETS, []], help=f"default: {' '.join(TARGETS)}"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers here")
    options = parser.parse_args()
    results: dict[str, Any] = {}
    console = Console(width=120)
    for target in options.targets or TARGETS:
        results[target] = PRINTERS[target](console)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0 if all(check["holds"] for check in results.get("handoff", [])) else 1


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


PRINTERS = {"serve": print_serve, "handoff": print_handoff, "router": print_router}


def pair(values: tuple[float, float], scale: float) -> str:
    return " / ".join(f"{value * scale:.3g}" for value in values)


if __name__ == "__main__":
    sys.exit(main())
