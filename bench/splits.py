"""How eight GPUs are best split between prefill and decode, and into ranks, for Llama-3-70B.

    make bench-splits                 writes bench/results/splits.md
    python -m bench.splits [FILE]     prints it, or writes it there

Every fleet of eight ranks is simulated: p prefill workers of a ranks beside d decode workers of b,
and colocated workers, as far as the model's heads allow the ranks and its weights leave them room.
Goodput is the highest rate of arrivals at which nine of ten requests keep to both targets, as the
router and the workers run with their defaults.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from common.errors import ConfigError
from common.ranks import possible_ranks
from common.types import Role
from simulator.costs import BANDWIDTH_EFFICIENCY, COMPUTE_EFFICIENCY
from simulator.deployment import Deployment, GpuSite, RankMemory, RoleRanks
from simulator.hardware import gpu_named, model_named
from simulator.planner import TARGET_SHARE
from simulator.simulation import Simulation
from simulator.workload import Workload, lognormal, poisson

MODEL, NUM_GPUS = "llama-3-70b", 8
GPUS = ("h100", "h200")
LOADS = {"4,000 in, 100 out": (4000, 100), "3,000 / 500": (3000, 500), "500 / 1,000": (500, 1000)}
"""Mean lengths."""
TTFT_S, ITL_S = 2.0, 0.05
MAX_NUM_SEQS = 256
ARRIVALS_S, MIN_REQUESTS, SEED = 60.0, 200, 0
SPREAD = 0.5
"""Of lengths: sigma of their logarithm."""
LOWEST_RATE, PRECISION = 0.5, 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """`goodput` in requests per second of all GPUs, by the names of LOADS."""

    gpu: str
    deployment: Deployment
    memory: dict[Role, RankMemory]
    goodput: dict[str, float]


def run() -> list[Row]:
    wanted = [(gpu, fleet) for gpu in GPUS for fleet in fitting(gpu)]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(row_of, *zip(*wanted, strict=True)))


def row_of(gpu: str, deployment: Deployment) -> Row:
    return Row(
        gpu=gpu,
        deployment=deployment,
        memory=site(gpu).memory(deployment),
        goodput={
            name: goodput(gpu, deployment, prompt, output)
            for name, (prompt, output) in LOADS.items()
        },
    )


def fitting(gpu: str) -> list[Deployment]:
    found = []
    for deployment in fleets():
        try:
            site(gpu).memory(deployment)
        except ConfigError:
            continue
        found.append(deployment)
    return found


def fleets() -> Iterator[Deployment]:
    """Of NUM_GPUS ranks in all; colocated ones first."""
    model = model_named(MODEL)
    possible = possible_ranks(model.num_heads, model.num_kv_heads)

    def dealt(num_gpus: int) -> list[tuple[int, int]]:
        """So many workers of so many ranks each."""
        return [(num_gpus // n, n) for n in possible if n <= num_gpus and num_gpus % n == 0]

    for count, num_ranks in dealt(NUM_GPUS):
        yield Deployment(colocated=count, ranks=RoleRanks(prefill=num_ranks, decode=num_ranks))
    for for_prefill in range(1, NUM_GPUS):
        for prefill, prefill_ranks in dealt(for_prefill):
            for decode, decode_ranks in dealt(NUM_GPUS - for_prefill):
                ranks = RoleRanks(prefill=prefill_ranks, decode=decode_ranks)
                yield Deployment(prefill=prefill, decode=decode, ranks=ranks)


def goodput(gpu: str, deployment: Deployment, prompt: int, output: int) -> float:
    workers = site(gpu).workers(deployment)

    def keeps_to_targets(rate: float) -> bool:
        load = load_of(rate, prompt, output)
        outcome = Simulation(workers, load, itl_target_s=ITL_S).run()
        return outcome.attainment(TTFT_S, ITL_S) >= TARGET_SHARE

    return highest(keeps_to_targets)


def highest(keeps_to_targets: Callable[[float], bool]) -> float:
    """To a share of PRECISION; 0 where not even LOWEST_RATE does."""
    kept, missed = 0.0, LOWEST_RATE
    while keeps_to_targets(missed):
        kept, missed = missed, 2 * missed
    while kept and missed / kept > 1 + PRECISION:
        rate = (kept * missed) ** 0.5
        if keeps_to_targets(rate):
            kept = rate
        else:
            missed = rate
    return kept


def load_of(rate: float, prompt: int, output: int) -> Workload:
    return poisson(
        num_requests=max(MIN_REQUESTS, round(rate * ARRIVALS_S)),
        rate=rate,
        prompt=lognormal(prompt, SPREAD, 7000),
        output=lognormal(output, SPREAD, 4 * output),
        seed=SEED,
    ).at_most(model_named(MODEL).max_position_embeddings)


@cache
def site(gpu: str) -> GpuSite:
    return GpuSite(
        model=model_named(MODEL),
        gpu=gpu_named(gpu),
        memory_utilization=0.9,
        max_num_seqs=MAX_NUM_SEQS,
        compute_efficiency=COMPUTE_EFFICIENCY,
        bandwidth_efficiency=BANDWIDTH_EFFICIENCY,
    )


# --- the table ------------------------------------------------------------------------------------


def markdown(rows: Sequence[Row]) -> str:
    lines = [
        f"# {MODEL} on {NUM_GPUS} GPUs: prefill, decode and ranks",
        "",
        f"`make bench-splits`, simulated: the highest rate (requests/s) at which {TARGET_SHARE:.0%}"
        f" of the requests have TTFT within {TTFT_S:g} s",
        f"and a mean gap within {1000 * ITL_S:g} ms, found to {PRECISION:.0%}; {ARRIVALS_S:g} s of"
        f" Poisson arrivals, at least {MIN_REQUESTS} requests, log-normal",
        "lengths. 2 x P2 is two prefill workers of two ranks, D decodes, C does both; default KV"
        " codec and chunks. Memory is that of one rank, its",
        "weights and its pages. Splits that are missing leave no room for the weights.",
    ]
    for gpu in GPUS:
        here = [row for row in rows if row.gpu == gpu]
        best = {name: max((row.goodput[name] for row in here), default=0.0) for name in LOADS}
        lines += ["", f"## {gpu}", "", "| " + " | ".join(["fleet", "GB of a rank", *LOADS]) + " |"]
        lines.append("|" + "---|" * (2 + len(LOADS)))
        lines += [f"| {' | '.join(cells(row, best))} |" for row in here]
    return "\n".join(lines) + "\n"


def cells(row: Row, best: dict[str, float]) -> list[str]:
    memory = ", ".join(
        f"{role}: {held.weights / 1e9:.1f} + {held.pages / 1e9:.1f}"
        for role, held in row.memory.items()
    )
    rates = [
        f"**{rate:.2f}**" if rate == best[name] else f"{rate:.2f}"
        for name, rate in row.goodput.items()
    ]
    return [row.deployment.shape, memory, *rates]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.splits", allow_abbrev=False)
    parser.add_argument("file", type=Path, nargs="?", help="where the table is written")
    options = parser.parse_args()
    text = markdown(run())
    if options.file is None:
        sys.stdout.write(text)
    else:
        options.file.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
