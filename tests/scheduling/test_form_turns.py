"""Outputs under slow grammars take turns, so that a step never waits long for masks; nobody else
notices, and each of them goes on.
"""

from dataclasses import replace

from common.scheduling.plan import StepPlan
from common.types import SamplingParams
from decode_worker.scheduler import BatchScheduler
from tests.scheduling.test_schedulers import batch_scheduler, null_step, submit

SLOW_S = 0.06


def running(num_free: int, num_slow: int, grammar: str = "wide") -> BatchScheduler:
    s = batch_scheduler(num_packed=4000, num_exact=200, max_num_seqs=64)
    for number in range(num_free):
        submit(s, f"free{number}", 6, max_tokens=400)
    for number in range(num_slow):
        form = SamplingParams(max_tokens=400, temperature=0, grammar=grammar)
        submit(s, f"slow{number}", 6, sampling=form)
    return s


def step(s: BatchScheduler, cost_s: float) -> StepPlan:
    """One step; masks of slow outputs take `cost_s` each."""
    s.admit(0.0)
    plan, _ = s.plan(0.0)
    assert plan is not None
    keys = [key for key in (*(c.key for c in plan.chunks), *plan.decodes) if "slow" in key]
    took = tuple((key, cost_s) for key in keys)
    waited = cost_s * len(keys)
    result = replace(null_step(plan), slow_masks=took, mask_wait_s=waited, duration_s=0.05 + waited)
    s.apply(plan, result, 0.0)
    s.check_invariants()
    return plan


def test_one_slow_mask_a_step_and_all_the_others() -> None:
    s = running(16, 20)
    for _ in range(60):  # prompts are computed, step times are fitted
        step(s, SLOW_S)
    turns: dict[str, int] = {}
    for _ in range(60):
        plan = step(s, SLOW_S)
        slow = [key for key in plan.decodes if "slow" in key]
        assert len(plan.decodes) - len(slow) == 16, "streams without a grammar are in every step"
        assert len(slow) == 1, "50 ms of a step are room for one mask of 60"
        turns[slow[0]] = turns.get(slow[0], 0) + 1
    assert sorted(turns.values()) == [3] * 20, "by turns"


def test_quick_grammars_are_never_left_out() -> None:
    s = running(4, 20, grammar="narrow")
    for _ in range(40):
        s.admit(0.0)
        plan, _ = s.plan(0.0)
        assert plan is not None
        s.apply(plan, replace(null_step(plan), duration_s=0.05), 0.0)
    plan, _ = s.plan(0.0)
    assert plan is not None
    assert len(plan.decodes) == 24


def test_all_of_them_end() -> None:
    """Every output gets as many tokens as it asked for, and pages are given back."""
    s = batch_scheduler(num_packed=400, num_exact=40, max_num_seqs=16)
    for number in range(6):
        form = SamplingParams(max_tokens=9, temperature=0, grammar="wide")
        submit(s, f"slow{number}", 6, sampling=form)
    tokens: dict[str, int] = {}
    for _ in range(200):
        s.admit(0.0)
        plan, _ = s.plan(0.0)
        if plan is None:
            break
        took = tuple((key, SLOW_S) for key in plan.decodes)
        facts = s.apply(plan, replace(null_step(plan), slow_masks=took), 0.0)
        for request_id in facts.request_ids:
            tokens[request_id] = tokens.get(request_id, 0) + 1
        s.check_invariants()
    assert tokens == {f"slow{number}": 9 for number in range(6)}
    assert s.num_running == 0
