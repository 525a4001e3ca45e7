"""`tandem quality`: what a KV codec costs, measured through the paged engine on a text.

Windows of the text are computed chunk by chunk by one engine with fp32 pages and one engine for
each codec, which may have int8 weights too; at every position their next-token distributions are
compared. Perplexity is over the text's own tokens, `same top-1` is the share of positions with the
same most likely token, KL is from fp32 to the codec. A second column of windows is long, since
errors of K grow with distance.
With `--tasks` the share of right answers is compared as well (`tasks.py`).
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.config import QualityConfig, available_cores
from common.engine.calibrate import CHUNK_TOKENS, plans_of, read_tokens, spread
from common.engine.runner import ModelRunner, load_runner
from common.engine.tasks import Accuracy, accuracy_of, read_tasks
from common.model_config import ModelConfig
from common.pages import codec_named

BUCKET = 1000
"""Positions of a long window that are reported together."""

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """What is compared with fp32."""

    codec: str
    is_calibrated: bool = True
    weight_dtype: str = "auto"

    @property
    def name(self) -> str:
        weights = "" if self.weight_dtype == "auto" else f", {self.weight_dtype} weights"
        return self.codec + weights + ("" if self.is_calibrated else " without offsets")


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """Of one candidate over all windows of one length."""

    name: str
    num_windows: int
    window_tokens: int
    perplexity: float
    change: float
    """Of perplexity against fp32."""
    same_top_1: float
    """Share of positions, 0 to 1."""
    mean_kl: float
    """In nats."""
    by_thousand: tuple[float, ...]
    """Change of perplexity over positions 0 to 999, 1000 to 1999, ..."""


@dataclass(slots=True)
class Tally:
    """Numbers of every position: [windows, predicted positions]."""

    losses: list[NDArray[np.float32]] = field(default_factory=list)
    is_same: list[NDArray[np.bool_]] = field(default_factory=list)
    kl: list[NDArray[np.float32]] = field(default_factory=list)


def run(config: QualityConfig, report: Report) -> int:
    """Prints a table; 1 when the checked codec is beyond a bound."""
    threads = config.threads or available_cores()
    torch.set_num_threads(threads)
    tokens = read_tokens(config.model, config.text)
    results: list[Quality] = []
    for window_tokens, count in windows_of(config):
        windows = spread(tokens, window_tokens, count)
        report(f"{len(windows)} windows of {window_tokens:,} tokens")
        found = measure(config.model, windows, candidates_of(config), config.block_size, threads)
        results += found
        for line in table_of(found):
            report(line)
    accuracies = task_accuracies(config, threads) if config.tasks is not None else []
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


def task_accuracies(config: QualityConfig, threads: int) -> list[Accuracy]:
    """Of fp32 first, then of each candidate."""
    assert config.tasks is not None
    longest = ModelConfig.load(config.model).max_position_embeddings
    tasks = read_tasks(config.model, config.tasks, longest)
    num_blocks = -(-max(task.num_tokens for task in tasks) // config.block_size)
    found = []
    for candidate in (Candidate(codec="fp32"), *candidates_of(config)):
        runner = load_runner(
            config.model,
            codec=candidate.codec,
            block_size=config.block_size,
            num_blocks=num_blocks,
            num_exact=1,
            num_threads=threads,
            max_num_tokens=CHUNK_TOKENS,
            is_calibrated=candidate.is_calibrated,
            weight_dtype=candidate.weight_dtype,
        )
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
    longest = ModelConfig.load(config.model).max_position_embeddings // 16 * 16
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


def measure(
    model: str | Path,
    windows: NDArray[np.int32],
    candidates: Sequence[Candidate],
    block_size: int,
    threads: int,
) -> list[Quality]:
    """One result for fp32 itself, then one for each candidate."""
    everyone = [Candidate(codec="fp32"), *candidates]
    runners = [
        load_runner(
            model,
            codec=candidate.codec,
            block_size=block_size,
            num_blocks=windows.shape[1] // block_size,
            num_exact=1,
            num_threads=threads,
            max_num_tokens=CHUNK_TOKENS,
            is_calibrated=candidate.is_calibrated,
            weight_dtype=candidate.weight_dtype,
        )
        for candidate in everyone
    ]
    tallies = [Tally() for _ in everyone]
    for window in windows:
        for targets, logits in steps(runners, window, block_size):
            reference = torch.log_softmax(next(logits)[: len(targets)], dim=-1)
            add(tallies[0], reference, reference, targets)
            for tally, found in zip(tallies[1:], logits, strict=True):
                add(tally, torch.log_softmax(found[: len(targets)], dim=-1), reference, targets)
    return [
        quality_of(candidate.name, tally, tallies[0], windows)
        for candidate, tally in zip(everyone, tallies, strict=True)
    ]


def steps(
    runners: Sequence[ModelRunner], window: NDArray[np.int32], block_size: int
) -> Iterator[tuple[Tensor, Iterator[Tensor]]]:
    """For each chunk: the tokens that its rows predict, and every runner's logits, one by one."""
    for plan in plans_of(window, block_size):
        if not plan.chunks:
            for runner in runners:
                runner.execute(plan)
            continue
        first, count = plan.chunks[0].start, plan.chunks[0].num_tokens
        targets = torch.from_numpy(window[first + 1 : first + count + 1].astype(np.int64))
        yield targets, (runner.all_logits(plan) for runner in runners)


