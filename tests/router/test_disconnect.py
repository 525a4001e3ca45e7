"""Clients that go away, read slowly, or close one side (entries B42 to B52)."""

import json
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from common.types import Role
from tests.router.fake_worker import FakeWorker
from tests.router.stack import DEADLINE_S, Stack


def send(stack: Stack, **fields: Any) -> socket.socket:
    """A raw connection with one completion request on its way."""
    body = json.dumps({"prompt": "one two three", **fields}).encode()
    connection = socket.create_connection(("127.0.0.1", stack.router.http_port), timeout=DEADLINE_S)
    connection.sendall(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n" % len(body) + body
    )
    return connection


def read_all(connection: socket.socket) -> bytes:
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts)


def reset(connection: socket.socket) -> None:
    """What a killed process leaves: a reset."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def until_gone(stack: Stack, num_cancelled: int = 1) -> None:
    worker = stack.workers[0]
    stack.until(
        lambda: len(worker.cancelled) == num_cancelled and worker.num_running == 0, within_s=5
    )
    stack.until(lambda: stack.router.service.admission.is_idle)


@pytest.fixture(scope="module")
def shared(model_dir: Path) -> Iterator[Stack]:
    with Stack(model_dir, FakeWorker(Role.DECODE), FakeWorker(Role.PREFILL)) as running:
        yield running


@pytest.fixture
def stack(shared: Stack) -> Iterator[Stack]:
    """One router and pair of workers for all tests; the worker begins each test as new."""
    shared.do(shared.workers[0].reset)
    yield shared
    shared.check_idle()


@pytest.mark.parametrize("closes", [socket.socket.close, reset])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", ["queued", "prefill", "decode"])
def test_b43_b44_b78_a_client_that_goes_is_cancelled_in_every_phase(
    stack: Stack, closes: Any, stream: bool, phase: str
) -> None:
    worker = stack.workers[0]
    aborts = aborted(stack)
    worker.admits = phase != "queued"
    worker.has_prefill_pause = phase == "prefill"
    worker.steps_allowed = 3
    connection = send(stack, stream=stream, max_tokens=300)
    stack.until(lambda: len(worker.submitted) == 1)
    if phase == "decode":
        stack.until(lambda: worker.num_tokens_sent == 3)
    if phase == "prefill":
        stack.until(lambda: len(worker.routes) == 1)
    closes(connection)
    if phase == "decode" and stream:
        stack.do(lambda: worker.allow(2))  # only a write can tell
    until_gone(stack)
    stack.until(lambda: aborted(stack) == aborts + 1)


def aborted(stack: Stack) -> float:
    labels = {"endpoint": "/v1/completions", "outcome": "abort"}
    return stack.metric("tandem_router_requests_total", **labels)


def test_b42_all_outputs_of_a_request_stop(stack: Stack) -> None:
    worker = stack.workers[0]
    for number in range(1, 11):
        before = worker.num_tokens_sent
        stack.do(lambda: worker.allow(3))
        connection = send(stack, stream=True, n=4, max_tokens=200)
        stack.until(lambda before=before: worker.num_tokens_sent == before + 12)  # type: ignore[misc]
        reset(connection)
        until_gone(stack, number)
    assert worker.num_running == 0


@pytest.mark.parametrize("stream", [False, True])
def test_b43_a_half_closed_client_gets_its_answer(stack: Stack, stream: bool) -> None:
    worker = stack.workers[0]
    worker.steps_allowed = 0
    with send(stack, stream=stream, max_tokens=5) as connection:
        connection.shutdown(socket.SHUT_WR)
        stack.until(lambda: worker.num_running == 1)
        stack.do(lambda: worker.allow(2))
        stack.until(lambda: worker.num_tokens_sent == 2)
        stack.do(lambda: worker.allow(None))
        answer = read_all(connection)
    assert b"HTTP/1.1 200 OK" in answer
    assert (b"[DONE]" in answer) == stream
    assert answer.count(b'"length"') == 1


def test_b43_a_slow_reader_holds_up_nobody(stack: Stack) -> None:
    """It reads nothing for as long as 400 kB are made for it, then everything."""
    worker = stack.workers[0]
    with send(stack, stream=True, max_tokens=4000) as slow:
        stack.until(lambda: worker.num_running == 1)
        assert stack.complete("x", max_tokens=20).status_code == 200
        stack.until(lambda: worker.num_tokens_sent >= 4020)
        assert stack.complete("x", max_tokens=20).status_code == 200
        slow.settimeout(DEADLINE_S)
        answer = b""
        while b"[DONE]" not in answer:
            answer += slow.recv(1 << 20)
    assert answer.count(b"data: {") == 4000


def test_b50_a_retry_with_the_same_id_is_served(stack: Stack) -> None:
    worker = stack.workers[0]
    headers = {"x-request-id": "mine"}
    body = {"prompt": "one two three", "max_tokens": 5}
    expected = stack.http.post("/v1/completions", json=body, headers=headers).json()
    for _ in range(20):
        stack.do(lambda: worker.allow(2))
        before = worker.num_tokens_sent
        with stack.http.stream(
            "POST", "/v1/completions", json=body | {"stream": True}, headers=headers
        ):
            stack.until(lambda before=before: worker.num_tokens_sent == before + 2)  # type: ignore[misc]
        stack.do(lambda: worker.allow(None))
        again = stack.http.post("/v1/completions", json=body, headers=headers)
        assert again.headers["x-request-id"] == "mine"
        assert again.json()["choices"] == expected["choices"]


def test_b52_requests_whose_clients_are_gone_never_start(stack: Stack) -> None:
    worker = stack.workers[0]
    worker.admits = False
    waiting = [send(stack, max_tokens=5) for _ in range(5)]
    stack.until(lambda: len(worker.submitted) == 5)
    for connection in waiting:
        connection.close()
    until_gone(stack, 5)
    worker.admits = True
    assert stack.complete("x", max_tokens=5).status_code == 200
    assert worker.num_tokens_sent == 5


def test_pipelined_requests_are_answered_in_order(stack: Stack) -> None:
    request = b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"
    address = ("127.0.0.1", stack.router.http_port)
    with socket.create_connection(address, timeout=DEADLINE_S) as connection:
        connection.sendall(request * 3)
        answer = b""
        while answer.count(b'{"version"') < 3:
            answer += connection.recv(65536)
