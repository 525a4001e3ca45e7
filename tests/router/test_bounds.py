"""What a request asks for is bounded before it costs anything (docs/cases.md, T01 to T06)."""

import json
import random
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from common.clock import MonotonicClock
from common.errors import InvalidRequest, Overloaded
from common.limits import (
    LARGE_BODY_BYTES,
    MAX_BODIES_BYTES,
    MAX_HEADER_BYTES,
    MAX_HEADERS,
    MAX_JSON_DEPTH,
    MAX_JSON_OBJECTS,
    MAX_JSON_VALUES,
    MAX_SCHEMA_ITEMS,
    SMALL_BODY_BYTES,
)
from router.reading import json_shape
from router.reading.json_body import parse_json_object
from router.reading.json_shape import shape_of
from router.server.bodies import Bodies
from tests.router.stack import Stack


@pytest.fixture(autouse=True)
def alive(stack: Stack) -> Iterator[None]:
    before = stack.canary()
    yield
    assert stack.canary() == before


def refused(response: httpx.Response, words: str, status: int = 400) -> None:
    assert response.status_code == status, response.text
    assert words in response.text
    assert "Traceback" not in response.text
    assert "panic" not in response.text


# --- T01: numbers of a schema or a grammar --------------------------------------------------------

INTEGERS = {"type": "array", "items": {"type": "integer"}}
MANY = {f"p{i}": {"type": "integer"} for i in range(501)}
BEYOND: list[tuple[dict[str, Any], str]] = [
    ({"guided_json": INTEGERS | {"maxItems": 100_000_000}}, "the limit is 10000"),
    ({"guided_json": INTEGERS | {"minItems": MAX_SCHEMA_ITEMS + 1}}, "minItems 10001"),
    ({"guided_json": {"properties": {"a": INTEGERS | {"maxItems": 10**30}}}}, "maxItems"),
    ({"guided_json": {"allOf": [{"$ref": "#/x/y"}], "x": {"y": {"maxItems": 1e9}}}}, "maxItems"),
    ({"guided_json": {"type": "string", "maxLength": 2**31}}, "maxLength"),
    ({"guided_json": {"type": "object", "maxProperties": 10**6}}, "maxProperties"),
    ({"guided_json": {"type": "object", "properties": MANY}}, "501 optional properties"),
    ({"guided_json": {"anyOf": [{"const": i} for i in range(1001)]}}, "1001 entries in anyOf"),
    ({"guided_json": {"enum": list(range(4097))}}, "4097 entries in enum"),
    ({"guided_json": {"type": "string", "pattern": "a{100000}"}}, "100000 times"),
    ({"guided_json": {"anyOf": [INTEGERS | {"maxItems": 9999}] * 11}}, "100000 items"),
    ({"guided_choice": [f"c{i}" for i in range(4097)]}, "4096"),
    ({"guided_regex": "(a|b){1,1000000}"}, "1000000 times"),
    ({"guided_grammar": 'start: "a"~1..500000'}, "500000 times"),
    ({"structured_outputs": {"json": {}, "whitespace_pattern": "[ ]{0,99999}"}}, "99999 times"),
    (
        {"guided_grammar": f"start: %json {json.dumps(INTEGERS | {'maxItems': 10**6})}"},
        "3 s of processor time and 256 MiB of memory",
    ),
    ({"guided_json": {"anyOf": [INTEGERS | {"maxItems": 9999}] * 10}}, "too large"),
    ({"guided_regex": "(" * 50_000 + "a" + ")" * 50_000}, "cannot be compiled"),
    ({"guided_grammar": "root ::= " + "(" * 50_000 + '"a"' + ")" * 50_000}, "recursion"),
]


@pytest.mark.parametrize(("fields", "words"), BEYOND, ids=[words for _, words in BEYOND])
def test_t01_every_number_of_a_form_is_bounded(
    stack: Stack, fields: dict[str, Any], words: str
) -> None:
    # the compiler's process steps back for others: on a busy machine its 3 s take longer
    stack.http.timeout = 60.0
    refused(stack.complete(max_tokens=1, **fields), words)


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_json": {"type": "object", "properties": dict(list(MANY.items())[:500])}},
        {"guided_json": INTEGERS | {"maxItems": MAX_SCHEMA_ITEMS}},
        {"guided_choice": [f"choice {i}" for i in range(4096)]},
        {"guided_json": {"enum": [[i] for i in range(4096)]}},
    ],
    ids=["properties", "items", "choices", "enum"],
)
def test_t01_what_is_within_the_stated_bounds_works(stack: Stack, fields: dict[str, Any]) -> None:
    response = stack.complete(max_tokens=1, **fields)
    assert response.status_code == 200, response.text


