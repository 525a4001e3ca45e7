"""Parameters that workers act on, or that only shape the answer: what reaches the worker, and what
comes back.
"""

import random
from itertools import chain
from typing import Any

import pytest

from common.request_checks import checked_tokens
from router.text.tokenizer import Tokenizer
from tests.router.fake_worker import tokens
from tests.router.sse import events, text_of
from tests.router.stack import Stack


def submitted(stack: Stack, **fields: Any) -> Any:
    """What the worker was asked for."""
    worker = stack.workers[0]
    stack.do(worker.reset)
    response = stack.complete("a b c", max_tokens=2, **fields)
    assert response.status_code == 200, response.text
    return worker.submitted[0]


def param_of(response: Any) -> str:
    assert response.status_code == 400, response.text
    return str(response.json()["error"]["param"])


def test_priority_and_salt_travel(stack: Stack) -> None:
    assert submitted(stack).priority == 0
    assert submitted(stack, priority=3).priority == -3  # clients: lower is sooner
    assert submitted(stack, cache_salt="tenant-a").cache_salt == "tenant-a"
    assert param_of(stack.complete("a", cache_salt="x" * 300)) == "cache_salt"


def test_what_the_router_takes_workers_take_too(stack: Stack, tokenizer: Tokenizer) -> None:
    size = stack.router.service.model.vocabulary.size
    for priority in (0, 100):
        worker = stack.workers[0]
        request = submitted(stack, priority=priority)
        assert request.priority == -priority
        checked_tokens(request, size)
        stack.do(worker.reset)
    words = ["".join(random.Random(i).choices("0123456789", k=256)) for i in range(256)]
    assert param_of(stack.complete("a", bad_words=words)) == "bad_words"
    checked_tokens(submitted(stack, bad_words=words[:64]), size)


def test_no_top_logprobs_are_nothing_that_is_asked(stack: Stack) -> None:
    assert stack.chat("a", top_logprobs=0, max_tokens=1).json()["choices"][0]["logprobs"] is None
    assert param_of(stack.chat("a", top_logprobs=1)) == "top_logprobs"


def test_bad_words_are_banned_at_the_start_and_after_a_space(
    stack: Stack, tokenizer: Tokenizer
) -> None:
    found = submitted(stack, bad_words=["llama", "New York"]).sampling.bad_words
    forms = ["llama", " llama", "New York", " New York"]
    assert found == tuple(tuple(tokenizer.encode_words(form)) for form in forms)
    for wrong in ("llama", [""], [" "], [1], ["x" * 300]):
        assert param_of(stack.complete("a", bad_words=wrong)) == "bad_words"


def test_best_of_may_only_repeat_n(stack: Stack) -> None:
    assert submitted(stack, n=2, best_of=2).sampling.n == 2
    assert param_of(stack.complete("a", n=2, best_of=1)) == "best_of"
    assert param_of(stack.complete("a", n=2, best_of=3)) == "best_of"


def test_a_timeout_of_the_client_reaches_the_worker(stack: Stack) -> None:
    stack.do(stack.workers[0].reset)
    body = {"prompt": "a", "max_tokens": 1}
    headers = {"x-request-timeout": "7.5"}
    assert stack.http.post("/v1/completions", json=body, headers=headers).status_code == 200
    assert 7.0 < (stack.workers[0].submitted[0].deadline_s or 0) <= 7.5
    for wrong in ("0", "-1", "nan", "soon", "1e300"):
        headers = {"x-request-timeout": wrong}
        assert stack.http.post("/v1/completions", json=body, headers=headers).status_code == 400


def test_a_timeout_ends_a_request_that_hangs(stack: Stack) -> None:
    worker = stack.workers[0]
    stack.do(worker.reset)
    stack.do(lambda: worker.allow(0))
    body = {"prompt": "a", "max_tokens": 1}
    headers = {"x-request-timeout": "0.05"}
    response = stack.http.post("/v1/completions", json=body, headers=headers)
    stack.do(lambda: worker.allow(None))
    assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_exceeded")


