"""What clients of each protocol send beside their question: honoured, ignored or refused; and what
happens at the edges (calls that are cut, sent back, forced).
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer as HfTokenizer

from common.errors import ConfigError, InvalidRequest
from common.messages import unpack_tokens
from router.admission.keys import KeyRing, read_priorities
from router.grammar.closed_objects import closed, strict
from router.reading.protocols import PROTOCOLS, table
from router.text.chat_messages import normalized_messages
from router.text.chat_template import ChatTemplate
from router.text.tokenizer import Tokenizer
from tests.router.fake_worker import FakeWorker
from tests.router.sse import events
from tests.router.stack import Stack
from tests.router.test_chat_template import with_template
from tests.router.test_tools import CLOCK, WEATHER, saying

DOCS = Path(__file__).resolve().parents[2] / "docs"
ASK = [{"role": "user", "content": "Say it"}]


@pytest.fixture(scope="module")
def stack(model_dir: Path) -> Iterator[Stack]:
    with Stack(model_dir, FakeWorker()) as running:
        yield running


@pytest.fixture(scope="module")
def cut_call(model_dir: Path, tokenizer: Tokenizer) -> Iterator[Stack]:
    """A worker that says a forced list of calls."""
    text = '[{"name": "get_weather", "parameters": {"city": "Berlin"}}]'
    with saying(model_dir, tokenizer, text) as running:
        yield running


def post(stack: Stack, path: str, **fields: Any) -> httpx.Response:
    return stack.http.post(path, json=fields)


def error_of(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 400, response.text
    found: dict[str, Any] = response.json()["error"]
    return found


def submitted(stack: Stack) -> Any:
    """The last request that the worker got."""
    return stack.workers[0].submitted[-1]


# --- the table ------------------------------------------------------------------------------------


def test_t23_the_document_prints_the_table_of_the_code() -> None:
    assert table() in (DOCS / "api.md").read_text()


EXAMPLES: dict[type, Any] = {str: "high", bool: True, dict: {"a": "b"}, int: 3}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Say it", "max_tokens": 2},
    "/v1/chat/completions": {"messages": ASK, "max_tokens": 2},
    "/v1/responses": {"input": "Say it", "max_output_tokens": 2},
    "/v1/messages": {"messages": ASK, "max_tokens": 2},
}


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda protocol: protocol.title.strip("`"))
def test_t23_hints_change_nothing_and_what_is_refused_is_named(stack: Stack, protocol: Any) -> None:
    path = protocol.title.strip("`")
    assert path in BODIES
    hints = {name: EXAMPLES[kinds[0]] for name, kinds in protocol.ignored.items()}
    assert post(stack, path, **BODIES[path], **hints).status_code == 200
    for name, kinds in protocol.ignored.items():
        wrong: Any = [1] if bool not in kinds else "yes"
        response = post(stack, path, **BODIES[path], **{name: wrong})
        assert response.status_code == 400
        assert name in response.json()["error"]["message"]
    for name, neutral in protocol.refused.items():
        for value in neutral:
            assert post(stack, path, **BODIES[path], **{name: value}).status_code == 200, name
        response = post(stack, path, **BODIES[path], **{name: {"a": 1}})
        assert response.status_code == 400
        assert name in response.json()["error"]["message"]


def test_t23_what_gateways_send_for_anthropic_clients(stack: Stack) -> None:
    """The fields that litellm puts into /v1/responses, and those of Anthropic's own clients."""
    body = {
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "Say it"}]}],
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"effort": "high", "summary": "auto"},
        "text": {"format": {"type": "text"}, "verbosity": "low"},
        "truncation": "auto",
        "stream_options": {"include_obfuscation": False},
    }
    shown = post(stack, "/v1/responses", **body).json()
    assert shown["status"] == "completed"
    refused = post(stack, "/v1/responses", **body | {"include": ["message.output_text.logprobs"]})
    assert error_of(refused)["param"] == "include"
    message = {
        "max_tokens": 2,
        "system": [{"type": "text", "text": "Be brief", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "Say it", "cache_control": {"type": "ephemeral"}}
                ],
            }
        ],
        "tools": [
            {
                "name": "clock",
                "input_schema": {"type": "object"},
                "cache_control": {"type": "ephemeral"},
            }
        ],
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": []},
        "output_config": {"effort": "low"},
    }
    assert post(stack, "/v1/messages", **message).status_code == 200
    for wrong in (
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
        {"output_config": {"format": {"type": "grammar"}}},
    ):
        assert post(stack, "/v1/messages", **message | wrong).status_code == 400


