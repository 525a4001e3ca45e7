"""Errors name the fields that the client sent, in every protocol (T31, T32)."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from common.errors import TandemError
from router.api.anthropic.reader import read_message
from router.api.calls import Body
from router.api.kserve.generate import read_generate
from router.api.kserve.http import read_body
from router.api.openai.chat import read_chat
from router.api.openai.completions import read_completion
from router.api.openai.responses import read_response
from router.generation.ask import Ask
from router.generation.options import Vocabulary
from router.proto import inference_pb2 as pb
from router.reading.fields import Fields
from router.text.tokenizer import Tokenizer
from tests.router.fake_worker import FakeWorker
from tests.router.stack import DEADLINE_S, Stack

USER = {"role": "user", "content": "Say it"}
FUNCTION = {"name": "f", "parameters": {"type": "object"}}
SCHEMA = {"type": "json_schema", "schema": 3}
LOOSE = {"type": "object", "properties": {"a": {}}}

CHAT: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "messages"),
    ({"messages": [USER, "x"]}, "messages[1]"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": "x", "name": 1}]}, "messages[0].name"),
    (
        {"messages": [USER, {"role": "assistant", "tool_calls": [{"function": {}}]}]},
        "messages[1].tool_calls[0].function.name",
    ),
    ({"messages": [{"role": "assistant", "tool_calls": ["f"]}]}, "messages[0].tool_calls[0]"),
    ({"max_completion_tokens": 2, "min_tokens": 3}, "min_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"stop": [""]}, "stop"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"tools": 1}, "tools"),
    ({"tools": ["f"]}, "tools[0]"),
    ({"tools": [{"type": "web_search"}]}, "tools[0]"),
    ({"tools": [{"type": "function"}]}, "tools[0].function.name"),
    ({"tools": [{"function": {"name": "f", "parameters": 1}}]}, "tools[0].function.parameters"),
    (
        {"tools": [{"function": {"name": "f", "strict": True, "parameters": LOOSE}}]},
        "tools[0].function.parameters",
    ),
    ({"tools": [{"function": FUNCTION}] * 2}, "tools"),
    ({"tools": [{"function": FUNCTION}], "tool_choice": {"name": "f"}}, "tool_choice"),
    ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
    ({"stream_options": {}}, "stream_options"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
    ({"unheard_of": 1}, "unheard_of"),
]
COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": [1, "x"]}, "prompt"),
    ({"prompt": [10**9]}, "prompt"),
    ({"prompt": ["x"] * 1025}, "prompt"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "1"}, "max_tokens"),
    ({"logprobs": 21}, "logprobs"),
    ({"structured_outputs": {"json": 1}}, "structured_outputs.json"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
    ({"messages": [USER]}, "messages"),
]
RESPONSES: list[tuple[dict[str, Any], str]] = [
    ({"input": None}, "input"),
    ({"input": [{"type": "reasoning"}]}, "input"),
    ({"input": [USER, "x"]}, "input[1]"),
    ({"input": [{"type": "image"}]}, "input[0]"),
    ({"input": [{"type": "item_reference", "id": "m"}]}, "input[0]"),
    ({"instructions": "x", "input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
    ({"instructions": "x", "input": [USER, USER, {"role": "user"}]}, "input[2].content"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
    ({"input": [USER, {"type": "function_call"}]}, "input[1].name"),
    (
        {"input": [USER, {"type": "function_call", "name": "f", "arguments": "[" * 101}]},
        "input[1].arguments",
    ),
    ({"input": [USER, {"type": "function_call_output", "call_id": "c"}]}, "input[1].output"),
    (
        {"input": [{"type": "function_call_output", "call_id": 1, "output": "x"}]},
        "input[0].call_id",
    ),
    (
        {"input": [{"type": "function_call_output", "output": [{"type": "image"}]}]},
        "input[0].output[0]",
    ),
    ({"instructions": 1}, "instructions"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_tokens": 5}, "max_tokens"),
    ({"messages": [USER]}, "messages"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
    ({"tools": [{"type": "function", "name": "f", "parameters": 3}]}, "tools[0].parameters"),
    (
        {"tools": [{"type": "function", "name": "f", "strict": True, "parameters": LOOSE}]},
        "tools[0].parameters",
    ),
    ({"tools": [{"type": "web_search"}]}, "tools[0]"),
    ({"tools": [{"name": "f"}]}, "tools[0].function.name"),
    ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
    ({"text": {"format": {"type": "xml"}}}, "text.format"),
    ({"text": {"format": SCHEMA}}, "text.format.schema"),
    ({"text": {"format": SCHEMA | {"schema": LOOSE, "strict": True}}}, "text.format.schema"),
    ({"text": {"x": 1}}, "text.x"),
    ({"reasoning": {"effort": 1}}, "reasoning.effort"),
    ({"truncation": "some"}, "truncation"),
    ({"include": ["x"]}, "include"),
    ({"stream_options": {"include_usage": True}}, "stream_options.include_usage"),
    ({"max_output_tokens": 2, "min_tokens": 3}, "min_tokens"),
]
MESSAGES: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "system", "content": "x"}]}, "messages[0].role"),
    ({"messages": [USER, {"role": "user", "content": 3}]}, "messages[1].content"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0]"),
    (
        {
            "system": "x",
            "messages": [
                {
                    "role": "assistant",
                    "content": [{"type": "text", "text": "x"}, {"type": "tool_use"}],
                }
            ],
        },
        "messages[0].content[1].name",
    ),
    (
        {
            "messages": [
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "name": "f", "input": "[" * 101}],
                }
            ]
        },
        "messages[0].content[0].input",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_use", "name": "f"}]}]},
        "messages[0].content[0]",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": 1}]}]},
        "messages[0].content[0].tool_use_id",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [1]}]}]},
        "messages[0].content[0].content[0]",
    ),
    ({"system": 5}, "system"),
    ({"system": [{"type": "text", "text": "x"}, {"type": "image"}]}, "system[1]"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"stop_sequences": "x"}, "stop_sequences"),
    ({"stop_sequences": [5]}, "stop_sequences"),
    ({"stop_sequences": ["x"] * 1025}, "stop_sequences"),
    ({"stop": ["x"]}, "stop"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"metadata": {"user_id": 1}}, "metadata.user_id"),
    ({"tools": [{"name": "a b"}]}, "tools[0].name"),
    ({"tools": [{"name": "f", "input_schema": 3}]}, "tools[0].input_schema"),
    ({"tools": [{"name": "f", "description": 3}]}, "tools[0].description"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0]"),
    ({"tool_choice": {"type": "always"}}, "tool_choice.type"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
    ({"output_config": {"format": SCHEMA}}, "output_config.format.schema"),
    ({"output_format": SCHEMA}, "output_format.schema"),
    ({"output_format": SCHEMA, "output_config": {"format": SCHEMA}}, "output_format"),
    ({"output_config": {"effort": 1}}, "output_config.effort"),
    ({"thinking": {"type": "enabled"}}, "thinking"),
    ({"context_management": {"edits": [1]}}, "context_management.edits"),
    ({"n": 2}, "n"),
]
GENERATE: list[tuple[dict[str, Any], str]] = [
    ({"text_input": 5}, "text_input"),
    ({"max_tokens": "1"}, "max_tokens"),
    ({"parameters": {"max_tokens": 0}}, "max_tokens"),
    ({"max_tokens": 1, "parameters": {"max_tokens": 1}}, "max_tokens"),
    ({"parameters": {"stop": [""]}}, "stop"),
    ({"prompt": "x"}, "prompt"),
]
INFER: list[tuple[dict[str, Any], str]] = [
    ({"inputs": 5}, "inputs"),
    ({"inputs": []}, "text_input"),
    ({"parameters": {"max_tokens": 0}}, "max_tokens"),
    ({"parameters": {"max_tokens": "0"}}, "max_tokens"),
    ({"parameters": {"max_tokens": "many"}}, "max_tokens"),
    ({"parameters": {"stream": True}}, "stream"),
    ({"outputs": ["x"]}, "outputs"),
]
TEXT = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["x"]}

Read = Callable[[Fields, Vocabulary], Ask]


PROTOCOLS: dict[str, tuple[Read, dict[str, Any], list[tuple[dict[str, Any], str]]]] = {
    "chat": (read_chat, {"messages": [USER]}, CHAT),
    "completions": (read_completion, {"prompt": "x"}, COMPLETIONS),
    "responses": (read_response, {"input": "x"}, RESPONSES),
    "messages": (read_message, {"messages": [USER], "max_tokens": 5}, MESSAGES),
    "generate": (read_generate, {"text_input": "x"}, GENERATE),
    "infer": (
        lambda fields, vocabulary: read_body(Body(fields), vocabulary),
        {"inputs": [TEXT]},
        INFER,
    ),
}


@pytest.fixture(scope="module")
def vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    return Vocabulary(size=1000, eos_token_ids=(2,), encode=tokenizer.encode_words)


@pytest.mark.parametrize(
    ("protocol", "wrong", "named"),
    [
        pytest.param(protocol, wrong, named, id=f"{protocol}: {json.dumps(wrong)[:80]}")
        for protocol, (_, _, rows) in PROTOCOLS.items()
        for wrong, named in rows
    ],
)
def test_t31_the_field_that_is_wrong_is_named(
    vocabulary: Vocabulary, protocol: str, wrong: dict[str, Any], named: str
) -> None:
    read, right, _ = PROTOCOLS[protocol]
    read(Fields(dict(right)), vocabulary)
    with pytest.raises(TandemError) as found:
        read(Fields(right | wrong), vocabulary)
    assert found.value.http_status == 400
    assert found.value.param == named
    assert named.rpartition(".")[2] in found.value.message


# --- what is found later --------------------------------------------------------------------------


def error_of(stack: Stack, path: str, **body: Any) -> dict[str, Any]:
    response = stack.http.post(path, json=body)
    assert response.status_code == 400, response.text
    found: dict[str, Any] = response.json()["error"]
    return found


HUGE = 10**9


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/v1/completions", {"prompt": "x", "max_tokens": HUGE}, "max_tokens"),
        ("/v1/completions", {"prompt": ""}, "prompt"),
        ("/v1/completions", {"prompt": "x " * 20_000}, "prompt"),
        ("/v1/chat/completions", {"messages": [USER], "max_tokens": HUGE}, "max_tokens"),
        (
            "/v1/chat/completions",
            {"messages": [USER], "max_completion_tokens": HUGE},
            "max_completion_tokens",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x " * 20_000}]},
            "messages",
        ),
        ("/v1/responses", {"input": "x", "max_output_tokens": HUGE}, "max_output_tokens"),
        ("/v1/responses", {"input": "x " * 20_000}, "input"),
        (
            "/v1/responses",
            {"input": "x", "text": {"format": SCHEMA | {"schema": {"format": []}}}},
            "text.format",
        ),
    ],
)
def test_t31_what_is_found_later_has_the_client_s_name_too(
    stack: Stack, path: str, body: dict[str, Any], named: str
) -> None:
    error = error_of(stack, path, **body)
    assert error["param"] == named
    if named.startswith("max"):
        assert f"{named} of {HUGE}" in error["message"]


@pytest.mark.parametrize("given", [[], {}, 5, None, True])
def test_a_format_that_is_no_text_is_refused_in_our_words(stack: Stack, given: Any) -> None:
    described = {"name": "x", "schema": {"type": "string", "format": given}}
    form = {"type": "json_schema", "json_schema": described}
    error = error_of(stack, "/v1/chat/completions", messages=[USER], response_format=form)
    assert error["message"] == f"the schema has a format that is no text: {given!r}"
    assert error["param"] == "response_format"


@pytest.mark.parametrize("given", ["1e-308", "0.0009", "1e10", "inf", "-1", "soon"])
def test_a_timeout_out_of_range_says_what_the_range_is(stack: Stack, given: str) -> None:
    response = stack.http.post(
        "/v1/completions", json={"prompt": "a"}, headers={"x-request-timeout": given}
    )
    assert response.status_code == 400
    assert "from 0.001 to 1e+09" in response.json()["error"]["message"]


@pytest.fixture(scope="module")
def with_grpc(model_dir: Path) -> Iterator[Stack]:
    with Stack(model_dir, FakeWorker(), grpc="127.0.0.1:0") as running:
        yield running


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (pb.GenerateRequest(text="x", max_tokens=HUGE), f"max_tokens of {HUGE}"),
        (pb.GenerateRequest(text="x", stop=[""]), "stop must not hold an empty string"),
        (
            pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="robot")])),
            "messages[0].role",
        ),
    ],
)
def test_t31_over_grpc(with_grpc: Stack, request_: pb.GenerateRequest, words: str) -> None:
    front = with_grpc.router.grpc_front
    assert front is not None
    with grpc.insecure_channel(f"127.0.0.1:{front.port}") as channel:
        generate: Any = channel.unary_stream(
            "/tandem.v1.Inference/Generate",
            request_serializer=pb.GenerateRequest.SerializeToString,
        )
        with pytest.raises(grpc.RpcError) as found:
            list(generate(request_, timeout=DEADLINE_S))
    error: Any = found.value
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert words in error.details()
