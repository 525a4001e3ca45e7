"""Does the simulator predict a real fleet? Step times come from the workers themselves, after one
workload; medians are compared on another one.

    python -m bench prediction              the table
    python -m bench.prediction FILE.json    only measures, and writes times for `tandem plan`

Fitted on prompts of 32 to 1,024 tokens, one to eight at a time; predicted for 384 tokens in, 96
out, six at a time. The demo model on this machine's CPU.
"""

import argparse
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench.load import Seen, random_prompt, run_load
from bench.serving import Launched, serving
from commands.demo_model import NAME
from common.codecs import DEFAULT_KV_CODEC
from common.environment import home
from common.errors import ConfigError
from common.model_config import ModelConfig
from common.scheduling.step_time import StepTimes
from common.types import Role
from engine.pool_size import landing_of, pool_of
from router.fleet.routing import Predicting
from simulator.costs import READ_LATENCY_S, FittedCosts
from simulator.deployment import AUTO, Deployment, ownership_of, page_layout
from simulator.fit import save
from simulator.host import WorkerSetup
from simulator.simulation import Simulation
from simulator.workload import closed_loop, fixed

FIT_LOADS = ((32, 24, 8, 16), (256, 32, 4, 8), (1024, 24, 3, 6), (96, 40, 6, 12), (600, 16, 1, 3))
"""Prompt tokens, output tokens, how many at once, how many in all."""
PROMPT, OUTPUT, AT_ONCE, NUM_REQUESTS = 384, 96, 6, 30
NUM_BLOCKS, MAX_NUM_SEQS = 2048, 256
BOUND = 0.15

FLEETS = {
    "1 colocated": ("--prefill", "0", "--decode", "0", "--colocated", "1"),
    "1 prefill + 1 decode": ("--prefill", "1", "--decode", "1"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Medians in seconds, (measured, predicted)."""

    fleet: str
    ttft_s: tuple[float, float]
    itl_s: tuple[float, float]
    output_tokens_per_s: tuple[float, float]
    step_times: dict[str, StepTimes]

    @property
    def errors(self) -> tuple[float, float]:
        """Of TTFT and of ITL, relative."""
        return (self.ttft_s[1] / self.ttft_s[0] - 1, self.itl_s[1] / self.itl_s[0] - 1)

    @property
    def holds(self) -> bool:
        return max(map(abs, self.errors)) <= BOUND


def run() -> list[Row]:
    return [measure(name, arguments) for name, arguments in FLEETS.items()]


def measure(name: str, arguments: tuple[str, ...]) -> Row:
    with serving(*arguments, "--kv-blocks", str(NUM_BLOCKS)) as served:
        fit_to(served)
        times = {role: times_of(served, role) for role in roles_of(served)}
        prompts = [random_prompt(PROMPT, 9000 + seed) for seed in range(NUM_REQUESTS)]
        seen, wall_s = run_load(served.url, served.model, prompts, OUTPUT, AT_ONCE)
    workers = [setup(Role(role), times[role]) for role in times]
    predicted = Simulation(
        workers,
        closed_loop(
            num_requests=NUM_REQUESTS,
            concurrency=AT_ONCE,
            prompt=fixed(PROMPT),
            output=fixed(OUTPUT),
            seed=0,
        ),
        policy=Predicting,
    ).run()
    return Row(
        fleet=name,
        ttft_s=(median(request.ttft_s for request in seen), predicted.ttft(0.5)),
        itl_s=(median(gaps_of(seen)), predicted.gaps.percentile(0.5)),
        output_tokens_per_s=(NUM_REQUESTS * OUTPUT / wall_s, predicted.output_tokens_per_s),
        step_times=times,
    )


def fit_to(served: Launched) -> None:
    for number, (prompt, output, at_once, count) in enumerate(FIT_LOADS):
        prompts = [random_prompt(prompt, 100 * number + seed) for seed in range(count)]
        run_load(served.url, served.model, prompts, output, at_once)


def roles_of(served: Launched) -> list[str]:
    return [worker["role"] for worker in served.fleet()]


def times_of(served: Launched, role: str) -> StepTimes:
    found: dict[str, Any] | None = served.worker(role)["step_times"]
    if found is None:
        raise ConfigError(f"the {role} worker has not measured its steps")
    return StepTimes(**found)


def gaps_of(seen: Iterable[Seen]) -> list[float]:
    return [gap for request in seen for gap in request.gaps_s]


def setup(role: Role, times: StepTimes) -> WorkerSetup:
    model = ModelConfig.load(home() / "models" / NAME)
    layout = page_layout(model, DEFAULT_KV_CODEC)
    pool = pool_of(NUM_BLOCKS, MAX_NUM_SEQS)
    chunk_tokens = Deployment(chunk=AUTO).chunk_tokens
    landing = landing_of(chunk_tokens, layout.block_size)
    return WorkerSetup(
        role=role,
        costs=FittedCosts(times=times, read_s=READ_LATENCY_S),
        step_times=times,
        layout=layout,
        ownership=ownership_of(model, 1),
        num_packed=pool.num_packed,
        num_exact=pool.num_exact,
        chunk_tokens=chunk_tokens,
        is_chunk_auto=True,
        max_num_seqs=MAX_NUM_SEQS,
        max_model_len=model.max_position_embeddings,
        num_landing_packed=landing.num_packed,
        num_landing_exact=landing.num_exact,
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.prediction", allow_abbrev=False)
    parser.add_argument("file", type=Path, help="where a colocated worker's step times are written")
    options = parser.parse_args()
    with serving(*FLEETS["1 colocated"], "--kv-blocks", str(NUM_BLOCKS)) as served:
        fit_to(served)
        save(FittedCosts(times=times_of(served, Role.COLOCATED)), options.file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
