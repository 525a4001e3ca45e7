"""Kits K1 (texts), K2 (chats) and K3 (parameters) through every endpoint that generates: each is
answered or refused in the words of its API, soon, and the canary sings as before.
"""

import itertools
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.router.kits import K1, K2, NOT_NUMBERS
from tests.router.stack import Stack

Fields = dict[str, Any]

NUMBERS = [None, 0, -0.0, -1, 1, 1.0, 2, 20, 128, 129, 10_000, 2**31, 2**63, 2**64, 1e308]
WORDS = ["NaN", "Infinity", "-Infinity", "1e999"]
"""Numbers to some readers of JSON; bare words in a body."""


@pytest.fixture(autouse=True)
def alive(stack: Stack) -> Iterator[None]:
    before = stack.canary()
    yield
    assert stack.canary() == before


class Endpoint:
    """How one API says prompt, chat and parameters."""

    def __init__(
        self,
        path: str,
        text: str | None = None,
        chat: str | None = None,
        limit: str = "max_tokens",
        numbers: tuple[str, ...] = (),
    ) -> None:
        self.path = path
        self.text = text
        self.chat = chat
        self.limit = limit
        self.numbers = (limit, *numbers)

    def __repr__(self) -> str:
        return self.path

    def body(self, stack: Stack, text: str = "Hello", **fields: Any) -> Fields:
        base: Fields = {"model": stack.router.service.model.name, self.limit: 2}
        if self.text is not None:
            base[self.text] = text
        else:
            assert self.chat is not None
            base[self.chat] = [{"role": "user", "content": text}]
        return base | fields

    def ask(self, stack: Stack, body: Fields | bytes) -> httpx.Response:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        path = self.path.replace("MODEL", stack.router.service.model.name)
        return stack.http.post(path, content=data, headers={"content-type": "application/json"})


ENDPOINTS = [
    Endpoint("/v1/completions", text="prompt", numbers=("temperature", "top_p", "n", "seed")),
    Endpoint(
        "/v1/chat/completions",
        chat="messages",
        numbers=("temperature", "top_p", "n", "seed", "top_logprobs", "presence_penalty"),
    ),
    Endpoint(
        "/v1/responses",
        text="input",
        limit="max_output_tokens",
        numbers=("temperature", "top_p", "top_logprobs"),
    ),
    Endpoint("/v1/messages", chat="messages", numbers=("temperature", "top_p", "top_k")),
    Endpoint(
        "/v2/models/MODEL/generate",
        text="text_input",
        numbers=("temperature", "top_p", "top_k", "seed"),
    ),
    Endpoint("/v2/models/MODEL/generate_stream", text="text_input", numbers=("n", "logprobs")),
]


def answered_or_refused(response: httpx.Response) -> None:
    assert response.status_code == 200 or 400 <= response.status_code < 500, response.text
    if response.status_code != 200:
        error = response.json()["error"]
        message = error if isinstance(error, str) else error["message"]
        assert message
        assert "Traceback" not in response.text


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=repr)
def test_k1_every_text_is_answered(stack: Stack, endpoint: Endpoint) -> None:
    canary = stack.canary()
    for text, stream in itertools.product(K1, [False, True]):
        if stream and endpoint.path.startswith("/v2"):
            continue  # whether it streams is in the path
        response = endpoint.ask(stack, endpoint.body(stack, text, stream=stream))
        assert response.status_code == 200, (text[:40], response.text)
        response.content.decode("utf-8", errors="strict")
        assert stack.canary() == canary


@pytest.mark.parametrize("endpoint", [e for e in ENDPOINTS if e.chat], ids=repr)
def test_k2_every_chat_is_answered_or_refused_by_name(stack: Stack, endpoint: Endpoint) -> None:
    canary = stack.canary()
    for messages in [*K2, [], [{}], [{"role": "robot", "content": "x"}], [{"role": "user"}]]:
        body = endpoint.body(stack) | {endpoint.chat or "": messages}
        response = endpoint.ask(stack, body)
        answered_or_refused(response)
        assert stack.canary() == canary


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=repr)
def test_k3_every_number_is_taken_or_refused(stack: Stack, endpoint: Endpoint) -> None:
    for name in endpoint.numbers:
        for value in [*NUMBERS, *NOT_NUMBERS]:
            response = endpoint.ask(stack, endpoint.body(stack) | {name: value})
            answered_or_refused(response)
            if any(value is odd for odd in NOT_NUMBERS):
                assert response.status_code == 400, (name, value, response.text)
        for word in WORDS:
            text = json.dumps(endpoint.body(stack) | {name: "@"}).replace('"@"', word)
            assert endpoint.ask(stack, text.encode()).status_code == 400, (name, word)


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=repr)
def test_k3_null_everywhere_is_as_if_absent(stack: Stack, endpoint: Endpoint) -> None:
    nulls = dict.fromkeys((*endpoint.numbers, "stop", "stream", "user", "metadata"))
    body = endpoint.body(stack) | nulls | {endpoint.limit: 2}
    answered_or_refused(endpoint.ask(stack, body))


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=repr)
def test_k3_a_field_given_twice_or_unknown(stack: Stack, endpoint: Endpoint) -> None:
    body = json.dumps(endpoint.body(stack))
    twice = body[:-1] + f', "{endpoint.limit}": 3}}'
    assert endpoint.ask(stack, twice.encode()).status_code == 400
    answered_or_refused(endpoint.ask(stack, endpoint.body(stack) | {"no_such_field": 1}))
