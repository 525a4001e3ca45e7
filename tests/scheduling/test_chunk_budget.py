"""Chunk budgets as values, and what they do to the streams of a colocated scheduler: each step
takes the time that a model gives it, so gaps between tokens can be read off.
"""

from dataclasses import dataclass, field, replace
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from common.scheduling.chunk_budget import (
    DEFAULT_ITL_S,
    STRETCH,
    ChunkRoom,
    chunk_budget,
    chunk_s,
    quiet_step_s,
    tokens_within,
)
from common.scheduling.step_time import StepShape, StepTimes
from decode_worker.scheduler import BatchScheduler
from tests.scheduling.test_schedulers import batch_scheduler, null_step, submit

CPU = StepTimes(
    fixed_s=8e-3, prefill_token_s=1e-3, pair_s=2e-7, decode_s=2e-3, context_token_s=4e-7
)
GPU = StepTimes(
    fixed_s=8e-3, prefill_token_s=4e-5, pair_s=2e-9, decode_s=3e-5, context_token_s=1e-8
)
seconds = st.floats(0, 1e-2)
step_times = st.builds(
    StepTimes,
    fixed_s=seconds,
    prefill_token_s=seconds,
    pair_s=st.floats(0, 1e-5),
    decode_s=seconds,
    context_token_s=st.floats(0, 1e-5),
)


def budget(times: StepTimes | None, asked_s: float | None, num_decodes: int, context: int) -> int:
    return chunk_budget(times, asked_s, num_decodes, context, block_size=16, max_tokens=512)


def test_a_budget_is_what_the_target_leaves_time_for() -> None:
    # 8 + 4 * 2 + 0.8 = 16.8 ms of the 50 are taken; 33.2 ms are 33 tokens: 2 blocks
    assert budget(CPU, 0.05, 4, 2000) == 32
    assert budget(CPU, 0.1, 4, 2000) == 80
    assert budget(GPU, 0.05, 64, 64_000) == 512, "no more than the maximum"


def test_nothing_decodes_so_nothing_limits() -> None:
    assert budget(CPU, 0.001, 0, 0) == 512
    assert budget(None, None, 0, 0) == 512


def test_at_least_a_block_however_late_the_streams_are() -> None:
    assert budget(CPU, 0.001, 16, 60_000) == 16


def test_without_a_target_a_slow_device_gives_half_of_its_time() -> None:
    fast = budget(CPU, None, 4, 2000)
    assert fast == budget(CPU, DEFAULT_ITL_S, 4, 2000)
    quiet_s = quiet_step_s(CPU, 16, 16_000)
    assert quiet_s > DEFAULT_ITL_S / 2
    assert budget(CPU, None, 16, 16_000) == budget(CPU, 2 * quiet_s, 16, 16_000) == 32


token_times = st.builds(
    StepTimes,
    fixed_s=seconds,
    prefill_token_s=st.floats(1e-9, 1e-2),
    pair_s=st.one_of(st.just(0.0), st.floats(1e-13, 1e-5)),
    decode_s=seconds,
    context_token_s=st.floats(0, 1e-5),
)


@given(token_times, st.integers(0, 1_000_000), st.integers(1, 65_536))
def test_tokens_come_back_from_seconds_as_the_same_tokens(
    times: StepTimes, start: int, num_tokens: int
) -> None:
    taken_s = chunk_s(times, start, num_tokens)
    assert tokens_within(times, start, taken_s) == num_tokens
    short_s = (chunk_s(times, start, num_tokens - 1) + taken_s) / 2
    assert tokens_within(times, start, short_s) == num_tokens - 1


@given(token_times, st.integers(1, 64), st.sampled_from([1, 4, 16, 32]))
def test_a_room_deals_out_all_the_blocks_of_its_budget(
    times: StepTimes, num_blocks: int, block_size: int
) -> None:
    budget = num_blocks * block_size
    whole = ChunkRoom.within(times, budget, 0.0, block_size=block_size, max_tokens=1 << 20)
    assert whole.take(0, 10**9) == budget
    parts = ChunkRoom.within(times, budget, 0.0, block_size=block_size, max_tokens=1 << 20)
    dealt = [parts.take(number * block_size, block_size) for number in range(num_blocks)]
    assert dealt == [block_size] * num_blocks


