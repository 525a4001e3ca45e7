"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API for text and tools.

A request is put into the words of a chat and takes the same road; only the answer's form differs.
"""

import re
from collections.abc import Sequence
from typing import Any

from starlette.types import Scope

from common.errors import InvalidRequest, TandemError, UnsupportedParameter
from common.types import FinishReason
from router.api.openai.format import Answering, Format, message_of
from router.api.openai.generate import Ask, GenerateEndpoint, read_chat
from router.generation.generation import TextService, Usage
from router.reading.fields import Fields
from router.reading.json_body import shortened
from router.reading.protocols import MESSAGES
from router.server.exchange import Endpoint, Exchange, to_json
from router.text.parts import (
    CallArguments,
    CallBegun,
    Content,
    Part,
    PlainSplitter,
    Reasoning,
    parsed_arguments,
)
from router.text.text_output import Piece

_INT64 = 2**63
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_error(error: TandemError) -> bytes:
    fallback = "invalid_request_error" if error.http_status < 500 else "api_error"
    kind = _ERROR_TYPES.get(error.http_status, fallback)
    return to_json({"type": "error", "error": {"type": kind, "message": error.message}})


def anthropic_error_event(error: TandemError) -> bytes:
    return b"event: error\ndata: " + anthropic_error(error) + b"\n\n"


RENAMED = (
    (re.compile(r"^stop\b"), "stop_sequences"),
    (re.compile(r"\bmax_completion_tokens\b"), "max_tokens"),
    (re.compile(r"\bresponse_format(\.json_schema)?\b"), "output_config.format"),
    (re.compile(r"(?<=\])\.function\.parameters\b"), ".input_schema"),
    (re.compile(r"(?<=\])\.function\."), "."),
)


class MessagesEndpoint(GenerateEndpoint):
    path = "/v1/messages"
    renamed = RENAMED

    async def read(self, fields: Fields) -> Ask:
        if fields.integer("max_tokens", 1, _INT64) is None:
            raise InvalidRequest("max_tokens is required", param="max_tokens")
        chat, places = chat_fields(fields)
        return await read_chat(self._service, Fields(chat), places)

    def format(self, answering: Answering, fields: Fields) -> Format:
        return MessagesFormat(answering)

    def error_body(self, error: TandemError) -> bytes:
        return anthropic_error(error)

    def error_event(self, error: TandemError) -> bytes:
        return anthropic_error_event(error)


class CountTokens(Endpoint):
    renamed = RENAMED

    def __init__(self, service: TextService, max_body_bytes: int) -> None:
        super().__init__("/v1/messages/count_tokens", service.new_request_id)
        self._service = service
        self._max_body_bytes = max_body_bytes

    async def answer(self, exchange: Exchange, scope: Scope) -> None:
        fields = Fields(await exchange.json_object(self._max_body_bytes))
        self._service.check_model(fields.text("model"))
        chat, places = chat_fields(fields)
        ask = await read_chat(self._service, Fields(chat), places)
        await exchange.reply_json(200, {"input_tokens": len(ask.prompts[0])})

    def error_body(self, error: TandemError) -> bytes:
        return anthropic_error(error)


def chat_fields(fields: Fields) -> tuple[dict[str, Any], list[str]]:
    """The same request as a chat, and what the client calls its messages. Raises InvalidRequest."""
    MESSAGES.read(fields)
    _check_thinking(fields)
    _check_context_management(fields)
    effort, response_format = _output_config(fields)
    stops = fields.take("stop_sequences")
    if stops is not None and not isinstance(stops, list):
        raise fields.wrong("stop_sequences", "must be a list of texts", stops)
    found = _messages(fields.take("messages"))
    system = _system(fields.take("system"))
    if system:
        found.insert(0, ("system", {"role": "system", "content": system}))
    messages = [message for _, message in found]
    metadata = fields.object("metadata") or {}
    tool_choice, is_parallel = _tool_choice(fields.object("tool_choice"))
    chat = {
        "messages": messages,
        "max_tokens": fields.take("max_tokens"),
        "temperature": fields.take("temperature"),
        "stop": stops,
        "tools": _tools(fields.take("tools")),
        "tool_choice": tool_choice,
        "parallel_tool_calls": is_parallel,
        "reasoning_effort": effort,
        "response_format": response_format,
        "user": metadata.get("user_id"),
    }
    if messages and messages[-1]["role"] == "assistant" and messages[-1]["content"]:
        chat["continue_final_message"] = True
    return chat | fields.rest(), [place for place, _ in found]


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


def _output_config(fields: Fields) -> tuple[str | None, dict[str, Any] | None]:
    """How hard to think, and the schema that the answer must follow."""
    given = Fields(fields.object("output_config") or {}, "output_config.")
    effort = given.text("effort")
    form = given.object("format")
    given.finish()
    older = fields.object("output_format")  # where it stood before
    if form is not None and older is not None:
        raise fields.wrong("output_format", "is given twice", older)
    form = form or older
    if form is None:
        return effort, None
    if form.get("type") != "json_schema":
        raise UnsupportedParameter(
            f"output_config.format.type must be json_schema, got {shortened(form.get('type'))}",
            param="output_config.format.type",
        )
    return effort, {"type": "json_schema", "json_schema": form}


def _system(given: Any) -> str:
    if given is None or isinstance(given, str):
        return given or ""
    return "\n".join(_texts(given, "system"))


def _messages(given: Any) -> list[tuple[str, dict[str, Any]]]:
    """Each with the client's name for it."""
    if not isinstance(given, list) or not given:
        raise InvalidRequest("messages must be a list of messages", param="messages")
    found: list[tuple[str, dict[str, Any]]] = []
    for number, message in enumerate(given):
        where = f"messages[{number}]"
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ("user", "assistant"):
            raise InvalidRequest(
                f"{where}.role must be user or assistant, got {shortened(role)}", param=where
            )
        content = message.get("content")
        if isinstance(content, str):
            found.append((where, {"role": role, "content": content}))
        else:
            blocks = _of_blocks(role, content, f"{where}.content")
            found += [(where, block) for block in blocks]
    return found


