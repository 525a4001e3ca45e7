"""Tandem against aggregated and against fixed disaggregated serving, over many loads.

Llama-3.1 70B on four times four A100 (simulated). Systems, on the same requests:

    aggregated        4 colocated workers, chunks of 512, least loaded
    disaggregated     xP + yD, every prompt at a prefill worker
    Tandem            xP + yD or 4 colocated workers, each prompt where its first token is expected
                      first, chunks as the ITL target allows

Each of the last two has the fleet that did best with requests of another seed, as `tandem plan`
would recommend: a prefill worker cannot decode, so no routing makes up for too many of them (the
column "same fleet" shows by how much: mixed routing on the fixed system's own fleet). Goodput
counts requests whose first token comes within `ttft_target_s` (it grows with the prompt) and whose
mean gap stays within `ITL_S`. Load 1 is what four workers could do at best, by their step times.
"""

import itertools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache, partial
from statistics import mean

from common.scheduling.step_time import StepShape, num_pairs
from router.fleet.routing import LeastLoaded, Predicting, RoutingPolicy
from simulator.costs import BANDWIDTH_EFFICIENCY, COMPUTE_EFFICIENCY
from simulator.deployment import Deployment, GpuSite, RoleRanks
from simulator.hardware import gpu_named, model_named
from simulator.host import WorkerSetup
from simulator.simulation import Simulation
from simulator.workload import Workload, lognormal, poisson

PROMPTS = (128, 512, 2048, 8192, 32768)
OUTPUTS = (32, 256, 1024)
LOADS = (0.3, 0.6, 0.9, 1.1)
SEEDS = (1, 2, 3)
PLANNING_SEED, PLANNING_SHARE = 0, 0.5
"""So many of the requests are planned with."""
NUM_WORKERS = 4
MAX_NUM_SEQS = 64
ITL_S = 0.1
RANKS = RoleRanks(prefill=4, decode=4)
SIMULATED_S = 40.0
"""Of arrivals, where that takes neither too few requests nor too many."""
SPREAD = 0.5
"""Of lengths: sigma of their logarithm."""
Policy = Callable[[], RoutingPolicy]
MIXED: Policy = partial(Predicting, itl_target_s=ITL_S)
ALWAYS_REMOTE: Policy = partial(Predicting, always_remote=True, itl_target_s=ITL_S)
MEAN_BOUND, WORST_BOUND = 0.02, 0.05

AGGREGATED = Deployment(colocated=NUM_WORKERS, ranks=RANKS, chunk="512")
COLOCATED = Deployment(colocated=NUM_WORKERS, ranks=RANKS)
SPLIT = tuple(
    Deployment(prefill=n, decode=NUM_WORKERS - n, ranks=RANKS) for n in range(1, NUM_WORKERS)
)


@dataclass(frozen=True, slots=True)
class Cell:
    prompt: int
    output: int
    load: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Goodputs, requests per second, means over the seeds."""

    cell: Cell
    aggregated: float
    disaggregated: float
    disaggregated_fleet: str
    tandem: float
    tandem_fleet: str
    same_fleet: float
    """Mixed routing on the fleet of the disaggregated system."""

    @property
    def best_other(self) -> float:
        return max(self.aggregated, self.disaggregated)

    @property
    def loss(self) -> float:
        """Share that Tandem stays below the better one; negative when it is above."""
        return 1 - self.tandem / self.best_other if self.best_other else 0.0


def cells() -> list[Cell]:
    return [Cell(*values) for values in itertools.product(PROMPTS, OUTPUTS, LOADS)]


def run(on_row: Callable[[Row], None], chosen: Sequence[Cell] = ()) -> list[Row]:
    """All cells, or those chosen, in their order; `on_row` is told of each as it is done."""
    found: dict[Cell, Row] = {}
    wanted = chosen or cells()
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for done in as_completed([pool.submit(row_of, cell) for cell in wanted]):
            row = done.result()
            found[row.cell] = row
            on_row(row)
    return [found[cell] for cell in wanted]


def row_of(cell: Cell) -> Row:
    def planned(fleets: tuple[Deployment, ...], policy: Policy) -> Deployment:
        return max(
            fleets,
            key=lambda fleet: goodput(cell, fleet, policy, PLANNING_SEED, PLANNING_SHARE),
        )

    @cache
    def found(fleet: Deployment, policy: Policy) -> float:
        return mean(goodput(cell, fleet, policy, seed) for seed in SEEDS)

    fixed = planned(SPLIT, ALWAYS_REMOTE)
    tandem = planned((COLOCATED, *SPLIT), MIXED)
    return Row(
        cell=cell,
        aggregated=found(AGGREGATED, LeastLoaded),
        disaggregated=found(fixed, ALWAYS_REMOTE),
        disaggregated_fleet=fixed.shape,
        tandem=found(tandem, MIXED),
        tandem_fleet=tandem.shape,
        same_fleet=found(fixed, MIXED),
    )


def goodput(
    cell: Cell, deployment: Deployment, policy: Policy, seed: int, share: float = 1.0
) -> float:
    workload = load_of(cell, seed, share)

    outcome = Simulation(workers_of(deployment), workload, policy=policy, itl_target_s=ITL_S).run()
    num_good = sum(
        record.meets(ttft_target_s(record.prompt_tokens), ITL_S) for record in outcome.records
    )
    last_arrival = max(record.arrival_s for record in outcome.records)
    return num_good / last_arrival


@cache
def site() -> GpuSite:
    return GpuSite(
        model=model_named("llama-3.1-70b"),
        gpu=gpu_named("a100"),
        memory_utilization=0.9,
        max_num_seqs=MAX_NUM_SEQS,
        compute_efficiency=COMPUTE_EFFICIENCY,
        bandwidth_efficiency=BANDWIDTH_EFFICIENCY,
    )


@cache
def workers_of(deployment: Deployment) -> list[WorkerSetup]:
    return site().workers(deployment)


def load_of(cell: Cell, seed: int, share: float = 1.0) -> Workload:
    return poisson(
        num_requests=max(60, round(share * num_requests(cell))),
        rate=cell.load * capacity(cell),
        prompt=lognormal(cell.prompt, SPREAD, 4 * cell.prompt),
        output=lognormal(cell.output, SPREAD, 4 * cell.output),
        seed=1000 * seed + cell.prompt + cell.output,
    )


def num_requests(cell: Cell) -> int:
    """Enough for queues to build up."""
    return max(100, min(600, round(cell.load * capacity(cell) * SIMULATED_S)))


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
def decode_s(prompt: int, output: int) -> float:
    """A worker's time for a whole answer, in the largest batch that its pages and half of the ITL
    target allow; the other half is left to prompts.
    """
    worker = workers_of(AGGREGATED)[0]
    context = prompt + output // 2
    best_s = worker.costs.step_s(StepShape(num_decodes=1, num_context_tokens=context))
    for batch in range(2, worker.max_num_seqs + 1):
        shape = StepShape(num_decodes=batch, num_context_tokens=batch * context)
        fits = batch * (prompt + output) <= worker.num_packed * worker.layout.block_size
        step_s = worker.costs.step_s(shape)
        if not fits or step_s > ITL_S / 2:
            break
        best_s = step_s / batch
    return output * best_s


def capacity(cell: Cell) -> float:
    """Requests per second of all workers."""
    return NUM_WORKERS / (prefill_s(cell.prompt) + decode_s(cell.prompt, cell.output))