def test_without_a_target_every_waiting_prompt_gets_as_much_time_as_all_decodes() -> None:
    quiet_s = quiet_step_s(CPU, 16, 16_000)  # 46.4 ms

    def tokens(num_prompts: int, asked_s: float | None = None) -> int:
        return chunk_budget(
            CPU, asked_s, 16, 16_000, num_prompts=num_prompts, block_size=16, max_tokens=512
        )

    assert [tokens(n) for n in range(6)] == [32, 32, 80, 128, 176, 176]
    assert tokens(3) == budget(CPU, 4 * quiet_s, 16, 16_000)
    assert tokens(5, 2 * quiet_s) == 32, "a target holds however many wait"


def test_before_anything_is_measured_chunks_are_small() -> None:
    assert budget(None, 0.05, 4, 2000) == 64


@given(times=step_times, start=st.integers(0, 100_000), room_s=st.floats(0, 10))
@settings(max_examples=300, deadline=None)
def test_tokens_within_a_time_are_the_most(times: StepTimes, start: int, room_s: float) -> None:
    found = tokens_within(times, start, room_s)
    if found < 2**31:
        assert chunk_s(times, start, found) <= room_s * (1 + 1e-6) + 1e-9
        assert chunk_s(times, start, found + 1) >= room_s * (1 - 1e-6) - 1e-9


@given(
    times=step_times,
    target_s=st.floats(1e-3, 1),
    num_decodes=st.integers(1, 256),
    mean_context=st.integers(1, 10_000),
    prompts=st.lists(st.tuples(st.integers(0, 200), st.integers(1, 5000)), min_size=1, max_size=8),
)
@settings(max_examples=300, deadline=None)
def test_a_step_keeps_to_its_target_and_never_stands_still(
    times: StepTimes,
    target_s: float,
    num_decodes: int,
    mean_context: int,
    prompts: list[tuple[int, int]],
) -> None:
    quiet_s = quiet_step_s(times, num_decodes, num_decodes * mean_context)
    most = budget(times, target_s, num_decodes, num_decodes * mean_context)
    room = ChunkRoom.within(times, most, quiet_s, block_size=16, max_tokens=512)
    step_s, total = quiet_s, 0
    for number, (start_block, num_left) in enumerate(prompts):
        num_tokens = room.take(16 * start_block, num_left)
        assert number > 0 or num_tokens > 0
        assert num_tokens == num_left or num_tokens % 16 == 0
        step_s += chunk_s(times, 16 * start_block, num_tokens)
        total += num_tokens
        if room.is_full or num_tokens == 0:
            break
    assert total <= 512
    one_block_s = quiet_s + chunk_s(times, 16 * prompts[0][0], 16)
    assert (
        step_s <= max(STRETCH * max(target_s, quiet_s + chunk_s(times, 0, 16)), one_block_s) + 1e-9
    )


def test_a_prompt_a_little_longer_than_the_budget_is_not_cut() -> None:
    def room() -> ChunkRoom:
        return ChunkRoom.within(CPU, 64, 0.02, block_size=16, max_tokens=512)

    assert room().take(0, 80) == 80  # 100 ms instead of 84: less than a quarter more
    assert room().take(0, 90) == 64


def test_a_chunk_far_back_in_its_prompt_is_smaller() -> None:
    def room() -> ChunkRoom:
        return ChunkRoom.within(CPU, 64, 0.02, block_size=16, max_tokens=512)

    assert [room().take(start, 4000) for start in (0, 2048, 8192)] == [64, 32, 16]


@dataclass
class Streams:
    """A scheduler on a device whose steps take what `times` says."""

    scheduler: BatchScheduler
    times: StepTimes
    now: float = 0.0
    tokens: dict[str, list[float]] = field(default_factory=dict)
    steps: list[tuple[float, int]] = field(default_factory=list)
    """How long, and with how many prompt tokens."""

    def step(self) -> None:
        s = self.scheduler
        s.admit(self.now)
        context = s.num_context_tokens
        plan, _ = s.plan(self.now)
        assert plan is not None
        shape = StepShape.of(plan, context)
        duration_s = self.times.step_s(shape)
        self.now += duration_s
        self.steps.append((duration_s, shape.num_prefill_tokens))
        facts = s.apply(plan, replace(null_step(plan), duration_s=duration_s), self.now)
        for request_id in facts.request_ids:
            self.tokens.setdefault(request_id, []).append(self.now)
        s.check_invariants()

    def gaps(self, request_id: str) -> list[float]:
        times = self.tokens[request_id]
        return [later - earlier for earlier, later in pairwise(times)]