def _of_blocks(role: str, content: Any, where: str) -> list[dict[str, Any]]:
    """Results of tools become messages of their own, before the words that follow them."""
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise InvalidRequest(f"{where} must be a text or a list of blocks", param=where)
    results, texts, calls = [], [], []
    for block in content:
        match block.get("type"):
            case "text" if isinstance(block.get("text"), str):
                texts.append(block["text"])
            case "tool_use" if role == "assistant":
                function = {"name": block.get("name"), "arguments": block.get("input") or {}}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            case "tool_result" if role == "user":
                inner = block.get("content") or ""
                text = inner if isinstance(inner, str) else "\n".join(_texts(inner, where))
                call_id = block.get("tool_use_id")
                results.append({"role": "tool", "tool_call_id": call_id, "content": text})
            case "thinking" | "redacted_thinking":
                pass  # earlier thoughts are not part of the prompt
            case kind:
                raise UnsupportedParameter(
                    f"{where} holds a block of type {shortened(kind)}, which is not supported here",
                    param=where,
                )
    found: list[dict[str, Any]] = results
    if texts or calls or not results:
        message: dict[str, Any] = {"role": role, "content": "\n".join(texts)}
        found.append(message | ({"tool_calls": calls} if calls else {}))
    return found


def _texts(blocks: Any, where: str) -> list[str]:
    found = []
    for block in blocks if isinstance(blocks, list) else [None]:
        text = block.get("text") if isinstance(block, dict) else None
        if not isinstance(text, str) or not block or block.get("type") != "text":
            raise InvalidRequest(f"{where} must be a text or a list of text blocks", param=where)
        found.append(text)
    return found


def _tools(given: Any) -> Any:
    if not isinstance(given, list):
        return given
    found = []
    for tool in given:
        if isinstance(tool, dict) and tool.get("type") in (None, "custom"):
            function = {
                "name": tool.get("name"),
                "description": tool.get("description"),
                "parameters": tool.get("input_schema"),
            }
            tool = {
                "type": "function",
                "function": {name: value for name, value in function.items() if value is not None},
            }
        found.append(tool)
    return found


def _tool_choice(given: dict[str, Any] | None) -> tuple[Any, bool]:
    """The choice as chat has it, and whether calls may be parallel."""
    if given is None:
        return None, True
    is_parallel = given.get("disable_parallel_tool_use") is not True
    match given.get("type"):
        case "auto" | "none" as kind:
            return kind, is_parallel
        case "any":
            return "required", is_parallel
        case "tool":
            return {"type": "function", "function": {"name": given.get("name")}}, is_parallel
        case kind:
            raise InvalidRequest(
                f"tool_choice.type must be auto, any, tool or none, got {shortened(kind)}",
                param="tool_choice",
            )


