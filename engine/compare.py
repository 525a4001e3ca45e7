"""Codecs compared with fp32 over windows of a text: what `tandem quality` is made of.

One engine with fp32 pages and one for each candidate compute the windows chunk by chunk, one after
the other, over one copy of the weights (of each kind: int8 weights are a second). At every position
their next-token distributions are compared. A window is one observation: numbers come with the 95 %
interval of a window's mean (Student's t).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.model_config import ModelConfig
from engine.calibration import CHUNK_TOKENS, plans_of
from engine.config import EngineConfig
from engine.cpu_weights import CpuWeights
from engine.load import load_runner
from engine.pool_size import PoolSize
from engine.runner import ModelRunner
from engine.weights import Checkpoint

BUCKET = 1000
"""Positions of a long window that are reported together."""

STUDENT = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
    2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056,
    2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""Half width of the 95 % interval of a mean, in its standard errors, by degrees of freedom from 1
on; further on, nearly 1.96 + 2.4 / n."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A mean and its 95 % interval; as wide as can be for a single window."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, means: NDArray[np.float64]) -> "Interval":
        """Of one number for each window."""
        mean, freedom = float(means.mean()), len(means) - 1
        if freedom == 0:
            return cls(mean=mean, low=-np.inf, high=np.inf)
        times = STUDENT[freedom - 1] if freedom <= len(STUDENT) else 1.96 + 2.4 / freedom
        half = times * float(means.std(ddof=1)) / len(means) ** 0.5
        return cls(mean=mean, low=mean - half, high=mean + half)


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
    top_1: Interval
    """Share of positions with fp32's most likely token, 0 to 1."""
    kl: Interval
    """From fp32, in nats."""
    kl_by_window: tuple[float, ...]
    by_thousand: tuple[float, ...]
    """Change of perplexity over positions 0 to 999, 1000 to 1999, ..."""


class Engines:
    """Runners of one model on a CPU, over one copy of each kind of its weights."""

    def __init__(self, model: str | Path, block_size: int, threads: int) -> None:
        torch.set_num_threads(threads)
        self.block_size = block_size
        self._model = model
        self._threads = threads
        self._weights: dict[str, CpuWeights] = {}

    def runner(self, candidate: Candidate, num_blocks: int) -> ModelRunner:
        kind = candidate.weight_dtype
        if kind not in self._weights:
            self._weights[kind] = CpuWeights(
                Checkpoint.open(self._model), ModelConfig.load(self._model), kind
            )
        config = EngineConfig(
            model=self._model,
            kv_codec=candidate.codec,
            block_size=self.block_size,
            pool=PoolSize(num_packed=num_blocks, num_exact=1),
            num_threads=self._threads,
            max_num_tokens=CHUNK_TOKENS,
            max_model_len=num_blocks * self.block_size,
            is_calibrated=candidate.is_calibrated,
            weight_dtype=kind,
        )
        return load_runner(config, weights=self._weights[kind])


@dataclass(slots=True)
class Tally:
    """Numbers of every predicted position, chunk after chunk."""

    losses: list[NDArray[np.float32]] = field(default_factory=list)
    is_same: list[NDArray[np.bool_]] = field(default_factory=list)
    kl: list[NDArray[np.float32]] = field(default_factory=list)

    def add(self, found: Tensor, reference: Tensor, targets: Tensor) -> None:
        """Log-probabilities [rows, vocab_size] of one chunk."""
        self.losses.append(-found.gather(1, targets[:, None])[:, 0].numpy())
        self.is_same.append((found.argmax(1) == reference.argmax(1)).numpy())
        distance = torch.nn.functional.kl_div(found, reference, reduction="none", log_target=True)
        self.kl.append(distance.sum(1).numpy())


def measure(
    engines: Engines,
    windows: NDArray[np.int32],
    candidates: Sequence[Candidate],
    on_window: Callable[[], object] = lambda: None,
) -> list[Quality]:
    """One result for fp32 itself, then one for each candidate. `on_window` is called after each."""
    everyone = [Candidate(codec="fp32"), *candidates]
    num_blocks = windows.shape[1] // engines.block_size
    runners = [engines.runner(candidate, num_blocks) for candidate in everyone]
    tallies = [Tally() for _ in everyone]
    for window in windows:
        for targets, logits in _steps(runners, window, engines.block_size):
            reference = torch.log_softmax(next(logits)[: len(targets)], dim=-1)
            tallies[0].add(reference, reference, targets)
            for tally, found in zip(tallies[1:], logits, strict=True):
                tally.add(torch.log_softmax(found[: len(targets)], dim=-1), reference, targets)
        on_window()
    return [
        _quality_of(candidate.name, tally, tallies[0], windows)
        for candidate, tally in zip(everyone, tallies, strict=True)
    ]


def _steps(
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


def _quality_of(name: str, tally: Tally, fp32: Tally, windows: NDArray[np.int32]) -> Quality:
    num_windows, window_tokens = windows.shape

    def by_window(parts: Sequence[NDArray[np.float32] | NDArray[np.bool_]]) -> NDArray[np.float64]:
        return np.concatenate(parts).reshape(num_windows, -1).astype(np.float64)

    losses, base = by_window(tally.losses), by_window(fp32.losses)
    kl = by_window(tally.kl).mean(1)

    def change(first: int, end: int) -> float:
        return float(np.exp(losses[:, first:end].mean()) - np.exp(base[:, first:end].mean()))

    return Quality(
        name=name,
        num_windows=num_windows,
        window_tokens=window_tokens,
        perplexity=float(np.exp(losses.mean())),
        change=change(0, window_tokens),
        top_1=Interval.of(by_window(tally.is_same).mean(1)),
        kl=Interval.of(kl),
        kl_by_window=tuple(kl.tolist()),
        by_thousand=tuple(
            change(first, first + BUCKET) for first in range(0, window_tokens - 1, BUCKET)
        ),
    )