def colocated(times: StepTimes, **settings: object) -> Streams:
    values = {"chunk_tokens": 512, "is_chunk_auto": True, "max_num_seqs": 16, "max_model_len": 8192}
    scheduler = batch_scheduler(num_packed=8000, num_exact=64, **{**values, **settings})
    return Streams(scheduler, times)


def test_no_stream_stalls_behind_a_long_prompt() -> None:
    """Four streams run; a prompt of 4,000 tokens comes, which takes 6 s whole."""
    s = colocated(CPU)
    for number in range(4):
        submit(s.scheduler, f"s{number}", 16, max_tokens=2000)
    for _ in range(100):
        s.step()
    quiet_s = s.steps[-1][0]
    submit(s.scheduler, "long", 4000, s.now, max_tokens=1)
    while "long" not in s.tokens:
        s.step()
    assert CPU.prefill_s(0, 4000, 4000) > 5
    for number in range(4):
        # a quiet step is 17 ms, so 50 hold; a piece may stretch the last step
        assert max(s.gaps(f"s{number}")) < STRETCH * DEFAULT_ITL_S
    assert s.tokens["s0"][-1] == s.now, "they got a token in every step"
    during = [tokens for _, tokens in s.steps[100:]]
    assert sum(during) == 4000
    assert quiet_s < DEFAULT_ITL_S / 2


def test_alone_a_prompt_takes_the_largest_chunks() -> None:
    s = colocated(CPU)
    submit(s.scheduler, "long", 2000, max_tokens=1)
    while "long" not in s.tokens:
        s.step()
    assert [tokens for _, tokens in s.steps] == [512, 512, 512, 464]


def test_a_short_prompt_beside_a_long_one_does_not_wait_for_it() -> None:
    s = colocated(CPU)
    submit(s.scheduler, "stream", 16, max_tokens=2000)
    for _ in range(60):
        s.step()
    submit(s.scheduler, "long", 4000, s.now, max_tokens=1)
    for _ in range(10):
        s.step()
    submit(s.scheduler, "short", 40, s.now, max_tokens=1)
    before = len(s.steps)
    while "short" not in s.tokens:
        s.step()
    assert len(s.steps) - before <= 2
    assert "long" not in s.tokens


def test_a_fixed_number_is_the_most_of_a_step_over_all_requests() -> None:
    """Smaller only for the last piece of a prompt, or when the budget is full."""
    s = colocated(CPU, is_chunk_auto=False, chunk_tokens=64)
    submit(s.scheduler, "stream", 16, max_tokens=2000)
    for _ in range(20):
        s.step()
    for number, num_tokens in enumerate((500, 300, 70)):
        submit(s.scheduler, f"p{number}", num_tokens, s.now, max_tokens=1)
    before = len(s.steps)
    while len(s.tokens) < 4:
        s.step()
    sizes = [tokens for _, tokens in s.steps[before:]]
    assert max(sizes) <= 64
    assert sum(sizes) == 870
    # one stream decodes, so 63 tokens are left: 15 blocks of 4 while nothing ends
    assert sizes.count(60) >= len(sizes) - 6


def test_the_router_s_budget_holds_before_the_worker_s_own() -> None:
    s = colocated(CPU)
    submit(s.scheduler, "stream", 16, max_tokens=2000)
    for _ in range(40):
        s.step()
    own = s.scheduler.chunk_tokens
    s.scheduler.set_chunk_budget(8)
    assert s.scheduler.chunk_tokens == 8 < own
    submit(s.scheduler, "long", 400, s.now, max_tokens=1)
    s.step()
    assert s.steps[-1][1] == 8
    s.scheduler.set_chunk_budget(None)
    s.step()
    assert s.steps[-1][1] > 8
    s.scheduler.set_chunk_budget(100_000)
    s.step()
    assert sum(tokens for _, tokens in s.steps[-3:]) == 400
