"""Answers of /v1/messages: blocks of content, whole or as events; and errors in the same words."""

from collections.abc import Sequence
from typing import Any

from common.errors import TandemError
from common.types import FinishReason
from router.api.answering import Answering, message_of
from router.generation.generation import Usage
from router.server.exchange import to_json
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
