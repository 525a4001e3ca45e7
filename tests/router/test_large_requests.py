"""No request, however large, keeps the event loop from the others: it is bounded, and what takes
long is done in a thread.
"""

import dataclasses
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from common.errors import InvalidRequest
from router.fields import Fields
from router.options import read_completion_options
from router.structured import MAX_GRAMMAR_CHARS, Form, json_grammar
from tests.router.fake_worker import FakeWorker
from tests.router.stack import Stack


@pytest.fixture(scope="module")
def stack(model_dir: Path) -> Iterator[Stack]:
    with Stack(model_dir, FakeWorker()) as running:
        yield running


# --- grammars -------------------------------------------------------------------------------------


def never() -> str:
    raise AssertionError("converted before its size was looked at")


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
        Form(name="guided_json", source=source, convert=never).grammar()
    assert found.value.param == "guided_json"
    assert str(MAX_GRAMMAR_CHARS) in found.value.message


def test_forms_are_converted_off_the_loop(stack: Stack) -> None:
    service = stack.router.service
    threads: list[str] = []

    def convert() -> str:
        threads.append(threading.current_thread().name)
        return json_grammar({"type": "object"})

    form = Form(name="guided_json", source={}, convert=convert)
    options = read_completion_options(Fields({}), service.vocabulary)
    checked = stack.call(service.checked, dataclasses.replace(options, form=form), [])
    assert checked.sampling.grammar == json_grammar({"type": "object"})
    loops = stack.do(lambda: threading.current_thread().name)
    assert threads
    assert loops not in threads


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
