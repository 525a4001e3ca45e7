"""A simulated fleet: requests flow as in the product, and many steps at once are what they would
have been one by one.
"""

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from common.types import Role
from router.fleet.routing import LeastLoaded, Predicting
from simulator.host import LATENCY_S
from simulator.records import Outcome
from simulator.simulation import Simulation
from simulator.workload import (
    SimulatedRequest,
    Span,
    Workload,
    closed_loop,
    fixed,
    lognormal,
    poisson,
    uniform,
)
from tests.simulator.fleets import COSTS, TIMES, worker

P, D, C = Role.PREFILL, Role.DECODE, Role.COLOCATED


def one(prompt_tokens: int, output_tokens: int) -> Workload:
    request = SimulatedRequest(
        arrival_s=0.0, prompt=(Span(0, prompt_tokens),), output_tokens=output_tokens
    )
    return Workload(requests=(request,))


def check_finished(outcome: Outcome) -> None:
    for record in outcome.records:
        assert record.has_finished, record
        assert record.num_tokens == record.output_tokens
        assert record.error is None


def test_one_request_takes_what_its_steps_and_messages_take() -> None:
    outcome = Simulation([worker(C)], one(200, 5), keep_tokens=True).run()
    check_finished(outcome)
    times = outcome.records[0].token_times
    assert times is not None
    first = TIMES.prefill_s(0, 200, 256)
    assert times[0] == pytest.approx(first + 2 * LATENCY_S)  # there and back
    gaps = [later - earlier for earlier, later in pairwise(times)]
    # the prompt and the first token, then one more in each step
    expected = [
        TIMES.fixed_s + TIMES.decode_s + TIMES.context_token_s * (201 + i) for i in range(4)
    ]
    assert gaps == pytest.approx(expected)


def test_a_handed_over_prompt_is_read_chunk_by_chunk_while_the_next_is_computed() -> None:
    slow_link = replace(COSTS, read_byte_s=2e-8)
    setups = [worker(P), worker(D, costs=slow_link)]
    policy = LeastLoaded
    outcome = Simulation(setups, one(1024, 5), policy=policy, keep_tokens=True).run()
    check_finished(outcome)
    record = outcome.records[0]
    prefill = sum(TIMES.prefill_s(start, 256, 256) for start in range(0, 1024, 256))
    # submit, admitted, route, hand-off, first token, and on to the client
    assert record.ttft_s == pytest.approx(prefill + 6 * LATENCY_S)
    pages = worker(D).layout.packed_page_bytes
    num_bytes = [16 * pages] * 4
    assert record.token_times is not None
    first_gap = record.token_times[1] - record.token_times[0]
    # only the last chunk's pages are read after the first token
    assert first_gap < TIMES.fixed_s + 2 * slow_link.transfer_s(num_bytes[-1])
    assert outcome.workers[0].num_prompt_tokens == 1024
    assert outcome.workers[1].num_prompt_tokens == 0


def test_a_request_whose_first_token_is_its_last_ends_at_the_prefill_worker() -> None:
    outcome = Simulation([worker(P), worker(D)], one(300, 1), policy=LeastLoaded).run()
    check_finished(outcome)
    assert outcome.workers[1].num_steps == 0


def test_a_prompt_seen_before_is_not_computed_again() -> None:
    shared = (Span(0, 640),)
    requests = tuple(
        SimulatedRequest(arrival_s=float(i), prompt=(*shared, Span(10_000 + i, 1)), output_tokens=4)
        for i in range(3)
    )
    outcome = Simulation([worker(C)], Workload(requests=requests)).run()
    check_finished(outcome)
    assert [record.num_cached_tokens for record in outcome.records] == [0, 640, 640]
    assert outcome.workers[0].num_prompt_tokens == 641 + 1 + 1


def test_a_closed_loop_keeps_so_many_at_once() -> None:
    load = closed_loop(
        num_requests=30, concurrency=5, prompt=fixed(100), output=uniform(5, 20), seed=3
    )
    outcome = Simulation([worker(C)], load).run()
    check_finished(outcome)
    events = [(r.arrival_s, 1) for r in outcome.records]
    events += [(r.last_token_s, -1) for r in outcome.records]
    at_once = peak = 0
    for _, change in sorted(events):  # one that ends makes room for one that comes
        at_once += change
        peak = max(peak, at_once)
    assert peak == 5


def test_a_prompt_longer_than_the_context_ends_in_an_error() -> None:
    outcome = Simulation([worker(C)], one(8000, 500)).run()
    assert outcome.records[0].error == "context_length_exceeded"
    assert not outcome.records[0].has_finished


def test_evicted_requests_are_submitted_anew_and_finish() -> None:
    load = closed_loop(
        num_requests=40, concurrency=20, prompt=fixed(120), output=uniform(200, 400), seed=5
    )
    outcome = Simulation([worker(C, num_packed=200)], load).run()
    check_finished(outcome)
    assert sum(record.num_retries for record in outcome.records) > 0


FLEETS = {
    "colocated": (Predicting, [(C, 600), (C, 600)]),
    "fixed": (LeastLoaded, [(P, 600), (P, 600), (D, 700)]),
    "mixed": (Predicting, [(P, 600), (D, 700), (C, 400)]),
    "short of pages": (Predicting, [(P, 300), (D, 260)]),
}


@pytest.mark.parametrize("name", list(FLEETS))
@pytest.mark.parametrize("is_auto", [False, True])
def test_steps_taken_at_once_are_what_they_would_be_one_by_one(name: str, is_auto: bool) -> None:
    seed = random.SystemRandom().randrange(2**31)
    print("seed", seed)  # noqa: T201
    policy, workers = FLEETS[name]
    setups = [worker(role, num_packed, is_chunk_auto=is_auto) for role, num_packed in workers]
    load = poisson(
        num_requests=60,
        rate=12.0,
        prompt=lognormal(300, 1.0, 2000),
        output=lognormal(80, 1.0, 400),
        seed=seed,
        shared_prefix=48,
    )
    seen = []
    for at_once in (True, False):
        simulation = Simulation(setups, load, policy=policy, at_once=at_once, keep_tokens=True)
        outcome = simulation.run()
        check_finished(outcome)
        for host in simulation.hosts:
            host.check_invariants()
            assert host.cache.load.held == 0
        seen.append((outcome, [host.state() for host in simulation.hosts]))
    (together, states), (one_by_one, other_states) = seen
    for fast, slow in zip(together.records, one_by_one.records, strict=True):
        assert fast.token_times == slow.token_times
        assert (fast.num_retries, fast.num_cached_tokens, fast.num_local_prefills) == (
            slow.num_retries,
            slow.num_cached_tokens,
            slow.num_local_prefills,
        )
        assert fast.worst_gap_s == slow.worst_gap_s
    assert together.gaps.counts == one_by_one.gaps.counts
    assert states == other_states
    for fast_worker, slow_worker in zip(together.workers, one_by_one.workers, strict=True):
        assert fast_worker.num_steps == slow_worker.num_steps
        assert fast_worker.num_prompt_tokens == slow_worker.num_prompt_tokens
        assert fast_worker.busy_s == pytest.approx(slow_worker.busy_s)
    assert together.num_events < one_by_one.num_events