class MessagesFormat:
    def __init__(self, answering: Answering) -> None:
        self._answering = answering
        self._splitter = (answering.splitter or PlainSplitter)()
        self._num_blocks = 0
        self._open: str | None = None
        self._has_calls = False
        self._last: Piece | None = None

    # --- streamed ---------------------------------------------------------------------------------

    def first_events(self, num_choices: int) -> bytes:
        usage = self._answering.generation.usage()
        message = self._message([], None, None, usage_object(usage) | {"output_tokens": 0})
        return _event("message_start", message=message)

    def events(self, piece: Piece) -> bytes:
        parts = self._splitter.push(piece.text)
        if piece.finish_reason is not None:
            parts = parts + self._splitter.flush()
            self._last = piece
        found = b"".join(map(self._part_events, parts))
        return found if piece.finish_reason is None else found + self._close()

    def last_events(self, usage: Usage) -> bytes:
        assert self._last is not None
        delta = {
            "stop_reason": stop_reason(self._last, self._has_calls),
            "stop_sequence": self._last.stop,
        }
        end = _event("message_delta", delta=delta, usage=usage_object(usage))
        return end + _event("message_stop")

    def _part_events(self, part: Part) -> bytes:
        match part:
            case Content(text):
                begun = self._begin("text", {"type": "text", "text": ""})
                return begun + self._delta({"type": "text_delta", "text": text})
            case Reasoning(text):
                block = {"type": "thinking", "thinking": "", "signature": ""}
                begun = self._begin("thinking", block)
                return begun + self._delta({"type": "thinking_delta", "thinking": text})
            case CallBegun(_, name):
                self._has_calls = True
                closed = self._close()
                call = {"type": "tool_use", "id": self._call_id(), "name": name, "input": {}}
                return closed + self._begin("tool_use", call)
            case CallArguments(_, text):
                return self._delta({"type": "input_json_delta", "partial_json": text})

    def _begin(self, kind: str, block: dict[str, Any]) -> bytes:
        if self._open == kind:
            return b""
        closed = self._close()
        self._open = kind
        return closed + _event("content_block_start", index=self._num_blocks, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._num_blocks, delta=delta)

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        self._open = None
        self._num_blocks += 1
        return _event("content_block_stop", index=self._num_blocks - 1)

    # --- whole ------------------------------------------------------------------------------------

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> bytes:
        (piece,) = pieces
        found = message_of(self._answering, piece.text)
        blocks: list[dict[str, Any]] = []
        if found.reasoning:
            blocks.append({"type": "thinking", "thinking": found.reasoning, "signature": ""})
        if found.content:
            blocks.append({"type": "text", "text": found.content})
        has_calls = False
        for call in found.calls:
            given = parsed_arguments(call.arguments)
            if given is None:
                continue  # nobody should run half a call
            has_calls = True
            blocks.append(
                {"type": "tool_use", "id": self._call_id(), "name": call.name, "input": given}
            )
        reason = stop_reason(piece, has_calls)
        return to_json(self._message(blocks, reason, piece.stop, usage_object(usage)))

    def _call_id(self) -> str:
        return self._answering.new_call_id().replace("call_", "toolu_")

    def _message(
        self,
        blocks: list[dict[str, Any]],
        reason: str | None,
        stop: str | None,
        usage: dict[str, Any],
    ) -> dict[str, Any]:
        return {
            "id": f"msg_{self._answering.call_id}",
            "type": "message",
            "role": "assistant",
            "model": self._answering.model,
            "content": blocks,
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": usage,
        }


def stop_reason(piece: Piece, has_calls: bool) -> str:
    if piece.finish_reason is FinishReason.LENGTH:
        return "max_tokens"
    if piece.stop is not None:
        return "stop_sequence"
    return "tool_use" if has_calls else "end_turn"


def usage_object(usage: Usage) -> dict[str, Any]:
    """Cached tokens are counted apart."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
    }


def _event(kind: str, **values: Any) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + to_json({"type": kind, **values}) + b"\n\n"
