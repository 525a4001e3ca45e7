"""Steps that are planned while one runs: the same tokens, whatever the timing; nothing held at the
end. The device is the hash model, so a page that was freed, grown or shared at the wrong time
changes tokens.
"""

from collections import deque
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from common.errors import Preempted, PromptTooLargeForPool
from common.messages import GenerateRequest, pack_tokens
from common.scheduling.block_hash import HashChain, root_hash
from common.scheduling.kv_cache import KvCache
from common.scheduling.plan import StepPlan, StepResult
from common.types import FinishReason, SamplingParams
from decode_worker.entries import Facts
from decode_worker.flights import MAX_IN_FLIGHT
from decode_worker.scheduler import BatchScheduler
from tests.fakes.hash_model import VOCAB_SIZE, HashRunner, expected_tokens

BLOCK = 4
STOPS = tuple(range(0, VOCAB_SIZE, 6))
"""One token in six ends an output that minds them."""


class Worker:
    """A colocated worker without its service. Results come when `apply` is called."""

    def __init__(self, num_packed: int = 40, num_exact: int = 20, **fields: Any) -> None:
        cache = KvCache(num_packed=num_packed, num_exact=num_exact, block_size=BLOCK)
        values = {"chunk_tokens": 16, "max_num_seqs": 8, "max_waiting": 100, "max_model_len": 1000}
        self.scheduler = BatchScheduler(cache, **{**values, **fields}, is_colocated=True)
        self.cache = cache
        self.runner = HashRunner(
            num_packed=num_packed,
            num_exact=num_exact,
            num_landing=1,
            block_size=BLOCK,
            incarnation=1,
        )
        self.now = 0.0
        self.under_way: deque[tuple[StepPlan, StepResult]] = deque()
        self.requests: dict[str, tuple[list[int], SamplingParams]] = {}
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.reasons: dict[tuple[str, int], FinishReason] = {}
        self.live: set[str] = set()
        self.cut: set[tuple[str, int]] = set()
        """Outputs that were ended from outside."""

    def add(self, prompt: list[int], sampling: SamplingParams, request_id: str = "") -> str:
        request_id = request_id or f"r{len(self.requests)}"
        request = GenerateRequest(
            request_id=request_id,
            token_ids=pack_tokens(prompt),
            num_prompt_tokens=len(prompt),
            sampling=sampling,
        )
        chain = HashChain(root_hash(b"model", BLOCK, ""), BLOCK)
        chain.extend(prompt)
        self.scheduler.add(request, np.asarray(prompt, dtype=np.int32), chain, self.now)
        self.requests[request_id] = prompt, sampling
        self.live.add(request_id)
        return request_id

    @property
    def can_plan(self) -> bool:
        return len(self.under_way) < MAX_IN_FLIGHT

    def plan(self) -> StepPlan | None:
        self.scheduler.admit(self.now)
        plan, facts = self.scheduler.plan(self.now)
        self.took(facts)
        if plan is not None:
            self.under_way.append((plan, self.runner.execute(plan)))
        return plan

    def apply(self) -> None:
        plan, result = self.under_way.popleft()
        self.took(self.scheduler.apply(plan, result, self.now))

    def took(self, facts: Facts) -> None:
        for request_id, index, token_id, reason in zip(
            facts.request_ids,
            facts.output_indices,
            facts.token_ids,
            facts.finish_reasons,
            strict=True,
        ):
            assert request_id in self.live, "a token of a request that has ended"
            self.tokens.setdefault((request_id, index), []).append(token_id)
            if reason is not None:
                self.reasons[request_id, index] = reason
        self.live -= set(facts.ended)
        lost = {request_id for request_id, error in facts.failed}
        assert all(isinstance(error, Preempted) for _, error in facts.failed)
        for request_id in facts.ended:
            prompt, sampling = self.requests[request_id]
            for index in range(sampling.n):
                wanted = expected_tokens(prompt, sampling, index)
                found = self.tokens.get((request_id, index), [])
                is_cut = request_id in lost or (request_id, index) in self.cut
                assert found == (wanted[: len(found)] if is_cut else wanted)

    def end(self) -> None:
        """Everything ends, with two steps under way whenever there is something to do."""
        for _ in range(3000):
            if not self.live:
                break
            self.now += 0.02
            while self.can_plan and self.plan() is not None:
                pass
            if self.under_way:
                self.apply()
            self.scheduler.check_invariants()
        assert not self.live, self.live
        while self.under_way:
            self.apply()
        self.plan()  # the runner is told of the last ones to forget
        assert self.runner.num_outputs == 0
        assert self.cache.load.held == 0


