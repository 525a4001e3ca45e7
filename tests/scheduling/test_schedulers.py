"""Both schedulers, driven step by step by a null model, with invariants after every step."""

import random
from collections import deque
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from common.errors import ContextLengthExceeded, DecodeFull, PromptTooLargeForPool
from common.handoff_messages import FirstTokens
from common.messages import GenerateRequest, pack_tokens
from common.scheduling.block_hash import HashChain, root_hash
from common.scheduling.kv_cache import KvCache
from common.scheduling.plan import StepPlan, StepResult
from common.scheduling.prompt_pages import PromptNames
from common.scheduling.prompt_queue import Prompt, PromptQueue, shareable
from common.types import FinishReason, SamplingParams
from decode_worker.entries import Facts
from decode_worker.finish import finish_reason
from decode_worker.flights import MAX_IN_FLIGHT, Pin
from decode_worker.scheduler import BatchScheduler
from prefill_worker.scheduler import ChunkComputed, PrefillScheduler, PromptComputed, PromptFailed

BLOCK = 4
ROOT = root_hash(b"test", BLOCK)


def chain_of(tokens: list[int]) -> HashChain:
    chain = HashChain(ROOT, BLOCK)
    chain.extend(tokens)
    return chain


def null_step(plan: StepPlan) -> StepResult:
    """A model whose every token is 7."""
    keys = [chunk.key for chunk in plan.chunks for _ in range(chunk.num_outputs)]
    keys += plan.decodes
    return StepResult(
        step=plan.step,
        keys=tuple(keys),
        token_ids=(7,) * len(keys),
        logprobs=(None,) * len(keys),
    )


def batch_scheduler(num_packed: int = 32, num_exact: int = 16, **settings: Any) -> BatchScheduler:
    cache = KvCache(num_packed=num_packed, num_exact=num_exact, block_size=BLOCK)
    values: dict[str, Any] = {
        "chunk_tokens": 16,
        "max_num_seqs": 8,
        "max_waiting": 100,
        "max_model_len": 1000,
        "is_colocated": True,
    }
    return BatchScheduler(cache, **{**values, **settings})


def submit(
    scheduler: BatchScheduler,
    request_id: str,
    num_tokens: int,
    now: float = 0.0,
    max_tokens: int = 8,
    seed: int = 0,
    **fields: Any,
) -> None:
    rng = random.Random(f"{request_id}/{seed}")
    tokens = fields.pop("tokens", None) or [rng.randrange(100) for _ in range(num_tokens)]
    n = fields.pop("n", 1)
    sampling = fields.pop("sampling", None) or SamplingParams(max_tokens=max_tokens, n=n)
    request = GenerateRequest(
        request_id=request_id,
        token_ids=pack_tokens(tokens),
        num_prompt_tokens=len(tokens),
        sampling=sampling,
        **fields,
    )
    scheduler.add(request, np.asarray(tokens, dtype=np.int32), chain_of(tokens), now)


def step(scheduler: BatchScheduler, now: float) -> tuple[StepPlan | None, list[Facts]]:
    scheduler.admit(now)
    plan, before = scheduler.plan(now)
    scheduler.check_invariants()
    if plan is None:
        return None, [before]
    after = scheduler.apply(plan, null_step(plan), now)
    scheduler.check_invariants()
    return plan, [before, after]


def test_decodes_come_first_and_chunks_fill_the_budget() -> None:
    s = batch_scheduler(chunk_tokens=16)
    submit(s, "a", 6)
    step(s, 0.0)
    submit(s, "b", 40)
    plan, _ = step(s, 0.1)
    assert plan is not None
    assert plan.decodes == ("a/0",)
    # 15 tokens are left of the budget; a piece that is not the last one ends on a block
    assert [(chunk.key, chunk.start, chunk.num_tokens) for chunk in plan.chunks] == [("b/0", 0, 12)]
    plan, _ = step(s, 0.2)
    assert plan is not None
    assert plan.decodes == ("a/0",)
    assert [(chunk.start, chunk.num_tokens) for chunk in plan.chunks] == [(12, 12)]


def test_a_short_prompt_overtakes_a_long_one_between_chunks() -> None:
    s = batch_scheduler(chunk_tokens=16, num_packed=64)
    submit(s, "long", 100)
    step(s, 0.0)
    submit(s, "short", 8, now=0.01)
    plan, facts = step(s, 0.02)
    assert plan is not None
    assert plan.chunks[0].key == "short/0"
    assert facts[1].request_ids == ["short"]


