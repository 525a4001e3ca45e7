"""T11 and T14: what is remembered of failures, when a request is tried again, and who is blamed."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import httpx
import pytest

from common.errors import (
    DecodeLost,
    Draining,
    InternalError,
    LayoutMismatch,
    Preempted,
    PrefillLost,
    TandemError,
)
from common.rpc import Stream
from common.scheduling.step_time import StepTimes
from common.types import Role, SamplingParams
from router.fleet.breaker import FIRST_OPEN_S, Breaker, RetryBudget, State
from router.fleet.recovery import (
    MAX_ATTEMPTS,
    PROGRESS_TOKENS,
    RECOVERY_S,
    Blame,
    Loss,
    avoids_decode,
    avoids_prefill,
    blame,
    next_attempt,
)
from tests.fakes.fleet import Fleet, Worker, fleet
from tests.fakes.hash_model import expected_tokens
from tests.faults.cells import Router
from tests.handoff.test_handoff_in_process import prompt_of, virtual
from tests.router.fake_worker import FakeWorker
from tests.router.stack import Stack


def after(breaker: Breaker, outcomes: str, now: float = 0.0) -> Breaker:
    for outcome in outcomes:
        if outcome == "F":
            breaker.failed(now)
        else:
            breaker.succeeded(now)
    return breaker


@pytest.mark.parametrize(
    ("outcomes", "state"),
    [
        ("FF", State.CLOSED),
        ("FFF", State.OPEN),
        ("FSFSF", State.OPEN),
        ("FF" + 12 * "S" + "F", State.CLOSED),
        (20 * ("F" + 19 * "S"), State.CLOSED),
        (8 * ("F" + 4 * "S"), State.OPEN),
    ],
)
def test_when_a_worker_is_taken_out(outcomes: str, state: State) -> None:
    assert after(Breaker(), outcomes).state is state


def test_failures_fade_with_time() -> None:
    breaker = after(Breaker(), "FF")
    assert breaker.score(60.0) == 1.0
    assert breaker.score(600.0) < 0.01
    assert after(breaker, "F", now=120.0).state is State.CLOSED


def test_a_worker_that_fails_again_after_its_self_test_stays_out_for_longer() -> None:
    breaker = after(Breaker(), "FFF")
    assert breaker.probe_at == FIRST_OPEN_S == 10.0
    now, pauses = 0.0, []
    for _ in range(5):
        pauses.append(breaker.probe_at - now)
        now = breaker.probe_at
        breaker.probe_begun()
        assert breaker.state is State.HALF_OPEN
        breaker.probe_ended(now, has_passed=True)
        assert breaker.failed(now + 1.0)
        now += 1.0
    assert pauses == [10.0, 60.0, 360.0, 600.0, 600.0]
    breaker.probe_begun()
    breaker.probe_ended(now, has_passed=False)
    assert breaker.state is State.OPEN
    breaker.probe_begun()
    breaker.probe_ended(now, has_passed=True)
    assert after(breaker, 15 * "S", now).score(now + 200.0) == pytest.approx(0.0, abs=0.1)
    after(breaker, "FFF", now + 200.0)
    assert breaker.probe_at == now + 210.0, "old times out are forgotten"


def test_the_retry_budget_is_a_tenth_of_what_is_accepted() -> None:
    budget = RetryBudget(share=0.1, most=20.0, per_second=0.5)
    assert sum(budget.take(0.0) for _ in range(100)) == 20
    for _ in range(100):
        budget.accepted()
    assert sum(budget.take(0.0) for _ in range(100)) in (9, 10)
    assert sum(budget.take(8.0) for _ in range(100)) == 4
    assert sum(budget.take(1000.0) for _ in range(100)) == 20, "it does not pile up"


def loss(error: type[TandemError], **fields: object) -> Loss:
    settings = {"attempt": 1, "num_new_tokens": 0, "has_begun": False, "was_remote": False}
    return Loss(error=error("on purpose"), **(settings | fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("found", "attempt"),
    [
        (loss(DecodeLost), 2),
        (loss(DecodeLost, attempt=MAX_ATTEMPTS), None),
        (loss(DecodeLost, attempt=MAX_ATTEMPTS, num_new_tokens=PROGRESS_TOKENS), 1),
        (loss(DecodeLost, attempt=MAX_ATTEMPTS, num_new_tokens=PROGRESS_TOKENS - 1), None),
        (loss(Draining, attempt=MAX_ATTEMPTS), MAX_ATTEMPTS),
        (loss(Preempted, attempt=2), 2),
        (loss(InternalError), 2),
        (loss(InternalError, has_begun=True), None),
        (loss(TandemError), None),
    ],
)
def test_attempts_count_since_the_last_progress(found: Loss, attempt: int | None) -> None:
    assert next_attempt(found) == attempt


def test_who_is_avoided_and_blamed() -> None:
    lost = loss(PrefillLost, was_remote=True)
    assert (avoids_prefill(lost), avoids_decode(lost)) == (True, False)
    assert blame(lost) == Blame(decode=0.5, prefill=1.0)
    there = loss(InternalError, was_remote=True, at_prefill=True)
    assert (avoids_prefill(there), avoids_decode(there)) == (True, False)
    assert blame(there) == Blame(prefill=1.0)
    here = loss(InternalError)
    assert (avoids_prefill(here), avoids_decode(here)) == (False, True)
    assert blame(here) == Blame(decode=1.0)
    unlike = loss(LayoutMismatch, was_remote=True)
    assert (avoids_prefill(unlike), avoids_decode(unlike)) == (True, False)
    assert blame(unlike) == Blame()
    leaving = loss(Draining, was_remote=True, at_prefill=True)
    assert (avoids_prefill(leaving), avoids_decode(leaving)) == (True, False)
    assert blame(leaving) == Blame()


# --- over HTTP, with fake workers -----------------------------------------------------------------


def counting(prompt: list[int], output_index: int) -> Iterator[int]:
    return (1000 + n for n in count())


def test_one_of_three_workers_answers_internal_error(model_dir: Path) -> None:
    """No client of a hundred sees it: three are tried elsewhere, then the worker is out."""
    workers = [FakeWorker(script=counting) for _ in range(3)]
    with Stack(model_dir, *workers) as stack:
        sick = workers[1]
        sick.refuses = lambda request: InternalError("a defect")
        codes = Counter(stack.complete("x", max_tokens=3).status_code for _ in range(100))
        assert codes == {200: 100}
        assert len(sick.submitted) == 3
        labels = {"role": "colocated"}
        assert stack.metric("tandem_router_worker_failures_total", **labels) == 3
        assert stack.metric("tandem_router_workers_taken_out_total", **labels) == 1
        assert stack.metric("tandem_router_retries_total") == 3
        shown = stack.http.get("/v1/fleet").json()["workers"]
        assert [w.get("excluded") for w in shown].count("has failed too often (open)") == 1
        assert stack.http.get("/ready").status_code == 200


def test_retries_stay_within_the_budget(model_dir: Path) -> None:
    """Half of a large fleet fails at once: clients see errors, but the load does not double."""
    workers = [FakeWorker(script=counting) for _ in range(12)]
    with Stack(model_dir, *workers) as stack:
        for sick in workers:
            sick.refuses = lambda request: InternalError("a defect")
        for _ in range(60):
            assert stack.complete("x", max_tokens=3).status_code == 500
        num_tries = sum(len(worker.submitted) for worker in workers)
        assert 60 + 20 <= num_tries <= 60 + 20 + 10 + 10


def test_a_worker_that_says_it_is_unfit_gets_no_requests(model_dir: Path) -> None:
    workers = [FakeWorker(script=counting) for _ in range(2)]
    with Stack(model_dir, *workers) as stack:
        sick = workers[0]
        stack.do(lambda: sick.set_state(unhealthy="it is being tested"))
        fleet_of = stack.router.service.fleet
        stack.until(lambda: len(fleet_of.decode_workers()) == 1)
        assert [stack.complete("x", max_tokens=2).status_code for _ in range(4)] == 4 * [200]
        assert sick.submitted == []
        assert stack.http.get("/ready").json()["reasons"] == [
            f"colocated {sick.address}: it is being tested"
        ]
        stack.do(lambda: sick.set_state(unhealthy=""))
        stack.until(lambda: len(fleet_of.decode_workers()) == 2)


# --- in one process, on virtual time --------------------------------------------------------------

SAMPLING = SamplingParams(max_tokens=6, temperature=0)


async def outcome_of(router: Router, number: int, sampling: SamplingParams = SAMPLING) -> str:
    prompt = prompt_of(40, seed=number)
    try:
        tokens = await router.generate(prompt, sampling)
    except TandemError as error:
        return error.code
    assert tokens == expected_tokens(prompt, sampling)
    return "right"


async def beside(f: Fleet, names: dict[str, Role], **settings: object) -> Router:
    for address, role in names.items():
        f.add(role, address, **settings)
    router = Router(f, "router", tuple(names))
    f.group.start_soon(router.run)
    await asyncio.sleep(1.0)
    return router


TWO_COLOCATED = {"c0:1": Role.COLOCATED, "c1:1": Role.COLOCATED}


def test_a_worker_whose_numbers_are_not_finite_takes_itself_out() -> None:
    async def main() -> None:
        async with fleet(num_prefill=0, num_decode=0) as f:
            router = await beside(f, TWO_COLOCATED)
            f.workers["c1:1"].device.is_sick = lambda plan: True
            outcomes = Counter([await outcome_of(router, number) for number in range(100)])
            assert outcomes == {"right": 100}
            assert len(f.unfit) == 1
            assert "not finite" in f.unfit[0]
            assert list(f.workers) == ["c0:1"]
            failures = router.fleet.num_failures[Role.COLOCATED]
            assert 2 <= failures <= 3

    virtual(main)


def test_what_overflows_for_some_prompts_only_is_no_reason_to_leave() -> None:
    """The self-test passes: the worker goes on, and is not tested again and again."""

    async def main() -> None:
        async with fleet(num_prefill=0, num_decode=0) as f:
            router = await beside(f, TWO_COLOCATED)
            for worker in f.workers.values():
                worker.device.is_sick = lambda plan: bool(plan and plan.chunks)
            outcomes = Counter([await outcome_of(router, number) for number in range(40)])
            assert outcomes == {"internal_error": 40}
            assert f.unfit == []
            assert sorted(w.device.num_self_tests for w in f.workers.values()) == [1, 1]
            for worker in f.workers.values():
                worker.device.is_sick = lambda plan: False
            assert await outcome_of(router, 1) == "right"
            assert all(w.service.watch.fault == "" for w in f.workers.values())
            f.check_at_rest()

    virtual(main)


def test_a_prefill_worker_whose_handoffs_fail_is_taken_out_and_tested() -> None:
    names = {"p0:1": Role.PREFILL, "p1:1": Role.PREFILL, "d0:1": Role.DECODE, "d1:1": Role.DECODE}

    async def main() -> None:
        async with fleet(num_prefill=0, num_decode=0) as f:
            router = await beside(f, names)
            sick = f.workers["p1:1"]

            async def fails(stream: Stream) -> None:
                await stream.receive()
                num_failed[0] += 1
                raise InternalError("on purpose")

            num_failed = [0]
            working = sick.service.handlers()
            f.network.serve("p1:1", {**working, "Handoff": fails})
            outcomes = Counter([await outcome_of(router, number) for number in range(86)])
            assert outcomes == {"right": 86}
            assert num_failed == [3]
            assert sick.device.num_self_tests == 0
            f.network.serve("p1:1", working)
            await asyncio.sleep(11.0)
            assert sick.device.num_self_tests == 1
            assert router.fleet.reasons() == []
            before = sick.device.num_tokens_computed
            for number in range(4):
                assert await outcome_of(router, 100 + number) == "right"
            assert sick.device.num_tokens_computed > before, "it is used again"

    virtual(main)


def test_an_open_worker_that_fails_its_self_test_leaves() -> None:
    """Two errors mid-answer and one before it: the router has it tested, it fails, it goes."""

    async def main() -> None:
        async with fleet(num_prefill=0, num_decode=0) as f:
            router = await beside(f, TWO_COLOCATED)
            sick = router.fleet.get("c0:1")
            assert sick is not None
            f.workers["c0:1"].device.is_sick = lambda plan: plan is None
            for _ in range(3):
                router.fleet.failed(sick, 1.0)
            assert [w.address for w in router.fleet.decode_workers()] == ["c1:1"]
            await asyncio.sleep(10.5)
            assert f.unfit == ["not fit to serve: self-test: the model's logits are not finite"]
            assert list(f.workers) == ["c1:1"]

    virtual(main)


# --- T14 ------------------------------------------------------------------------------------------


class Flow:
    """One long stream, and what it has got so far."""

    def __init__(self, router: Router, max_tokens: int) -> None:
        self.sampling = SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=5)
        self.prompt = prompt_of(30)
        self.task = asyncio.ensure_future(router.generate(self.prompt, self.sampling))

    async def is_right(self) -> bool:
        return await self.task == expected_tokens(self.prompt, self.sampling)


def busy(f: Fleet) -> Worker:
    return next(w for w in f.workers.values() if w.scheduler.num_running)


def test_a_long_stream_survives_any_number_of_losses_with_progress_between() -> None:
    async def main() -> None:
        async with fleet(num_prefill=0, num_decode=0) as f:
            router = await beside(f, TWO_COLOCATED)
            flow = Flow(router, max_tokens=600)
            for _ in range(8):
                await asyncio.sleep(1.2)
                address = busy(f).address
                f.kill(address)
                f.add(Role.COLOCATED, address)
            assert await flow.is_right()

    virtual(main)


def test_a_request_that_ends_its_worker_at_each_token_is_given_up() -> None:
    """Every attempt makes a token more, then the worker dies: three workers, no more."""

    async def main() -> None:
        async with fleet(num_prefill=0, num_decode=0) as f:
            names = {f"c{n}:1": Role.COLOCATED for n in range(6)}
            router = await beside(f, names)
            flow = Flow(router, max_tokens=600)
            while not flow.task.done():
                await asyncio.sleep(0.005)
                for worker in list(f.workers.values()):
                    if worker.metric("output_tokens_total") >= 2:
                        f.kill(worker.address)
            with pytest.raises(DecodeLost):
                await flow.task
            assert len(f.workers) == 3

    virtual(main)


def test_the_wait_for_a_worker_counts_from_the_latest_loss() -> None:
    """Lost at 0 s, placed at 6, lost at 9, placed at 16: 10 s would be over since the first."""

    async def main() -> None:
        async with fleet(num_prefill=0, num_decode=0) as f:
            router = await beside(f, {"c0:1": Role.COLOCATED})
            flow = Flow(router, max_tokens=400)
            await asyncio.sleep(1.0)
            f.kill("c0:1")
            await asyncio.sleep(6.0)
            f.add(Role.COLOCATED, "c0:1")
            await asyncio.sleep(3.0)
            f.kill("c0:1")
            await asyncio.sleep(7.0)
            f.add(Role.COLOCATED, "c0:1")
            assert await flow.is_right()

            flow = Flow(router, max_tokens=400)
            await asyncio.sleep(1.0)
            f.kill("c0:1")
            started = asyncio.get_running_loop().time()
            with pytest.raises(DecodeLost):
                await flow.task
            waited_s = asyncio.get_running_loop().time() - started
            assert RECOVERY_S <= waited_s <= RECOVERY_S + 0.2

    virtual(main)


def test_a_worker_that_is_back_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """T15: the same life of it, after its connection was lost."""
    caplog.set_level("INFO")

    async def main() -> None:
        async with fleet(num_prefill=0, num_decode=0) as f:
            router = await beside(f, TWO_COLOCATED)
            before = router.fleet.get("c0:1")
            f.network.drop("c0:1", "Watch")
            await asyncio.sleep(2.0)
            assert router.fleet.get("c0:1") is before
            assert len(router.fleet.decode_workers()) == 2
            assert await outcome_of(router, 1) == "right"

    virtual(main)
    said = [r.message.partition(",")[0] for r in caplog.records if r.name == "router.fleet.contact"]
    assert said.count("colocated c0:1 is back") == 1
    assert [line for line in said if line.startswith("lost colocated c0:1")]


# --- T50 ------------------------------------------------------------------------------------------


async def ready_after(router: Router, most_s: float) -> float:
    loop = asyncio.get_running_loop()
    began = loop.time()
    while not router.fleet.is_ready() and loop.time() - began < most_s:  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    return loop.time() - began


def test_without_prefill_workers_decode_workers_do_it_after_a_short_wait(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    names = {"p0:1": Role.PREFILL, "d0:1": Role.DECODE}

    async def main() -> None:
        async with fleet(num_prefill=0, num_decode=0) as f:
            f.add(Role.DECODE, "d0:1")
            router = Router(f, "router", tuple(names))
            f.group.start_soon(router.run)
            assert 4.0 < await ready_after(router, 20.0) < 6.0
            assert router.fleet.is_degraded()
            assert router.fleet.reasons()[-1] == "no prefill worker is available"
            assert await outcome_of(router, 1) == "right"
            computed = f.workers["d0:1"].device.num_tokens_computed
            assert computed == 40
            f.add(Role.PREFILL, "p0:1")
            await asyncio.sleep(3.0)
            assert not router.fleet.is_degraded()
            assert router.fleet.reasons() == []
            assert await outcome_of(router, 2) == "right"
            assert f.workers["d0:1"].device.num_tokens_computed == computed, "P computes again"
            f.kill("p0:1")
            await asyncio.sleep(0.5)
            assert router.fleet.is_degraded()
            assert await outcome_of(router, 3) == "right"

    virtual(main)
    said = [record.message for record in caplog.records if "prefill worker" in record.message]
    assert [line.split(":")[0] for line in said if "lost" not in line and "found" not in line] == [
        "no prefill worker",
        "no longer without prefill workers that could be used",
        "no prefill worker",
    ]


def test_remote_only_forbids_it() -> None:
    names = {"p0:1": Role.PREFILL, "d0:1": Role.DECODE}

    async def main() -> None:
        async with fleet(num_prefill=0, num_decode=0) as f:
            for address, role in names.items():
                f.add(role, address)
            router = Router(f, "router", tuple(names), is_remote_only=True)
            f.group.start_soon(router.run)
            await asyncio.sleep(1.0)
            assert await outcome_of(router, 1) == "right"
            f.kill("p0:1")
            await asyncio.sleep(60.0)
            assert not router.fleet.is_ready()
            assert not router.fleet.is_degraded()
            assert await outcome_of(router, 2) == "not_ready"
            assert f.workers["d0:1"].device.num_tokens_computed == 0
            f.add(Role.PREFILL, "p0:1")
            assert await ready_after(router, 20.0) < 3.0
            assert await outcome_of(router, 3) == "right"
            assert f.workers["d0:1"].device.num_tokens_computed == 0
            # lost under way: the request waits for another one
            flow = Flow(router, max_tokens=20)
            await asyncio.sleep(0.03)
            f.kill("p0:1")
            await asyncio.sleep(5.0)
            f.add(Role.PREFILL, "p0:1")
            assert await flow.is_right()
            assert f.workers["d0:1"].device.num_tokens_computed == 0

    virtual(main)


def test_running_streams_keep_their_chunk_budget_when_prompts_come_to_them() -> None:
    """A decode worker with streams gets long prompts since its prefill worker is gone: no step
    carries more prompt tokens than the router allows, so no gap is longer than that.
    """
    times = StepTimes(
        fixed_s=0.01, prefill_token_s=0.001, pair_s=0.0, decode_s=0.0005, context_token_s=0.0
    )

    async def main() -> None:
        async with fleet(
            num_prefill=0,
            num_decode=0,
            num_packed=1024,
            step_times=times,
            chunk_tokens=512,
            is_chunk_auto=True,
        ) as f:
            router = await beside(f, {"p0:1": Role.PREFILL, "d0:1": Role.DECODE})
            gaps: list[float] = []
            streams = [Flow(router, max_tokens=400) for _ in range(4)]
            await asyncio.sleep(2.0)
            f.kill("p0:1")
            scheduler = f.workers["d0:1"].scheduler
            budgets = {scheduler.chunk_tokens}
            prompts = [
                asyncio.ensure_future(
                    router.generate(prompt_of(900, seed=n), SamplingParams(max_tokens=2))
                )
                for n in range(4)
            ]
            loop = asyncio.get_running_loop()
            while not all(prompt.done() for prompt in prompts):
                before = loop.time(), f.workers["d0:1"].metric("output_tokens_total")
                while f.workers["d0:1"].metric("output_tokens_total") == before[1]:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
                gaps.append(loop.time() - before[0])
                budgets.add(scheduler.chunk_tokens)
            assert f.workers["d0:1"].device.num_tokens_computed >= 4 * 900 - 200
            assert max(budgets) < 512
            assert max(gaps) < 0.01 + 0.001 * max(budgets) + 0.02
            for stream in streams:
                assert await stream.is_right()

    virtual(main)


def test_the_router_s_metrics_port_answers_while_its_loop_hangs(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T09, with a bound of a tenth of a second."""
    monkeypatch.setattr("common.watchdog.LOOP_S", 0.1)
    with Stack(model_dir, FakeWorker(script=counting)) as stack:
        url = f"http://127.0.0.1:{stack.router.metrics_server.port}/health"
        assert httpx.get(url).json() == {"status": "ok"}
        found: list[httpx.Response] = []

        def hang() -> None:
            """Holds the loop until the port has told so."""
            while not found or found[-1].status_code == 200:
                found.append(httpx.get(url, timeout=10))

        stack.do(hang)
        assert found[-1].status_code == 503
        assert "its event loop has not turned for" in found[-1].json()["reason"]
        stack.until(lambda: stack.router.watch.fault == "")
        assert stack.complete("x", max_tokens=2).status_code == 200
