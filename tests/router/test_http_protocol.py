"""HTTP as clients really speak it: raw bytes over a socket."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.router.fake_worker import FakeWorker
from tests.router.stack import DEADLINE_S, Stack

BODY = json.dumps({"prompt": "Say it", "max_tokens": 3}).encode()
STREAM = json.dumps({"prompt": "Say it", "max_tokens": 3, "stream": True}).encode()
UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n"


@pytest.fixture(scope="module")
def stack(model_dir: Path) -> Iterator[Stack]:
    with Stack(model_dir, FakeWorker()) as running:
        yield running


def connected(stack: Stack) -> socket.socket:
    return socket.create_connection(("127.0.0.1", stack.router.http_port), timeout=DEADLINE_S)


def post(body: bytes, headers: bytes = b"", version: bytes = b"1.1") -> bytes:
    return (
        b"POST /v1/completions HTTP/%s\r\nHost: tandem\r\n%s"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
        % (version, headers, len(body), body)
    )


def read_answer(reader: "socket.SocketIO | object") -> tuple[bytes, dict[bytes, bytes], bytes]:
    """Status line, headers and a body with a length."""
    readline = reader.readline  # type: ignore[union-attr]
    status = readline().strip()
    headers: dict[bytes, bytes] = {}
    while line := readline().strip():
        name, _, value = line.partition(b":")
        headers[name.lower()] = value.strip()
    return status, headers, reader.read(int(headers[b"content-length"]))  # type: ignore[union-attr]


def test_t21_an_offer_to_upgrade_is_ignored_and_the_body_is_read(stack: Stack) -> None:
    plain = stack.complete("Say it", max_tokens=3).json()["choices"][0]["text"]
    with connected(stack) as client, client.makefile("rb") as reader:
        for _ in range(2):  # some clients offer it with every request
            client.sendall(post(BODY, UPGRADE))
            status, headers, body = read_answer(reader)
            assert status == b"HTTP/1.1 200 OK"
            assert b"upgrade" not in headers
            assert json.loads(body)["choices"][0]["text"] == plain
        client.sendall(post(BODY))
        assert read_answer(reader)[0] == b"HTTP/1.1 200 OK"


@pytest.mark.parametrize("size", [1, 50, 180])
def test_t21_wherever_its_bytes_are_cut(stack: Stack, size: int) -> None:
    request = post(BODY, UPGRADE)
    with connected(stack) as client, client.makefile("rb") as reader:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for start in range(0, len(request), size):
            client.sendall(request[start : start + size])
        assert read_answer(reader)[0] == b"HTTP/1.1 200 OK"


def test_t21_in_chunks_and_with_a_websocket_offered(stack: Stack) -> None:
    head = post(b"", b"Connection: Upgrade\r\nUpgrade: websocket\r\n")
    head = head.replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    with connected(stack) as client, client.makefile("rb") as reader:
        client.sendall(head + b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY))
        assert read_answer(reader)[0] == b"HTTP/1.1 200 OK"


def test_t21_a_get_with_an_offer(stack: Stack) -> None:
    with connected(stack) as client, client.makefile("rb") as reader:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: tandem\r\n" + UPGRADE + b"\r\n")
        assert read_answer(reader)[2] == b'{"status":"ok"}'


def test_a_tunnel_is_refused(stack: Stack) -> None:
    with connected(stack) as client, client.makefile("rb") as reader:
        client.sendall(b"CONNECT tandem:443 HTTP/1.1\r\nHost: tandem:443\r\n\r\n")
        assert read_answer(reader)[0] == b"HTTP/1.1 400 Bad Request"
        assert reader.read() == b""


def test_t39_a_stream_over_http_1_0_ends_with_the_connection(stack: Stack) -> None:
    whole = stack.complete("Say it", max_tokens=3).json()["choices"][0]["text"]
    with connected(stack) as client, client.makefile("rb") as reader:
        client.sendall(post(STREAM, version=b"1.0"))
        head, _, events = reader.read().partition(b"\r\n\r\n")
    assert b"200 OK" in head
    assert b"transfer-encoding" not in head.lower()
    blocks = events.decode().split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    assert all(block.startswith("data: ") for block in blocks[:-1])
    chunks = [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole


def test_t39_a_whole_answer_over_http_1_0_has_its_length(stack: Stack) -> None:
    with connected(stack) as client, client.makefile("rb") as reader:
        client.sendall(post(BODY, version=b"1.0"))
        status, headers, body = read_answer(reader)
        assert status == b"HTTP/1.1 200 OK"
        assert headers[b"connection"] == b"close"
        assert json.loads(body)["choices"][0]["text"]
        assert reader.read() == b""


def test_t29_a_silent_connection_is_kept_as_long_as_the_option_says(
    stack: Stack, model_dir: Path
) -> None:
    """One server closes after half a second of silence; meanwhile nobody speaks on the connection
    to the other one, which is as patient as by default and takes the next request.
    """
    request = b"GET /health HTTP/1.1\r\nHost: tandem\r\n\r\n"
    with (
        Stack(model_dir, FakeWorker(), keep_alive_s=0.5) as hasty,
        connected(hasty) as closed,
        connected(stack) as kept,
        closed.makefile("rb") as reader_of_closed,
        kept.makefile("rb") as reader_of_kept,
    ):
        for client, reader in ((kept, reader_of_kept), (closed, reader_of_closed)):
            client.sendall(request)
            assert read_answer(reader)[0] == b"HTTP/1.1 200 OK"
        assert reader_of_closed.read() == b"", "it ends with the connection"
        kept.sendall(request)
        assert read_answer(reader_of_kept)[0] == b"HTTP/1.1 200 OK"
        assert stack.router.config.keep_alive_s == 120.0


def test_many_offers_in_one_piece_are_answered_one_after_another(stack: Stack) -> None:
    request = b"GET /health HTTP/1.1\r\nHost: tandem\r\n" + UPGRADE + b"\r\n"
    with connected(stack) as client, client.makefile("rb") as reader:
        client.sendall(request * 500)
        for _ in range(500):
            assert read_answer(reader)[2] == b'{"status":"ok"}'


def test_a_length_of_a_head_that_is_no_number(stack: Stack) -> None:
    path = f"/v2/models/{stack.router.service.model.name}/infer"
    for length in ("9" * 5000, "-1", "1e3", "٣"):
        headers = {"inference-header-content-length": length.encode()}
        response = stack.http.post(path, content=b"{}", headers=headers)  # type: ignore[arg-type]
        assert response.status_code == 400, length
