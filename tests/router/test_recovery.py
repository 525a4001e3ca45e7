"""Workers that fail under way: the client sees a pause, or a clean error; never a lost or doubled
token.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count, product
from pathlib import Path

import openai
import pytest

from common.errors import (
    DecodeFull,
    Draining,
    GrammarFailed,
    InternalError,
    LayoutMismatch,
    PageRefused,
    PrefillLost,
    PullFailed,
    TandemError,
)
from common.types import Role
from router.fleet.breaker import Breaker
from tests.router.fake_worker import FakeWorker
from tests.router.sse import events, finish_of, text_of
from tests.router.stack import Stack


def counting(prompt: list[int], output_index: int) -> Iterator[int]:
    """Tokens that differ at each position and for each output, so that a slip shows."""
    return (1000 + 100 * output_index + n for n in count())


def colocated() -> FakeWorker:
    return FakeWorker(script=counting)


def pair() -> tuple[FakeWorker, FakeWorker, FakeWorker]:
    return (
        FakeWorker(Role.DECODE, script=counting),
        FakeWorker(Role.PREFILL),
        FakeWorker(Role.PREFILL),
    )


RETRIED = [PrefillLost, PullFailed, PageRefused, LayoutMismatch, Draining]


def whole(stack: Stack, n: int = 1) -> list[str]:
    body = stack.complete("x", max_tokens=20, n=n).json()
    assert body["usage"]["completion_tokens"] == 20 * n
    return [choice["text"] for choice in body["choices"]]


@pytest.mark.parametrize("after", [0, 10])
@pytest.mark.parametrize("n", [1, 2])
def test_b118_a_decode_worker_dies_and_another_goes_on(model_dir: Path, after: int, n: int) -> None:
    first, second = colocated(), colocated()
    with Stack(model_dir, first, second) as stack:
        expected = whole(stack, n)
        for worker in (first, second):
            worker.submitted.clear()
            stack.do(lambda worker=worker: worker.allow(after))  # type: ignore[misc]
        before = first.num_tokens_sent + second.num_tokens_sent
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(stack.complete, "x", max_tokens=20, n=n, stream=True)
            stack.until(
                lambda: (
                    first.num_tokens_sent + second.num_tokens_sent - before == n * after
                    and bool(first.submitted or second.submitted)
                )
            )
            used = first if first.submitted else second
            other = second if used is first else first
            stack.do(lambda: other.allow(None))
            stack.call(used.stop)
            stack.workers.remove(used)
        chunks = events(asked.result())
        assert [text_of(chunks, index) for index in range(n)] == expected
        assert [finish_of(chunks, index) for index in range(n)] == ["length"] * n
        assert stack.metric("tandem_router_retries_total") >= 1
        resumed = other.submitted[-1]
        assert resumed.num_prompt_tokens == 1
        assert len(resumed.token_ids) // 4 == 1 + after
        assert resumed.sampling.n == (n if after == 0 else 1)
        assert resumed.output_index == (n - 1 if after else 0)


def test_attempts_are_counted_for_each_output(model_dir: Path) -> None:
    """Four outputs lose their worker twice; each of them is in its third attempt then."""
    workers = [colocated() for _ in range(3)]
    with Stack(model_dir, *workers) as stack:
        expected = whole(stack, n=4)
        for worker in workers:
            stack.do(lambda worker=worker: worker.reset())  # type: ignore[misc]
            worker.steps_allowed = 5
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(stack.complete, "x", max_tokens=20, n=4, stream=True)
            for _ in range(2):
                stack.until(lambda: any(w.steps_allowed == 0 and w.num_running for w in workers))
                used = next(w for w in workers if w.num_running)
                for other in workers:
                    other.steps_allowed = None if len(stack.workers) == 2 else other.steps_allowed
                stack.workers.remove(used)
                stack.call(used.stop)
                workers.remove(used)
        chunks = events(asked.result())
        assert [text_of(chunks, index) for index in range(4)] == expected


def forget_failures(stack: Stack) -> None:
    for worker in stack.router.service.fleet.linked():
        worker.breaker = Breaker()


def test_errors_that_a_retry_can_help_are_hidden(model_dir: Path) -> None:
    with Stack(model_dir, *pair(), FakeWorker(Role.DECODE, script=counting)) as stack:
        expected = whole(stack)
        for number, (error, after) in enumerate(product(RETRIED, (0, 7))):
            forget_failures(stack)
            stack.workers[0].fails_after = (after, error("on purpose"))
            assert [whole(stack) for _ in range(2)] == [expected] * 2
            assert stack.workers[0].fails_after is None
            assert stack.metric("tandem_router_retries_total") == number + 1


def test_b109_a_failed_prefill_worker_is_avoided_then_done_without(model_dir: Path) -> None:
    decode, one, two = pair()
    with Stack(model_dir, decode, one, two) as stack:
        decode.fails_after = (0, PullFailed("on purpose"))
        whole(stack)
        assert [route.prefill for route in decode.routes] in (
            [one.address, two.address],
            [two.address, one.address],
        )
        stack.call(one.stop)
        stack.call(two.stop)
        stack.until(lambda: len(stack.router.service.fleet.linked()) == 1)
        whole(stack)
        assert decode.routes[-1].prefill is None


def failing(worker: FakeWorker, error: TandemError) -> None:
    worker.refuses = lambda request: error


def test_three_attempts_then_the_error(model_dir: Path) -> None:
    workers = [colocated() for _ in range(4)]
    with Stack(model_dir, *workers) as stack:
        for worker in workers:
            failing(worker, PullFailed("never"))
        response = stack.complete("x")
        assert (response.status_code, response.json()["error"]["code"]) == (503, "pull_failed")
        assert sum(len(worker.submitted) for worker in workers) == 3


def test_an_error_that_no_retry_can_help_is_not_retried(model_dir: Path) -> None:
    with Stack(model_dir, colocated(), colocated()) as stack:
        for worker in stack.workers:
            failing(worker, GrammarFailed("no end"))
        response = stack.complete("x")
        assert (response.status_code, response.json()["error"]["message"]) == (400, "no end")
        assert sum(len(worker.submitted) for worker in stack.workers) == 1


def test_a_defect_is_tried_elsewhere_once_each_and_blamed_on_the_request(model_dir: Path) -> None:
    """T11: with one worker at fault another answers; a request that fails everywhere is answered
    with its error at once, and no worker is taken out for it.
    """
    with Stack(model_dir, colocated(), colocated()) as stack:
        for worker in stack.workers:
            failing(worker, InternalError("a defect"))
        for number in range(1, 6):
            response = stack.complete("x")
            assert (response.status_code, response.json()["error"]["message"]) == (500, "a defect")
            assert sum(len(worker.submitted) for worker in stack.workers) == 2 * number
        now = time.monotonic()
        scores = [worker.breaker.score(now) for worker in stack.router.service.fleet.linked()]
        assert scores == [0.0, 0.0]
        assert stack.router.service.fleet.reasons() == []


def test_b115_a_full_decode_worker_sends_the_request_to_another(model_dir: Path) -> None:
    one, two = colocated(), colocated()
    with Stack(model_dir, one, two) as stack:
        failing(one, DecodeFull("no room"))
        for _ in range(4):
            assert stack.complete("x", max_tokens=1).status_code == 200
        failing(two, DecodeFull("no room"))
        response = stack.complete("x")
        assert (response.status_code, response.json()["error"]["code"]) == (429, "decode_full")
        assert int(response.headers["retry-after"]) >= 1


def broken_stream(stack: Stack, breaks: Callable[[], None]) -> str:
    """A stream of which three tokens arrive before `breaks`."""
    worker = stack.workers[0]
    stack.do(lambda: worker.allow(3))
    body = {"prompt": "x", "max_tokens": 20, "stream": True}
    with stack.http.stream("POST", "/v1/completions", json=body) as response:
        stack.until(lambda: worker.num_tokens_sent == 3)
        breaks()
        return response.read().decode()


def test_b19_an_error_under_way_is_an_error_event(model_dir: Path) -> None:
    with Stack(model_dir, colocated()) as stack:
        worker = stack.workers[0]
        worker.fails_after = (3, InternalError("a defect"))
        text = broken_stream(stack, lambda: stack.do(lambda: worker.allow(None)))
        blocks = text.strip().split("\n\n")
        assert len(blocks) == 4
        assert '"code":"internal_error"' in blocks[-1]
        assert "[DONE]" not in text
        assert text.count('"finish_reason":null') == 3


def test_b19_the_openai_client_raises(model_dir: Path) -> None:
    with Stack(model_dir, colocated()) as stack:
        worker = stack.workers[0]
        with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="x", max_retries=0) as client:
            for after in (0, 3):
                worker.fails_after = (after, InternalError("a defect"))
                with pytest.raises(openai.APIError, match="a defect"):
                    list(
                        client.completions.create(
                            model=worker_model(stack), prompt="x", stream=True
                        )
                    )
                worker.fails_after = (after, InternalError("a defect"))
                with pytest.raises(openai.InternalServerError):
                    client.completions.create(model=worker_model(stack), prompt="x")


def worker_model(stack: Stack) -> str:
    return stack.router.service.model.name


def test_a_session_that_breaks_is_opened_again(model_dir: Path) -> None:
    with Stack(model_dir, colocated()) as stack:
        expected = whole(stack)[0]
        worker = stack.workers[0]

        def breaks() -> None:
            stack.do(worker.drop_sessions)
            stack.do(lambda: worker.allow(None))

        stream = broken_stream_after(stack, 5, breaks)
        assert stream == expected


def broken_stream_after(stack: Stack, num_tokens: int, breaks: Callable[[], None]) -> str:
    worker = stack.workers[0]
    before = worker.num_tokens_sent
    stack.do(lambda: worker.allow(num_tokens))
    body = {"prompt": "x", "max_tokens": 20, "stream": True}
    with stack.http.stream("POST", "/v1/completions", json=body) as response:
        stack.until(lambda: worker.num_tokens_sent - before == num_tokens)
        breaks()
        response.read()
    return text_of(events(response))


def test_b119_a_worker_that_restarts_serves_again(model_dir: Path) -> None:
    with Stack(model_dir, colocated()) as stack:
        old = stack.workers[0]
        expected = whole(stack)
        stack.call(old.stop)
        stack.until(lambda: not stack.router.service.fleet.is_ready())
        response = stack.complete("x")
        assert response.status_code == 503
        assert "retry-after" in response.headers
        new = FakeWorker(script=counting, incarnation="reborn")
        stack.call(new.start, old.address)
        stack.workers[0] = new
        stack.until(lambda: stack.router.service.fleet.is_ready(), within_s=5)
        assert whole(stack) == expected


def test_the_request_deadline(model_dir: Path) -> None:
    with Stack(model_dir, colocated(), request_timeout_s=0.2) as stack:
        worker = stack.workers[0]
        worker.steps_allowed = 0
        response = stack.complete("x")
        assert (response.status_code, response.json()["error"]["code"]) == (
            504,
            "deadline_exceeded",
        )
        stack.until(lambda: len(worker.cancelled) == 1 and worker.num_running == 0)