def test_t23_how_hard_to_think_reaches_the_template(model_dir: Path, tmp_path: Path) -> None:
    template = "{{ reasoning_effort }}: {{ messages[0].content }}"
    with Stack(with_template(model_dir, tmp_path, template), FakeWorker()) as stack:
        expected = stack.router.service.model.tokenizer.encode_words("high: Say it")
        for path, fields in (
            ("/v1/chat/completions", {"reasoning_effort": "high"}),
            ("/v1/responses", {"reasoning": {"effort": "high"}}),
            ("/v1/messages", {"output_config": {"effort": "high"}}),
        ):
            assert post(stack, path, **BODIES[path], **fields).status_code == 200
            assert list(unpack_tokens(submitted(stack).token_ids)) == expected


# --- usage, scores, prompts that are cut ----------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_t22_usage_in_every_chunk(stack: Stack, path: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    fields = BODIES[path] | {"max_tokens": 4, "stream": True, "stream_options": options}
    found = events(post(stack, path, **fields))
    counts = [chunk["usage"]["completion_tokens"] for chunk in found]
    assert counts == sorted(counts)
    assert counts[-1] == 4
    assert {chunk["usage"]["prompt_tokens"] for chunk in found} == {
        found[-1]["usage"]["prompt_tokens"]
    }
    assert [bool(chunk["choices"]) for chunk in found] == [True] * (len(found) - 1) + [False]
    texts = [c["choices"][0] for c in found if c["choices"]]
    assert len([t for t in texts if "text" in t or "content" in t["delta"]]) >= 4


def test_t32_tokens_by_number(stack: Stack) -> None:
    fields: dict[str, Any] = {"max_tokens": 3, "return_tokens_as_token_ids": True}
    scores = stack.complete("Say it", logprobs=1, **fields).json()["choices"][0]["logprobs"]
    ids = stack.complete("Say it", return_token_ids=True, max_tokens=3).json()["choices"][0]
    assert scores["tokens"] == [f"token_id:{i}" for i in ids["token_ids"]]
    assert all(name.startswith("token_id:") for top in scores["top_logprobs"] for name in top)
    chat = stack.chat(logprobs=True, top_logprobs=1, **fields).json()["choices"][0]["logprobs"]
    for entry in chat["content"]:
        assert re.fullmatch(r"token_id:\d+", entry["token"])
        assert re.fullmatch(r"token_id:\d+", entry["top_logprobs"][0]["token"])


def test_t32_prompts_are_cut_to_their_ends_where_asked(stack: Stack) -> None:
    service = stack.router.service
    words = "one two three four five six seven eight"
    ids = service.model.tokenizer.encode_words(words)
    for prompt in (words, ids):
        shown = stack.complete(
            prompt, truncate_prompt_tokens=3, return_token_ids=True, max_tokens=2
        ).json()
        assert shown["choices"][0]["prompt_token_ids"] == ids[-3:]
        assert shown["usage"]["prompt_tokens"] == 3
    whole = stack.chat(words, return_token_ids=True, max_tokens=2).json()["prompt_token_ids"]
    cut = stack.chat(words, truncate_prompt_tokens=4, return_token_ids=True, max_tokens=2).json()
    assert cut["prompt_token_ids"] == whole[-4:]
    limit = service.max_model_len
    long = (ids * limit)[: limit + 50]
    assert error_of(stack.complete(long, max_tokens=5))["code"] == "context_length_exceeded"
    shown = stack.complete(long, truncate_prompt_tokens=-1, max_tokens=5).json()
    assert shown["usage"]["prompt_tokens"] == limit - 5
    shown = stack.complete(words, truncate_prompt_tokens=2, echo=True, logprobs=1, max_tokens=1)
    choice = shown.json()["choices"][0]
    assert choice["text"].startswith(" seven eight")
    assert choice["text"] == "".join(choice["logprobs"]["tokens"])
    assert choice["logprobs"]["text_offset"][:2] == [0, len(" seven")]
    for wrong in (0, -2, "3", 1.5):
        response = stack.complete(words, truncate_prompt_tokens=wrong)
        assert error_of(response)["param"] == "truncate_prompt_tokens"


