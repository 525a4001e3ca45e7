"""Waiting in line, between clients: who goes first, for how long anybody is overtaken, and that
every schedule ends.
"""

import random
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.scheduling.fair_line import FairLine
from common.scheduling.kv_cache import KvCache
from common.scheduling.prompt_pages import PromptNames
from common.scheduling.prompt_queue import Prompt, PromptQueue
from common.scheduling.step_time import StepShape, StepTimes
from common.types import SamplingParams
from decode_worker.scheduler import BatchScheduler
from prefill_worker.scheduler import ChunkComputed, PrefillScheduler, PromptComputed
from tests.scheduling.test_schedulers import (
    BLOCK,
    batch_scheduler,
    chain_of,
    null_step,
    step,
    submit,
)


@dataclass(eq=False)
class Item:
    name: str
    client: str = ""
    priority: int = 0
    place: tuple[float, int] = (0.0, 0)
    cost: int = 10


def line(*items: Item) -> FairLine[Item]:
    made: FairLine[Item] = FairLine()
    for number, item in enumerate(items):
        item.place = (item.place[0], number)
        made.add(item)
        made.check_invariants()
    return made


def serve(made: FairLine[Item]) -> str:
    item = next(iter(made))
    made.remove(item)
    made.charge(item.client, item.priority, item.cost)
    made.check_invariants()
    return item.name


def test_clients_take_turns() -> None:
    made = line(*(Item(f"a{n}", "a") for n in range(4)), Item("b0", "b"), Item("b1", "b"))
    order = [item.name for item in made]
    assert order == ["a0", "b0", "a1", "b1", "a2", "a3"]
    assert [serve(made) for _ in range(6)] == order


def test_turns_are_by_tokens_not_by_requests() -> None:
    made = line(*(Item(f"a{n}", "a", cost=30) for n in range(3)))
    for number in range(6):
        made.add(Item(f"b{number}", "b", place=(0.0, number)))
    assert [serve(made) for _ in range(9)] == [
        *("a0", "b0", "b1", "b2"), *("a1", "b3", "b4", "b5"), "a2",
    ]  # fmt: skip


def test_a_priority_goes_before_any_turn() -> None:
    made = line(Item("a0", "a"), Item("a1", "a", priority=1), Item("b0", "b", priority=-1))
    assert [serve(made) for _ in range(3)] == ["a1", "a0", "b0"]


def test_idle_time_earns_nothing_and_a_debt_stays() -> None:
    made = line(*(Item(f"a{n}", "a") for n in range(8)))
    for _ in range(4):
        serve(made)
    made.add(Item("b0", "b", place=(0.0, 90), cost=25))
    made.add(Item("b1", "b", place=(0.0, 91), cost=10))
    # b joins level with a: the 40 tokens that a has had before are not held against it
    assert [serve(made) for _ in range(3)] == ["a4", "b0", "a5"]
    made.remove(next(item for item in made if item.name == "b1"))
    made.add(Item("b2", "b", place=(0.0, 92)))
    # b left and came back: it still has had 5 tokens more
    assert [serve(made) for _ in range(3)] == ["a6", "b2", "a7"]


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 2), st.integers(1, 100)), max_size=60)
)
@settings(max_examples=100, deadline=None)
def test_looking_ahead_is_what_serving_does(rows: list[tuple[str, int, int]]) -> None:
    items = [
        Item(f"{client}{number}", client, priority, cost=cost)
        for number, (client, priority, cost) in enumerate(rows)
    ]
    made = line(*items)
    ahead = [item.name for item in made]
    assert [serve(made) for _ in items] == ahead


