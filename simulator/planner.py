"""Which deployment serves a workload best: simulates them, from coarse to fine.

First every shape (how many prefill, decode and colocated workers), chunks as the product chooses
them and the first codec; then, for the best shapes, the other chunk sizes and codecs. Without a
number of GPUs, the fewest that keep to the targets are looked for first.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from common.errors import ConfigError
from common.types import Role
from simulator.deployment import Deployment, RankMemory, RoleRanks, Site, kv_concurrency
from simulator.records import Outcome
from simulator.simulation import Simulation
from simulator.workload import Workload

TARGET_SHARE: Final = 0.9
"""A deployment keeps to the targets when so many of the requests do."""
FINER_SHAPES: Final = 2
"""Shapes that the other chunk sizes and codecs are tried for."""
HOPELESS_SHARE: Final = 0.5
"""Of requests that meet the targets with all GPUs in colocated workers: below that no other shape
of as many GPUs is tried.
"""
WORKER_COUNTS: Final = (1, 2, 3, 4, 6, 8, 12, 16)
_EQUAL: Final = 0.01
"""Goodputs that differ by less are equal: latency decides."""

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """`itl_s` bounds the mean gap of each request, `ttft_s` its first token."""

    ttft_s: float
    itl_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What a deployment came to. Pairs are (p50, p99), in seconds; rates are per second."""

    deployment: Deployment
    num_gpus: int
    goodput_per_gpu: float
    share_met: float
    ttft_s: tuple[float, float]
    itl_s: tuple[float, float]
    output_tokens_per_s: float
    tokens_per_s: float
    kv_concurrency: int
    num_failed: int
    rank_memory: dict[Role, RankMemory]

    @property
    def keeps_to_targets(self) -> bool:
        return self.share_met >= TARGET_SHARE

    def cost_per_million(self, gpu_hour_price: float) -> float:
        """Of output tokens, at that price for an hour of one GPU."""
        return self.num_gpus * gpu_hour_price / 3600 / max(self.output_tokens_per_s, 1e-9) * 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    rows: tuple[Row, ...]
    recommended: Row | None
    """None when no deployment keeps to the targets."""
    best: Row


class Planner:
    def __init__(
        self,
        site: Site,
        workload: Workload,
        targets: Targets,
        *,
        ranks: RoleRanks,
        chunks: Sequence[str],
        codecs: Sequence[str],
        report: Report = lambda _: None,
    ) -> None:
        self._site = site
        self._workload = workload
        self._targets = targets
        self._ranks = ranks
        self._chunks = chunks
        self._codecs = codecs
        self._report = report
        self._rows: dict[Deployment, Row] = {}

    def plan(self, num_gpus: int | None) -> Plan:
        """Raises ConfigError when the GPUs do not suffice for one worker, or the model not fit."""
        if num_gpus is not None and num_gpus < self._ranks.decode:
            raise ConfigError(
                f"--gpus is {num_gpus}, but one worker needs {self._ranks.decode}"
                " (--tensor-parallel)"
            )
        self._check_memory(num_gpus or gpu_counts(self._ranks)[-1])
        rows = self._coarse_growing() if num_gpus is None else self._coarse(num_gpus)
        return self._finer(rows)

    def _check_memory(self, num_gpus: int) -> None:
        """That every worker of any shape has room, before the first one is simulated."""
        first, *others = self._shapes(num_gpus)
        for shape in (first, *others[:1]):
            for codec in self._codecs:
                self._site.memory(replace(shape, codec=codec))

    def _coarse_growing(self) -> list[Row]:
        """The shapes of the smallest fleet that keeps to the targets; of the largest one tried when
        none does.
        """
        *smaller, most = gpu_counts(self._ranks)
        for num_gpus in smaller:
            possible = self._shapes(num_gpus)
            if not possible:
                continue
            colocated = possible[0]
            is_whole = colocated.num_gpus == num_gpus
            if is_whole and self._try(colocated).share_met < HOPELESS_SHARE:
                continue
            rows = self._coarse(num_gpus)
            if any(row.keeps_to_targets for row in rows):
                return rows
        return self._coarse(most)

    def _coarse(self, num_gpus: int) -> list[Row]:
        return [self._try(shape) for shape in self._shapes(num_gpus)]

    def _shapes(self, num_gpus: int) -> list[Deployment]:
        """All colocated first."""
        chunk, codec = self._chunks[0], self._codecs[0]
        possible = shapes(num_gpus, self._ranks)
        return [replace(shape, chunk=chunk, codec=codec) for shape in possible]

    def _finer(self, coarse: list[Row]) -> Plan:
        rows = list(coarse)
        for row in ranked(coarse, self._targets)[:FINER_SHAPES]:
            for chunk in self._chunks:
                for codec in self._codecs:
                    tried = self._try(replace(row.deployment, chunk=chunk, codec=codec))
                    if tried not in rows:
                        rows.append(tried)
        order = ranked(rows, self._targets)
        good = [row for row in order if row.keeps_to_targets]
        return Plan(rows=tuple(order), recommended=good[0] if good else None, best=order[0])

    def _try(self, deployment: Deployment) -> Row:
        if deployment not in self._rows:
            self._report(
                f"simulating {deployment.shape}, chunks {deployment.chunk}, {deployment.codec}"
            )
            workers = self._site.workers(deployment)
            outcome = Simulation(workers, self._workload, itl_target_s=self._targets.itl_s).run()
            self._rows[deployment] = row_of(
                deployment,
                outcome,
                self._targets,
                concurrency=kv_concurrency(workers, round(self._workload.mean_tokens)),
                rank_memory=self._site.memory(deployment),
            )
        return self._rows[deployment]