def test_t32_a_chat_may_repeat_the_words_it_goes_on_with(stack: Stack) -> None:
    messages = [*ASK, {"role": "assistant", "content": "Well, "}]
    fields: dict[str, Any] = {"messages": messages, "max_tokens": 3, "continue_final_message": True}
    path = "/v1/chat/completions"
    plain = post(stack, path, **fields).json()["choices"][0]["message"]["content"]
    whole = post(stack, path, **fields, echo=True).json()["choices"][0]["message"]["content"]
    assert whole == "Well, " + plain
    found = events(post(stack, path, **fields, echo=True, stream=True))
    pieces = [chunk["choices"][0]["delta"].get("content", "") for chunk in found]
    assert "".join(pieces) == whole
    asked = post(stack, path, messages=ASK, max_tokens=3, echo=True).json()
    assert not asked["choices"][0]["message"]["content"].startswith("Say it")


def test_t32_an_empty_salt_is_refused(stack: Stack) -> None:
    assert error_of(stack.complete("a", cache_salt=""))["param"] == "cache_salt"


def test_t32_paths_of_platforms(stack: Stack) -> None:
    for method in ("GET", "POST"):
        assert stack.http.request(method, "/ping").status_code == 200
    assert stack.http.get("/load").json() == {"server_load": 0}
    chat = post(stack, "/invocations", messages=ASK, max_tokens=2).json()
    assert chat["object"] == "chat.completion"
    text = post(stack, "/invocations", prompt="Say it", max_tokens=2).json()
    assert text["object"] == "text_completion"
    assert error_of(post(stack, "/invocations", input="Say it"))["message"]


def test_t32_a_schema_for_a_message(model_dir: Path, tokenizer: Tokenizer) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    with saying(model_dir, tokenizer, '{"a": 1}') as stack:
        for where in (
            {"output_config": {"format": {"type": "json_schema", "schema": schema}}},
            {"output_format": {"type": "json_schema", "schema": schema}},
        ):
            response = post(stack, "/v1/messages", messages=ASK, max_tokens=20, **where)
            assert response.status_code == 200, response.text
            assert '"a"' in submitted(stack).sampling.grammar
        response = post(
            stack,
            "/v1/messages",
            messages=ASK,
            max_tokens=20,
            output_config={"format": {"type": "json_schema", "schema": 3}},
        )
        assert "output_config.format" in error_of(response)["message"]


TAGGED = {
    "type": "structural_tag",
    "triggers": ["<f="],
    "structures": [
        {
            "begin": "<f=get>",
            "schema": {
                "type": "object",
                "properties": {"a": {"type": "integer", "x-guidance": {"lenient": True}}},
                "required": ["a"],
                "additionalProperties": False,
            },
            "end": "</f>",
        }
    ],
}


def follows(grammar: str, text: str, reference: HfTokenizer) -> bool:
    """Whether the whole text may be an answer."""
    matcher = LLMatcher(LLTokenizer(reference.to_str()), grammar)
    ids = reference.encode(text, add_special_tokens=False).ids
    return matcher.validate_tokens(ids) == len(ids)


def test_t32_pieces_of_json_between_markers(stack: Stack, reference: HfTokenizer) -> None:
    for fields in (
        {"response_format": TAGGED},
        {"structured_outputs": {"structural_tag": json.dumps(TAGGED)}},
        {"structured_outputs": {"structural_tag": TAGGED}},
    ):
        response = stack.complete("Say it", max_tokens=2, **fields)
        assert response.status_code == 200, response.text
        grammar = submitted(stack).sampling.grammar
        assert follows(grammar, 'Well <f=get>{"a": 1}</f> done', reference)
        assert follows(grammar, "no tag at all", reference)
        assert not follows(grammar, 'Well <f=get>{"b": 1}', reference)
        assert not follows(grammar, "Well <f=set>", reference)
    wrongs: list[dict[str, Any]] = [
        {"triggers": ["<g="]},
        {"triggers": [""]},
        {"structures": []},
        {"structures": [{"begin": "<f=x>"}]},
        {"format": {"type": "tag"}},
        {"more": 1},
    ]
    for wrong in wrongs:
        error = error_of(stack.complete("Say it", response_format=TAGGED | wrong))
        assert error["param"].startswith("response_format")