class LineMachine(RuleBasedStateMachine):
    """While two clients both wait, neither gets more than an item's worth more tokens than the
    other, whatever comes and goes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.line: FairLine[Item] = FairLine()
        self.number = 0
        self.served = {"a": 0, "b": 0}
        self.both_since: dict[str, int] | None = None

    @rule(client=st.sampled_from("ab"), cost=st.integers(1, 50), place=st.floats(0, 100))
    def add(self, client: str, cost: int, place: float) -> None:
        self.number += 1
        self.line.add(Item(f"{self.number}", client, place=(place, self.number), cost=cost))
        self.look()

    @precondition(lambda self: len(self.line) > 0)
    @rule()
    def serve(self) -> None:
        item = next(iter(self.line))
        self.line.remove(item)
        self.line.charge(item.client, 0, item.cost)
        self.served[item.client] += item.cost
        self.look()

    @precondition(lambda self: len(self.line) > 0)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        item = data.draw(st.sampled_from(sorted(self.line, key=lambda item: item.name)))
        self.line.remove(item)
        self.look()

    def look(self) -> None:
        if {item.client for item in self.line} != {"a", "b"}:
            self.both_since = None
        elif self.both_since is None:
            self.both_since = dict(self.served)

    @invariant()
    def holds(self) -> None:
        self.line.check_invariants()
        if self.both_since is not None:
            a, b = (self.served[client] - self.both_since[client] for client in "ab")
            # one item each way, and one item of debt from before
            assert abs(a - b) <= 100


TestLine = LineMachine.TestCase
TestLine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


# --- one client floods, another asks now and then ----------------------------------------------

TIMES = StepTimes(
    fixed_s=0.005, prefill_token_s=0.0002, pair_s=0.0, decode_s=0.0005, context_token_s=0.0
)


def waits(num_flood: int, client_of_flood: str) -> tuple[list[float], float]:
    """Time to first token of a client that sends one request a second, and when all was done."""
    s = batch_scheduler(
        num_packed=600, num_exact=64, max_num_seqs=16, chunk_tokens=64, max_waiting=5000
    )
    for number in range(num_flood):
        submit(s, f"flood{number}", 40, 0.0, max_tokens=20, client=client_of_flood)
    now, sent, asked = 0.0, 0, 10
    sent_at: dict[str, float] = {}
    first: dict[str, float] = {}
    done: set[str] = set()
    while len(done) < num_flood + asked:
        while sent < asked and sent <= now:
            sent_at[f"slow{sent}"] = now
            submit(s, f"slow{sent}", 40, now, max_tokens=20, client="slow")
            sent += 1
        s.admit(now)
        context = s.num_context_tokens
        plan, _ = s.plan(now)
        if plan is None:
            now = float(sent)
            continue
        duration_s = TIMES.step_s(StepShape.of(plan, context))
        now += duration_s
        facts = s.apply(plan, replace(null_step(plan), duration_s=duration_s), now)
        for request_id in facts.request_ids:
            first.setdefault(request_id, now)
        done.update(facts.ended)
    s.check_invariants()
    return [first[key] - sent_at[key] for key in sent_at], now


def test_a_flood_of_one_client_hardly_delays_another() -> None:
    idle, _ = waits(0, "flood")
    fair, fair_end = waits(1000, "flood")
    unfair, unfair_end = waits(1000, "slow")
    assert max(idle) < 0.05
    # the flood fills the batch, so it is a place in it that is waited for: 20 steps, shared by 16
    assert max(fair) < 0.25
    assert max(unfair) > 10
    assert fair_end == pytest.approx(unfair_end, rel=0.02), "fairness costs no throughput"


def test_a_flood_is_served_too_while_another_floods() -> None:
    """Nobody starves: both get about half until one is through."""
    s = batch_scheduler(num_packed=600, num_exact=64, max_waiting=5000)
    for number in range(100):
        submit(s, f"a{number}", 16, 0.0, max_tokens=4, client="a")
    for number in range(100):
        submit(s, f"b{number}", 16, 0.0, max_tokens=4, client="b")
    ended: list[str] = []
    while len(ended) < 200:
        _, facts = step(s, 0.0)
        ended += [key for fact in facts for key in fact.ended]
    for end in range(20, 200, 20):
        num_a = sum(key.startswith("a") for key in ended[:end])
        assert abs(2 * num_a - end) <= 8


def prompt(key: str, num_tokens: int, **fields: Any) -> Prompt:
    tokens = np.full(num_tokens, 1, dtype=np.int32)
    return Prompt(
        key=key,
        token_ids=tokens,
        num_prompt_tokens=num_tokens,
        sampling=SamplingParams(max_tokens=1),
        hashes=[],
        **fields,
    )


def test_prefill_goes_on_with_what_has_its_blocks_whoever_waits() -> None:
    """A long prompt holds nearly the whole pool; short ones that do not fit have waited for long.
    Stopping the line for them would stop the one that they wait for.
    """
    cache = KvCache(num_packed=100, num_exact=2, block_size=BLOCK)
    queue = PromptQueue(cache)
    queue.add(prompt("long", 402), 0.0)
    now, computed = 0.0, 0
    for _ in range(50):
        now += 0.5
        queue.add(prompt(f"short{now}", 8), now)
        _, chunks = queue.plan(16, now)
        assert [chunk.key for chunk in chunks] == ["long"]
        computed += chunks[0].num_tokens
        done = queue.apply(chunks[0])
        queue.check_invariants()
        if computed == 402:
            break
    assert computed == 402
    assert done is not None
    assert done.table is not None
    cache.free(done.table)
    _, chunks = queue.plan(16, now)
    assert [chunk.key for chunk in chunks] == ["short0.5", "short1.0"]


def test_among_the_prompts_of_a_client_the_shortest_remaining_is_first() -> None:
    queue = PromptQueue(KvCache(num_packed=400, num_exact=20, block_size=BLOCK))
    queue.add(prompt("long", 400), 0.0)
    _, chunks = queue.plan(300, 0.0)
    queue.apply(chunks[0])
    queue.add(prompt("middle", 200), 0.01)
    _, chunks = queue.plan(16, 0.01)
    assert [chunk.key for chunk in chunks] == ["long"], "100 tokens are left of it"


def test_prefill_is_fair_by_chunks() -> None:
    """A client with one long prompt gets every second chunk beside a flood of short ones."""
    cache = KvCache(num_packed=1000, num_exact=300, block_size=BLOCK)
    queue = PromptQueue(cache)
    for number in range(100):
        queue.add(prompt(f"short{number}", 16, client="flood"), 0.0)
    queue.add(prompt("long", 320, client="other"), 0.0)
    keys = []
    for _ in range(40):
        _, chunks = queue.plan(16, 0.0)
        keys += [chunk.key for chunk in chunks]
        for chunk in chunks:
            done = queue.apply(chunk)
            if done is not None and done.cost == 0:
                assert done.table is not None
                cache.free(done.table)
        queue.check_invariants()
    assert keys.count("long") == 20
    assert "long" in keys[-3:]


def run_until(s: BatchScheduler, wanted: str, now: float) -> list[str]:
    """Steps until `wanted` has ended; who was evicted meanwhile."""
    evicted: list[str] = []
    for _ in range(500):
        _, facts = step(s, now)
        for fact in facts:
            evicted += [request_id for request_id, error in fact.failed]
            if wanted in fact.ended:
                return evicted
    raise AssertionError(f"{wanted} does not end")


def test_the_lowest_priority_is_evicted_before_the_youngest() -> None:
    s = batch_scheduler(num_packed=12, num_exact=16, max_num_seqs=4)
    submit(s, "old and low", 9, now=0.0, max_tokens=28, priority=-1)
    submit(s, "young", 9, now=1.0, max_tokens=28)
    submit(s, "youngest", 9, now=2.0, max_tokens=28)
    assert run_until(s, "young", 2.0) == ["old and low", "youngest"]


def test_an_evicted_request_resumes_cheaply() -> None:
    """It comes back with its tokens so far and computes only what is not in its cached blocks."""
    s = batch_scheduler(num_packed=16, num_exact=16, max_num_seqs=4)
    prompts = {key: [1000 * number + k for k in range(17)] for number, key in enumerate("ab")}
    tokens = {key: list(prompt) for key, prompt in prompts.items()}
    for number, (key, prompt) in enumerate(prompts.items()):
        submit(s, key, 0, float(number), 26, tokens=prompt)
    evicted_at = 0
    while not evicted_at:
        _, facts = step(s, 2.0)
        for fact in facts:
            for key, token in zip(fact.request_ids, fact.token_ids, strict=True):
                tokens[key].append(token)
            if fact.failed:
                assert [key for key, _ in fact.failed] == ["b"]
                evicted_at = len(tokens["b"])
    # it waits until the older one has ended: readmitted at once it would be evicted again
    submit(s, "b again", 0, 2.0, 26, tokens=tokens["b"], age_s=1.0)
    admissions = s.admit(2.0)
    while not admissions:
        assert s.num_decodes == 1
        plan, _ = s.plan(2.0)
        assert plan is not None
        s.apply(plan, null_step(plan), 2.0)
        s.check_invariants()
        admissions = s.admit(2.0)
    assert [a.request_id for a in admissions] == ["b again"]
    cached = admissions[0].num_cached_tokens
    assert evicted_at - cached <= 2 * BLOCK, f"{cached} of {evicted_at} tokens are cached"


def test_a_request_whose_time_is_up_in_line_gets_no_blocks() -> None:
    s = batch_scheduler(max_num_seqs=1)
    submit(s, "running", 8, max_tokens=100)
    step(s, 0.0)
    submit(s, "late", 8, 0.0, deadline_s=2.0)
    submit(s, "patient", 8, 0.0, deadline_s=60.0)
    step(s, 1.0)
    assert s.num_waiting == 2
    _, facts = step(s, 2.0)
    assert [(key, error.code) for key, error in facts[0].failed] == [("late", "deadline_exceeded")]
    assert facts[0].ended == ["late"]
    assert (s.num_waiting, s.num_running) == (1, 1)


@given(
    rows=st.lists(
        st.tuples(
            st.sampled_from(["", "a", "b"]),
            st.integers(0, 2),
            st.integers(1, 120),
            st.integers(1, 30),
            st.floats(0, 3),
        ),
        min_size=1,
        max_size=40,
    ),
    num_packed=st.integers(40, 80),
    is_auto=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_any_schedule_ends(
    rows: list[tuple[str, int, int, int, float]], num_packed: int, is_auto: bool
) -> None:
    """Preempted requests come back with what they have, as the router sends them."""
    s = batch_scheduler(num_packed=num_packed, num_exact=24, is_chunk_auto=is_auto)
    rng = random.Random(len(rows))
    left: dict[str, tuple[int, dict[str, Any]]] = {}
    now, names = 0.0, 0
    for number, (client, priority, num_tokens, max_tokens, gap_s) in enumerate(rows):
        now += gap_s / 10
        fields: dict[str, Any] = {"client": client, "priority": priority}
        left[f"r{number}"] = (max_tokens, fields)
        submit(s, f"r{number}", num_tokens, now, max_tokens, **fields)
        if rng.random() < 0.5:
            names += _some_step(s, now, left)
    for _ in range(5000):
        if not left:
            break
        now += 0.02
        names += _some_step(s, now, left)
    assert not left
    assert s.num_running == s.num_waiting == 0
    assert s._cache.load.held == 0


def _some_step(s: Any, now: float, left: dict[str, tuple[int, dict[str, Any]]]) -> int:
    """One step; what was evicted is submitted again."""
    _, facts = step(s, now)
    evicted = 0
    for fact in facts:
        for request_id, error in fact.failed:
            assert error.code == "preempted"
            evicted += 1
            max_tokens, fields = left.pop(request_id)
            again = f"{request_id}~"
            left[again] = (max_tokens, fields)
            submit(s, again, 8 + len(again), now, max_tokens, age_s=now, **fields)
        for request_id in fact.ended:
            left.pop(request_id, None)
    return evicted


def test_the_same_prompts_in_line_at_a_prefill_worker_all_end() -> None:
    """Random lengths, clients and priorities on a pool for two of them."""
    seed = 11
    rng = random.Random(seed)
    cache = KvCache(num_packed=60, num_exact=8, block_size=BLOCK)
    s = PrefillScheduler(cache, chunk_tokens=32, max_model_len=1000)
    wanted = set()
    for number in range(60):
        num_tokens = rng.randrange(1, 200)
        tokens = [rng.randrange(100) for _ in range(num_tokens)]
        chain = chain_of(tokens)
        wanted.add(f"p{number}")
        s.add(
            prompt(f"p{number}", num_tokens, client=rng.choice("abc"), priority=rng.randrange(2)),
            PromptNames.of(chain, num_tokens, BLOCK),
            0,
            0.01 * number,
        )
    now = 1.0
    done: set[str] = set()
    while len(done) < 60 and now < 100:
        now += 0.05
        plan = s.plan(now)
        assert plan is not None, f"seed {seed}: {wanted - done} wait for ever"
        for fact in s.apply(plan, null_step(plan), now):
            if isinstance(fact, ChunkComputed):
                s.release((page.kind, page.block_id) for page in fact.pages)
            elif isinstance(fact, PromptComputed):
                done.add(fact.key)
        s.check_invariants()
    assert done == wanted