def test_t01_tools_that_must_be_called_are_bounded_too(stack: Stack) -> None:
    parameters = {"type": "object", "properties": {"a": INTEGERS | {"maxItems": 10**8}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    refused(stack.chat(tools=tools, tool_choice="required"), "maxItems")


# --- T03: heads -----------------------------------------------------------------------------------


def raw(stack: Stack, data: bytes) -> bytes:
    """The answer to bytes, up to its end or the connection's."""
    with socket.create_connection(("127.0.0.1", stack.router.http_port), timeout=10) as client:
        client.sendall(data)
        found = b""
        while part := client.recv(65536):
            found += part
            head, gap, body = found.partition(b"\r\n\r\n")
            if gap and b"content-length: %d" % len(body) in head.lower():
                return found
        return found


def head(num_bytes: int) -> bytes:
    """One of so many bytes: URL, names and values, and four for each header."""
    start = len("/health") + len("host") + 1 + 4 + len("x") + 4
    return b"GET /health HTTP/1.1\r\nhost: a\r\nx: " + b"a" * (num_bytes - start) + b"\r\n\r\n"


def test_t03_bytes_of_headers_are_bounded(stack: Stack) -> None:
    assert raw(stack, head(MAX_HEADER_BYTES)).startswith(b"HTTP/1.1 200 ")
    for num_bytes in (MAX_HEADER_BYTES + 1, MAX_HEADER_BYTES + 20_000):
        answer = raw(stack, head(num_bytes))
        assert answer.startswith(b"HTTP/1.1 431 ")
        assert b'"code":"headers_too_large"' in answer


def test_t03_the_number_of_headers_is_bounded(stack: Stack) -> None:
    for count, status in ((MAX_HEADERS - 1, b"200"), (MAX_HEADERS, b"431")):
        more = b"".join(b"x-%d: 1\r\n" % i for i in range(count))
        answer = raw(stack, b"GET /health HTTP/1.1\r\nhost: a\r\n" + more + b"\r\n")
        assert answer.startswith(b"HTTP/1.1 " + status)


CHUNKED = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
ENDLESS = {
    "a header's value": b"GET /health HTTP/1.1\r\nhost: a\r\nx: ",
    "a header's name": b"GET /health HTTP/1.1\r\nhost: a\r\n",
    "the URL": b"GET /",
    "the upgrade's head": b"GET /health HTTP/1.1\r\nupgrade: h2c\r\nconnection: upgrade\r\nx: ",
    "a chunk's extension": CHUNKED + b"1;x=",
    "a trailer": CHUNKED + b"1\r\n{\r\n0\r\nx: ",
}


@pytest.mark.parametrize("where", ENDLESS)
def test_t03_nothing_outside_of_a_body_is_endless(stack: Stack, where: str) -> None:
    """The server keeps none of it, and says so as soon as it is too much."""
    answer = raw(stack, ENDLESS[where] + b"a" * 100_000)
    assert answer.startswith((b"HTTP/1.1 431 ", b"HTTP/1.1 400 ")), answer[:100]


# --- T05: bodies ----------------------------------------------------------------------------------


def test_t05_large_bodies_are_parsed_beside_the_loop(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []

    def watched(body: bytes) -> dict[str, Any]:
        threads.append(threading.current_thread().name)
        return parse_json_object(body)

    monkeypatch.setattr("router.server.bodies.parse_json_object", watched)
    loop = stack.do(lambda: threading.current_thread().name)
    assert stack.complete("a", max_tokens=1).status_code == 200
    assert stack.complete("a" * LARGE_BODY_BYTES, max_tokens=1).status_code in (200, 400)
    assert (threads[0] == loop, threads[1] == loop) == (True, False)


def test_bodies_under_way_are_bounded_together(stack: Stack) -> None:
    bodies = Bodies(MonotonicClock(), max_bytes=100_000)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"x" * 60_000, "more_body": False}

    async def two() -> None:
        small, first, second = bodies.hold(), bodies.hold(), bodies.hold()
        assert len(await small.read(receive, None, 10**6)) == 60_000
        assert bodies.num_bytes == 0  # small ones do not count

        async def large() -> dict[str, Any]:
            return {"type": "http.request", "body": b"x" * (SMALL_BODY_BYTES + 1)}

        await first.read(large, None, 10**6)
        with pytest.raises(Overloaded, match="100000"):
            await second.read(large, None, 10**6)
        first.end()
        first.end()
        await second.read(large, None, 10**6)
        second.end()
        assert bodies.num_bytes == 0

    stack.call(two)
    assert MAX_BODIES_BYTES >= 8 * 2**20


def test_a_body_that_does_not_come_is_not_waited_for(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.server.bodies.BODY_S", 0.05)
    answer = raw(stack, b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n\r\n{")
    assert answer.startswith(b"HTTP/1.1 408 ")


def test_a_head_that_does_not_come_is_not_waited_for(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.http_protocol.HEAD_S", 0.05)
    assert raw(stack, b"GET /health HTT").startswith(b"HTTP/1.1 408 ")
    assert raw(stack, b"") == b""


# --- T06: the shape of JSON -----------------------------------------------------------------------


def nested(depth: int, leaf: Any = 1) -> Any:
    value = leaf
    for level in range(depth):
        value = [value] if level % 2 else {"a": value}
    return value


DEEP = nested(490)
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": json.dumps(DEEP)}}
USER = {"role": "user", "content": "x"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": DEEP}}
NESTED = [
    ("/v1/chat/completions", {"messages": [USER], "chat_template_kwargs": DEEP}),
    ("/v1/chat/completions", {"messages": [USER], "tools": [TOOL]}),
    ("/v1/chat/completions", {"messages": [USER | {"more": DEEP}]}),
    ("/v1/chat/completions", {"messages": [USER, {"role": "assistant", "tool_calls": [CALL]}]}),
    ("/v1/messages", {"max_tokens": 1, "messages": [USER], "tools": [{"input_schema": DEEP}]}),
    ("/v1/responses", {"input": "x", "tools": [{"type": "function", "parameters": DEEP}]}),
    ("/v1/completions", {"prompt": "x", "guided_json": json.dumps(DEEP)}),
    ("/v1/completions", {"prompt": "x", "guided_json": DEEP}),
    ("/tokenize", {"messages": [USER], "chat_template_kwargs": DEEP}),
    ("/v1/messages/count_tokens", {"messages": [USER], "tools": [{"input_schema": DEEP}]}),
]


@pytest.mark.parametrize(
    ("path", "body"), NESTED, ids=[f"{p} {i}" for i, (p, _) in enumerate(NESTED)]
)
def test_t06_depth_is_bounded_wherever_json_is_read(
    stack: Stack, path: str, body: dict[str, Any]
) -> None:
    refused(stack.http.post(path, json=body), f"the limit is {MAX_JSON_DEPTH} levels")


def test_t06_depth_within_the_bound_is_read(stack: Stack) -> None:
    depth = MAX_JSON_DEPTH - 1
    body = {"messages": [USER], "chat_template_kwargs": {"x": nested(depth - 1)}, "max_tokens": 1}
    assert stack.http.post("/v1/chat/completions", json=body).status_code == 200
    body["chat_template_kwargs"] = {"x": nested(depth)}
    refused(stack.http.post("/v1/chat/completions", json=body), "nested too deeply")


def test_t06_json_in_a_tensor(stack: Stack) -> None:
    name = stack.router.service.model.name
    parameters = json.dumps({"a": DEEP})
    inputs = [
        {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["x"]},
        {"name": "sampling_parameters", "datatype": "BYTES", "shape": [1], "data": [parameters]},
    ]
    refused(stack.http.post(f"/v2/models/{name}/infer", json={"inputs": inputs}), "levels")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"a":[' + "[]," * MAX_JSON_OBJECTS + "[]]}", "objects, lists and texts"),
        ('{"a":[' + '"",' * MAX_JSON_OBJECTS + "[]]}", "objects, lists and texts"),
        ('{"a":[' + "1," * MAX_JSON_VALUES + "1]}", "values"),
        ("[" * 10**6, "levels"),
    ],
    ids=["lists", "texts", "numbers", "depth"],
)
def test_counts_are_bounded_before_anything_is_made(text: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        parse_json_object(text.encode())


def counted(text: str) -> tuple[int, int, int]:
    """Depth, objects and values, character by character."""
    depth = deepest = num_objects = 0
    num_values = 1
    in_text = escaped = False
    for char in text:
        if in_text:
            in_text = escaped or char != '"'
            escaped = char == "\\" and not escaped
        elif char == '"':
            in_text, escaped = True, False
            num_objects += 1
        elif char in "[{":
            depth, num_objects, num_values = depth + 1, num_objects + 1, num_values + 1
            deepest = max(deepest, depth)
        elif char in "]}":
            depth -= 1
        elif char == ",":
            num_values += 1
    return deepest, num_objects, num_values


def test_the_shape_is_right_wherever_slices_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    seed = random.randrange(2**32)
    rng = random.Random(seed)

    def value(depth: int) -> Any:
        kind = rng.random()
        if depth > 4 or kind < 0.4:
            return rng.choice(['a\\b"', '\\\\"', "x", 1, True, None, "\\", "[{,"])
        if kind < 0.7:
            return [value(depth + 1) for _ in range(rng.randrange(4))]
        return {rng.choice('ab"\\,[') + str(i): value(depth + 1) for i in range(rng.randrange(4))}

    for size in (1, 2, 3, 7, 64):
        monkeypatch.setattr(json_shape, "SLICE", size)
        for _ in range(150):
            text = json.dumps(value(0))
            shape = shape_of(text.encode())
            depth, num_objects, num_values = counted(text)
            assert (shape.depth, shape.num_values) == (depth, num_values), f"seed {seed}: {text}"
            # a text that spans slices may count once more in each
            assert num_objects <= shape.num_objects <= num_objects + len(text) // size + 1