# --- errors name what the client sent -------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        ("/v1/messages", {"stop_sequences": [""]}, "stop_sequences"),
        ("/v1/messages", {"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ("/v1/messages", {"tools": [{"name": "a", "input_schema": 3}]}, "tools[0].input_schema"),
        ("/v1/messages", {"system": "Be brief", "messages": [{"role": "user", "content": 3}]},
         "messages[0].content"),
        ("/v1/responses", {"max_output_tokens": 10**9}, "max_output_tokens"),
        ("/v1/responses", {"instructions": "x", "input": [{"role": "user"}]}, "input[0].content"),
        ("/v1/responses", {"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ("/v1/responses", {"text": {"format": {"type": "xml"}}}, "text.format"),
        ("/v1/responses",
         {"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
    ],
)  # fmt: skip
def test_t31_errors_name_what_the_client_sent(
    stack: Stack, path: str, fields: dict[str, Any], named: str
) -> None:
    error = error_of(post(stack, path, **BODIES[path] | fields))
    assert named in error["message"]
    if path == "/v1/responses":
        assert error["param"].startswith(named)


# --- calls: forced, cut, sent back ----------------------------------------------------------------


def test_t25_a_forced_call_makes_a_format_moot(stack: Stack) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for choice in ("required", {"type": "function", "function": {"name": "clock"}}):
        fields: dict[str, Any] = {"tools": [CLOCK], "tool_choice": choice}
        stack.chat(max_tokens=2, **fields)
        alone = submitted(stack).sampling.grammar
        response = stack.chat(max_tokens=2, **fields, response_format=form)
        assert response.status_code == 200, response.text
        assert submitted(stack).sampling.grammar == alone


@pytest.mark.parametrize("num_tokens", range(1, 12))
def test_t26_a_forced_call_that_is_cut_leaks_no_syntax(cut_call: Stack, num_tokens: int) -> None:
    fields: dict[str, Any] = {"tools": [WEATHER], "tool_choice": "required"}
    choice = cut_call.chat(**fields, max_tokens=num_tokens).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert not choice["message"]["content"]
    for call in choice["message"].get("tool_calls", []):
        assert call["function"]["name"] == "get_weather"
    streamed = events(cut_call.chat(**fields, max_tokens=num_tokens, stream=True))
    deltas = [chunk["choices"][0]["delta"] for chunk in streamed]
    assert not any(delta.get("content") for delta in deltas)
    function: Any = WEATHER["function"]
    tool = {"name": "get_weather", "input_schema": function["parameters"]}
    message = post(
        cut_call,
        "/v1/messages",
        messages=ASK,
        tools=[tool],
        tool_choice={"type": "any"},
        max_tokens=num_tokens,
    ).json()
    assert message["stop_reason"] == "max_tokens"
    assert not [block for block in message["content"] if block["type"] == "text"]
    response = post(
        cut_call,
        "/v1/responses",
        input="Say it",
        tools=[{"type": "function"} | function],
        tool_choice="required",
        max_output_tokens=num_tokens,
    ).json()
    assert response["status"] == "incomplete"
    for item in response["output"]:
        assert item["type"] == "function_call" or not "".join(p["text"] for p in item["content"])


def test_t27_a_call_that_was_cut_is_read_back(stack: Stack, reference: HfTokenizer) -> None:
    def prompt_of(arguments: str) -> str:
        call = {"id": "c", "type": "function",
                "function": {"name": "get_weather", "arguments": arguments}}  # fmt: skip
        messages = [
            *ASK,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "?"},
        ]
        response = post(
            stack,
            "/v1/chat/completions",
            messages=messages,
            tools=[WEATHER],
            max_tokens=1,
            return_token_ids=True,
        )
        assert response.status_code == 200, response.text
        ids: list[int] = response.json()["prompt_token_ids"]
        return reference.decode(ids, skip_special_tokens=False)

    prompt_of('{"city": "Ber')
    prompt_of('{"city": "Ber<|im_end|>')
    prompt_of("")


def test_t27_what_was_cut_is_rendered_as_it_is() -> None:
    call = {"function": {"name": "f", "arguments": '{"city": "Ber'}}
    messages = normalized_messages([{"role": "assistant", "tool_calls": [call]}], takes_parts=False)
    template = ChatTemplate(
        "{{ messages[0].tool_calls[0].function.arguments | tojson }}", special_tokens={}
    )
    assert template.render(messages, {}) == '{"city": "Ber'


@pytest.mark.parametrize("role", ["user", "system", "tool", "developer"])
@pytest.mark.parametrize("content", [{}, {"content": None}])
def test_t49_only_an_assistant_may_say_nothing(
    stack: Stack, role: str, content: dict[str, None]
) -> None:
    silent = {"role": role, **content}
    response = post(stack, "/v1/chat/completions", messages=[*ASK, silent], max_tokens=1)
    assert error_of(response)["param"] == "messages[1].content"
    spoken = {"role": "assistant", **content}
    response = post(stack, "/v1/chat/completions", messages=[*ASK, spoken], max_tokens=1)
    assert response.status_code == 200


# --- closed objects -------------------------------------------------------------------------------

OPEN: dict[str, Any] = {
    "type": "object",
    "properties": {
        "a": {"type": "object", "properties": {"b": {"type": "integer"}}},
        "free": {"type": "object"},
        "said": {"type": "object", "properties": {}, "additionalProperties": True},
        "list": {"type": "array", "items": {"$ref": "#/$defs/item"}},
        "both": {"allOf": [{"properties": {"x": {}}}, {"properties": {"y": {}}}]},
    },
    "$defs": {"item": {"type": "object", "properties": {"c": {"type": "string"}}}},
}


def test_t28_objects_that_name_their_properties_are_closed() -> None:
    found = closed(OPEN)
    assert found["additionalProperties"] is False
    inside = found["properties"]
    assert inside["a"]["additionalProperties"] is False
    assert found["$defs"]["item"]["additionalProperties"] is False
    assert inside["free"] == OPEN["properties"]["free"]
    assert inside["said"]["additionalProperties"] is True
    assert inside["both"] == OPEN["properties"]["both"]
    assert "additionalProperties" not in OPEN, "the client's own is left alone"


def test_t28_strict_is_what_openai_calls_strict() -> None:
    good = {
        "type": "object",
        "properties": {"a": {"anyOf": [{"type": "integer"}, {"type": "null"}]}},
        "required": ["a"],
    }
    assert strict(good, "here")["additionalProperties"] is False
    for bad in (
        {"type": "object", "properties": {"a": {}}, "required": []},
        good | {"additionalProperties": True},
        good | {"properties": {"a": {"type": "object", "properties": {"b": {}}}}},
        {"type": "array"},
    ):
        with pytest.raises(InvalidRequest, match="here is called strict"):
            strict(bad, "here")


def test_strict_schemas_are_read_at_the_speed_of_their_size(stack: Stack) -> None:
    names = [f"p{number}" for number in range(20_000)]
    wide = {"type": "object", "properties": dict.fromkeys(names, True), "required": names[::-1]}
    with pytest.raises(InvalidRequest, match="too many characters"):
        strict(wide | {"description": "x" * 300_000}, "here")
    names = names[:8_000]
    some = {"type": "object", "properties": dict.fromkeys(names, True), "required": names[::-1]}
    assert strict(some, "here")["additionalProperties"] is False
    described = {"name": "x", "schema": wide | {"title": "x" * 300_000}, "strict": True}
    form = {"type": "json_schema", "json_schema": described}
    assert "too many characters" in error_of(stack.chat(response_format=form))["message"]


def test_t28_over_http(model_dir: Path, stack: Stack) -> None:
    parameters: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
    function: dict[str, Any] = {"name": "f", "parameters": parameters}
    tool = {"type": "function", "function": function}
    fields: dict[str, Any] = {"tools": [tool], "tool_choice": "required", "max_tokens": 2}
    stack.chat(**fields)
    by_default = submitted(stack).sampling.grammar
    with Stack(model_dir, FakeWorker(), tool_objects="open") as other:
        other.chat(**fields)
        assert submitted(other).sampling.grammar != by_default
    function["strict"] = True
    error = error_of(stack.chat(**fields))
    assert error["param"] == "tools[0].function.parameters"
    described = {"name": "x", "schema": parameters, "strict": True}
    form = {"type": "json_schema", "json_schema": described}
    assert "strict" in error_of(stack.chat(response_format=form))["message"]
    parameters["required"] = ["a"]
    assert stack.chat(**fields).status_code == 200


# --- keys -----------------------------------------------------------------------------------------


def test_t07_without_keys_nobody_is_served_before_others(stack: Stack, model_dir: Path) -> None:
    assert error_of(stack.complete("a", priority=-1))["param"] == "priority"
    assert stack.complete("a", priority=100, max_tokens=1).status_code == 200
    assert stack.complete("a", priority=101).status_code == 400
    with Stack(model_dir, FakeWorker(), priorities="-5:5") as wider:
        assert wider.complete("a", priority=-5, max_tokens=1).status_code == 200
        assert submitted(wider).priority == 5
        assert wider.complete("a", priority=-6).status_code == 400
    for wrong in ("5:-5", "1", "a:b", ":", "0:99999999999"):
        with pytest.raises(ConfigError, match="LOW:HIGH"):
            read_priorities(wrong, "--priorities")


KEYS = """\
# who may ask
plain
urgent priorities=-10:10 name=ann
patient priorities=5:10
beta#key max_outputs=3   # a comment
"""


@pytest.fixture(scope="module")
def keyed(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text(KEYS)
    with Stack(model_dir, FakeWorker(), api_keys=str(path)) as running:
        yield running


def ask(stack: Stack, key: str, **fields: Any) -> httpx.Response:
    body = {"prompt": "Say it", "max_tokens": 1, **fields}
    return stack.http.post("/v1/completions", json=body, headers={"x-api-key": key})


def test_t07_a_key_says_which_priorities_it_may_ask_for(keyed: Stack) -> None:
    assert ask(keyed, "urgent", priority=-10).status_code == 200
    assert ask(keyed, "urgent", priority=-11).status_code == 400
    assert ask(keyed, "plain", priority=-1).status_code == 400
    assert ask(keyed, "plain", priority=7).status_code == 200
    assert ask(keyed, "patient").status_code == 200
    assert submitted(keyed).priority == -5, "who says nothing gets the next to what is usual"
    assert ask(keyed, "patient", priority=0).status_code == 400


def test_t08_a_key_s_bound_holds_when_it_is_idle(keyed: Stack) -> None:
    assert ask(keyed, "beta#key", n=3).status_code == 200
    error = error_of(ask(keyed, "beta#key", n=50))
    assert error["param"] == "n"
    assert "3 at a time" in error["message"]
    assert ask(keyed, "plain", n=50).status_code == 200


def test_t33_keys_are_read_as_they_are_written(keyed: Stack, tmp_path: Path) -> None:
    assert ask(keyed, "beta").status_code == 401
    for headers in ({"x-api-key": " plain  "}, {"authorization": "Bearer plain  "}):
        assert keyed.router.service.access.keys.check(headers) is not None
    path = tmp_path / "keys"
    path.write_text("schlüssel\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="keys:1: a key must be of ASCII"):
        KeyRing.open(path, "")
    with pytest.raises(ConfigError, match="environment"):
        KeyRing.open(None, "schlüssel")


def test_t37_prefixes_are_shared_within_a_key_only(keyed: Stack, model_dir: Path) -> None:
    def salt(stack: Stack, key: str, **fields: Any) -> str:
        assert ask(stack, key, **fields).status_code == 200
        return str(submitted(stack).cache_salt)

    mine = salt(keyed, "plain")
    assert mine == salt(keyed, "plain")
    others = {salt(keyed, "urgent"), salt(keyed, "plain", cache_salt="x"), ""}
    assert mine not in others
    assert len(others) == 3
    with Stack(
        model_dir, FakeWorker(), api_keys=keyed.router.config.api_keys, prefix_sharing="all"
    ) as shared:
        assert salt(shared, "plain") == salt(shared, "urgent") == ""


def test_t37_who_has_no_key_sees_no_addresses(model_dir: Path, keyed: Stack) -> None:
    worker = FakeWorker()
    with Stack(model_dir, worker, api_keys=keyed.router.config.api_keys) as stack:
        stack.call(worker.stop)
        stack.until(lambda: not stack.router.service.fleet.is_ready())
        shown = stack.http.get("/ready")
        assert shown.status_code == 503
        assert shown.json()["reasons"]
        assert worker.address not in shown.text
        known = stack.http.get("/ready", headers={"x-api-key": "plain"})
        assert worker.address in known.text
        stack.workers.clear()
