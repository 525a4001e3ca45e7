"""Answers of /v1/chat/completions."""

from collections.abc import Sequence
from json.encoder import encode_basestring_ascii
from typing import Any

from common.types import FinishReason, TokenLogprobs
from router.api.answering import Answering, message_of
from router.api.openai.events import event_head, last_event, usage_object, usage_tail, written
from router.api.openai.scores import LOWEST_LOGPROB, numbered, prompt_logprobs_object
from router.generation.generation import Usage
from router.server.exchange import large_json, to_json
from router.text.parts import CallArguments, CallBegun, Content, Part, Reasoning, Splitter
from router.text.text_output import Piece, TokenEntry


class ChatFormat:
    def __init__(self, answering: Answering) -> None:
        self._answering = answering
        self._id = f"chatcmpl-{answering.call_id}"
        self._texts = answering.texts
        self._head = event_head(answering, self._id, "chat.completion.chunk")
        self._tail = usage_tail(answering)
        self._splitters: dict[int, Splitter] = {}
        self._with_calls: set[int] = set()

    def first_events(self, num_choices: int) -> bytes:
        words = encode_basestring_ascii(self._answering.generation.call.continued).encode()
        delta = b'"delta":{"role":"assistant","content":%s},"logprobs":null,"finish_reason":null}'
        delta = delta % words
        tail = self._tail()
        if self._answering.options.returns_token_ids:
            ids = to_json(self._answering.generation.prompt_ids(0))
            tail = tail.replace(b"]", b'],"prompt_token_ids":' + ids, 1)
        return b"".join(
            self._head + b'{"index":%d,' % choice + delta + tail for choice in range(num_choices)
        )

    def events(self, piece: Piece) -> bytes:
        if self._answering.splitter is not None:
            return self._part_events(piece)
        content = b""
        if piece.text or piece.entries or piece.token_ids:
            content = self._delta_event(
                piece, b'{"content":%s}' % encode_basestring_ascii(piece.text).encode()
            )
        return content + self._finish_event(piece, False)

    def last_events(self, usage: Usage) -> bytes:
        return last_event(self._answering, self._head, usage)

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> bytes:
        answering = self._answering
        body: dict[str, Any] = {
            "id": self._id,
            "object": "chat.completion",
            "created": answering.created,
            "model": answering.model,
            "choices": [self._choice(piece) for piece in pieces],
            "usage": usage_object(usage),
        }
        if answering.options.prompt_logprobs is not None:
            body["prompt_logprobs"] = prompt_logprobs_object(answering, 0)
        if answering.options.returns_token_ids:
            body["prompt_token_ids"] = answering.generation.prompt_ids(0)
        return written(answering, body)

    def _choice(self, piece: Piece) -> dict[str, Any]:
        message = message_of(self._answering, piece.text)
        content = self._answering.generation.call.continued + message.content
        shown: dict[str, Any] = {
            "role": "assistant",
            "content": content if content or not message.calls else None,
            "refusal": None,
        }
        if message.reasoning:
            shown["reasoning_content"] = message.reasoning
        if message.calls:
            shown["tool_calls"] = [
                {
                    "id": call.call_id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments or "{}"},
                }
                for call in message.calls
            ]
        choice: dict[str, Any] = {
            "index": piece.choice,
            "message": shown,
            "logprobs": self._logprobs(piece.entries),
            "finish_reason": self._reason(piece.finish_reason, bool(message.calls)),
        }
        if self._answering.options.returns_token_ids:
            choice["token_ids"] = piece.token_ids
        return choice

    # --- events of answers that have parts --------------------------------------------------------

    def _part_events(self, piece: Piece) -> bytes:
        splitter = self._splitters.get(piece.choice)
        if splitter is None:
            assert self._answering.splitter is not None
            splitter = self._splitters[piece.choice] = self._answering.splitter()
        parts = splitter.push(piece.text)
        if piece.finish_reason is not None:
            parts = parts + splitter.flush()
        deltas = [to_json(self._delta(piece.choice, part)) for part in parts]
        if not deltas and (piece.entries or piece.token_ids):
            deltas = [b"{}"]
        bare = Piece(piece.choice, "", None)
        events = [
            self._delta_event(bare if number else piece, delta)
            for number, delta in enumerate(deltas)
        ]
        return b"".join(events) + self._finish_event(piece, piece.choice in self._with_calls)

    def _delta(self, choice: int, part: Part) -> dict[str, Any]:
        match part:
            case Content(text):
                return {"content": text}
            case Reasoning(text):
                return {"reasoning_content": text}
            case CallBegun(index, name):
                self._with_calls.add(choice)
                begun = {
                    "index": index,
                    "id": self._answering.new_call_id(),
                    "type": "function",
                    "function": {"name": name, "arguments": ""},
                }
                return {"tool_calls": [begun]}
            case CallArguments(index, text):
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}

    def _delta_event(self, piece: Piece, delta: bytes) -> bytes:
        ids = b""
        if self._answering.options.returns_token_ids:
            ids = b',"token_ids":' + to_json(piece.token_ids)
        return b'%s{"index":%d,"delta":%s,"logprobs":%s,"finish_reason":null%s}%s' % (
            self._head,
            piece.choice,
            delta,
            large_json(self._logprobs(piece.entries), 3) if piece.entries else b"null",
            ids,
            self._tail(),
        )

    def _finish_event(self, piece: Piece, has_calls: bool) -> bytes:
        if piece.finish_reason is None:
            return b""
        return b'%s{"index":%d,"delta":{},"logprobs":null,"finish_reason":"%s"}%s' % (
            self._head,
            piece.choice,
            str(self._reason(piece.finish_reason, has_calls)).encode(),
            self._tail(),
        )

    def _reason(self, reason: FinishReason | None, has_calls: bool) -> str | None:
        """As OpenAI has it: an answer forced to be one call ends as any other."""
        tools = self._answering.options.tools
        is_named = tools is not None and tools.is_named
        if has_calls and reason is FinishReason.STOP and not is_named:
            return "tool_calls"
        return None if reason is None else reason.value

    # --- log-probabilities ------------------------------------------------------------------------

    def _logprobs(self, entries: Sequence[TokenEntry]) -> dict[str, Any] | None:
        if not entries:
            return None
        return {"content": [self._entry(*entry) for entry in entries], "refusal": None}

    def _entry(self, token_id: int, logprobs: TokenLogprobs | None) -> dict[str, Any]:
        assert logprobs is not None
        top = zip(logprobs.top_ids, logprobs.top_logprobs, strict=True)
        return {
            **self._token(token_id, logprobs.logprob),
            "top_logprobs": [self._token(top_id, value) for top_id, value in top],
        }

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self._texts.raw(token_id)
        named = self._answering.options.names_tokens_by_id
        return {
            "token": numbered(token_id) if named else raw.decode("utf-8", "replace"),
            "logprob": max(logprob, LOWEST_LOGPROB),
            "bytes": list(raw),
        }
