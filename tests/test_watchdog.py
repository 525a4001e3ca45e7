"""T09: when a process is said to hang, and that time in which nobody looked does not count."""

import asyncio
import threading
from collections.abc import Iterator

import pytest

from common.clock import MonotonicClock
from common.handoff_messages import HandoffRequest, LinkReply
from common.messages import PoolLoad, WorkerState
from common.scheduling.plan import PrefillChunk, StepPlan
from common.scheduling.step_time import StepTimes
from common.types import Role
from common.watch_thread import WatchThread
from common.watchdog import (
    EXIT_AFTER_S,
    LOOK_EVERY_S,
    LOOP_S,
    Silence,
    Verdict,
    Watchdog,
)
from worker.watched_device import LEAST_BOUND_S, StepBounds


class ManualClock:
    """Moves only when told to."""

    def __init__(self) -> None:
        self._now = 100.0

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        self._now += seconds


class Watched:
    """A watchdog that is looked at as its thread does; `answers` is what the loop does."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.dog = Watchdog(self.clock.now())
        self.dog.serves()
        self.answers = True

    def looks(self, seconds: float) -> Iterator[Verdict]:
        for _ in range(round(seconds / LOOK_EVERY_S)):
            self.clock.advance(LOOK_EVERY_S)
            if self.answers:
                self.dog.answered()
            yield self.dog.look(self.clock.now())
            if not self.dog.waits_for_loop:
                self.dog.pinged(self.clock.now())

    def until_fault(self, most_s: float) -> float:
        began = self.clock.now()
        for verdict in self.looks(most_s):
            if verdict.fault:
                return self.clock.now() - began
        raise AssertionError(f"no fault in {most_s} s")


def test_an_idle_process_is_well_for_ever() -> None:
    assert all(verdict == Verdict() for verdict in Watched().looks(3600.0))


def test_steps_one_after_another_are_progress() -> None:
    w = Watched()
    job = w.dog.job_began(w.clock.now(), LEAST_BOUND_S)
    for _ in range(200):
        assert not any(verdict.fault for verdict in w.looks(4.0))
        following = w.dog.job_began(w.clock.now(), LEAST_BOUND_S)
        w.dog.job_ended(w.clock.now(), job)
        job = following


def test_a_step_that_does_not_end_is_a_fault_and_then_the_end() -> None:
    w = Watched()
    job = w.dog.job_began(w.clock.now(), LEAST_BOUND_S)
    assert w.until_fault(20.0) <= LEAST_BOUND_S + LOOK_EVERY_S
    verdicts = list(w.looks(EXIT_AFTER_S))
    assert [verdict.must_exit for verdict in verdicts].index(True) == len(verdicts) - 1
    assert "its device has not moved for 35" in verdicts[-1].fault
    w.dog.job_ended(w.clock.now(), job)
    assert next(w.looks(LOOK_EVERY_S)) == Verdict()


def test_a_fault_that_passes_is_no_reason_to_end() -> None:
    w = Watched()
    for _ in range(5):
        job = w.dog.job_began(w.clock.now(), LEAST_BOUND_S)
        assert not any(verdict.must_exit for verdict in w.looks(30.0))
        w.dog.job_ended(w.clock.now(), job)
        assert not any(verdict.fault for verdict in w.looks(1.0))


def test_a_loop_that_does_not_turn_is_a_fault() -> None:
    w = Watched()
    list(w.looks(2.0))
    w.answers = False
    assert w.until_fault(20.0) <= LOOP_S + 2 * LOOK_EVERY_S
    w.answers = True
    assert [v.fault for v in w.looks(1.0)][-1] == ""


@pytest.mark.parametrize("gap_s", [2.0, 60.0, 86_400.0])
def test_a_suspended_machine_is_no_fault(gap_s: float) -> None:
    """SIGSTOP in the middle of a step, with a ping under way: both get the rest of their time."""
    w = Watched()
    w.dog.job_began(w.clock.now(), LEAST_BOUND_S)
    assert not any(verdict.fault for verdict in w.looks(3.0))
    w.clock.advance(gap_s)
    w.answers = False
    left_s = w.until_fault(10.0)
    assert left_s == pytest.approx(LEAST_BOUND_S - 3.0, abs=2 * LOOK_EVERY_S)


def test_reading_weights_may_take_its_time() -> None:
    w = Watched()
    w.dog = Watchdog(w.clock.now())
    w.answers = False
    w.dog.job_began(w.clock.now(), 1800.0)
    assert not any(verdict.fault for verdict in w.looks(1700.0))
    assert w.until_fault(200.0) <= 101.0


def plan(num_tokens: int) -> StepPlan:
    chunk = PrefillChunk(key="a/0", start=0, num_tokens=num_tokens, block_ids=(0,))
    return StepPlan(step=1, chunks=(chunk,))


def test_bounds_follow_the_fitted_step_times() -> None:
    times: list[StepTimes | None] = [None]
    bounds = StepBounds(
        lambda: times[0], lambda: 0, block_size=16, self_test_s=1.0, may_compile=False
    )
    assert bounds.of(plan(48)) == LEAST_BOUND_S
    assert bounds.of(plan(480)) == 30.0, "by the self-test's speed: ten times its 48 tokens"
    fast = StepTimes(fixed_s=0.01, prefill_token_s=1e-4, pair_s=0, decode_s=0, context_token_s=0)
    times[0] = fast
    assert bounds.of(plan(480)) == LEAST_BOUND_S
    times[0] = StepTimes(fixed_s=1, prefill_token_s=0.01, pair_s=0, decode_s=0, context_token_s=0)
    assert bounds.of(plan(500)) == pytest.approx(30.0)


def silent_after(silence: Silence, now: float, step_s: float = LOOK_EVERY_S) -> float:
    began = now
    while not silence.is_too_long(now):
        now += step_s
        assert now - began < 1000
    return now - began


def test_silence_is_three_heartbeats() -> None:
    assert 6.0 < silent_after(Silence(2.0, 0.0), 0.0) <= 6.5
    stopped = Silence(2.0, 0.0)
    assert not stopped.is_too_long(0.5)
    assert not stopped.is_too_long(500.0), "it was this process that slept"
    assert 4.5 < silent_after(stopped, 500.5) <= 6.5
    promised_nothing = Silence(0.0, 0.0)
    assert not any(promised_nothing.is_too_long(n / 2) for n in range(10_000))


def test_the_thread_sees_a_loop_that_hangs_and_that_it_turns_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Real time, with bounds a tenth as long."""
    monkeypatch.setattr("common.watchdog.LOOP_S", 0.8)
    monkeypatch.setattr("common.watchdog.LOOK_EVERY_S", 0.05)
    monkeypatch.setattr("common.watch_thread.LOOK_EVERY_S", 0.05)
    faults: list[str] = []

    async def main() -> None:
        told = asyncio.Event()
        seen = threading.Event()

        def on_fault(fault: str) -> None:
            faults.append(fault)
            if not fault:
                told.set()

        with WatchThread(MonotonicClock()) as watch:
            assert watch.not_ready == "it is starting"
            watch.serves(on_fault)
            assert (watch.not_ready, watch.fault) == ("", "")

            def hang() -> None:
                while not watch.fault:
                    seen.wait(0.001)

            asyncio.get_running_loop().call_soon(hang)
            async with asyncio.timeout(20):
                await told.wait()
            assert watch.fault == ""

    asyncio.run(main())
    assert "its event loop has not turned for" in faults[0]
    assert faults[1] == ""


def test_workers_of_before_promise_nothing() -> None:
    state = WorkerState(
        role=Role.PREFILL, incarnation="1", pid=1, metrics="", model_fingerprint="", layout="",
        block_size=16, max_model_len=1, max_prompt_tokens=1, draining=False,
        blocks=PoolLoad(total=0, free=0, cached=0, held=0), running=0, waiting=0,
        num_queued_tokens=0,
    )  # fmt: skip
    assert (state.heartbeat_s, state.unhealthy) == (0.0, "")
    fields = HandoffRequest.__dataclass_fields__, LinkReply.__dataclass_fields__
    assert [found["heartbeat_s"].default for found in fields] == [0.0, 0.0]
