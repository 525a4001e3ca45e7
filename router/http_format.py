"""Answers of the two generating endpoints as bytes, whole and as stream events, in OpenAI's shapes.

What is the same in all events of a stream is encoded once; per token only the text and the choice
are.
"""

from collections.abc import Sequence
from json.encoder import encode_basestring_ascii
from typing import Any, Protocol

from common.types import TokenLogprobs
from router.detokenizer import TokenTexts
from router.generation import Usage
from router.http_exchange import to_json
from router.text_output import Piece, TokenEntry

DONE = b"data: [DONE]\n\n"
_LOWEST_LOGPROB = -9999.0
"""JSON has no infinity."""


class Format(Protocol):
    def first_events(self, num_choices: int) -> bytes: ...

    def events(self, piece: Piece) -> bytes: ...

    def usage_event(self, usage: Usage) -> bytes: ...

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> bytes: ...


class ChatFormat:
    def __init__(
        self, call_id: str, model: str, created: int, texts: TokenTexts, *, include_usage: bool
    ) -> None:
        self._id = f"chatcmpl-{call_id}"
        self._model = model
        self._created = created
        self._texts = texts
        self._head = _event_head(self._id, "chat.completion.chunk", created, model)
        self._tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"

    def first_events(self, num_choices: int) -> bytes:
        delta = b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
        return b"".join(
            self._head + b'{"index":%d,' % choice + delta + self._tail
            for choice in range(num_choices)
        )

    def events(self, piece: Piece) -> bytes:
        content = b""
        if piece.text or piece.entries:
            content = (
                b'%s{"index":%d,"delta":{"content":%s},"logprobs":%s,"finish_reason":null}%s'
                % (
                    self._head,
                    piece.choice,
                    encode_basestring_ascii(piece.text).encode(),
                    self._logprobs_json(piece.entries),
                    self._tail,
                )
            )
        if piece.finish_reason is None:
            return content
        return b'%s%s{"index":%d,"delta":{},"logprobs":null,"finish_reason":"%s"}%s' % (
            content,
            self._head,
            piece.choice,
            piece.finish_reason.value.encode(),
            self._tail,
        )

    def usage_event(self, usage: Usage) -> bytes:
        return self._head + b'],"usage":' + to_json(usage_object(usage)) + b"}\n\n"

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> bytes:
        return to_json(
            {
                "id": self._id,
                "object": "chat.completion",
                "created": self._created,
                "model": self._model,
                "choices": [
                    {
                        "index": piece.choice,
                        "message": {"role": "assistant", "content": piece.text, "refusal": None},
                        "logprobs": self._logprobs(piece.entries),
                        "finish_reason": piece.finish_reason,
                    }
                    for piece in pieces
                ],
                "usage": usage_object(usage),
            }
        )

    def _logprobs_json(self, entries: Sequence[TokenEntry]) -> bytes:
        return to_json(self._logprobs(entries)) if entries else b"null"

    def _logprobs(self, entries: Sequence[TokenEntry]) -> dict[str, Any] | None:
        if not entries:
            return None
        return {"content": [self._entry(*entry) for entry in entries], "refusal": None}

    def _entry(self, token_id: int, logprobs: TokenLogprobs) -> dict[str, Any]:
        top = zip(logprobs.top_ids, logprobs.top_logprobs, strict=True)
        return {
            **self._token(token_id, logprobs.logprob),
            "top_logprobs": [self._token(top_id, value) for top_id, value in top],
        }

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self._texts.raw(token_id)
        return {
            "token": raw.decode("utf-8", "replace"),
            "logprob": max(logprob, _LOWEST_LOGPROB),
            "bytes": list(raw),
        }


class CompletionFormat:
    def __init__(
        self, call_id: str, model: str, created: int, texts: TokenTexts, *, include_usage: bool
    ) -> None:
        self._id = f"cmpl-{call_id}"
        self._model = model
        self._created = created
        self._texts = texts
        self._head = _event_head(self._id, "text_completion", created, model)
        self._tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
        self._offsets: dict[int, int] = {}

    def first_events(self, num_choices: int) -> bytes:
        return b""

    def events(self, piece: Piece) -> bytes:
        reason = b"null"
        if piece.finish_reason is not None:
            reason = b'"%s"' % piece.finish_reason.value.encode()
        return b'%s{"index":%d,"text":%s,"logprobs":%s,"finish_reason":%s}%s' % (
            self._head,
            piece.choice,
            encode_basestring_ascii(piece.text).encode(),
            to_json(self._logprobs(piece)) if piece.entries else b"null",
            reason,
            self._tail,
        )

    def usage_event(self, usage: Usage) -> bytes:
        return self._head + b'],"usage":' + to_json(usage_object(usage)) + b"}\n\n"

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> bytes:
        return to_json(
            {
                "id": self._id,
                "object": "text_completion",
                "created": self._created,
                "model": self._model,
                "choices": [
                    {
                        "index": piece.choice,
                        "text": piece.text,
                        "logprobs": self._logprobs(piece),
                        "finish_reason": piece.finish_reason,
                    }
                    for piece in pieces
                ],
                "usage": usage_object(usage),
            }
        )

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        if not piece.entries:
            return None
        tokens: list[str] = []
        offsets: list[int] = []
        offset = self._offsets.get(piece.choice, 0)
        for token_id, _ in piece.entries:
            tokens.append(self._name(token_id))
            offsets.append(offset)
            offset += len(self._texts.visible(token_id).decode("utf-8", "ignore"))
        self._offsets[piece.choice] = offset
        return {
            "tokens": tokens,
            "token_logprobs": [max(e.logprob, _LOWEST_LOGPROB) for _, e in piece.entries],
            "top_logprobs": [self._top(*entry) for entry in piece.entries],
            "text_offset": offsets,
        }

    def _top(self, token_id: int, logprobs: TokenLogprobs) -> dict[str, float]:
        """The alternatives by name, the sampled token always among them."""
        found = dict(zip(logprobs.top_ids, logprobs.top_logprobs, strict=True))
        found.setdefault(token_id, logprobs.logprob)
        return {self._name(i): max(value, _LOWEST_LOGPROB) for i, value in found.items()}

    def _name(self, token_id: int) -> str:
        raw = self._texts.raw(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _event_head(call_id: str, kind: str, created: int, model: str) -> bytes:
    start = to_json({"id": call_id, "object": kind, "created": created, "model": model})
    return b"data: " + start[:-1] + b',"choices":['
