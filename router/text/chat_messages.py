"""Chat messages as clients send them, to what templates expect.

Only an assistant may say nothing: its null or missing content becomes the empty string. Other null
fields vanish, a list of text parts becomes its text (joined by newlines) unless the template takes
parts itself, `developer` is another word for `system`, and the arguments of tool calls become
objects (arguments that were cut off stay the text they are). Parts that are not text are refused.
"""

from collections.abc import Sized
from typing import Any

from common.errors import InvalidRequest, UnsupportedParameter
from common.limits import MAX_MESSAGES
from router.reading.json_body import TooMuchJson, parse_json, shortened
from router.text.chat_template import Message, Verbatim

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_TEXT_PARTS = ("text", "input_text", "output_text")


def normalized_messages(given: Any, *, takes_parts: bool) -> list[Message]:
    """The messages of a chat. Raises InvalidRequest."""
    if not isinstance(given, list):
        raise InvalidRequest("messages must be a list of messages", param="messages")
    if not given:
        raise InvalidRequest("messages must not be empty", param="messages")
    check_count(given)
    return [normalized(m, f"messages[{i}]", takes_parts) for i, m in enumerate(given)]


def check_count(given: Sized, name: str = "messages") -> None:
    if len(given) > MAX_MESSAGES:
        raise InvalidRequest(f"more than {MAX_MESSAGES} messages", param=name)


def normalized(given: Any, where: str, takes_parts: bool) -> Message:
    """One of them; `where` is the client's name for it."""
    if not isinstance(given, dict):
        raise InvalidRequest(f"{where} must be an object, got {shortened(given)}", param=where)
    message = {name: value for name, value in given.items() if value is not None}
    role = message.get("role")
    if role not in ROLES:
        raise InvalidRequest(
            f"{where}.role must be one of {', '.join(ROLES)}, got {shortened(role)}",
            param=f"{where}.role",
        )
    if role == "developer":
        message["role"] = "system"
    for name in ("name", "tool_call_id", "refusal", "reasoning_content"):
        if not isinstance(message.get(name, ""), str):
            raise InvalidRequest(f"{where}.{name} must be a string", param=f"{where}.{name}")
    if "content" not in message and role != "assistant":
        raise InvalidRequest(f"{where}.content is required", param=f"{where}.content")
    message["content"] = read_content(message.get("content", ""), f"{where}.content", takes_parts)
    if "tool_calls" in message:
        message["tool_calls"] = _tool_calls(message["tool_calls"], f"{where}.tool_calls")
    return message


def read_content(content: Any, where: str, takes_parts: bool) -> Any:
    """A text, or parts that are texts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{where} must be a string or a list of parts", param=where)
    texts = [_part_text(part, f"{where}[{i}]") for i, part in enumerate(content)]
    if takes_parts:
        return [{"type": "text", "text": text} for text in texts]
    return "\n".join(texts)


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if kind is not None and kind not in _TEXT_PARTS:
        raise UnsupportedParameter(
            f"{where} is of type {shortened(kind)}; only text is supported", param=where
        )
    text = part.get("text") if isinstance(part, dict) else None
    if kind is None or not isinstance(text, str):
        raise InvalidRequest(f"{where} must be a text part", param=where)
    return text


def _tool_calls(calls: Any, where: str) -> list[Any]:
    if not isinstance(calls, list):
        raise InvalidRequest(f"{where} must be a list", param=where)
    return [_tool_call(call, f"{where}[{i}]") for i, call in enumerate(calls)]


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise InvalidRequest(f"{where} must name a function", param=where)
    return {**call, "function": called(function, f"{where}.function")}


def called(
    function: dict[str, Any], where: str, arguments_name: str = "arguments"
) -> dict[str, Any]:
    """A call's name and arguments; `where` is the client's name for what holds them."""
    if not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{where}.name must be a string", param=f"{where}.name")
    arguments = function.get("arguments", "{}")
    if isinstance(arguments, str):
        place = f"{where}.{arguments_name}"
        try:
            arguments = parse_json(arguments or "{}", place, param=place)
        except TooMuchJson:
            raise
        except InvalidRequest:
            arguments = Verbatim(arguments)  # a call that was cut off, as we told it ourselves
    return {**function, "arguments": arguments}
