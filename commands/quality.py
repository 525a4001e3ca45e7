"""`tandem quality`: what a KV codec costs, measured through the paged engine on a text.

Windows of the text are compared position by position (`compare.py`); a second set of windows is
long, since errors of K grow with distance. The checked codec is held to bounds on the distance from
fp32 (KL) and on the share of positions with the same most likely token, each by the worse end of
its 95 % interval, so that luck with few windows passes nothing. Perplexity is over the text's own
tokens, and shown only: its change is noise where KL is not.
With `--tasks` the share of right answers is compared as well (`tasks.py`).
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from commands.config import QualityConfig
from common.codecs import codec_named
from common.environment import available_cores
from common.errors import ConfigError
from common.model_config import ModelConfig
from engine.calibration import read_tokens, spread
from engine.compare import BUCKET, Candidate, Engines, Interval, Quality, measure
from engine.tasks import Accuracy, accuracy_of, read_tasks

Report = Callable[[str], None]


def run(config: QualityConfig, report: Report) -> int:
    """Prints a table; 1 when the checked codec is beyond a bound."""
    threads = config.threads or available_cores()
    engines = Engines(config.model, config.block_size, threads)
    tokens = read_tokens(config.model, config.text)
    results: list[Quality] = []
    with _progress() as progress:
        for window_tokens, count in windows_of(config):
            windows = spread(tokens, window_tokens, count)
            if len(windows) < 2:
                raise ConfigError(
                    f"the text has one window of {window_tokens:,} tokens only; an interval needs "
                    f"two: take a longer text, or fewer kinds of windows",
                    param="text",
                )
            report(f"{len(windows)} windows of {window_tokens:,} tokens")
            task = progress.add_task(f"{window_tokens:,} tokens", total=len(windows))
            candidates = candidates_of(config)
            found = measure(engines, windows, candidates, partial(progress.advance, task))
            results += found
            for line in table_of(found):
                report(line)
    accuracies = task_accuracies(config, engines) if config.tasks is not None else []
    for line in accuracy_table(accuracies):
        report(line)
    if config.json is not None:
        rows = [asdict(result) for result in results] + [asdict(a) for a in accuracies]
        text = json.dumps(rows, indent=1)
        Path(config.json).write_text(text + "\n", encoding="utf-8")
    misses = misses_of(config, results) + accuracy_misses(config, accuracies)
    for miss in misses:
        report(f"MISSED: {miss}")
    return 1 if misses else 0


def _progress() -> Progress:
    """Beside the table, on standard error; nothing where that is a file."""
    console = Console(stderr=True)
    columns = (TextColumn("windows of {task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(
        *columns,
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def task_accuracies(config: QualityConfig, engines: Engines) -> list[Accuracy]:
    """Of fp32 first, then of each candidate."""
    assert config.tasks is not None
    longest = ModelConfig.load(config.model).longest
    tasks = read_tasks(config.model, config.tasks, longest)
    num_blocks = -(-max(task.num_tokens for task in tasks) // config.block_size)
    found = []
    for candidate in (Candidate(codec="fp32"), *candidates_of(config)):
        runner = engines.runner(candidate, num_blocks)
        found.append(accuracy_of(candidate.name, runner, tasks, config.block_size))
    return found


def accuracy_table(accuracies: Sequence[Accuracy]) -> Iterator[str]:
    if not accuracies:
        return
    width = max(len(result.name) for result in accuracies) + 2
    yield f"{accuracies[0].num_tasks} tasks"
    yield f"{'codec':{width}}{'right':>7}{'accuracy %':>12}{'of fp32 %':>11}"
    for r in accuracies:
        kept = f"{kept_of(r, accuracies[0]):>11.2f}"
        yield f"{r.name:{width}}{r.num_right:>7}{r.share * 100:>12.2f}{kept}"


def kept_of(result: Accuracy, fp32: Accuracy) -> float:
    """Percent of fp32's accuracy; 100 where fp32 has none to keep."""
    return 100.0 * result.num_right / fp32.num_right if fp32.num_right else 100.0