def test_b139_a_long_prompt_is_overtaken_only_for_a_bounded_time() -> None:
    """Short prompts keep coming faster than they can be computed; ageing bounds the wait of the
    long one.
    """
    cache = KvCache(num_packed=4000, num_exact=1000, block_size=BLOCK)
    queue = PromptQueue(cache)

    def add(key: str, num_tokens: int, now: float) -> None:
        tokens = [hash((key, i)) % 1000 for i in range(num_tokens)]
        queue.add(
            Prompt(
                key=key,
                token_ids=np.asarray(tokens, dtype=np.int32),
                num_prompt_tokens=num_tokens,
                sampling=SamplingParams(max_tokens=1),
                hashes=shareable(chain_of(tokens).full, num_tokens, BLOCK),
            ),
            now,
        )

    add("long", 2048, 0.0)
    now, number, done = 0.0, 0, False
    while not done and now < 60:
        now += 0.1
        for _ in range(2):
            number += 1
            add(f"short{number}", 100, now)
        _, chunks = queue.plan(128, now)
        for chunk in chunks:
            prompt = queue.apply(chunk)
            assert prompt is not None
            done = done or (chunk.key == "long" and chunk.num_outputs > 0)
    # 2048 tokens of ageing take 2 s; computing it takes 1.6 s
    assert done
    assert now < 6.0


def test_b135_small_requests_pass_one_that_does_not_fit_for_a_bounded_time() -> None:
    s = batch_scheduler(num_packed=40, num_exact=80, max_num_seqs=32)
    submit(s, "running", 60, max_tokens=100)
    step(s, 0.0)
    submit(s, "head", 120, now=1.0, max_tokens=4)
    submit(s, "small0", 8, now=1.0)
    step(s, 1.0)
    assert s.num_waiting == 1, "the small one has its blocks, the head waits"
    submit(s, "small1", 8, now=3.5)
    step(s, 3.5)
    assert s.num_waiting == 2, "the head has waited long enough: nobody passes it any more"


def test_the_youngest_is_evicted_and_the_oldest_never() -> None:
    s = batch_scheduler(num_packed=8, num_exact=16, max_num_seqs=4)
    submit(s, "old", 9, now=0.0, max_tokens=24)
    submit(s, "young", 9, now=1.0, max_tokens=24)
    step(s, 1.0)
    evicted: list[str] = []
    ended: list[str] = []
    for number in range(60):
        plan, facts = step(s, 2.0 + number)
        if plan is None:
            break
        for fact in facts:
            evicted += [request_id for request_id, _ in fact.failed]
            ended += fact.ended
    assert evicted == ["young"]
    assert "old" in ended
    assert s.num_running == 0


def test_b34_too_long_for_the_context_or_the_pool_is_refused_at_once() -> None:
    s = batch_scheduler(max_model_len=100, num_packed=10, num_exact=4)
    with pytest.raises(ContextLengthExceeded, match=r"90.*11|11.*90"):
        submit(s, "a", 90, max_tokens=11)
    with pytest.raises(PromptTooLargeForPool, match="44 tokens"):
        submit(s, "b", 40, max_tokens=5)
    submit(s, "c", 40, max_tokens=4)  # 11 blocks: exactly the pool
    plan, _ = step(s, 0.0)
    assert plan is not None


def test_b116_the_line_is_bounded_and_places_are_given_back() -> None:
    s = batch_scheduler(max_waiting=2)
    for round_number in range(3):
        submit(s, f"a{round_number}", 4)
        submit(s, f"b{round_number}", 4)
        with pytest.raises(DecodeFull):
            submit(s, f"c{round_number}", 4)
        s.abort(f"a{round_number}")
        s.abort(f"b{round_number}")
        s.check_invariants()


def test_b141_a_request_is_preempted_a_bounded_number_of_times() -> None:
    """Evicted requests come back as the router resubmits them, with their age."""
    s = batch_scheduler(num_packed=30, num_exact=60, max_num_seqs=8)
    prompts = {f"r{i}": [i * 1000 + k for k in range(38)] for i in range(3)}
    tokens = {key: list(prompt) for key, prompt in prompts.items()}
    arrivals = {key: float(i) for i, key in enumerate(prompts)}
    evictions = dict.fromkeys(prompts, 0)
    now = 3.0

    def resubmit(key: str) -> None:
        request = GenerateRequest(
            request_id=key,
            token_ids=pack_tokens(tokens[key]),
            num_prompt_tokens=38,
            sampling=SamplingParams(max_tokens=60),
            age_s=now - arrivals[key],
        )
        s.add(request, np.asarray(tokens[key], dtype=np.int32), chain_of(tokens[key]), now)

    for key in prompts:
        resubmit(key)
    done: set[str] = set()
    steps = 0
    while len(done) < 3 and steps < 1000:
        steps += 1
        now += 0.02
        _, facts = step(s, now)
        for fact in facts:
            for key, token in zip(fact.request_ids, fact.token_ids, strict=True):
                tokens[key].append(token)
            for key, _ in fact.failed:
                evictions[key] += 1
            for key in fact.ended:
                if len(tokens[key]) == 98:
                    done.add(key)
                else:
                    resubmit(key)
    assert done == set(prompts)
    assert max(evictions.values()) < 3, evictions
    # one after the other: three times 3 chunks of 16 and 60 tokens
    assert steps <= 1.5 * 3 * 63


