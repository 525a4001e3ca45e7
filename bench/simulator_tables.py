"""Tables of what the simulator is measured by: its speed, its predictions, the grid of loads."""

from dataclasses import asdict
from statistics import mean
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import grid, plan_speed, prediction


def print_plan_speed(console: Console) -> dict[str, Any]:
    table = Table(
        title=f"simulated requests; {plan_speed.GOAL_REQUESTS:,} should take at most"
        f" {plan_speed.GOAL_S:.0f} s"
    )
    names = ("fleet", "requests", "simulated s", "CPU s", "requests/s", "steps", "events")
    for name in (*names, f"{plan_speed.GOAL_REQUESTS:,} take s"):
        table.add_column(name, justify="left" if name == "fleet" else "right")
    rows = plan_speed.run()
    for row in rows:
        table.add_row(
            row.fleet,
            f"{row.requests:,}",
            f"{row.simulated_s:.0f}",
            f"{row.cpu_s:.1f}",
            f"{row.requests_per_s:.0f}",
            f"{row.num_steps:,}",
            f"{row.num_events:,}",
            f"{row.goal_s:.0f}",
        )
    console.print(table)
    return {
        "rows": [{**asdict(row), "requests_per_s": row.requests_per_s} for row in rows],
        "holds": all(row.goal_s <= plan_speed.GOAL_S for row in rows),
    }


def print_prediction(console: Console) -> dict[str, Any]:
    table = Table(
        title=f"{prediction.PROMPT} tokens in, {prediction.OUTPUT} out, {prediction.AT_ONCE} at"
        f" once: medians, measured / predicted; errors should stay within {prediction.BOUND:.0%}"
    )
    for name in ("fleet", "TTFT ms", "error", "ITL ms", "error", "output tokens/s"):
        table.add_column(name, justify="left" if name == "fleet" else "right")
    rows = prediction.run()
    for row in rows:
        table.add_row(
            row.fleet,
            pair(row.ttft_s, 1000),
            f"{row.errors[0]:+.1%}",
            pair(row.itl_s, 1000),
            f"{row.errors[1]:+.1%}",
            pair(row.output_tokens_per_s, 1),
        )
    console.print(table)
    return {
        "rows": [asdict(row) for row in rows],
        "holds": all(row.holds for row in rows),
    }


def print_grid(console: Console) -> dict[str, Any]:
    table = Table(
        title=f"goodput, requests/s of {grid.NUM_WORKERS} workers; ITL {1000 * grid.ITL_S:.0f} ms"
    )
    names = ("prompt", "output", "load", "aggregated", "disaggregated", "same fleet", "Tandem")
    for name in (*names, "loss %"):
        table.add_column(name, justify="right", no_wrap=True)
    rows = grid.run(lambda row: console.print("  ".join(grid_columns(row))))
    for row in rows:
        table.add_row(*grid_columns(row))
    console.print(table)
    losses = [row.loss for row in rows]
    worst = max(rows, key=lambda row: row.loss)
    console.print(
        f"below the better of the two: on average {mean(losses):.1%} (at most"
        f" {grid.MEAN_BOUND:.0%}), at worst {worst.loss:.1%} (at most {grid.WORST_BOUND:.0%}) with"
        f" {worst.cell.prompt} in, {worst.cell.output} out, load {worst.cell.load:g}"
    )
    return {
        "rows": [{**asdict(row), "loss": row.loss} for row in rows],
        "holds": mean(losses) <= grid.MEAN_BOUND and worst.loss <= grid.WORST_BOUND,
    }


def grid_columns(row: grid.Row) -> tuple[str, ...]:
    return (
        str(row.cell.prompt),
        str(row.cell.output),
        f"{row.cell.load:g}",
        f"{row.aggregated:.4g}",
        f"{row.disaggregated:.4g} ({row.disaggregated_fleet})",
        f"{row.same_fleet:.4g}",
        f"{row.tandem:.4g} ({row.tandem_fleet})",
        f"{100 * row.loss:+.1f}",
    )


def pair(values: tuple[float, float], scale: float) -> str:
    return " / ".join(f"{value * scale:.4g}" for value in values)
