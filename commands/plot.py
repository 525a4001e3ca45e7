"""The planner's rows as a picture: goodput of each deployment, and how near each comes to the
targets.
"""

from pathlib import Path

from common.errors import ConfigError
from simulator.planner import Plan, Row, Targets


def draw(plan: Plan, targets: Targets, path: Path) -> None:
    """Writes a PNG. Raises ConfigError without matplotlib, or when the file cannot be written."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: pip install matplotlib") from error
    rows = list(plan.rows)
    figure = Figure(figsize=(12, max(4.0, 0.32 * len(rows) + 1.5)), layout="constrained")
    bars, dots = figure.subplots(1, 2)
    colours = ["tab:green" if row is plan.recommended else "tab:blue" for row in rows]
    bars.barh([name(row) for row in rows], [row.goodput_per_gpu for row in rows], color=colours)
    bars.invert_yaxis()
    bars.set_xlabel("goodput per GPU (requests/s)")
    dots.scatter([row.ttft_s[1] for row in rows], [1000 * row.itl_s[1] for row in rows], c=colours)
    for row in rows:
        dots.annotate(
            row.deployment.shape,
            (row.ttft_s[1], 1000 * row.itl_s[1]),
            textcoords="offset points",
            xytext=(4, 3),
            fontsize=7,
        )
    dots.axvline(targets.ttft_s, linestyle="--", color="gray")
    dots.axhline(1000 * targets.itl_s, linestyle="--", color="gray")
    dots.set(xscale="log", yscale="log", xlabel="TTFT p99 (s)", ylabel="ITL p99 (ms)")
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise ConfigError(f"--plot {path}: {error.strerror or error}") from error


def name(row: Row) -> str:
    deployment = row.deployment
    return f"{deployment.shape}, {deployment.chunk}, {deployment.codec}"