def add(tally: Tally, found: Tensor, reference: Tensor, targets: Tensor) -> None:
    """Log-probabilities [rows, vocab_size] of one chunk."""
    tally.losses.append(-found.gather(1, targets[:, None])[:, 0].numpy())
    tally.is_same.append((found.argmax(1) == reference.argmax(1)).numpy())
    distance = torch.nn.functional.kl_div(found, reference, reduction="none", log_target=True)
    tally.kl.append(distance.sum(1).numpy())


def quality_of(name: str, tally: Tally, fp32: Tally, windows: NDArray[np.int32]) -> Quality:
    num_windows, window_tokens = windows.shape
    losses, base = (
        np.concatenate(which.losses).reshape(num_windows, -1).astype(np.float64)
        for which in (tally, fp32)
    )
    buckets = range(0, window_tokens - 1, BUCKET)

    def change(first: int, end: int) -> float:
        return float(np.exp(losses[:, first:end].mean()) - np.exp(base[:, first:end].mean()))

    return Quality(
        name=name,
        num_windows=num_windows,
        window_tokens=window_tokens,
        perplexity=float(np.exp(losses.mean())),
        change=change(0, window_tokens),
        same_top_1=float(np.concatenate(tally.is_same).mean()),
        mean_kl=float(np.concatenate(tally.kl).mean()),
        by_thousand=tuple(change(first, first + BUCKET) for first in buckets),
    )


def table_of(results: Sequence[Quality]) -> Iterator[str]:
    width = max(len(result.name) for result in results) + 2
    is_long = results[0].window_tokens > 2 * BUCKET
    end = "  change by thousand positions" if is_long else ""
    yield f"{'codec':{width}}{'perplexity':>11}{'change':>9}{'top-1 %':>9}{'KL':>9}{end}"
    for r in results:
        row = f"{r.name:{width}}{r.perplexity:>11.3f}{r.change:>+9.3f}"
        row += f"{r.same_top_1 * 100:>9.2f}{r.mean_kl:>9.4f}"
        if is_long:
            row += "  " + " ".join(f"{change:+.3f}" for change in r.by_thousand)
        yield row


def misses_of(config: QualityConfig, results: Sequence[Quality]) -> list[str]:
    """Bounds that the checked codec does not keep."""
    misses = []
    name, plain = checked(config), checked(config, is_calibrated=False)
    for r in (result for result in results if result.name == name):
        is_long = r.window_tokens > 1024
        bound = config.max_long_change if is_long else config.max_change
        where = f"{name} over windows of {r.window_tokens:,}"
        if r.change > bound:
            misses.append(f"{where}: perplexity {r.change:+.3f}, bound {bound:+.3f}")
        if not is_long and r.same_top_1 * 100 < config.min_top_1:
            misses.append(f"{where}: {r.same_top_1:.2%} same top-1, bound {config.min_top_1:g} %")
        without = [
            other
            for other in results
            if other.name == plain and other.window_tokens == r.window_tokens
        ]
        if without and r.change > without[0].change:
            misses.append(f"{where}: worse than without offsets ({without[0].change:+.3f})")
    return misses
