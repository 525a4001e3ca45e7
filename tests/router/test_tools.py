"""Tools, reasoning and structured output, over a worker that says what the test scripts."""

import functools
import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from router.grammar.grammars import json_grammar
from router.text.calls import HermesSplitter, LlamaSplitter, MistralSplitter
from router.text.parsers import guessed_tool_parser
from router.text.parts import (
    CallArguments,
    CallBegun,
    Content,
    Part,
    PlainSplitter,
    Reasoning,
    Splitter,
)
from router.text.reasoning import ReasoningSplitter
from router.text.tokenizer import Tokenizer
from router.text.tools import ToolUse
from router.text.whole_calls import ListSplitter, NamedSplitter
from tests.router.fake_worker import FakeWorker, tokens
from tests.router.sse import events, finish_of
from tests.router.stack import Stack

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}

Taken = tuple[str, str, list[tuple[str, str]]]


def taken_apart(splitter: Splitter, text: str, rng: random.Random) -> Taken:
    """Content, reasoning and calls of a text that comes in random pieces."""
    pieces = []
    while text:
        size = rng.randint(1, 7)
        pieces.append(text[:size])
        text = text[size:]
    return joined([part for piece in pieces for part in splitter.push(piece)] + splitter.flush())


def joined(parts: Sequence[Part]) -> Taken:
    content, reasoning = "", ""
    calls: dict[int, tuple[str, str]] = {}
    for part in parts:
        match part:
            case Content(more):
                content += more
            case Reasoning(more):
                reasoning += more
            case CallBegun(index, name):
                assert index == len(calls)
                calls[index] = (name, "")
            case CallArguments(index, more):
                calls[index] = (calls[index][0], calls[index][1] + more)
    return content, reasoning, list(calls.values())


def thinking(inner: Callable[[], Splitter], begins_inside: bool) -> Callable[[], Splitter]:
    return lambda: ReasoningSplitter(inner(), begins_inside=begins_inside)


Case = tuple[Callable[[], Splitter], str, Taken]


def kept(make: Callable[[], Splitter], text: str) -> Case:
    """All of it is content."""
    return make, text, (text, "", [])


