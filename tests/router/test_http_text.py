"""Kind 1: the OpenAI API over HTTP, streamed and not (entries B01 to B20 of the public reports)."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from router.text.tokenizer import Tokenizer
from tests.router.fake_worker import EOS, FakeWorker, tokens
from tests.router.kits import K1
from tests.router.sse import deltas, events, finish_of, text_of
from tests.router.stack import Stack

STORY = "Once upon a time there was a llama that sang all day, and the whole valley listened to it."


@pytest.fixture(scope="module")
def story(model_dir: Path, tokenizer: Tokenizer) -> Iterator[Stack]:
    """A model that always tells the same story."""
    ids = tokenizer.encode_words(STORY)
    with Stack(model_dir, FakeWorker(script=tokens(*ids))) as running:
        yield running


@pytest.fixture(scope="module")
def client(stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def both_ways(stack: Stack, **fields: Any) -> tuple[str, str, int]:
    """Text, finish reason and completion tokens; the same streamed and not, or this fails."""
    whole = stack.complete("Tell me", **fields).json()
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = events(stack.complete("Tell me", **fields, **usage))
    choice = whole["choices"][0]
    assert text_of(chunks) == choice["text"]
    assert finish_of(chunks) == choice["finish_reason"]
    assert chunks[-1]["usage"] == whole["usage"]
    return choice["text"], choice["finish_reason"], whole["usage"]["completion_tokens"]


# --- stop strings ---------------------------------------------------------------------------------


def test_b01_b02_every_cut_of_a_story_stops_exactly_before_it(story: Stack) -> None:
    for start, length in itertools.product(range(0, len(STORY) - 12, 3), (3, 10)):
        stop = STORY[start : start + length]
        response = story.complete("x", stop=stop, max_tokens=60).json()
        text, reason = response["choices"][0]["text"], response["choices"][0]["finish_reason"]
        assert (text, reason) == (STORY[: STORY.index(stop)], "stop"), stop


def test_b01_no_character_of_a_stop_is_streamed(story: Stack) -> None:
    text, reason, _ = both_ways(story, stop="llama that sang", max_tokens=60)
    assert (text, reason) == ("Once upon a time there was a ", "stop")


def test_b01_two_stops_one_a_prefix_of_the_other(story: Stack) -> None:
    text, reason, _ = both_ways(story, stop=["a llama that", "a llama"], max_tokens=60)
    assert (text, reason) == ("Once upon a time there was ", "stop")


def test_b02_completion_tokens_count_the_token_that_matched(
    story: Stack, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode_words(STORY)
    text = tokenizer.decode(ids[:7])
    stop = tokenizer.decode([ids[7]])[1:3]
    _, reason, num_tokens = both_ways(story, stop=text[-1] + " " + stop, max_tokens=60)
    assert (reason, num_tokens) == ("stop", 8)


def test_b01_the_worker_is_told_to_stop(story: Stack) -> None:
    worker = story.workers[0]
    story.complete("x", stop="llama", max_tokens=1000, ignore_eos=True)
    story.until(lambda: worker.num_running == 0)


def test_b03_a_stop_that_never_comes_changes_no_chunk(story: Stack) -> None:
    plain = events(story.complete("x", stream=True, max_tokens=16))
    stopped = events(story.complete("x", stream=True, max_tokens=16, stop="#" * 40))
    assert deltas(plain) == deltas(stopped)
    assert len(deltas(plain)) == 16
    empty = [c for chunk in stopped for c in chunk["choices"] if not c["text"]]
    assert not [c for c in empty if c["finish_reason"] is None]


def test_include_stop_str_in_output(story: Stack) -> None:
    text, reason, _ = both_ways(story, stop="llama", include_stop_str_in_output=True, max_tokens=60)
    assert (text, reason) == ("Once upon a time there was a llama", "stop")


def test_stop_token_ids_end_without_their_text(story: Stack, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_words(STORY)
    text, reason, num = both_ways(story, stop_token_ids=[ids[3]], max_tokens=60)
    assert (text, reason, num) == (tokenizer.decode(ids[:3]), "stop", 4)
    text, _, _ = both_ways(
        story, stop_token_ids=[ids[3]], include_stop_str_in_output=True, max_tokens=60
    )
    assert text == tokenizer.decode(ids[:4])


def test_b20_min_tokens_outlives_a_stop_string(story: Stack) -> None:
    text, _, num = both_ways(story, stop=["upon", "valley"], min_tokens=12, max_tokens=60)
    assert num >= 12
    assert text == STORY[: STORY.index("valley")]


def test_b20_ignore_eos(story: Stack) -> None:
    assert story.complete("x", max_tokens=60).json()["choices"][0]["finish_reason"] == "stop"
    sampling = story.workers[0].submitted[-1].sampling
    assert sampling.stop_token_ids == (EOS,)
    story.complete("x", max_tokens=5, ignore_eos=True)
    assert story.workers[0].submitted[-1].sampling.stop_token_ids == ()


def test_b36_a_thousand_stops(story: Stack) -> None:
    stops = [f"stop string {n}" for n in range(1000)]
    text, reason, _ = both_ways(story, stop=stops, max_tokens=16)
    assert reason == "length"
    assert STORY.startswith(text)


# --- text -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", K1)
def test_b04_b18_kit_texts_stream_as_they_are(stack: Stack, prompt: str) -> None:
    """The worker repeats the prompt, so the answer is the prompt, whatever is in it."""
    max_tokens = stack.http.post("/tokenize", json={"prompt": prompt}).json()["count"]
    body = {"max_tokens": max_tokens, "temperature": 0}
    whole = stack.complete(prompt, **body).json()["choices"][0]["text"]
    chunks = events(stack.complete(prompt, **body, stream=True))
    assert text_of(chunks) == whole
    if "<|im" not in prompt and "\x04" not in prompt:  # the vocabulary lacks byte 4
        assert whole == prompt


def test_b04_an_endless_lone_lead_byte_is_valid_utf8(stack: Stack) -> None:
    fields = {"logit_bias": {"143": 100}, "max_tokens": 20}
    whole = stack.complete("x", **fields).json()["choices"][0]["text"]
    assert whole == "\ufffd" * 20
    assert text_of(events(stack.complete("x", **fields, stream=True))) == whole


def test_b131_a_leading_space_is_kept(story: Stack, stack: Stack) -> None:
    assert stack.complete(" world", max_tokens=1).json()["choices"][0]["text"] == " world"


# --- chunks and usage -----------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_b06_usage_is_one_last_chunk_without_choices(stack: Stack, path: str, n: int) -> None:
    prompt: dict[str, Any] = {"prompt": "Hi you"}
    if path.startswith("chat"):
        prompt = {"messages": [{"role": "user", "content": "Hi you"}]}
    body = {**prompt, "n": n, "max_tokens": 5}
    whole = stack.http.post(f"/v1/{path}", json=body).json()
    streamed = body | {"stream": True, "stream_options": {"include_usage": True}}
    chunks = events(stack.http.post(f"/v1/{path}", json=streamed))
    assert [chunk["choices"] == [] for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1]["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert whole["usage"]["completion_tokens"] == 5 * n
    for index in range(n):
        assert finish_of(chunks, index) == "length"
    assert len({chunk["id"] for chunk in chunks}) == 1


@pytest.mark.parametrize("options", [None, {"include_usage": False}, {}])
def test_b07_no_usage_chunk_unless_asked(stack: Stack, options: Any) -> None:
    chunks = events(stack.chat(stream=True, stream_options=options, max_tokens=3))
    assert all(chunk["choices"] for chunk in chunks)


def test_b07_stream_options_need_stream(stack: Stack) -> None:
    response = stack.chat(stream_options={"include_usage": True})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "stream_options")


def test_the_first_chat_chunk_has_the_role_and_content_follows(stack: Stack) -> None:
    chunks = events(stack.chat(stream=True, max_tokens=3))
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-1]["choices"][0]["delta"] == {}


def test_b12_null_means_default(stack: Stack) -> None:
    names = (
        *("max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "stop", "seed", "n"),
        *("logit_bias", "tools", "user", "stream", "stream_options", "presence_penalty"),
        *("frequency_penalty", "repetition_penalty", "logprobs", "top_logprobs", "metadata"),
        *("response_format", "tool_choice", "min_tokens", "ignore_eos", "stop_token_ids"),
    )
    response = stack.chat("a", **dict.fromkeys(names), max_tokens=4)
    assert response.status_code == 200, response.text
    completion = [name for name in names if name not in ("tools", "tool_choice", "top_logprobs")]
    completion.remove("max_completion_tokens")
    response = stack.complete("a", **dict.fromkeys(completion), max_tokens=None)
    assert response.json()["usage"]["completion_tokens"] == 16


def test_b12_chat_without_max_tokens_may_fill_the_context(model_dir: Path) -> None:
    with Stack(model_dir, FakeWorker(max_model_len=128)) as tiny:
        both: list[dict[str, Any]] = [{}, {"max_tokens": None}]
        for fields in both:
            body = tiny.chat(**fields, ignore_eos=True).json()
            assert body["usage"]["total_tokens"] == 128
            assert body["choices"][0]["finish_reason"] == "length"
        assert tiny.complete("a").json()["usage"]["completion_tokens"] == 16


def test_b13_max_completion_tokens(stack: Stack) -> None:
    body = stack.chat(max_completion_tokens=5).json()
    assert body["usage"]["completion_tokens"] == 5
    assert body["choices"][0]["finish_reason"] == "length"
    body = stack.chat(max_completion_tokens=5, max_tokens=9).json()
    assert body["usage"]["completion_tokens"] == 5


def test_b13_end_of_text_exactly_at_the_cap_is_stop(model_dir: Path) -> None:
    with Stack(model_dir, FakeWorker(script=tokens(100, 101))) as stack:
        body = stack.complete("x", max_tokens=3).json()
        assert body["choices"][0]["finish_reason"] == "stop"
        assert body["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 3, "seed": 5},
        {"logprobs": 2},
        {"stop": " a"},
        {"max_tokens": 1},
        {"prompt": ["one two", "three four"], "n": 2},
    ],
)
def test_b15_stream_and_whole_agree(story: Stack, fields: dict[str, Any]) -> None:
    body = {"prompt": "Tell me", "max_tokens": 12, **fields}
    whole = story.http.post("/v1/completions", json=body).json()
    streamed = body | {"stream": True, "stream_options": {"include_usage": True}}
    chunks = events(story.http.post("/v1/completions", json=streamed))
    assert chunks[-1]["usage"] == whole["usage"]
    for choice in whole["choices"]:
        assert text_of(chunks, choice["index"]) == choice["text"]
        assert finish_of(chunks, choice["index"]) == choice["finish_reason"]


@pytest.mark.parametrize(
    ("prompt", "num_choices"),
    [("a", 1), (["a", "b"], 2), ([5, 6, 7], 1), ([[5, 6], [7, 8, 9]], 2)],
)
def test_b16_four_shapes_of_prompt(stack: Stack, prompt: Any, num_choices: int) -> None:
    body = stack.complete(prompt, n=2, max_tokens=3).json()
    assert [choice["index"] for choice in body["choices"]] == list(range(2 * num_choices))
    singles = prompt if num_choices > 1 else [prompt]
    alone = [stack.complete(single, max_tokens=3).json() for single in singles]
    for choice in body["choices"]:
        expected = alone[choice["index"] // 2]["choices"][0]["text"]
        assert choice["text"] == expected
    expected_tokens = sum(answer["usage"]["prompt_tokens"] for answer in alone)
    assert body["usage"]["prompt_tokens"] == expected_tokens
    assert body["usage"]["completion_tokens"] == 6 * num_choices


@pytest.mark.parametrize("prompt", [[], [[]], ["a", [5]], [5, "a"], [["a"]], [[5], 6], {}, 5, None])
def test_b16_other_shapes_are_refused(stack: Stack, prompt: Any) -> None:
    response = stack.complete(prompt)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")


def test_b122_every_end_of_text_id_ends(model_dir: Path, tmp_path: Path) -> None:
    import json
    import shutil

    directory = tmp_path / "model"
    shutil.copytree(model_dir, directory)
    path = directory / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": [0, 7], "temperature": 0.5}))
    with Stack(directory, FakeWorker()) as stack:
        for token_id in (0, 2, 7):
            body = stack.complete("x", logit_bias={str(token_id): 100}).json()
            choice = body["choices"][0]
            assert (choice["text"], choice["finish_reason"]) == ("", "stop")
            assert body["usage"]["completion_tokens"] == 1


def test_cached_tokens_come_from_the_worker(model_dir: Path) -> None:
    worker = FakeWorker()
    worker.num_cached_tokens = 2
    with Stack(model_dir, worker) as stack:
        usage = stack.complete([5, 6, 7, 8], max_tokens=1).json()["usage"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": 2}


# --- logprobs -------------------------------------------------------------------------------------


def test_chat_logprobs(stack: Stack) -> None:
    body = stack.chat(logprobs=True, top_logprobs=2, max_tokens=4).json()
    entries = body["choices"][0]["logprobs"]["content"]
    assert len(entries) == 4
    assert all(entry["logprob"] == -0.5 and len(entry["top_logprobs"]) == 2 for entry in entries)
    text = b"".join(bytes(entry["bytes"]) for entry in entries).decode()
    assert text.endswith(body["choices"][0]["message"]["content"])
    chunks = events(stack.chat(logprobs=True, top_logprobs=2, max_tokens=4, stream=True))
    streamed = [
        entry
        for chunk in chunks
        for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert streamed == entries


def test_completion_logprobs(stack: Stack) -> None:
    choice = stack.complete("one two three", logprobs=1, max_tokens=3).json()["choices"][0]
    assert choice["logprobs"]["tokens"] == ["one", " two", " three"]
    assert choice["logprobs"]["text_offset"] == [0, 3, 7]
    assert choice["logprobs"]["token_logprobs"] == [-0.5] * 3
    assert choice["logprobs"]["top_logprobs"][0] == {"one": -0.5}


def test_b37_top_logprobs_need_logprobs(stack: Stack) -> None:
    assert stack.chat(top_logprobs=2).status_code == 400


# --- the official client --------------------------------------------------------------------------


def test_openai_client(client: openai.OpenAI, stack: Stack) -> None:
    model = client.models.list().data[0].id
    assert client.models.retrieve(model).id == model
    chat = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "Hi"}], max_tokens=5, temperature=0
    )
    streamed = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Hi"}],
        max_tokens=5,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(streamed)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == chat.choices[0].message.content
    assert chunks[-1].usage == chat.usage
    completion = client.completions.create(model=model, prompt="Hello world", max_tokens=2)
    assert completion.choices[0].text == "Hello world"


def test_openai_client_unknown_model(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="gpt-x"):
        client.completions.create(model="gpt-x", prompt="Hello")


def test_request_id_is_echoed_or_minted(stack: Stack) -> None:
    given = stack.http.get("/health", headers={"x-request-id": "mine-1"})
    assert given.headers["x-request-id"] == "mine-1"
    minted = stack.http.get("/health", headers={"x-request-id": "not this one"})
    assert len(minted.headers["x-request-id"]) == 32


def test_tokenize_and_detokenize(stack: Stack) -> None:
    found = stack.http.post("/tokenize", json={"prompt": "Hello world"}).json()
    assert found == {"count": 2, "max_model_len": 8192, "tokens": found["tokens"]}
    back = stack.http.post("/detokenize", json={"tokens": found["tokens"]}).json()
    assert back == {"prompt": "Hello world"}
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    assert stack.http.post("/tokenize", json=chat).json()["count"] > 10