def sampling(max_tokens: int, **fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=3, **fields)


def test_the_next_step_goes_on_with_tokens_that_nobody_has_read() -> None:
    worker = Worker()
    worker.add([1, 2, 3], sampling(6))
    worker.plan()
    worker.apply()
    first, second = worker.plan(), worker.plan()
    assert first is not None
    assert second is not None
    assert first.decodes == second.decodes == ("r0/0",)
    # four tokens are known or unread when the second one runs, and the fifth opens a block
    assert first.grown == ()
    assert [key for key, _ in second.grown] == ["r0/0"]
    worker.end()


def test_an_output_that_is_about_to_reach_its_limit_is_left_out() -> None:
    worker = Worker()
    worker.add([1, 2, 3], sampling(3))
    worker.plan()
    worker.apply()
    assert worker.plan() is not None  # the second token
    assert worker.plan() is not None  # the third one, the last
    worker.apply()
    assert worker.plan() is None
    worker.apply()
    assert worker.reasons == {("r0", 0): FinishReason.LENGTH}


def test_what_was_computed_beyond_the_end_is_thrown_away() -> None:
    prompt = [5, 6, 7]
    known = expected_tokens(prompt, sampling(20))
    stop = known[3]
    assert stop not in known[:3]
    worker = Worker()
    worker.add(prompt, sampling(20, stop_token_ids=(stop,)))
    worker.end()
    assert worker.tokens["r0", 0] == known[:4]
    assert worker.reasons == {("r0", 0): FinishReason.STOP}


def test_chunks_of_a_long_prompt_follow_each_other_without_a_pause() -> None:
    worker = Worker()
    worker.add(list(range(1, 41)), sampling(1))
    plans = [worker.plan(), worker.plan()]
    worker.apply()
    plans.append(worker.plan())
    found = [(c.start, c.num_tokens, c.num_outputs) for p in plans if p for c in p.chunks]
    assert found == [(0, 16, 0), (16, 16, 0), (32, 8, 1)]
    worker.end()


def test_pages_of_an_aborted_request_stay_until_both_steps_are_applied() -> None:
    worker = Worker()
    request_id = worker.add(list(range(1, 8)), sampling(40))
    worker.plan()
    worker.apply()
    held = worker.cache.load.held
    worker.plan()
    worker.plan()
    worker.scheduler.abort(request_id)
    worker.live.discard(request_id)
    assert worker.cache.load.held >= held
    worker.apply()
    assert worker.cache.load.held >= held
    worker.apply()
    assert worker.cache.load.held == 0


def test_when_pages_run_short_the_device_is_emptied_before_anybody_is_evicted() -> None:
    """Two requests want a page at once and there is one: the older one gets it."""
    worker = Worker(num_packed=5, num_exact=8)
    worker.add([1, 2, 3, 4, 5, 6], sampling(14))
    worker.add([11, 12, 13, 14, 15, 16], sampling(14))
    was_short = False
    while worker.live == {"r0", "r1"}:
        worker.now += 0.1
        if worker.can_plan:
            alone = not worker.under_way
            before = set(worker.live)
            plan = worker.plan()
            assert worker.live == before or alone, "evicted beside a step that was under way"
            was_short |= plan is None
            if plan is not None and worker.can_plan:
                continue
        if worker.under_way:
            worker.apply()
    assert was_short
    assert worker.live == {"r0"}
    worker.end()


