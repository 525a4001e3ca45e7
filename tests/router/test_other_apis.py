"""/v1/responses and /v1/messages: other words for a chat, other forms for its answer."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from router.text.tokenizer import Tokenizer
from tests.router.fake_worker import FakeWorker, tokens
from tests.router.stack import Stack
from tests.router.test_tools import saying

STORY = "Once upon a time a llama sang."
CALL = '<tool_call>{"name": "clock", "arguments": {"zone": "UTC"}}</tool_call>'
FLAT_TOOL = {"type": "function", "name": "clock", "parameters": {"type": "object"}}
CLOCK = {"name": "clock", "input_schema": {"type": "object"}}


@pytest.fixture(scope="module")
def teller(model_dir: Path, tokenizer: Tokenizer) -> Iterator[Stack]:
    with saying(model_dir, tokenizer, STORY) as running:
        yield running


@pytest.fixture(scope="module")
def caller(model_dir: Path, tokenizer: Tokenizer) -> Iterator[Stack]:
    with saying(model_dir, tokenizer, f"Well. {CALL}") as running:
        yield running


def cut_room(tokenizer: Tokenizer) -> int:
    """Tokens of an answer that ends within the arguments of its call."""
    return len(tokenizer.encode_words(f"Well. {CALL}".partition("UTC")[0]))


def named_events(response: Any) -> list[tuple[str, dict[str, Any]]]:
    """Each event's name, which its data repeats, and the data."""
    assert response.headers["content-type"] == "text/event-stream"
    found = []
    for block in response.text.strip().split("\n\n"):
        first, second = block.split("\n")
        data = json.loads(second.removeprefix("data: "))
        assert data["type"] == first.removeprefix("event: ")
        found.append((data["type"], data))
    return found


# --- responses ------------------------------------------------------------------------------------


def respond(stack: Stack, **fields: Any) -> Any:
    return stack.http.post("/v1/responses", json={"input": "Tell me", **fields})


def test_a_response_as_the_openai_client_sees_it(teller: Stack) -> None:
    with openai.OpenAI(base_url=f"{teller.url}/v1", api_key="none", max_retries=0) as client:
        model = teller.router.service.model.name
        response = client.responses.create(model=model, input="Tell me", instructions="Be brief.")
        assert response.output_text == STORY
        assert response.status == "completed"
        assert response.usage is not None
        assert response.usage.output_tokens == 11
        texts = []
        with client.responses.stream(model=model, input="Tell me") as stream:
            for event in stream:
                if event.type == "response.output_text.delta":
                    texts.append(event.delta)
            final = stream.get_final_response()
        assert "".join(texts) == STORY == final.output_text
        assert len(texts) > 3


def test_the_events_of_a_response_in_order(teller: Stack) -> None:
    found = named_events(respond(teller, stream=True))
    assert [data["sequence_number"] for _, data in found] == list(range(len(found)))
    kinds = [kind for kind, _ in found if kind != "response.output_text.delta"]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    last = found[-1][1]["response"]
    whole = respond(teller).json()
    assert last["usage"] == whole["usage"]
    assert last["output"][0]["content"] == whole["output"][0]["content"]


def test_a_response_that_is_cut_is_incomplete(teller: Stack) -> None:
    body = respond(teller, max_output_tokens=3).json()
    assert body["status"] == "incomplete"
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    events = named_events(respond(teller, max_output_tokens=3, stream=True))
    assert events[-1][0] == "response.incomplete"


def test_tools_and_results_in_a_response(caller: Stack) -> None:
    given = [
        {"role": "user", "content": [{"type": "input_text", "text": "What time is it?"}]},
        {"type": "reasoning", "summary": []},
        {"type": "function_call", "call_id": "c1", "name": "clock", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "12:00"},
    ]
    fields: dict[str, Any] = {"input": given, "tools": [FLAT_TOOL]}
    message, call = respond(caller, **fields).json()["output"]
    assert message["content"][0]["text"] == "Well. "
    assert (call["type"], call["name"], call["arguments"]) == (
        "function_call",
        "clock",
        '{"zone": "UTC"}',
    )
    events = named_events(respond(caller, **fields, stream=True))
    deltas = [d["delta"] for k, d in events if k == "response.function_call_arguments.delta"]
    assert "".join(deltas) == '{"zone": "UTC"}'
    assert [item["type"] for item in events[-1][1]["response"]["output"]] == [
        "message",
        "function_call",
    ]


def test_a_cut_call_is_no_complete_item(caller: Stack, tokenizer: Tokenizer) -> None:
    room = cut_room(tokenizer)
    fields: dict[str, Any] = {"tools": [FLAT_TOOL], "max_output_tokens": room}
    body = respond(caller, **fields).json()
    message, call = body["output"]
    assert body["status"] == "incomplete"
    assert (message["status"], call["status"]) == ("completed", "incomplete")
    assert call["arguments"].startswith('{"zone')
    events = named_events(respond(caller, **fields, stream=True))
    assert "response.function_call_arguments.done" not in [kind for kind, _ in events]
    done = [d["item"]["status"] for kind, d in events if kind == "response.output_item.done"]
    assert done == ["completed", "incomplete"]
    shown = [item["status"] for item in events[-1][1]["response"]["output"]]
    assert shown == done
    whole = respond(caller, tools=[FLAT_TOOL], max_output_tokens=64).json()
    assert [item["status"] for item in whole["output"]] == ["completed", "completed"]


def test_a_response_of_a_schema(teller: Stack) -> None:
    form = {"type": "json_schema", "name": "n", "schema": {"type": "object"}}
    assert respond(teller, text={"format": form}).status_code == 200
    assert teller.workers[0].submitted[-1].sampling.grammar is not None


