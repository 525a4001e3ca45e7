"""How many requests a second `tandem plan` simulates, on one core.

Llama-3 8B on four H100, 2 prefill + 2 decode workers and 4 colocated ones, at 70 % of what they can
take; 1,000 tokens in and 200 out on average, arrivals at random.
"""

import time
from dataclasses import dataclass

from simulator.costs import BANDWIDTH_EFFICIENCY, COMPUTE_EFFICIENCY
from simulator.deployment import Deployment, GpuSite
from simulator.hardware import gpu_named, model_named
from simulator.simulation import Simulation
from simulator.workload import lognormal, poisson

NUM_REQUESTS = 10_000
GOAL_REQUESTS, GOAL_S = 100_000, 600.0
RATE = 40.0
FLEETS = (Deployment(prefill=2, decode=2), Deployment(colocated=4))


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    fleet: str
    requests: int
    simulated_s: float
    cpu_s: float
    num_steps: int
    num_events: int

    @property
    def requests_per_s(self) -> float:
        return self.requests / self.cpu_s

    @property
    def goal_s(self) -> float:
        """What the goal's number of requests would take."""
        return GOAL_REQUESTS / self.requests_per_s


def run(num_requests: int = NUM_REQUESTS) -> list[Row]:
    return [measure(deployment, num_requests) for deployment in FLEETS]


def measure(deployment: Deployment, num_requests: int) -> Row:
    site = GpuSite(
        model=model_named("llama-3-8b"),
        gpu=gpu_named("h100"),
        memory_utilization=0.9,
        max_num_seqs=256,
        compute_efficiency=COMPUTE_EFFICIENCY,
        bandwidth_efficiency=BANDWIDTH_EFFICIENCY,
    )
    workload = poisson(
        num_requests=num_requests,
        rate=RATE,
        prompt=lognormal(1000, 0.8, 6000),
        output=lognormal(200, 0.8, 1600),
        seed=0,
    )
    began = time.process_time()
    outcome = Simulation(site.workers(deployment), workload).run()
    cpu_s = time.process_time() - began
    assert len(outcome.finished) == num_requests
    return Row(
        fleet=deployment.shape,
        requests=num_requests,
        simulated_s=outcome.duration_s,
        cpu_s=cpu_s,
        num_steps=sum(worker.num_steps for worker in outcome.workers),
        num_events=outcome.num_events,
    )
