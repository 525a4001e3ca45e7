"""What decisions cost, guarded with much room to spare: lines executed, processor time, and memory
that does not grow. `python -m bench scheduler` has the numbers.
"""

import sys
import time
import tracemalloc
from types import FrameType

from bench.scheduler import measure
from common.scheduling.step_fit import StepFit
from common.scheduling.step_time import StepShape
from decode_worker.scheduler import BatchScheduler
from tests.scheduling.test_schedulers import batch_scheduler, null_step, step, submit

LARGE_POOL = 20_000


def test_b133_a_plan_is_cheap_and_does_not_depend_on_how_many_wait() -> None:
    idle, busy = measure((0, 5_000), LARGE_POOL, num_steps=60)
    # 256 running; measured 70 us, and 25 us on a prefill worker
    assert busy.plan_s < 600e-6
    # a cost for each one that waits would show as hundreds of times
    assert busy.plan_s < 5 * idle.plan_s
    assert busy.admit_s < 100e-6
    assert busy.apply_s < 2e-3
    assert busy.prefill_plan_s < 5 * idle.prefill_plan_s


def lines_of_steps(s: BatchScheduler, count: int) -> int:
    """Lines of Python that admit, plan and apply execute together: no clock, so no noise."""
    num_lines = 0

    def trace(frame: FrameType, event: str, _: object) -> object:
        nonlocal num_lines
        num_lines += event == "line"
        return trace

    for _ in range(count):
        sys.settrace(trace)  # type: ignore[arg-type]
        try:
            s.admit(0.0)
            plan, _facts = s.plan(0.0)
            assert plan is not None
            s.apply(plan, null_step(plan), 0.0)
        finally:
            sys.settrace(None)
    return num_lines


def test_b144_requests_that_wait_for_pages_cost_no_step_anything() -> None:
    """Two run; 500 have been admitted and wait for their hand-offs."""

    def with_pulls(num_pulls: int) -> int:
        s = batch_scheduler(
            num_packed=20_000, num_exact=4000, max_num_seqs=1000, max_waiting=1000,
            is_colocated=False,
        )  # fmt: skip
        for number in range(2 + num_pulls):
            submit(s, f"r{number}", 40, max_tokens=500)
        for admission in s.admit(0.0):
            if admission.request_id in ("r0", "r1"):
                s.route_local(admission.request_id)
            else:
                s.route_remote(admission.request_id, 0.0)
        while s.num_decodes < 2:
            step(s, 0.0)
        assert s.num_running == 2 + num_pulls
        return lines_of_steps(s, 20)

    assert with_pulls(500) < 1.1 * with_pulls(0)


def test_b143_nothing_is_left_of_requests_that_have_ended() -> None:
    """Requests of one token from many clients; the scheduler keeps nothing of them. (Their prompts
    fill no block: the journal of the prefix cache remembers a bounded number of names.)
    """
    s = batch_scheduler(num_packed=64, num_exact=32)

    def serve(first: int, count: int) -> None:
        for number in range(first, first + count):
            submit(s, f"r{number}", 3, max_tokens=1, client=f"client {number}")
            s.admit(0.0)
            plan, _ = s.plan(0.0)
            assert plan is not None
            s.apply(plan, null_step(plan), 0.0)

    serve(0, 200)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        serve(200, 1000)
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert grown < 1000 * 20, f"{grown} bytes of 1,000 requests are left"
    s.check_invariants()


def test_fitting_step_times_costs_little() -> None:
    fit = StepFit()

    def observe(count: int) -> None:
        for number in range(count):
            fit.observe(StepShape(num_decodes=1 + number % 9, num_context_tokens=number), 0.02)

    observe(300)
    began = time.thread_time()
    observe(320)
    # about 50 us a step, of steps that take 10 ms and more
    assert (time.thread_time() - began) / 320 < 500e-6