@pytest.mark.parametrize("lead", [0, 1])
def test_an_output_that_fails_alone_does_not_take_its_ended_sibling_along(lead: int) -> None:
    """The second step still holds an output that has ended in the first: that it fails there is
    nobody's failure.
    """
    worker = Worker()
    params = sampling(9, n=2)
    worker.add([1, 2, 3], params)
    worker.plan()
    worker.apply()
    first, second = worker.plan(), worker.plan()
    assert first is not None
    assert second is not None
    worker.apply()
    worker.scheduler.end_output("r0", lead)
    plan, result = worker.under_way.popleft()
    kept = 1 - lead
    failed = StepResult(
        step=plan.step,
        keys=(f"r0/{kept}",),
        token_ids=(result.token_ids[kept],),
        logprobs=(None,),
        failed=(f"r0/{lead}",),
    )
    facts = worker.scheduler.apply(plan, failed, worker.now)
    assert facts.failed == []
    assert facts.token_ids == [expected_tokens([1, 2, 3], params, kept)[2]]


def abort(worker: Worker, request_id: str) -> None:
    worker.scheduler.abort(request_id)
    worker.live.discard(request_id)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_chunk_of_an_earlier_request_by_the_same_name_is_not_the_new_ones(depth: int) -> None:
    worker = Worker()
    worker.add(list(range(1, 41)), sampling(2))
    for _ in range(depth):
        worker.plan()
    abort(worker, "r0")
    worker.add(list(range(50, 95)), sampling(2), "r0")
    worker.apply()
    worker.plan()
    worker.scheduler.check_invariants()
    worker.end()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_first_token_of_an_earlier_request_by_the_same_name_is_not_the_new_ones(
    depth: int,
) -> None:
    """The chunks of both are whole prompts of the same length."""
    worker = Worker()
    worker.add([9] * 5, sampling(40))
    worker.plan()
    worker.apply()
    worker.plan()
    worker.add(list(range(1, 13)), sampling(2))
    if depth == 1:
        worker.apply()
    worker.plan()
    abort(worker, "r1")
    worker.add(list(range(50, 62)), sampling(2), "r1")
    worker.apply()
    worker.plan()
    worker.scheduler.check_invariants()
    worker.end()
    assert worker.tokens["r1", 0] == expected_tokens(list(range(50, 62)), sampling(2))


class OverlapMachine(RuleBasedStateMachine):
    @initialize(num_packed=st.integers(4, 30), chunk=st.sampled_from([4, 8, 16]))
    def start(self, num_packed: int, chunk: int) -> None:
        self.w = Worker(
            num_packed=num_packed,
            num_exact=max(6, num_packed // 2),
            chunk_tokens=chunk,
            max_num_seqs=6,
        )

    @rule(
        num_tokens=st.integers(1, 30),
        max_tokens=st.integers(1, 20),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        first=st.integers(0, 2),
        stops=st.booleans(),
    )
    def add(self, num_tokens: int, max_tokens: int, n: int, first: int, stops: bool) -> None:
        params = sampling(max_tokens, n=n, stop_token_ids=STOPS if stops else ())
        try:
            self.w.add([first + k for k in range(num_tokens)], params)
        except PromptTooLargeForPool:
            return

    @precondition(lambda self: self.w.can_plan)
    @rule()
    def plan(self) -> None:
        self.w.plan()

    @precondition(lambda self: self.w.under_way)
    @rule()
    def apply(self) -> None:
        self.w.apply()

    @precondition(lambda self: self.w.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.w.live)))
        self.w.scheduler.abort(request_id)
        self.w.live.discard(request_id)

    @precondition(lambda self: self.w.live)
    @rule(data=st.data(), index=st.integers(0, 2))
    def end_output(self, data: st.DataObject, index: int) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.w.live)))
        self.w.cut.add((request_id, index))
        facts = self.w.scheduler.end_output(request_id, index)
        self.w.live -= set(facts.ended)

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "w"):
            self.w.scheduler.check_invariants()

    def teardown(self) -> None:
        if hasattr(self, "w"):
            self.w.end()


TestOverlap = OverlapMachine.TestCase
TestOverlap.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
