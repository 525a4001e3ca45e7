"""Answers of /v1/completions."""

from collections.abc import Sequence
from json.encoder import encode_basestring_ascii
from typing import Any

from common.types import TokenLogprobs
from router.api.answering import Answering
from router.api.openai.events import event_head, last_event, usage_object, usage_tail, written
from router.api.openai.scores import (
    LOWEST_LOGPROB,
    Offsets,
    numbered,
    prompt_logprobs_object,
    token_name,
)
from router.generation.generation import Usage
from router.server.exchange import large_json, to_json
from router.text.text_output import Piece


class CompletionFormat:
    def __init__(self, answering: Answering) -> None:
        self._answering = answering
        self._id = f"cmpl-{answering.call_id}"
        self._texts = answering.texts
        self._head = event_head(answering, self._id, "text_completion")
        self._tail = usage_tail(answering)
        self._names_by_id = answering.options.names_tokens_by_id
        self._offsets: dict[int, Offsets] = {}
        self._told_prompts: set[int] = set()

    def first_events(self, num_choices: int) -> bytes:
        return b""

    def events(self, piece: Piece) -> bytes:
        reason = b"null"
        if piece.finish_reason is not None:
            reason = b'"%s"' % piece.finish_reason.value.encode()
        return b'%s{"index":%d,"text":%s,"logprobs":%s,"finish_reason":%s%s}%s' % (
            self._head,
            piece.choice,
            encode_basestring_ascii(piece.text).encode(),
            large_json(self._logprobs(piece), 3) if piece.entries else b"null",
            reason,
            self._ids(piece),
            self._tail(),
        )

    def last_events(self, usage: Usage) -> bytes:
        return last_event(self._answering, self._head, usage)

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> bytes:
        return written(
            self._answering,
            {
                "id": self._id,
                "object": "text_completion",
                "created": self._answering.created,
                "model": self._answering.model,
                "choices": [self._choice(piece) for piece in pieces],
                "usage": usage_object(usage),
            },
        )

    def _choice(self, piece: Piece) -> dict[str, Any]:
        options, generation = self._answering.options, self._answering.generation
        choice = {
            "index": piece.choice,
            "text": piece.text,
            "logprobs": self._logprobs(piece),
            "finish_reason": piece.finish_reason,
        }
        if options.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs_object(self._answering, piece.choice)
        if options.returns_token_ids:
            choice["token_ids"] = piece.token_ids
            choice["prompt_token_ids"] = generation.prompt_ids(piece.choice)
        return choice

    def _ids(self, piece: Piece) -> bytes:
        if not self._answering.options.returns_token_ids:
            return b""
        ids = b',"token_ids":' + to_json(piece.token_ids)
        if piece.choice not in self._told_prompts:
            self._told_prompts.add(piece.choice)
            prompt = self._answering.generation.prompt_ids(piece.choice)
            ids += b',"prompt_token_ids":' + to_json(prompt)
        return ids

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        if not piece.entries:
            return None
        tokens: list[str] = []
        offsets: list[int] = []
        choice_offsets = self._offsets.get(piece.choice)
        if choice_offsets is None:
            choice_offsets = self._offsets[piece.choice] = self._new_offsets(piece.choice)
        for token_id, _ in piece.entries:
            tokens.append(self._name(token_id))
            offsets.append(choice_offsets.push(token_id))
        return {
            "tokens": tokens,
            "token_logprobs": [
                None if entry is None else max(entry.logprob, LOWEST_LOGPROB)
                for _, entry in piece.entries
            ],
            "top_logprobs": [self._top(*entry) for entry in piece.entries],
            "text_offset": offsets,
        }

    def _new_offsets(self, choice: int) -> Offsets:
        options, generation = self._answering.options, self._answering.generation
        if not options.echo:
            return Offsets(self._texts, 0, None)
        prompt = generation.prompt_text(choice)
        return Offsets(self._texts, len(generation.prompt_ids(choice)), prompt)

    def _top(self, token_id: int, logprobs: TokenLogprobs | None) -> dict[str, float] | None:
        """The alternatives by name, the token itself always among them."""
        if logprobs is None:
            return None
        found = dict(zip(logprobs.top_ids, logprobs.top_logprobs, strict=True))
        found.setdefault(token_id, logprobs.logprob)
        return {self._name(i): max(value, LOWEST_LOGPROB) for i, value in found.items()}

    def _name(self, token_id: int) -> str:
        return numbered(token_id) if self._names_by_id else token_name(self._texts, token_id)