def test_token_ids_come_back_whole_and_streamed(stack: Stack, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_words("a b c")
    fields: dict[str, Any] = {"return_token_ids": True, "max_tokens": 3, "n": 2}
    choices = stack.complete("a b c", **fields).json()["choices"]
    assert [choice["prompt_token_ids"] for choice in choices] == [ids, ids]
    assert [choice["token_ids"] for choice in choices] == [ids, ids]
    chunks = events(stack.complete("a b c", stream=True, **fields))
    for index in (0, 1):
        own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert own[0]["prompt_token_ids"] == ids
        assert list(chain(*(c["token_ids"] for c in own))) == ids
    body = stack.chat(return_token_ids=True, max_tokens=3).json()
    assert body["choices"][0]["token_ids"] == body["prompt_token_ids"][:3]
    chunks = events(stack.chat(return_token_ids=True, max_tokens=3, stream=True))
    assert chunks[0]["prompt_token_ids"] == body["prompt_token_ids"]


# --- log-probabilities of the prompt --------------------------------------------------------------


def test_prompt_logprobs_as_vllm_shows_them(stack: Stack, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_words("a b c")
    body = stack.complete("a b c", prompt_logprobs=1, max_tokens=1).json()
    first, second, third = body["choices"][0]["prompt_logprobs"]
    assert first is None
    assert second[str(ids[1])] == {"logprob": -0.125, "rank": 2, "decoded_token": " b"}
    assert third[str(ids[2])]["logprob"] == -0.25
    assert third["100"]["rank"] == 1
    chat = stack.chat("a", prompt_logprobs=0, max_tokens=1).json()
    assert chat["prompt_logprobs"][0] is None
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    assert param_of(stack.complete("a", prompt_logprobs=1, stream=True)) == "prompt_logprobs"
    assert param_of(stack.complete("a", prompt_logprobs=21)) == "prompt_logprobs"


@pytest.mark.parametrize("stream", [False, True])
def test_b17_echo_of_text_and_of_ids(stack: Stack, tokenizer: Tokenizer, stream: bool) -> None:
    ids = tokenizer.encode_words("a b c")
    for prompt in ("a b c", ids):
        response = stack.complete(prompt, echo=True, max_tokens=3, n=2, stream=stream)
        if stream:
            assert [text_of(events(response), i) for i in (0, 1)] == ["a b ca b c"] * 2
        else:
            assert [c["text"] for c in response.json()["choices"]] == ["a b ca b c"] * 2


@pytest.mark.parametrize("text", ["🦙🦙 hi", "a<|im_end|>🦙 b", " 漢字\u0301x", "ABC"])
@pytest.mark.parametrize("as_ids", [False, True])
def test_offsets_are_positions_in_the_text(
    stack: Stack, tokenizer: Tokenizer, text: str, as_ids: bool
) -> None:
    ids = tokenizer.encode_words(text)
    prompt = ids if as_ids else text
    fields: dict[str, Any] = {"echo": True, "logprobs": 1, "max_tokens": 12}
    fields["return_token_ids"] = True
    choice = stack.complete(prompt, **fields).json()["choices"][0]
    logprobs, shown = choice["logprobs"], choice["text"]
    offsets = logprobs["text_offset"]
    assert offsets == sorted(offsets)
    assert offsets[len(ids)] == len(tokenizer.decode(ids) if as_ids else text)
    for token, offset in zip(logprobs["tokens"], offsets, strict=True):
        if not token.startswith(("bytes:", "<|")):
            assert shown.startswith(token, offset)
    first, *more = events(stack.complete(prompt, **fields, stream=True))
    streamed = [c["choices"][0]["logprobs"] for c in (first, *more)]
    assert [*chain(*(part["text_offset"] for part in streamed if part))] == offsets
    assert first["choices"][0]["prompt_token_ids"] == choice["prompt_token_ids"]


@pytest.mark.parametrize("max_tokens", [0, 1, 3])
def test_b10_echo_with_logprobs_covers_the_prompt(stack: Stack, max_tokens: int) -> None:
    fields: dict[str, Any] = {"echo": True, "logprobs": 1, "max_tokens": max_tokens}
    body = stack.complete("a b c d", **fields).json()
    (choice,) = body["choices"]
    logprobs = choice["logprobs"]
    usage = body["usage"]
    assert usage["completion_tokens"] == max_tokens
    assert len(logprobs["tokens"]) == usage["prompt_tokens"] + max_tokens
    assert logprobs["token_logprobs"][:4] == [None, -0.125, -0.25, -0.375]
    assert logprobs["token_logprobs"][4:] == [-0.5] * max_tokens
    assert logprobs["top_logprobs"][0] is None
    assert len(logprobs["top_logprobs"][1]) == 2
    assert logprobs["text_offset"][:4] == [0, 1, 3, 5]
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert choice["finish_reason"] == "length"
    chunks = events(stack.complete("a b c d", stream=True, **fields))
    streamed = [c["logprobs"] for chunk in chunks for c in chunk["choices"] if c["logprobs"]]
    assert [*chain(*(part["token_logprobs"] for part in streamed))] == logprobs["token_logprobs"]
    assert [*chain(*(part["text_offset"] for part in streamed))] == logprobs["text_offset"]


# --- a stop string that ends one of several outputs -----------------------------------------------


def test_an_output_that_a_stop_string_ended_is_cancelled_at_the_worker(stack: Stack) -> None:
    worker = stack.workers[0]
    stack.do(worker.reset)
    stops, goes_on = tokens(*[100] * 4), tokens(*[101] * 6)
    worker.script = lambda prompt, index: (stops if index else goes_on)(prompt, index)
    texts = stack.router.service.model.tokenizer.texts
    stop = texts.visible(100).decode()
    body = stack.complete("x", n=2, max_tokens=6, stop=stop).json()
    stack.do(worker.reset_script)
    assert [c["finish_reason"] for c in body["choices"]] == ["length", "stop"]
    assert body["usage"]["completion_tokens"] == 7
    (request,) = worker.submitted
    assert worker.cancelled_outputs == [(request.request_id, 1)]
    assert worker.cancelled == []