def shapes(num_gpus: int, ranks: RoleRanks) -> Iterator[Deployment]:
    """All colocated first; then prefill and decode workers in every proportion that leaves no room
    for one more of either.
    """
    if num_colocated := num_gpus // ranks.decode:
        yield Deployment(colocated=num_colocated, ranks=ranks)
    for num_prefill in range(1, num_gpus // ranks.prefill + 1):
        num_decode, left = divmod(num_gpus - num_prefill * ranks.prefill, ranks.decode)
        if num_decode and left < ranks.prefill:
            yield Deployment(prefill=num_prefill, decode=num_decode, ranks=ranks)


def gpu_counts(ranks: RoleRanks) -> list[int]:
    """What is tried, fewest first: so many workers of either role, or pairs of both."""
    units = (ranks.prefill, ranks.decode, ranks.prefill + ranks.decode)
    counts = {count * unit for count in WORKER_COUNTS for unit in units}
    most = WORKER_COUNTS[-1] * max(ranks.prefill, ranks.decode)
    return sorted(count for count in counts if count <= most)


def row_of(
    deployment: Deployment,
    outcome: Outcome,
    targets: Targets,
    *,
    concurrency: int,
    rank_memory: dict[Role, RankMemory],
) -> Row:
    finished = outcome.finished
    prompt_tokens = sum(record.prompt_tokens for record in finished)
    duration_s = max(outcome.duration_s, 1e-9)
    return Row(
        deployment=deployment,
        num_gpus=deployment.num_gpus,
        goodput_per_gpu=outcome.goodput(targets.ttft_s, targets.itl_s) / deployment.num_gpus,
        share_met=outcome.attainment(targets.ttft_s, targets.itl_s),
        ttft_s=(outcome.ttft(0.5), outcome.ttft(0.99)),
        itl_s=(outcome.gaps.percentile(0.5), outcome.gaps.percentile(0.99)),
        output_tokens_per_s=outcome.output_tokens_per_s,
        tokens_per_s=outcome.output_tokens_per_s + prompt_tokens / duration_s,
        kv_concurrency=concurrency,
        num_failed=len(outcome.records) - len(finished),
        rank_memory=rank_memory,
    )


def ranked(rows: Sequence[Row], targets: Targets) -> list[Row]:
    """Best first: those that keep to the targets, then by goodput per GPU; equal ones by how near
    their slowest tokens come to the targets.
    """
    best = max((row.goodput_per_gpu for row in rows), default=0.0)

    def key(row: Row) -> tuple[bool, int, float]:
        missing = round((best - row.goodput_per_gpu) / max(best * _EQUAL, 1e-12))
        strain = max(row.ttft_s[1] / targets.ttft_s, row.itl_s[1] / targets.itl_s)
        return (not row.keeps_to_targets, missing, strain)

    return sorted(rows, key=key)