CASES: list[Case] = [
    (
        HermesSplitter,
        'Hi <tool_call>\n{"name": "f", "arguments": {"a": "}{\\"", "b": [1,{"c":2}]}}\n</tool_call>'
        '\n<tool_call>{"arguments": {"x": 1}, "name": "g"}</tool_call> bye <tool',
        ("Hi bye <tool", "", [("f", '{"a": "}{\\"", "b": [1,{"c":2}]}'), ("g", '{"x": 1}')]),
    ),
    (HermesSplitter, "a < b <tool> c", ("a < b <tool> c", "", [])),
    kept(HermesSplitter, '<tool_call>{"nam": 1}</tool_call>'),
    kept(HermesSplitter, "Hello <tool_call>oops no json</tool_call> bye"),
    kept(HermesSplitter, "text <tool_call>\nI do not know"),
    kept(HermesSplitter, '<tool_call>{"name": "a\\x", "arguments": {"x": 1}}</tool_call>'),
    kept(HermesSplitter, '<tool_call>{"name": "a\n", "arguments": {"x": 1}}</tool_call>'),
    kept(HermesSplitter, '<tool_call>{"name": "\\u12", "arguments": {"x": 1}}</tool_call>'),
    kept(HermesSplitter, '<tool_call>{"name": "\\ud800", "arguments": {"x": 1}}</tool_call>'),
    kept(HermesSplitter, '<tool_call>{"arguments": {}, "name": "\\ud800"}</tool_call>'),
    kept(HermesSplitter, '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
    kept(HermesSplitter, '<tool_call>{"name": "f", "argum'),
    kept(HermesSplitter, "<tool_call>" + " " * 300 + '{"name": "f", "arguments": {}}'),
    (
        HermesSplitter,
        '<tool_call>{"name": "a", "arguments": {"x": 1}</tool_call>\n'
        '<tool_call>{"name": "b", "arguments": {"y": 2}}</tool_call>',
        ("", "", [("a", '{"x": 1}'), ("b", '{"y": 2}')]),
    ),
    (
        HermesSplitter,
        '<tool_call>{"name": "a", "arguments": {"x": "<tool_call>"}\n'
        '<tool_call>{"name": "b", "arguments": {"y": 2}}}</tool_call>',
        ("", "", [("a", '{"x": "<tool_call>"}'), ("b", '{"y": 2}')]),
    ),
    (
        HermesSplitter,
        'Say <tool_call> or <tool_call>{"name: <tool_call>{"name": "f", "arguments": {}} so '
        '</tool_call> and {"x": 1}',
        ('Say <tool_call> or <tool_call>{"name:  so  and {"x": 1}', "", [("f", "{}")]),
    ),
    (HermesSplitter, '<tool_call>{"name": "f"}</tool_call>', ("", "", [("f", "{}")])),
    (
        HermesSplitter,
        '<tool_call>{"name": "f", "arguments": {"a": 1',
        ("", "", [("f", '{"a": 1')]),
    ),
    (
        MistralSplitter,
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name":"g","arguments":{}}]',
        ("", "", [("f", '{"a": 1}'), ("g", "{}")]),
    ),
    (MistralSplitter, '[TOOL_CALLS]f[ARGS]{"a": {"b":1}}', ("", "", [("f", '{"a": {"b":1}}')])),
    (
        MistralSplitter,
        'f[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g{ "b": {}} [TOOL_CALLS]h[ARGS]{}',
        ("f", "", [("f", '{"a": 1}'), ("g", '{ "b": {}}'), ("h", "{}")]),
    ),
    kept(MistralSplitter, "no [TOOLS]"),
    kept(MistralSplitter, "hi [TOOL_CALLS]nothing here"),
    kept(MistralSplitter, "hi [TOOL_CALLS]a set{x}, [TOOL_CALLS]set{x}"),
    (
        LlamaSplitter,
        '<|python_tag|>{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}',
        ("", "", [("f", '{"a": 1}'), ("g", "{}")]),
    ),
    (
        LlamaSplitter,
        '{"name": "f", "parameters": {"a": 1}}\nDone: {"b": 2}',
        ('\nDone: {"b": 2}', "", [("f", '{"a": 1}')]),
    ),
    kept(LlamaSplitter, '{"answer": 42}'),
    kept(LlamaSplitter, '{"name": "Ann", "age": 42}'),
    kept(LlamaSplitter, '{"a": 1}\nHere you go, that was JSON. {x} more'),
    kept(LlamaSplitter, '{"a": 1}, {"b": 2}'),
    kept(LlamaSplitter, "<|python_tag|>print(1)"),
    kept(LlamaSplitter, " plain"),
    kept(LlamaSplitter, " "),
    (ListSplitter, '[{"name": "f", "para', ("", "", [])),
    (
        ListSplitter,
        '[{"name": "f", "parameters": {"a": "x"}}, {"name": "g", "parameters": {}}]',
        ("", "", [("f", '{"a": "x"}'), ("g", "{}")]),
    ),
    (lambda: NamedSplitter("f"), '{"a": 1}', ("", "", [("f", '{"a": 1}')])),
    (
        thinking(HermesSplitter, False),
        '\n<think>hm</think>\n\nyes <tool_call>{"name": "f", "arguments": {}}</tool_call>',
        ("yes ", "hm", [("f", "{}")]),
    ),
    (thinking(PlainSplitter, True), "hm</think>\n\nyes", ("yes", "hm", [])),
    (thinking(PlainSplitter, True), "<think>hm</think>yes", ("yes", "hm", [])),
    (thinking(PlainSplitter, True), "never ends", ("", "never ends", [])),
    (thinking(PlainSplitter, False), "just <think>no</think>", ("just <think>no</think>", "", [])),
    (thinking(PlainSplitter, False), "<thi", ("<thi", "", [])),
]


@pytest.mark.parametrize(("make", "text", "expected"), CASES, ids=range(len(CASES)))
def test_an_answer_is_taken_apart_however_it_is_cut(
    make: Callable[[], Splitter], text: str, expected: Taken
) -> None:
    rng = random.Random(1)
    for _ in range(100):
        assert taken_apart(make(), text, rng) == expected


FORMATS = [HermesSplitter, MistralSplitter, LlamaSplitter, ListSplitter]
SCRAPS = [
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<tool_", "[TOOL"),
    *('{"name": "', 'f"', ', "arguments": ', ', "parameters": ', '{"a": 1}', "{", "}", "[", "]"),
    *('"', "\\", "\\u12", "\n", " ", ", ", ";", "f", "words ", " " * 257, "{}"),
]
CALL_TEXT = '{"name": "f", "arguments": {"a": 1}}'


@pytest.mark.parametrize("make", FORMATS)
@given(scraps=st.lists(st.sampled_from([*SCRAPS, CALL_TEXT]), max_size=24), rng=st.randoms())
@settings(max_examples=100, deadline=None)
def test_parts_are_the_same_for_every_way_of_cutting(
    make: Callable[[], Splitter], scraps: list[str], rng: random.Random
) -> None:
    text = "".join(scraps)
    splitter = make()
    whole = joined(splitter.push(text) + splitter.flush())
    assert taken_apart(make(), text, rng) == whole
    if make is ListSplitter:
        assert not whole[0], "the grammar makes calls, so nothing of it is content"
    elif not whole[2]:
        assert whole[0] == text


@pytest.mark.parametrize("make", [form for form in FORMATS if form is not ListSplitter])
@given(scraps=st.lists(st.sampled_from(SCRAPS), max_size=24).map("".join), rng=st.randoms())
@settings(max_examples=100, deadline=None)
def test_text_without_a_call_stays_content(
    make: Callable[[], Splitter], scraps: str, rng: random.Random
) -> None:
    text = scraps.replace('"name"', '"nam"').replace("f[ARGS]", "[ARGS]").replace("f{", "{")
    assert taken_apart(make(), text, rng) == (text, "", [])


def test_the_parser_is_guessed_from_the_template() -> None:
    assert guessed_tool_parser("{{ '[TOOL_CALLS]' }}") == "mistral"
    assert guessed_tool_parser("{{ '<|python_tag|>' }}") == "llama3_json"
    assert guessed_tool_parser("{{ '<tool_call>' }}") == "hermes"


# --- over HTTP ------------------------------------------------------------------------------------


def saying(model_dir: Path, tokenizer: Tokenizer, text: str, **config: Any) -> Stack:
    ids = tokenizer.encode_words(text)
    return Stack(model_dir, FakeWorker(script=tokens(*ids)), **config)


def streamed_message(response: Any) -> dict[str, Any]:
    """What a client puts together from a stream."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for chunk in events(response):
        for choice in chunk["choices"]:
            delta = choice["delta"]
            for name in ("content", "reasoning_content"):
                message[name] += delta.get(name) or ""
            for call in delta.get("tool_calls", []):
                if "id" in call:
                    assert call["index"] == len(message["tool_calls"])
                    message["tool_calls"].append(call["function"] | {"id": call["id"]})
                else:
                    own = message["tool_calls"][call["index"]]
                    own["arguments"] += call["function"]["arguments"]
    return message


@pytest.fixture(scope="module")
def caller(model_dir: Path, tokenizer: Tokenizer) -> Iterator[Stack]:
    text = (
        'Let me see. <tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call>'
    )
    with saying(model_dir, tokenizer, text) as running:
        yield running


def test_b15_tool_calls_streamed_and_whole_agree(caller: Stack) -> None:
    body = caller.chat(tools=[WEATHER], max_tokens=80).json()
    message = body["choices"][0]["message"]
    assert body["choices"][0]["finish_reason"] == "tool_calls"
    assert message["content"] == "Let me see. "
    (call,) = message["tool_calls"]
    assert call["type"] == "function"
    assert call["id"].startswith("call_")
    assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
    response = caller.chat(tools=[WEATHER], max_tokens=80, stream=True)
    streamed = streamed_message(response)
    assert streamed["content"] == message["content"]
    (streamed_call,) = streamed["tool_calls"]
    assert streamed_call["arguments"] == call["function"]["arguments"]
    assert finish_of(events(response)) == "tool_calls"


def test_tool_choice_none_leaves_the_text_alone(caller: Stack) -> None:
    choice = caller.chat(tools=[WEATHER], tool_choice="none", max_tokens=80).json()["choices"][0]
    assert "<tool_call>" in choice["message"]["content"]
    assert choice["finish_reason"] == "stop"


def test_required_and_named_tools_become_grammars(model_dir: Path, tokenizer: Tokenizer) -> None:
    text = '[{"name": "get_weather", "parameters": {"city": "Oslo"}}]'
    with saying(model_dir, tokenizer, text) as stack:
        fields: dict[str, Any] = {"tools": [WEATHER, CLOCK], "tool_choice": "required"}
        choice = stack.chat(**fields, max_tokens=80).json()["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        (call,) = choice["message"]["tool_calls"]
        assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
        grammar = stack.workers[0].submitted[-1].sampling.grammar
        assert grammar is not None
        assert accepts(model_dir, grammar, text)
        assert not accepts(model_dir, grammar, "[]")
        assert accepts(model_dir, grammar, '[{"name": "clock", "parameters": {}}]')
    with saying(model_dir, tokenizer, '{"city": "Oslo"}') as stack:
        named = {"type": "function", "function": {"name": "get_weather"}}
        fields = {"tools": [WEATHER, CLOCK], "tool_choice": named, "max_tokens": 80}
        choice = stack.chat(**fields).json()["choices"][0]
        assert choice["finish_reason"] == "stop"  # as OpenAI has it
        assert choice["message"]["content"] is None
        (call,) = choice["message"]["tool_calls"]
        assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
        streamed = streamed_message(stack.chat(**fields, stream=True))
        assert streamed["tool_calls"][0]["arguments"] == '{"city": "Oslo"}'


def picky(name: str, values: list[Any], reference: str, **more: Any) -> dict[str, Any]:
    """A tool whose argument `x` refers to a definition called Item."""
    parameters: dict[str, Any] = {
        "type": "object",
        "properties": {"x": {"$ref": reference}},
        "required": ["x"],
        "additionalProperties": False,
    }
    where = "definitions" if "definitions" in reference else "$defs"
    item = {"enum": values, "default": {"$ref": "#"}, "$anchor": "item"}
    function = {"name": name, "parameters": parameters | {where: {"Item": item}} | more}
    return {"type": "function", "function": function}


@pytest.mark.parametrize(
    ("reference", "more"),
    [
        ("#/$defs/Item", {}),
        ("#/definitions/Item", {}),
        ("#item", {}),
        ("https://tools.example/t#/$defs/Item", {"$id": "https://tools.example/t"}),
        ("#/$defs/Item", {"$id": "https://tools.example/t#"}),
    ],
)
def test_each_tool_keeps_its_own_definitions(
    model_dir: Path, reference: str, more: dict[str, Any]
) -> None:
    tools = (picky("a", ["red"], reference, **more), picky("b", [1], reference, **more))
    use = ToolUse(tools=tools, choice="required", is_named=False, is_parallel=True)
    grammar = json_grammar(use.schema)
    for name, good, bad in (("a", '"red"', "1"), ("b", "1", '"red"')):
        text = f'[{{"name": "{name}", "parameters": {{"x": %s}}}}]'
        assert accepts(model_dir, grammar, text % good)
        assert not accepts(model_dir, grammar, text % bad)


def test_a_tool_may_refer_to_itself(model_dir: Path) -> None:
    schema = {
        "properties": {"$ref": {"type": "integer"}, "child": {"$ref": "#"}},
        "additionalProperties": {"$ref": "#/properties/$ref"},
    }
    tool = {"type": "function", "function": {"name": "tree", "parameters": schema}}
    use = ToolUse(tools=(tool,), choice="required", is_named=False, is_parallel=True)
    grammar = json_grammar(use.schema)
    text = '[{"name": "tree", "parameters": {"child": {"$ref": 1, "other": %s}}}]'
    assert accepts(model_dir, grammar, text % "2")
    assert not accepts(model_dir, grammar, text % '"2"')
    assert not accepts(model_dir, grammar, '[{"name": "tree", "parameters": {"child": []}}]')


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [CLOCK, CLOCK]}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [CLOCK], "tool_choice": "always"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {"tools": [CLOCK], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
        ),
    ],
)
def test_wrong_tools_are_refused(stack: Stack, fields: dict[str, Any], param: str) -> None:
    response = stack.chat(**fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_reasoning_is_kept_apart(model_dir: Path, tokenizer: Tokenizer) -> None:
    text = "<think>It is simple.</think>\n\nFour."
    with saying(model_dir, tokenizer, text, reasoning_parser="qwen3") as stack:
        message = stack.chat(max_tokens=40).json()["choices"][0]["message"]
        assert message["reasoning_content"] == "It is simple."
        assert message["content"] == "Four."
        streamed = streamed_message(stack.chat(max_tokens=40, stream=True))
        assert streamed["reasoning_content"] == "It is simple."
        assert streamed["content"] == "Four."
    with saying(model_dir, tokenizer, text) as stack:
        assert stack.chat(max_tokens=40).json()["choices"][0]["message"]["content"] == text


def test_the_last_message_is_continued(stack: Stack, tokenizer: Tokenizer) -> None:
    messages = [
        {"role": "user", "content": "Count"},
        {"role": "assistant", "content": "One, two,"},
    ]
    body = {"messages": messages, "max_tokens": 1, "return_token_ids": True}
    fields = {"continue_final_message": True}
    response = stack.http.post("/v1/chat/completions", json=body | fields).json()
    assert response["prompt_token_ids"][-4:] == tokenizer.encode_words("One, two,")[-4:]
    both = fields | {"add_generation_prompt": True}
    refused = stack.http.post("/v1/chat/completions", json=body | both)
    assert refused.status_code == 400


# --- structured output ----------------------------------------------------------------------------


@functools.cache
def grammar_tokenizer(model_dir: Path) -> LLTokenizer:
    return LLTokenizer(str(model_dir / "tokenizer.json"), n_vocab=49152, eos_token=[2])


def accepts(model_dir: Path, grammar: str, text: str) -> bool:
    tokenizer = grammar_tokenizer(model_dir)
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    ids = tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
CONSTRAINTS: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "json_object"}}, '{"x": [1]}', "[1]"),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": SCHEMA, "strict": True},
            }
        },
        '{"a": 2}',
        '{"a": 3}',
    ),
    ({"guided_json": SCHEMA}, '{"a": 1}', '{"b": 1}'),
    ({"guided_json": json.dumps(SCHEMA)}, '{"a": 1}', '{"b": 1}'),
    ({"guided_regex": "[ab]{3}"}, "aba", "abc"),
    ({"guided_choice": ["yes", "no"]}, "no", "maybe"),
    ({"guided_grammar": 'root ::= "x" | "y" root'}, "yyx", "yy"),
    ({"guided_grammar": 'start: "x" | "y" start'}, "yyx", "yy"),
    ({"structured_outputs": {"regex": "[0-9]+"}}, "42", "x"),
    ({"structured_outputs": {"choice": ["a"]}}, "a", "b"),
    ({"structured_outputs": {"json": SCHEMA, "whitespace_pattern": ""}}, '{"a":1}', '{"a" : 1}'),
    ({"structured_outputs": {"json_object": True}}, "{}", "1"),
]


@pytest.mark.parametrize(("fields", "good", "bad"), CONSTRAINTS, ids=range(len(CONSTRAINTS)))
def test_constraints_become_grammars(
    stack: Stack, model_dir: Path, fields: dict[str, Any], good: str, bad: str
) -> None:
    for send in (stack.chat, stack.complete):
        response = send(**fields, max_tokens=1)
        assert response.status_code == 200, response.text
        grammar = stack.workers[0].submitted[-1].sampling.grammar
        assert grammar is not None
        assert accepts(model_dir, grammar, good)
        assert not accepts(model_dir, grammar, bad)


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "foo"}}}},
        {"response_format": {"type": "yaml"}},
        {"response_format": "json"},
        {"guided_json": 5},
        {"guided_json": "{"},
        {"guided_regex": "a(b"},
        {"guided_choice": []},
        {"guided_choice": ["a", 1]},
        {"guided_grammar": "root ::= ("},
        {"structured_outputs": {"regex": "a", "choice": ["b"]}},
        {"structured_outputs": {"rgx": "a"}},
        {"guided_regex": "a", "guided_choice": ["b"]},
        {"guided_regex": "a", "ignore_eos": True},
        {"guided_regex": "a" * 300_000},
    ],
    ids=lambda fields: str(fields)[:60],
)
def test_wrong_constraints_are_refused(stack: Stack, fields: dict[str, Any]) -> None:
    response = stack.complete(**fields)
    assert response.status_code == 400, response.text
    assert "Traceback" not in response.text
