"""No request, however large, keeps the event loop from the others: it is bounded, and what takes
long is done in a thread.
"""

import copy
import json
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from common.errors import InvalidRequest
from common.limits import MAX_GRAMMAR_CHARS
from router.grammar.structured import Form
from router.server.exchange import large_json, to_json
from router.text.tokenizer import Tokenizer
from tests.router.fake_worker import FakeWorker
from tests.router.stack import Stack


@pytest.fixture(scope="module")
def stack(model_dir: Path) -> Iterator[Stack]:
    with Stack(model_dir, FakeWorker()) as running:
        yield running


# --- grammars -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    [
        "x" * (MAX_GRAMMAR_CHARS + 1),
        {"properties": {f"p{i}": {"type": "integer"} for i in range(20_000)}},
        [["x" * 1_000] * 300],
        {"x" * (MAX_GRAMMAR_CHARS + 1): 1},
    ],
    ids=["text", "schema", "list", "key"],
)
def test_a_large_form_is_refused_before_anything_is_made_of_it(source: Any) -> None:
    with pytest.raises(InvalidRequest) as found:
        Form(name="guided_json", kind="json", source=source).job()
    assert found.value.param == "guided_json"
    assert str(MAX_GRAMMAR_CHARS) in found.value.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_grammar": "root ::= " + '"a" ' * 100_000}, "guided_grammar"),
        ({"guided_regex": "a" * 300_000}, "guided_regex"),
        ({"guided_choice": ["a" * 1_000] * 300}, "guided_choice"),
        ({"guided_json": json.dumps({"title": "a" * 300_000})}, "guided_json"),
        ({"guided_json": {"title": "a" * 300_000}}, "guided_json"),
        ({"structured_outputs": {"json": {"title": "a" * 300_000}}}, "structured_outputs"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_large_grammars_are_refused_by_name(
    stack: Stack, fields: dict[str, Any], param: str
) -> None:
    response = stack.complete("x", **fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_tools_that_must_be_called_are_bounded_too(stack: Stack) -> None:
    function = {"name": "f", "parameters": {"title": "a" * 300_000}}
    tools = [{"type": "function", "function": function}]
    response = stack.chat("x", tools=tools, tool_choice="required")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")


# --- log-probabilities of prompts -----------------------------------------------------------------


def test_scores_count_once_for_each_output(stack: Stack) -> None:
    prompt = [5] * 3_000
    fields: dict[str, Any] = {"echo": True, "logprobs": 20, "max_tokens": 0}
    assert stack.complete(prompt, **fields, n=1).status_code == 200
    for response in (
        stack.complete(prompt, **fields, n=20),
        stack.complete([prompt] * 20, **fields),
        stack.complete(prompt, prompt_logprobs=20, n=20),
    ):
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "prompt_logprobs"


def test_echo_alone_adds_no_prompt_logprobs(stack: Stack) -> None:
    fields: dict[str, Any] = {"echo": True, "max_tokens": 1}
    (choice,) = stack.complete("a b c", **fields, logprobs=2).json()["choices"]
    assert "prompt_logprobs" not in choice
    assert len(choice["logprobs"]["tokens"]) == 4
    (choice,) = stack.complete("a b c", **fields, logprobs=2, prompt_logprobs=0).json()["choices"]
    assert [entry and len(entry) for entry in choice["prompt_logprobs"]] == [None, 1, 1]
    assert len(choice["logprobs"]["top_logprobs"][1]) >= 2


@pytest.mark.parametrize("stream", [False, True])
def test_many_scores_are_written_off_the_loop(stack: Stack, stream: bool) -> None:
    service = stack.router.service
    threads: list[str] = []
    texts = service.model.tokenizer.texts

    class Spy:
        def __getattr__(self, name: str) -> Any:
            return getattr(texts, name)

        def visible(self, token_id: int) -> bytes:
            threads.append(threading.current_thread().name)
            return texts.visible(token_id)

    service.model.tokenizer.texts = Spy()  # type: ignore[assignment]
    try:
        response = stack.complete(
            [5] * 1_000, echo=True, logprobs=5, max_tokens=1, n=2, stream=stream
        )
    finally:
        service.model.tokenizer.texts = texts
    assert response.status_code == 200
    loop = stack.do(lambda: threading.current_thread().name)
    assert len(threads) >= 2_000
    assert threads.count(loop) <= 2  # the generated tokens, at most


@pytest.mark.parametrize(
    "value",
    [
        None,
        {"a": [1, "\u2028", None, True], "b": {"c": {"d": {"e": {"f": [1.5, (2, 3)]}}}}},
        {"choices": [{"logprobs": {"tokens": ["x"] * 1_000, "top": [{"y": 1.0}] * 129}}]},
        [[1] * 128, [2] * 129, [], {}],
        (),
    ],
)
def test_large_answers_are_the_same_bytes(value: Any) -> None:
    assert large_json(value) == to_json(value)


# --- texts and token ids --------------------------------------------------------------------------


def test_prompts_count_together(tokenizer: Tokenizer) -> None:
    threads: list[str] = []

    def note(text: str, add_special_tokens: bool) -> list[int]:
        threads.append(threading.current_thread().name)
        return [len(text)]

    spied = copy.copy(tokenizer)
    spied._encode = note  # type: ignore[method-assign]
    own = threading.current_thread().name
    assert anyio.run(spied.encode_all, ["x" * 1_900], 10_000) == [[1_900]]
    assert threads == [own]
    threads.clear()
    assert anyio.run(spied.encode_all, ["x" * 1_900] * 3, 10_000) == [[1_900]] * 3
    assert own not in threads
    threads.clear()
    tools = {"tools": ["x" * 5_000]}
    anyio.run(partial(spied.encode_chat, variables=tools), [{"role": "user", "content": "a"}], 999)
    assert own not in threads


def test_lists_of_texts_are_what_their_texts_are(stack: Stack) -> None:
    texts = ["a b c " * 100, "d", "e f " * 400]
    together = stack.complete(texts, max_tokens=2, return_token_ids=True).json()["choices"]
    for text, choice in zip(texts, together, strict=True):
        (alone,) = stack.complete(text, max_tokens=2, return_token_ids=True).json()["choices"]
        assert alone["prompt_token_ids"] == choice["prompt_token_ids"]


def test_detokenize_is_bounded_and_off_the_loop(stack: Stack) -> None:
    response = stack.http.post("/detokenize", json={"tokens": [5] * 300_000})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tokens")
    assert "262144" in response.json()["error"]["message"]
    few = stack.http.post("/detokenize", json={"tokens": [5] * 10}).json()["prompt"]
    many = stack.http.post("/detokenize", json={"tokens": [5] * 5_000}).json()["prompt"]
    assert many == few * 500
    wrong = stack.http.post("/detokenize", json={"tokens": [*[5] * 5_000, -1]})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "tokens")
    tokens = stack.http.post("/tokenize", json={"prompt": "a " * 2_000}).json()
    assert tokens["count"] == len(tokens["tokens"]) > 2_000
