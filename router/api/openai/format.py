"""Answers of the OpenAI endpoints as bytes, whole and as stream events.

What is the same in all events of a stream is encoded once; per token only the text and the choice
are.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii
from typing import Any, Protocol

from common.types import FinishReason, TokenLogprobs
from router.generation.generation import Generation, PromptEntry, Usage
from router.generation.options import Options
from router.server.exchange import large_json, to_json
from router.text.detokenizer import Detokenizer, TokenTexts
from router.text.parts import CallArguments, CallBegun, Content, Part, Reasoning, Splitter
from router.text.text_output import Piece, TokenEntry

DONE = b"data: [DONE]\n\n"
_LOWEST_LOGPROB = -9999.0
"""JSON has no infinity."""


class Format(Protocol):
    def first_events(self, num_choices: int) -> bytes: ...

    def events(self, piece: Piece) -> bytes: ...

    def last_events(self, usage: Usage) -> bytes: ...

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> bytes: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Answering:
    """What a format must know of the call it answers."""

    call_id: str
    model: str
    created: int
    texts: TokenTexts
    options: Options
    generation: Generation
    splitter: Callable[[], Splitter] | None
    """None: all text is content."""
    new_call_id: Callable[[], str]
    continued: str
    """What an answer in a chat begins with before the model says anything."""

    def write(self, body: dict[str, Any]) -> bytes:
        options = self.options
        has_scores = options.sampling.logprobs is not None or options.prompt_logprobs is not None
        return large_json(body) if has_scores else to_json(body)

    def usage_tail(self) -> Callable[[], bytes]:
        """What ends each event of a stream after its choices."""
        if self.options.has_usage_in_chunks:
            usage = self.generation.usage
            return lambda: b'],"usage":%s}\n\n' % to_json(usage_object(usage()))
        tail = b'],"usage":null}\n\n' if self.options.include_usage else b"]}\n\n"
        return lambda: tail

    def last_event(self, head: bytes, usage: Usage) -> bytes:
        """The usage alone, where it was asked for, and the end."""
        if not self.options.include_usage:
            return DONE
        return head + b'],"usage":' + to_json(usage_object(usage)) + b"}\n\n" + DONE

    @property
    def is_named(self) -> bool:
        return self.options.tools is not None and self.options.tools.is_named


@dataclass(slots=True)
class Call:
    call_id: str
    name: str
    arguments: str = ""


class Message:
    """An answer put together from its parts."""

    def __init__(self, new_call_id: Callable[[], str]) -> None:
        self._new_call_id = new_call_id
        self.content = ""
        self.reasoning = ""
        self.calls: list[Call] = []

    def add(self, parts: Sequence[Part]) -> None:
        for part in parts:
            match part:
                case Content(text):
                    self.content += text
                case Reasoning(text):
                    self.reasoning += text
                case CallBegun(_, name):
                    self.calls.append(Call(self._new_call_id(), name))
                case CallArguments(_, text):
                    self.calls[-1].arguments += text


def message_of(answering: Answering, text: str) -> Message:
    message = Message(answering.new_call_id)
    if answering.splitter is None:
        message.content = text
    else:
        splitter = answering.splitter()
        message.add(splitter.push(text))
        message.add(splitter.flush())
    return message


class ChatFormat:
    def __init__(self, answering: Answering) -> None:
        self._answering = answering
        self._id = f"chatcmpl-{answering.call_id}"
        self._texts = answering.texts
        self._head = _event_head(
            self._id, "chat.completion.chunk", answering.created, answering.model
        )
        self._tail = answering.usage_tail()
        self._splitters: dict[int, Splitter] = {}
        self._with_calls: set[int] = set()

    def first_events(self, num_choices: int) -> bytes:
        words = encode_basestring_ascii(self._answering.continued).encode()
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
        return self._answering.last_event(self._head, usage)

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
        return answering.write(body)

    def _choice(self, piece: Piece) -> dict[str, Any]:
        message = message_of(self._answering, piece.text)
        content = self._answering.continued + message.content
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
        if has_calls and reason is FinishReason.STOP and not self._answering.is_named:
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
            "token": _numbered(token_id) if named else raw.decode("utf-8", "replace"),
            "logprob": max(logprob, _LOWEST_LOGPROB),
            "bytes": list(raw),
        }


class _Offsets:
    """Where in the text of a choice each of its tokens begins; parts of one character begin where
    that does.
    """

    def __init__(self, texts: TokenTexts, num_prompt: int, prompt: str | None) -> None:
        """The first `num_prompt` tokens are an echoed prompt, whose text the client may have
        given.
        """
        self._texts = texts
        self._detokenizer = Detokenizer(texts)
        self._num_prompt_left = num_prompt
        self._prompt = prompt
        self._at = 0

    def push(self, token_id: int) -> int:
        text = self._detokenizer.push(token_id)
        begins = self._at
        with contextlib.suppress(UnicodeDecodeError):
            # what was held back stands before a token that is text by itself
            begins += max(0, len(text) - len(self._texts.visible(token_id).decode()))
        self._at += len(text)
        if self._num_prompt_left:
            self._num_prompt_left -= 1
            self._in_prompt(token_id, text)
        return begins

    def _in_prompt(self, token_id: int, text: str) -> None:
        prompt = self._prompt
        if prompt is not None:
            # tokens may have added a space at the start, and left out control tokens
            if self._at == len(text) and text.startswith(" ") and not prompt.startswith(" "):
                self._at -= 1
            control = self._texts.raw(token_id).decode("utf-8", "replace")
            if not self._texts.visible(token_id) and prompt.startswith(control, self._at):
                self._at += len(control)
            self._at = min(self._at, len(prompt))
        if not self._num_prompt_left:
            held = self._detokenizer.flush()
            self._at = self._at + len(held) if prompt is None else len(prompt)
            self._detokenizer = Detokenizer(self._texts)


class CompletionFormat:
    def __init__(self, answering: Answering) -> None:
        self._answering = answering
        self._id = f"cmpl-{answering.call_id}"
        self._texts = answering.texts
        self._head = _event_head(self._id, "text_completion", answering.created, answering.model)
        self._tail = answering.usage_tail()
        self._names_by_id = answering.options.names_tokens_by_id
        self._offsets: dict[int, _Offsets] = {}
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
        return self._answering.last_event(self._head, usage)

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> bytes:
        return self._answering.write(
            {
                "id": self._id,
                "object": "text_completion",
                "created": self._answering.created,
                "model": self._answering.model,
                "choices": [self._choice(piece) for piece in pieces],
                "usage": usage_object(usage),
            }
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
                None if entry is None else max(entry.logprob, _LOWEST_LOGPROB)
                for _, entry in piece.entries
            ],
            "top_logprobs": [self._top(*entry) for entry in piece.entries],
            "text_offset": offsets,
        }

    def _new_offsets(self, choice: int) -> "_Offsets":
        options, generation = self._answering.options, self._answering.generation
        if not options.echo:
            return _Offsets(self._texts, 0, None)
        prompt = generation.prompt_texts[choice // options.sampling.n]
        return _Offsets(self._texts, len(generation.prompt_ids(choice)), prompt)

    def _top(self, token_id: int, logprobs: TokenLogprobs | None) -> dict[str, float] | None:
        """The alternatives by name, the token itself always among them."""
        if logprobs is None:
            return None
        found = dict(zip(logprobs.top_ids, logprobs.top_logprobs, strict=True))
        found.setdefault(token_id, logprobs.logprob)
        return {self._name(i): max(value, _LOWEST_LOGPROB) for i, value in found.items()}

    def _name(self, token_id: int) -> str:
        return _numbered(token_id) if self._names_by_id else token_name(self._texts, token_id)


def prompt_logprobs_object(answering: Answering, choice: int) -> list[dict[str, Any] | None]:
    """As vLLM shows them: for each prompt token the tokens by id, the prompt's own first."""
    ids = answering.generation.prompt_ids(choice)
    entries = answering.generation.prompt_logprobs(choice)
    count = answering.options.prompt_logprobs or 0
    return [
        _scored(answering.texts, token_id, entry, count)
        for token_id, entry in zip(ids, entries, strict=True)
    ]


def _scored(
    texts: TokenTexts, token_id: int, entry: PromptEntry, count: int
) -> dict[str, Any] | None:
    if entry is None:
        return None
    found = {token_id: (entry.logprobs.logprob, entry.rank)}
    logprobs = entry.logprobs.first(count)
    top = zip(logprobs.top_ids, logprobs.top_logprobs, strict=True)
    for rank, (top_id, logprob) in enumerate(top, start=1):
        found.setdefault(top_id, (logprob, rank))
    return {
        str(i): {
            "logprob": max(logprob, _LOWEST_LOGPROB),
            "rank": rank,
            "decoded_token": texts.raw(i).decode("utf-8", "replace"),
        }
        for i, (logprob, rank) in found.items()
    }


def _numbered(token_id: int) -> str:
    return f"token_id:{token_id}"


def token_name(texts: TokenTexts, token_id: int) -> str:
    raw = texts.raw(token_id)
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