@pytest.mark.parametrize(
    "fields",
    [
        {"input": None},
        {"input": []},
        {"input": [5]},
        {"input": [{"type": "image"}]},
        {"input": [{"role": "user", "content": "x"}, {"type": "item_reference", "id": "msg_1"}]},
        {"previous_response_id": "resp_1"},
        {"background": True},
        {"max_output_tokens": 0},
        {"text": {"format": {"type": "yaml"}}},
        {"tools": [{"type": "web_search"}]},
        {"nonsense": 1},
        {"messages": []},
    ],
    ids=str,
)
def test_wrong_responses_requests_are_refused(teller: Stack, fields: dict[str, Any]) -> None:
    response = respond(teller, **fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["type"] == "invalid_request_error"


# --- messages -------------------------------------------------------------------------------------


def message(stack: Stack, **fields: Any) -> Any:
    body = {"max_tokens": 64, "messages": [{"role": "user", "content": "Tell me"}]}
    return stack.http.post("/v1/messages", json=body | fields)


def test_a_message(teller: Stack) -> None:
    body = message(teller, system=[{"type": "text", "text": "Be brief."}], top_k=5).json()
    assert body["content"] == [{"type": "text", "text": STORY}]
    assert (body["stop_reason"], body["stop_sequence"]) == ("end_turn", None)
    assert body["usage"]["output_tokens"] == 11
    assert message(teller, max_tokens=2).json()["stop_reason"] == "max_tokens"
    body = message(teller, stop_sequences=[" llama"]).json()
    assert body["content"] == [{"type": "text", "text": "Once upon a time a"}]
    assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", " llama")


def test_the_events_of_a_message(teller: Stack) -> None:
    found = named_events(message(teller, stream=True, stop_sequences=[" sang"]))
    assert [kind for kind, _ in found if kind != "content_block_delta"] == [
        "message_start",
        "content_block_start",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    deltas = [data["delta"]["text"] for kind, data in found if kind == "content_block_delta"]
    assert "".join(deltas) == "Once upon a time a llama"
    end = found[-2][1]
    assert end["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": " sang"}
    whole = message(teller, stop_sequences=[" sang"]).json()
    assert end["usage"] == whole["usage"]


def test_tools_and_results_in_messages(caller: Stack) -> None:
    messages = [
        {"role": "user", "content": "What time is it?"},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "t1", "name": "clock", "input": {}}],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "12:00"},
                {"type": "text", "text": "Thanks"},
            ],
        },
    ]
    fields: dict[str, Any] = {"messages": messages, "tools": [CLOCK]}
    body = message(caller, **fields).json()
    text, call = body["content"]
    assert text == {"type": "text", "text": "Well. "}
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "clock", {"zone": "UTC"})
    assert body["stop_reason"] == "tool_use"
    found = named_events(message(caller, **fields, stream=True))
    inputs = [
        data["delta"]["partial_json"]
        for kind, data in found
        if kind == "content_block_delta" and data["delta"]["type"] == "input_json_delta"
    ]
    assert json.loads("".join(inputs)) == {"zone": "UTC"}
    starts = [d["content_block"]["type"] for k, d in found if k == "content_block_start"]
    assert starts == ["text", "tool_use"]
    assert message(caller, **fields, tool_choice={"type": "any"}).status_code == 200


def test_a_cut_call_cannot_be_run(caller: Stack, tokenizer: Tokenizer) -> None:
    fields: dict[str, Any] = {"tools": [CLOCK], "max_tokens": cut_room(tokenizer)}
    body = message(caller, **fields).json()
    assert body["stop_reason"] == "max_tokens"
    assert body["content"] == [{"type": "text", "text": "Well. "}]
    found = named_events(message(caller, **fields, stream=True))
    inputs = [d["delta"].get("partial_json", "") for k, d in found if k == "content_block_delta"]
    with pytest.raises(json.JSONDecodeError):
        json.loads("".join(inputs))
    assert found[-2][1]["delta"]["stop_reason"] == "max_tokens"


def test_an_assistants_words_are_continued(teller: Stack) -> None:
    messages = [
        {"role": "user", "content": "Count"},
        {"role": "assistant", "content": "One, two,"},
    ]
    assert message(teller, messages=messages).status_code == 200
    counted = teller.http.post("/v1/messages/count_tokens", json={"messages": messages})
    plain = teller.http.post("/v1/messages/count_tokens", json={"messages": messages[:1]})
    assert counted.json()["input_tokens"] > plain.json()["input_tokens"]


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": None},
        {"max_tokens": 0},
        {"messages": []},
        {"messages": [{"role": "system", "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
        {"messages": [{"role": "user", "content": 5}]},
        {"tool_choice": {"type": "always"}},
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        {"system": 5},
        {"nonsense": 1},
        {"n": 2},
    ],
    ids=str,
)
def test_wrong_messages_are_refused(teller: Stack, fields: dict[str, Any]) -> None:
    response = message(teller, **fields)
    assert response.status_code == 400, response.text
    body = response.json()
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")


def test_an_unknown_model_in_anthropics_words(teller: Stack) -> None:
    response = message(teller, model="other")
    assert (response.status_code, response.json()["error"]["type"]) == (404, "not_found_error")


def test_a_failure_under_way_is_an_event(model_dir: Path) -> None:
    from common.errors import InternalError

    worker = FakeWorker(script=tokens(*[100] * 50))
    with Stack(model_dir, worker) as stack:
        worker.fails_after = (3, InternalError("broken on purpose"))
        found = named_events(message(stack, stream=True))
        assert found[-1][0] == "error"
        assert found[-1][1]["error"]["type"] == "api_error"