def test_outputs_of_one_prompt_share_its_full_blocks() -> None:
    s = batch_scheduler()
    submit(s, "a", 10, n=3, max_tokens=5)
    plan, facts = step(s, 0.0)
    assert plan is not None
    assert [chunk.num_outputs for chunk in plan.chunks] == [3]
    assert facts[1].output_indices == [0, 1, 2]
    plan, facts = step(s, 0.1)
    assert plan is not None
    assert plan.decodes == ("a/0", "a/1", "a/2")
    tables = {start.key: start.block_ids for start in plan.starts}
    assert set(tables) == {"a/1", "a/2"}
    assert tables["a/1"][:2] == tables["a/2"][:2]
    assert tables["a/1"][2] != tables["a/2"][2]
    assert len(plan.copies) == 2


def test_finish_rules() -> None:
    sampling = SamplingParams(max_tokens=3, min_tokens=2, stop_token_ids=(5,))
    assert finish_reason(sampling, 5, 1) is None
    assert finish_reason(sampling, 5, 2) is FinishReason.STOP
    assert finish_reason(sampling, 5, 3) is FinishReason.STOP
    assert finish_reason(sampling, 6, 3) is FinishReason.LENGTH


class BatchMachine(RuleBasedStateMachine):
    """Random requests, routes, aborts and steps on a small pool; every request ends, nothing stays
    held.
    """

    @initialize(
        num_packed=st.integers(6, 40), chunk=st.sampled_from([4, 8, 16]), colocated=st.booleans()
    )
    def start(self, num_packed: int, chunk: int, colocated: bool) -> None:
        self.s = batch_scheduler(
            num_packed=num_packed,
            num_exact=max(6, num_packed // 2),
            chunk_tokens=chunk,
            max_num_seqs=6,
            is_colocated=colocated,
        )
        self.now = 0.0
        self.number = 0
        self.live: set[str] = set()
        self.num_outputs: dict[str, int] = {}
        self.pins: list[Pin] = []
        self.to_route: list[str] = []
        self.remote: list[str] = []
        self.in_flight: deque[StepPlan] = deque()

    @rule(
        num_tokens=st.integers(1, 40),
        max_tokens=st.integers(1, 20),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        shared=st.booleans(),
        priority=st.integers(0, 1),
    )
    def add(self, num_tokens: int, max_tokens: int, n: int, shared: bool, priority: int) -> None:
        self.number += 1
        request_id = f"r{self.number}"
        tokens = (
            list(range(num_tokens))
            if shared
            else [self.number * 100 + k for k in range(num_tokens)]
        )
        try:
            submit(
                self.s, request_id, 0, self.now, max_tokens, tokens=tokens, n=n, priority=priority
            )
        except PromptTooLargeForPool:
            return
        self.live.add(request_id)
        self.num_outputs[request_id] = n

    @rule(seconds=st.floats(0.01, 3.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def admit(self) -> None:
        for admission in self.s.admit(self.now):
            if admission.needs_route:
                self.to_route.append(admission.request_id)

    @precondition(lambda self: self.to_route)
    @rule(local=st.booleans())
    def route(self, local: bool) -> None:
        request_id = self.to_route.pop(0)
        if request_id not in self.live:
            return
        if local:
            self.s.route_local(request_id)
        else:
            self.s.route_remote(request_id, self.now)
            self.remote.append(request_id)

    @precondition(lambda self: self.remote)
    @rule(tokens_first=st.booleans())
    def hand_off(self, tokens_first: bool) -> None:
        request_id = self.remote.pop(0)
        if request_id not in self.live:
            return
        if not tokens_first:
            self.s.remote.landed_all(request_id)
        n = self.num_outputs[request_id]
        tokens = FirstTokens(token_ids=(7,) * n, logprobs=(None,) * n, num_cached_tokens=0)
        self.took(self.s.remote.first_tokens(request_id, tokens))
        if tokens_first and request_id in self.live:
            self.s.remote.landed_all(request_id)

    @precondition(lambda self: self.remote)
    @rule()
    def begin_landing(self) -> None:
        if self.remote[0] in self.live:
            self.pins.append(self.s.remote.pin(self.remote[0]))

    @precondition(lambda self: self.pins)
    @rule()
    def end_landing(self) -> None:
        self.s.remote.unpin(self.pins.pop(0))

    @precondition(lambda self: len(self.in_flight) < MAX_IN_FLIGHT)
    @rule()
    def plan(self) -> None:
        plan, facts = self.s.plan(self.now)
        self.took(facts)
        if plan is not None:
            self.in_flight.append(plan)

    @precondition(lambda self: self.in_flight)
    @rule()
    def apply(self) -> None:
        plan = self.in_flight.popleft()
        self.took(self.s.apply(plan, null_step(plan), self.now))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.live)))
        self.s.abort(request_id)
        self.live.discard(request_id)

    def took(self, facts: Facts) -> None:
        self.live -= set(facts.ended)

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "s"):
            self.s.check_invariants()

    def teardown(self) -> None:
        """Any schedule ends."""
        if not hasattr(self, "s"):
            return
        for _ in range(3000):
            if not self.live:
                break
            self.now += 0.02
            self.admit()
            while self.pins:
                self.end_landing()
            while self.to_route:
                self.route(local=False)
            while self.remote:
                self.hand_off(tokens_first=True)
            if len(self.in_flight) < MAX_IN_FLIGHT:
                self.plan()
            if self.in_flight:
                self.apply()
            self.s.check_invariants()
        assert not self.live, self.live
        while self.pins:
            self.end_landing()
        while self.in_flight:
            self.apply()
        self.s.check_invariants()
        assert self.s._cache.load.held == 0


