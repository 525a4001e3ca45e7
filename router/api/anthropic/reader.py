"""A request in the words of Anthropic's Messages."""

from typing import Any

from common.errors import InvalidRequest, UnsupportedParameter
from router.api.openai.chat import finished_chat
from router.generation.ask import Ask
from router.generation.options import INT64, Said, Vocabulary, read_options
from router.grammar.structured import Form, read_response_format
from router.reading.fields import Fields
from router.reading.json_body import shortened
from router.reading.protocols import CHAT, MESSAGES, Names
from router.text.chat_messages import called, check_count
from router.text.chat_template import Message
from router.text.tools import (
    Choice,
    ToolUse,
    framed_tool,
    function_tool,
    listed_tools,
    tool_use,
)

NAMES = Names(prompt="messages", stop="stop_sequences")


def read_message(fields: Fields, vocabulary: Vocabulary) -> Ask:
    MESSAGES.read(fields)
    Fields(fields.object("metadata") or {}, "metadata.").text("user_id")
    CHAT.read(fields)
    _check_thinking(fields)
    _check_context_management(fields)
    effort, form = _output_config(fields)
    stops = fields.take(NAMES.stop)
    if stops is not None and not isinstance(stops, list):
        raise fields.wrong(NAMES.stop, "must be a list of texts", stops)
    said = Said(
        max_tokens=fields.integer("max_tokens", 1, INT64),
        names=NAMES,
        tools=_tools(fields, vocabulary),
        form=form,
    )
    options = read_options(fields, vocabulary, said)
    messages = _messages(fields)
    last = messages[-1]
    chat = finished_chat(
        fields,
        options,
        messages,
        effort=fields.text("reasoning_effort") or effort,
        continues=last["role"] == "assistant" and bool(last["content"]),
    )
    fields.finish()
    return Ask(prompt=chat, options=options)


def _check_thinking(fields: Fields) -> None:
    thinking = fields.object("thinking") or {}
    if thinking.get("type", "disabled") not in ("adaptive", "disabled"):
        raise UnsupportedParameter(
            "thinking must be disabled or adaptive: a budget for it is not supported here",
            param="thinking",
        )


def _check_context_management(fields: Fields) -> None:
    """Edits of the history are the client's to make."""
    given = Fields(fields.object("context_management") or {}, "context_management.")
    given.unsupported("edits", ([],))
    given.finish()


def _output_config(fields: Fields) -> tuple[str | None, Form | None]:
    """How hard to think, and the schema that the answer must follow."""
    given = Fields(fields.object("output_config") or {}, "output_config.")
    effort = given.text("effort")
    name, form = "output_config.format", given.object("format")
    given.finish()
    older = fields.object("output_format")  # where it stood before
    if form is not None and older is not None:
        raise fields.wrong("output_format", "is given twice", older)
    if older is not None:
        name, form = "output_format", older
    if form is not None and form.get("type") != "json_schema":
        raise UnsupportedParameter(
            f"{name}.type must be json_schema, got {shortened(form.get('type'))}",
            param=f"{name}.type",
        )
    return effort, read_response_format(form, name, is_flat=True)


# --- messages -------------------------------------------------------------------------------------


def _messages(fields: Fields) -> list[Message]:
    given = fields.take("messages")
    if not isinstance(given, list) or not given:
        raise InvalidRequest("messages must be a list of messages", param="messages")
    system = _system(fields.take("system"))
    found: list[Message] = [{"role": "system", "content": system}] if system else []
    for number, message in enumerate(given):
        where = f"messages[{number}]"
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ("user", "assistant"):
            raise InvalidRequest(
                f"{where}.role must be user or assistant, got {shortened(role)}",
                param=f"{where}.role",
            )
        content = message.get("content")
        if isinstance(content, str):
            found.append({"role": role, "content": content})
        else:
            found += _of_blocks(role, content, f"{where}.content")
    check_count(found)
    return found


