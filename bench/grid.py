"""Tandem's routing against aggregated and against fixed disaggregated serving, over many loads.

Llama-3 8B on four H100 (simulated). Systems, on the same requests:

    aggregated        4 colocated workers, chunks of 512, least loaded
    disaggregated     xP + yD, every prompt at a prefill worker
    Tandem            the same fleets, each prompt where its first token is expected first

Goodput counts requests whose first token comes within `ttft_target_s` (it grows with the prompt)
and whose mean gap stays within `ITL_S`. Load 1 is what four workers could do at best, by their step
times. A disaggregated fleet has the proportion that did best on a seed of its own, Tandem's
likewise (all colocated is one of them): that is what `tandem plan` is for.
"""

import itertools
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from statistics import mean

from common.scheduling.step_time import StepShape, num_pairs
from router.routing import LeastLoaded, Predicting, RoutingPolicy
from simulator.costs import BANDWIDTH_EFFICIENCY, COMPUTE_EFFICIENCY
from simulator.deployment import Deployment, GpuSite
from simulator.hardware import gpu_named, model_named
from simulator.host import WorkerSetup
from simulator.simulation import simulate
from simulator.workload import Workload, lognormal, poisson

PROMPTS = (128, 512, 2048, 8192, 32768)
OUTPUTS = (32, 256, 1024)
LOADS = (0.3, 0.6, 0.9, 1.1)
SEEDS = (1, 2, 3)
PLANNING_SEED = 0
NUM_DEVICES = 4
MAX_NUM_SEQS = 32
ITL_S = 0.05
SPREAD = 0.5
"""Of lengths: sigma of their logarithm."""
MEAN_BOUND, WORST_BOUND = 0.02, 0.05

AGGREGATED = Deployment(colocated=NUM_DEVICES, chunk="512")
SHAPES = tuple(Deployment(prefill=n, decode=NUM_DEVICES - n) for n in range(1, NUM_DEVICES))


@dataclass(frozen=True, slots=True)
class Cell:
    prompt: int
    output: int
    load: float


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    name: str
    deployment: Deployment
    is_mixed: bool


AGGREGATED_SYSTEM = System(name="aggregated", deployment=AGGREGATED, is_mixed=False)
FIXED = tuple(System(name="disaggregated", deployment=d, is_mixed=False) for d in SHAPES)
TANDEM = tuple(
    System(name="Tandem", deployment=d, is_mixed=True)
    for d in (*SHAPES, Deployment(colocated=NUM_DEVICES))
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Goodputs, requests per second, means over the seeds. Those by shape are of the planning
    seed.
    """

    cell: Cell
    aggregated: float
    disaggregated: float
    tandem: float
    disaggregated_shape: str
    tandem_shape: str
    tandem_by_shape: dict[str, float]
    disaggregated_by_shape: dict[str, float]

    @property
    def best_other(self) -> float:
        return max(self.aggregated, self.disaggregated)

    @property
    def loss(self) -> float:
        """Share that Tandem stays below the better one; negative when it is above."""
        return 1 - self.tandem / self.best_other if self.best_other else 0.0


def cells() -> list[Cell]:
    return [Cell(*values) for values in itertools.product(PROMPTS, OUTPUTS, LOADS)]


def run(chosen: list[Cell] | None = None) -> list[Row]:
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(row_of, chosen or cells()))


def row_of(cell: Cell) -> Row:
    def planned(systems: tuple[System, ...]) -> tuple[System, dict[str, float]]:
        tried = {system: goodput(cell, system, PLANNING_SEED) for system in systems}
        by_shape = {system.deployment.shape: value for system, value in tried.items()}
        return max(systems, key=lambda system: tried[system]), by_shape

    def found(system: System) -> float:
        return mean(goodput(cell, system, seed) for seed in SEEDS)

    fixed, fixed_by_shape = planned(FIXED)
    tandem, tandem_by_shape = planned(TANDEM)
    return Row(
        cell=cell,
        aggregated=found(AGGREGATED_SYSTEM),
        disaggregated=found(fixed),
        tandem=found(tandem),
        disaggregated_shape=fixed.deployment.shape,
        tandem_shape=tandem.deployment.shape,
        tandem_by_shape=tandem_by_shape,
        disaggregated_by_shape=fixed_by_shape,
    )


def goodput(cell: Cell, system: System, seed: int) -> float:
    policy: Callable[[], RoutingPolicy] = LeastLoaded
    if system is not AGGREGATED_SYSTEM:
        policy = partial(Predicting, always_remote=not system.is_mixed, itl_target_s=ITL_S)
    outcome = simulate(
        workers_of(system.deployment), load_of(cell, seed), policy=policy, itl_target_s=ITL_S
    )
    num_good = sum(
        record.meets(ttft_target_s(record.prompt_tokens), ITL_S) for record in outcome.records
    )
    last_arrival = max(record.arrival_s for record in outcome.records)
    return num_good / last_arrival


@cache
def site() -> GpuSite:
    return GpuSite(
        model=model_named("llama-3.1-8b"),
        gpu=gpu_named("h100"),
        tp=1,
        memory_utilization=0.9,
        max_num_seqs=MAX_NUM_SEQS,
        compute_efficiency=COMPUTE_EFFICIENCY,
        bandwidth_efficiency=BANDWIDTH_EFFICIENCY,
    )


@cache
def workers_of(deployment: Deployment) -> list[WorkerSetup]:
    return site().workers(deployment)


def load_of(cell: Cell, seed: int) -> Workload:
    return poisson(
        num_requests=num_requests(cell),
        rate=cell.load * capacity(cell),
        prompt=lognormal(cell.prompt, SPREAD, 4 * cell.prompt),
        output=lognormal(cell.output, SPREAD, 4 * cell.output),
        seed=1000 * seed + cell.prompt + cell.output,
    )


def num_requests(cell: Cell) -> int:
    """Enough for queues to build up, fewer where each takes long to simulate."""
    return max(80, min(240, 600_000 // (cell.prompt + 2 * cell.output)))


@cache
def prefill_s(num_tokens: int) -> float:
    """Of a prompt alone on a worker."""
    costs, start, total = workers_of(AGGREGATED)[0].costs, 0, 0.0
    while start < num_tokens:
        count = min(512, num_tokens - start)
        shape = StepShape(num_prefill_tokens=count, num_pairs=num_pairs(start, count))
        total += costs.step_s(shape)
        start += count
    return total


def ttft_target_s(prompt_tokens: int) -> float:
    rounded = -(-prompt_tokens // 512) * 512
    return 0.25 + 3 * prefill_s(rounded)


@cache
def capacity(cell: Cell) -> float:
    """Requests per second of all workers, each with the largest batch that its pages and the ITL
    target allow, half of the target left to prompts.
    """
    worker = workers_of(AGGREGATED)[0]
    context = cell.prompt + cell.output // 2
    batch, step_s = 1, 0.0
    for count in range(1, worker.max_num_seqs + 1):
        shape = StepShape(num_decodes=count, num_context_tokens=count * context)
        fits = count * (cell.prompt + cell.output) <= worker.num_packed * worker.layout.block_size
        if not fits or worker.costs.step_s(shape) > ITL_S / 2:
            break
        batch, step_s = count, worker.costs.step_s(shape)
    step_s = step_s or worker.costs.step_s(StepShape(num_decodes=1, num_context_tokens=context))
    # a prompt's chunks ride on decode steps: what they add is their own work
    return NUM_DEVICES / (prefill_s(cell.prompt) + cell.output * step_s / batch)