TestBatch = BatchMachine.TestCase
TestBatch.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def prefill_scheduler(tokens: list[int]) -> tuple[PrefillScheduler, StepPlan]:
    """One that computes "a", a prompt of one chunk, now."""
    cache = KvCache(num_packed=16, num_exact=8, block_size=BLOCK)
    s = PrefillScheduler(cache, chunk_tokens=16, max_model_len=1000)
    add_prompt(s, "a", tokens)
    plan = s.plan(0.0)
    assert plan is not None
    return s, plan


def add_prompt(s: PrefillScheduler, key: str, tokens: list[int]) -> None:
    chain = chain_of(tokens)
    prompt = Prompt(
        key=key,
        token_ids=np.asarray(tokens, dtype=np.int32),
        num_prompt_tokens=len(tokens),
        sampling=SamplingParams(max_tokens=4),
        hashes=shareable(chain.full, len(tokens), BLOCK),
    )
    s.add(prompt, PromptNames.of(chain, prompt.num_tokens, BLOCK), 0, 0.0)


def test_pages_are_handed_out_before_the_samples_are_there() -> None:
    s, plan = prefill_scheduler(list(range(10)))
    [stored] = s.stored(plan)
    assert [page.index for page in stored.pages] == [0, 1, 2]
    s.check_invariants()
    assert [type(fact) for fact in s.apply(plan, null_step(plan), 0.0)] == [PromptComputed]
    s.check_invariants()
    s.release((page.kind, page.block_id) for page in stored.pages)
    s.check_invariants()


def test_a_grammar_that_gives_up_is_the_requests_own_failure() -> None:
    s, plan = prefill_scheduler(list(range(10)))
    [stored] = s.stored(plan)
    why = (("a", "too complex"),)
    result = StepResult(step=plan.step, failed=("a",), failed_grammars=why)
    [failed] = s.apply(plan, result, 0.0)
    assert isinstance(failed, PromptFailed)
    assert (failed.error.code, failed.error.http_status) == ("grammar_failed", 400)
    assert "grammar" in failed.error.message
    assert "too complex" in failed.error.message
    s.release((page.kind, page.block_id) for page in stored.pages)
    s.check_invariants()


def test_a_prompt_that_fails_after_its_pages_were_handed_out_is_not_found_again() -> None:
    tokens = list(range(10))
    s, plan = prefill_scheduler(tokens)
    [stored] = s.stored(plan)
    [failed] = s.apply(plan, StepResult(step=plan.step, failed=("a",)), 0.0)
    assert isinstance(failed, PromptFailed)
    assert (failed.key, failed.error.code) == ("a", "internal_error")
    s.release((page.kind, page.block_id) for page in stored.pages)
    s.check_invariants()
    add_prompt(s, "again", tokens)
    again = s.plan(1.0)
    assert again is not None
    assert [(chunk.start, chunk.num_tokens) for chunk in again.chunks] == [(0, 10)]


