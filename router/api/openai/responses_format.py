"""Answers of /v1/responses: output items, whole or as events that tell of each step."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from common.types import FinishReason
from router.api.answering import Answering, message_of
from router.generation.generation import Usage
from router.reading.fields import Fields
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


@dataclass(slots=True)
class _Item:
    """One output item under way."""

    kind: str
    item_id: str
    index: int
    call_id: str = ""
    name: str = ""
    texts: list[str] = field(default_factory=list)
    is_cut: bool = False

    @property
    def status(self) -> str:
        """Of one that nothing more comes for."""
        return "incomplete" if self.is_cut else "completed"

    def end(self, is_cut: bool) -> None:
        """A call is as complete as its arguments."""
        if self.kind == "function_call":
            is_cut = parsed_arguments(self.text) is None
        self.is_cut = is_cut

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def object(self, status: str) -> dict[str, Any]:
        shown: dict[str, Any] = {"id": self.item_id, "type": self.kind, "status": status}
        if self.kind == "message":
            content = [_text_part(self.text)] if self.texts else []
            return shown | {"role": "assistant", "content": content}
        if self.kind == "reasoning":
            content = [{"type": "reasoning_text", "text": self.text}] if self.texts else []
            return shown | {"summary": [], "content": content}
        return shown | {"call_id": self.call_id, "name": self.name, "arguments": self.text}


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


class ResponsesFormat:
    def __init__(self, answering: Answering, fields: Fields) -> None:
        self._answering = answering
        self._fields = fields
        self._splitter = (answering.splitter or PlainSplitter)()
        self._items: list[_Item] = []
        self._open: _Item | None = None
        self._sequence = 0
        self._reason: FinishReason | None = None

    # --- streamed ---------------------------------------------------------------------------------

    def first_events(self, num_choices: int) -> bytes:
        shown = self._response("in_progress", None)
        return self._event("response.created", response=shown) + self._event(
            "response.in_progress", response=shown
        )

    def events(self, piece: Piece) -> bytes:
        parts = self._splitter.push(piece.text)
        if piece.finish_reason is not None:
            parts = parts + self._splitter.flush()
            self._reason = piece.finish_reason
        found = b"".join(map(self._part_events, parts))
        if piece.finish_reason is None:
            return found
        return found + self._close(is_cut=piece.finish_reason is FinishReason.LENGTH)

    def last_events(self, usage: Usage) -> bytes:
        status = self._status()
        return self._event(f"response.{status}", response=self._response(status, usage))

    def _part_events(self, part: Part) -> bytes:
        match part:
            case Content(text):
                return self._text("message", "response.output_text.delta", text)
            case Reasoning(text):
                return self._text("reasoning", "response.reasoning_text.delta", text)
            case CallBegun(_, name):
                return self._begin("function_call", name)
            case CallArguments(_, text):
                assert self._open is not None
                self._open.texts.append(text)
                return self._item_event("response.function_call_arguments.delta", delta=text)

    def _text(self, kind: str, event: str, text: str) -> bytes:
        begun = b""
        if self._open is None or self._open.kind != kind:
            begun = self._begin(kind)
        assert self._open is not None
        self._open.texts.append(text)
        extra: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        return begun + self._item_event(event, content_index=0, delta=text, **extra)

    def _begin(self, kind: str, name: str = "") -> bytes:
        closed = self._close()
        item = self._new_item(kind, name)
        self._open = item
        shown = item.object("in_progress")
        begun = closed + self._event(
            "response.output_item.added", output_index=item.index, item=shown
        )
        if kind != "message":
            return begun
        return begun + self._item_event(
            "response.content_part.added", content_index=0, part=_text_part("")
        )

    def _close(self, *, is_cut: bool = False) -> bytes:
        item = self._open
        if item is None:
            return b""
        item.end(is_cut)
        found = b""
        if item.kind == "message":
            done = {"content_index": 0, "text": item.text, "logprobs": []}
            found = self._item_event("response.output_text.done", **done)
            found += self._item_event(
                "response.content_part.done", content_index=0, part=_text_part(item.text)
            )
        elif item.kind == "reasoning":
            found = self._item_event(
                "response.reasoning_text.done", content_index=0, text=item.text
            )
        elif not item.is_cut:
            found = self._item_event(
                "response.function_call_arguments.done", name=item.name, arguments=item.text
            )
        self._open = None
        shown = item.object(item.status)
        return found + self._event("response.output_item.done", output_index=item.index, item=shown)

    def _item_event(self, kind: str, **values: Any) -> bytes:
        assert self._open is not None
        about = {"item_id": self._open.item_id, "output_index": self._open.index}
        return self._event(kind, **about, **values)

    def _event(self, kind: str, **values: Any) -> bytes:
        body = {"type": kind, "sequence_number": self._sequence, **values}
        self._sequence += 1
        return b"event: " + kind.encode() + b"\ndata: " + to_json(body) + b"\n\n"

    # --- whole ------------------------------------------------------------------------------------

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> bytes:
        (piece,) = pieces
        self._reason = piece.finish_reason
        message = message_of(self._answering, piece.text)
        if message.reasoning:
            self._new_item("reasoning").texts.append(message.reasoning)
        if message.content or not message.calls:
            self._new_item("message").texts.append(message.content)
        for call in message.calls:
            item = self._new_item("function_call", call.name)
            item.texts.append(call.arguments)
        for item in self._items:
            is_last = item is self._items[-1]
            item.end(is_last and piece.finish_reason is FinishReason.LENGTH)
        return to_json(self._response(self._status(), usage))

    def _new_item(self, kind: str, name: str = "") -> _Item:
        prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc"}[kind]
        index = len(self._items)
        item = _Item(kind, f"{prefix}_{self._answering.call_id}_{index}", index, name=name)
        if kind == "function_call":
            item.call_id = self._answering.new_call_id()
        self._items.append(item)
        return item

    def _status(self) -> str:
        return "incomplete" if self._reason is FinishReason.LENGTH else "completed"

    def _response(self, status: str, usage: Usage | None) -> dict[str, Any]:
        answering, fields = self._answering, self._fields
        sampling = answering.options.sampling
        is_cut = status == "incomplete"
        return {
            "id": f"resp_{answering.call_id}",
            "object": "response",
            "created_at": answering.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": fields.take("instructions"),
            "max_output_tokens": answering.options.max_tokens,
            "metadata": fields.take("metadata") or {},
            "model": answering.model,
            "output": [item.object(item.status) for item in self._items if usage is not None],
            "parallel_tool_calls": answering.options.tools is None
            or answering.options.tools.is_parallel,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": sampling.temperature,
            "text": fields.take("text") or {"format": {"type": "text"}},
            "tool_choice": fields.take("tool_choice") or "auto",
            "tools": fields.take("tools") or [],
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": None if usage is None else _usage_object(usage),
            "user": fields.take("user"),
        }


def _usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