def accuracy_misses(config: QualityConfig, accuracies: Sequence[Accuracy]) -> list[str]:
    return [
        f"{r.name} over {r.num_tasks} tasks: {kept_of(r, accuracies[0]):.2f} % of fp32's accuracy, "
        f"bound {config.min_accuracy_kept:g} %"
        for r in accuracies
        if r.name == checked(config) and kept_of(r, accuracies[0]) < config.min_accuracy_kept
    ]


def windows_of(config: QualityConfig) -> list[tuple[int, int]]:
    """Lengths and counts; a length beyond the model's positions is cut to them."""
    longest = ModelConfig.load(config.model).longest // 16 * 16
    wanted = ((1024, config.windows), (8192, config.long_windows))
    return [(min(length, longest), count) for length, count in wanted if count]


def candidates_of(config: QualityConfig) -> list[Candidate]:
    """Quantised codecs without offsets too: offsets must not do harm. Quantised weights with fp32
    pages too: what they cost alone.
    """
    weights = config.weight_dtype
    candidates = []
    if weights != "auto" and "fp32" not in config.codecs:
        candidates.append(Candidate(codec="fp32", weight_dtype=weights))
    for codec in config.codecs:
        candidates.append(Candidate(codec=codec, weight_dtype=weights))
        if codec_named(codec).is_quantised and config.compare_offsets:
            without = Candidate(codec=codec, weight_dtype=weights, is_calibrated=False)
            candidates.append(without)
    return candidates


def checked(config: QualityConfig, *, is_calibrated: bool = True) -> str:
    """Name of what the bounds hold for."""
    weights = config.weight_dtype
    candidate = Candidate(codec=config.check, weight_dtype=weights, is_calibrated=is_calibrated)
    return candidate.name


def is_long(result: Quality) -> bool:
    return result.window_tokens > 2 * BUCKET


def table_of(results: Sequence[Quality]) -> Iterator[str]:
    width = max(len(result.name) for result in results) + 2
    end = "  change by thousand positions" if is_long(results[0]) else ""
    yield (
        f"{'codec':{width}}{'KL':>9}{'95 %':>20}{'top-1 %':>9}{'95 %':>17}"
        f"{'perplexity':>12}{'change':>9}{end}"
    )
    for r in results:
        kl = f"{max(r.kl.low, 0):.5f} - {r.kl.high:.5f}"
        top = f"{r.top_1.low * 100:.2f} - {min(r.top_1.high, 1) * 100:.2f}"
        row = f"{r.name:{width}}{r.kl.mean:>9.5f}{kl:>20}{r.top_1.mean * 100:>9.2f}{top:>17}"
        row += f"{r.perplexity:>12.3f}{r.change:>+9.3f}"
        if is_long(r):
            row += "  " + " ".join(f"{change:+.3f}" for change in r.by_thousand)
        yield row


def misses_of(config: QualityConfig, results: Sequence[Quality]) -> list[str]:
    """Bounds that the checked codec does not keep."""
    misses = []
    name, plain = checked(config), checked(config, is_calibrated=False)
    for r in (result for result in results if result.name == name):
        where = f"{name} over {r.num_windows} windows of {r.window_tokens:,}"
        max_kl = config.max_long_kl if is_long(r) else config.max_kl
        if r.kl.high > max_kl:
            misses.append(f"{where}: KL up to {r.kl.high:.5f}, bound {max_kl:g}")
        low = r.top_1.low * 100
        if low < config.min_top_1:
            misses.append(f"{where}: same top-1 from {low:.2f} %, bound {config.min_top_1:g} %")
        for other in results:
            if other.name == plain and other.window_tokens == r.window_tokens:
                harm = Interval.of(np.subtract(r.kl_by_window, other.kl_by_window))
                if harm.low > 0:
                    misses.append(f"{where}: KL is {harm.mean:.5f} more than without offsets")
    return misses