def _system(given: Any) -> str:
    if given is None or isinstance(given, str):
        return given or ""
    return _joined(given, "system")


def _of_blocks(role: str, content: Any, where: str) -> list[Message]:
    """Results of tools become messages of their own, before the words that follow them."""
    if not isinstance(content, list):
        raise InvalidRequest(f"{where} must be a text or a list of blocks", param=where)
    results: list[Message] = []
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    for number, block in enumerate(content):
        place = f"{where}[{number}]"
        if not isinstance(block, dict):
            raise InvalidRequest(f"{place} must be an object", param=place)
        match block.get("type"):
            case "text":
                texts.append(_text(block, place))
            case "tool_use" if role == "assistant":
                calls.append(_call(block, place))
            case "tool_result" if role == "user":
                results.append(_result(block, place))
            case "thinking" | "redacted_thinking":
                pass  # earlier thoughts are not part of the prompt
            case kind:
                raise UnsupportedParameter(
                    f"{place} is a block of type {shortened(kind)}, which is not supported here",
                    param=place,
                )
    if texts or calls or not results:
        message: Message = {"role": role, "content": "\n".join(texts)}
        results.append(message | ({"tool_calls": calls} if calls else {}))
    return results


def _call(block: dict[str, Any], where: str) -> dict[str, Any]:
    function = {"name": block.get("name"), "arguments": block.get("input") or {}}
    return {
        "id": block.get("id"),
        "type": "function",
        "function": called(function, where, arguments_name="input"),
    }


def _result(block: dict[str, Any], where: str) -> Message:
    call_id, inner = block.get("tool_use_id"), block.get("content") or ""
    if not isinstance(call_id, str | None):
        place = f"{where}.tool_use_id"
        raise InvalidRequest(f"{place} must be a string", param=place)
    text = inner if isinstance(inner, str) else _joined(inner, f"{where}.content")
    about = {} if call_id is None else {"tool_call_id": call_id}
    return {"role": "tool", **about, "content": text}


def _joined(blocks: Any, where: str) -> str:
    if not isinstance(blocks, list):
        raise InvalidRequest(f"{where} must be a text or a list of text blocks", param=where)
    return "\n".join(_text(block, f"{where}[{number}]") for number, block in enumerate(blocks))


def _text(block: Any, where: str) -> str:
    text = block.get("text") if isinstance(block, dict) else None
    if not isinstance(text, str) or block.get("type") != "text":
        raise InvalidRequest(f"{where} must be a text block", param=where)
    return text


# --- tools ----------------------------------------------------------------------------------------


def _tools(fields: Fields, vocabulary: Vocabulary) -> ToolUse | None:
    choice, is_parallel = _choice(fields.object("tool_choice"))
    return tool_use(
        listed_tools(fields, _tool),
        choice,
        is_parallel=fields.boolean("parallel_tool_calls", is_parallel),
        keeps_open=vocabulary.keeps_tools_open,
    )


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        return framed_tool(tool, where)
    function = {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": tool.get("input_schema"),
    }
    said = {name: value for name, value in function.items() if value is not None}
    return function_tool(said, where, schema="input_schema")


def _choice(given: dict[str, Any] | None) -> tuple[Choice, bool]:
    """The choice, and whether calls may be parallel."""
    if given is None:
        return Choice(), True
    is_parallel = given.get("disable_parallel_tool_use") is not True
    match given.get("type"):
        case "auto" | "none" as kind:
            return Choice(kind), is_parallel
        case "any":
            return Choice("required"), is_parallel
        case "tool":
            name = given.get("name")
            if not isinstance(name, str):
                raise InvalidRequest(
                    f"tool_choice.name must be a string, got {shortened(name)}",
                    param="tool_choice.name",
                )
            return Choice(name=name), is_parallel
        case kind:
            raise InvalidRequest(
                f"tool_choice.type must be auto, any, tool or none, got {shortened(kind)}",
                param="tool_choice.type",
            )