def test_a_prompt_aborted_between_its_pages_and_its_samples_leaves_nothing_held() -> None:
    s, plan = prefill_scheduler(list(range(10)))
    [stored] = s.stored(plan)
    s.abort("a")
    s.release((page.kind, page.block_id) for page in stored.pages)
    s.check_invariants()
    assert s.apply(plan, null_step(plan), 0.0) == []
    s.check_invariants()
    assert (s.num_running, s.num_waiting) == (0, 0)


class PrefillMachine(RuleBasedStateMachine):
    """Random prompts, aborts and late releases on a small pool."""

    @initialize(num_packed=st.integers(6, 40), chunk=st.sampled_from([4, 8, 16]))
    def start(self, num_packed: int, chunk: int) -> None:
        self.cache = KvCache(
            num_packed=num_packed, num_exact=max(4, num_packed // 2), block_size=BLOCK
        )
        self.s = PrefillScheduler(self.cache, chunk_tokens=chunk, max_model_len=1000)
        self.now = 0.0
        self.number = 0
        self.lengths: dict[str, int] = {}
        self.pages: dict[str, list[Any]] = {}
        self.indices: dict[str, list[int]] = {}
        self.in_flight: StepPlan | None = None

    @rule(num_tokens=st.integers(1, 60), held=st.integers(0, 2), shared=st.booleans())
    def add(self, num_tokens: int, held: int, shared: bool) -> None:
        self.number += 1
        key = f"r{self.number}"
        tokens = (
            list(range(num_tokens))
            if shared
            else [self.number * 100 + k for k in range(num_tokens)]
        )
        chain = chain_of(tokens)
        prompt = Prompt(
            key=key,
            token_ids=np.asarray(tokens, dtype=np.int32),
            num_prompt_tokens=num_tokens,
            sampling=SamplingParams(max_tokens=4),
            hashes=shareable(chain.full, num_tokens, BLOCK),
        )
        held = min(held, (num_tokens - 1) // BLOCK)
        try:
            self.s.add(prompt, PromptNames.of(chain, prompt.num_tokens, BLOCK), held, self.now)
        except PromptTooLargeForPool:
            return
        self.lengths[key] = -(-num_tokens // BLOCK) - held
        self.pages[key] = []

    @precondition(lambda self: self.in_flight is None)
    @rule()
    def plan(self) -> None:
        self.now += 0.01
        self.in_flight = self.s.plan(self.now)

    @precondition(lambda self: self.in_flight is not None)
    @rule()
    def apply(self) -> None:
        plan, self.in_flight = self.in_flight, None
        assert plan is not None
        for fact in self.s.apply(plan, null_step(plan), self.now):
            match fact:
                case ChunkComputed():
                    self.take(fact)
                case PromptComputed(key=key):
                    # every wanted page was handed out, once, in order
                    indices = self.indices[key]
                    assert indices == list(range(indices[0], indices[0] + len(indices)))
                    assert len(indices) == self.lengths.pop(key)

    @precondition(lambda self: self.in_flight is not None)
    @rule()
    def stored(self) -> None:
        assert self.in_flight is not None
        for fact in self.s.stored(self.in_flight):
            self.take(fact)

    def take(self, fact: ChunkComputed) -> None:
        self.pages[fact.key] += fact.pages
        self.indices.setdefault(fact.key, []).extend(page.index for page in fact.pages)

    @precondition(lambda self: self.lengths)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.lengths)))
        self.s.abort(key)
        del self.lengths[key]

    @precondition(lambda self: any(self.pages.values()))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(k for k, pages in self.pages.items() if pages)))
        page = self.pages[key].pop()
        self.s.release([(page.kind, page.block_id)])

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "s"):
            self.s.check_invariants()

    def teardown(self) -> None:
        if not hasattr(self, "s"):
            return
        for _ in range(3000):
            for pages in self.pages.values():
                self.s.release([(page.kind, page.block_id) for page in pages])
                pages.clear()
            self.lengths = {k: n for k, n in self.lengths.items() if n > 0}
            if self.in_flight is None:
                self.plan()
            if self.in_flight is None:
                break
            plan, self.in_flight = self.in_flight, None
            for fact in self.s.apply(plan, null_step(plan), self.now):
                if isinstance(fact, ChunkComputed):
                    self.s.release([(page.kind, page.block_id) for page in fact.pages])
            self.s.check_invariants()
        assert self.s.num_running == self.s.num_waiting == 0
        assert self.cache.load.held == 0


TestPrefill = PrefillMachine.TestCase
TestPrefill.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
