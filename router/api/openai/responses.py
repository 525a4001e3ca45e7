"""POST /v1/responses: OpenAI's Responses API for text, without state on the server."""

from typing import Any

from common.errors import InvalidRequest, UnsupportedParameter
from router.api.answering import Answering, Format
from router.api.calls import Body, GenerateEndpoint
from router.api.openai.chat import finished_chat
from router.api.openai.responses_format import ResponsesFormat
from router.generation.ask import Ask
from router.generation.options import INT64, Said, Vocabulary, read_options
from router.grammar.structured import Form, read_response_format
from router.reading.fields import Fields
from router.reading.json_body import shortened
from router.reading.protocols import CHAT, RESPONSES, Names
from router.text.chat_messages import called, check_count, normalized, read_content
from router.text.chat_template import Message
from router.text.tools import (
    ToolUse,
    check_type,
    framed_tool,
    function_tool,
    listed_tools,
    read_choice,
    tool_use,
)

NAMES = Names(prompt="input", max_tokens="max_output_tokens")
_INCLUDED = (
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
)
"""Of things that no answer here has: nothing is shown for them."""


class ResponsesEndpoint(GenerateEndpoint):
    path = "/v1/responses"

    def read(self, body: Body, vocabulary: Vocabulary) -> Ask:
        return read_response(body.fields, vocabulary)

    def format(self, answering: Answering, fields: Fields) -> Format:
        return ResponsesFormat(answering, fields)


def read_response(fields: Fields, vocabulary: Vocabulary) -> Ask:
    RESPONSES.read(fields)
    CHAT.read(fields)
    _check_include(fields)
    truncation = fields.text("truncation")
    if truncation not in (None, "auto", "disabled"):
        raise fields.wrong("truncation", "must be auto or disabled", truncation)
    stream_options = Fields(fields.object("stream_options") or {}, "stream_options.")
    stream_options.ignored("include_obfuscation", (bool,))
    stream_options.finish()
    said = Said(
        max_tokens=fields.integer("max_output_tokens", 1, INT64),
        names=NAMES,
        tools=_tools(fields, vocabulary),
        form=_form(fields),
    )
    effort = _effort(fields)
    options = read_options(fields, vocabulary, said)
    chat = finished_chat(fields, options, _messages(fields, vocabulary.takes_parts), effort=effort)
    fields.finish()
    return Ask(prompt=chat, options=options)


def _check_include(fields: Fields) -> None:
    include = fields.take("include")
    if include is None:
        return
    if not isinstance(include, list):
        raise fields.wrong("include", "must be a list of texts", include)
    for name in include:
        if name not in _INCLUDED:
            raise UnsupportedParameter(
                f"include: {shortened(name)} is not offered", param="include"
            )


def _effort(fields: Fields) -> str | None:
    reasoning = Fields(fields.object("reasoning") or {}, "reasoning.")
    for name in ("summary", "generate_summary"):
        reasoning.ignored(name, (str,))
    effort = reasoning.text("effort")
    reasoning.finish()
    return fields.text("reasoning_effort") or effort


def _form(fields: Fields) -> Form | None:
    text = Fields(fields.object("text") or {}, "text.")
    form = read_response_format(text.object("format"), "text.format", is_flat=True)
    text.ignored("verbosity", (str,))
    text.finish()
    return form


def _tools(fields: Fields, vocabulary: Vocabulary) -> ToolUse | None:
    return tool_use(
        listed_tools(fields, _tool),
        read_choice(fields.take("tool_choice"), takes_bare=True),
        is_parallel=fields.boolean("parallel_tool_calls", True),
        keeps_open=vocabulary.keeps_tools_open,
    )


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    """Functions stand without a frame here; one of a chat is taken too."""
    if "function" in tool or tool.get("type") != "function":
        return framed_tool(tool, where)
    check_type(tool, where)
    return function_tool({name: v for name, v in tool.items() if name != "type"}, where)


def _messages(fields: Fields, takes_parts: bool) -> list[Message]:
    given = fields.take("input")
    instructions = fields.text("instructions")
    found: list[Message] = []
    if instructions:
        found.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        return [*found, {"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise fields.wrong("input", "must be a text or a list", given)
    for number, item in enumerate(given):
        _add_item(found, item, f"input[{number}]", takes_parts)
    if not found:
        raise InvalidRequest("input holds no message", param="input")
    check_count(found, "input")
    return found


def _add_item(messages: list[Message], item: Any, where: str, takes_parts: bool) -> None:
    if not isinstance(item, dict):
        raise InvalidRequest(f"{where} must be an object", param=where)
    match item.get("type", "message"):
        case "message":
            said = {name: item.get(name) for name in ("role", "content")}
            messages.append(normalized(said, where, takes_parts))
        case "function_call":
            _add_call(messages, where, item)
        case "function_call_output":
            messages.append(_output(item, where, takes_parts))
        case "item_reference":
            raise UnsupportedParameter(
                f"{where} refers to an item of an earlier answer, but none is kept: send the item",
                param=where,
            )
        case "reasoning":
            pass  # earlier thoughts are not part of the prompt
        case kind:
            raise UnsupportedParameter(
                f"{where} is of type {shortened(kind)}, which is not supported", param=where
            )


def _add_call(messages: list[Message], where: str, item: dict[str, Any]) -> None:
    """Calls belong to the assistant's message before them."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    function = called({"name": item.get("name"), "arguments": item.get("arguments", "{}")}, where)
    calls = messages[-1].setdefault("tool_calls", [])
    calls.append({"id": item.get("call_id"), "type": "function", "function": function})


def _output(item: dict[str, Any], where: str, takes_parts: bool) -> Message:
    call_id, output = item.get("call_id"), item.get("output")
    if output is None:
        raise InvalidRequest(f"{where}.output is required", param=f"{where}.output")
    if not isinstance(call_id, str | None):
        raise InvalidRequest(f"{where}.call_id must be a string", param=f"{where}.call_id")
    about = {} if call_id is None else {"tool_call_id": call_id}
    return {
        "role": "tool",
        **about,
        "content": read_content(output, f"{where}.output", takes_parts),
    }
