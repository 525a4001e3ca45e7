"""Text and chats to token ids, by the model's tokenizer.json.

Text of a completion is encoded once, with the special tokens that tokenizer.json's post-processor
adds, and control tokens written in it count (prompts are often templated by the client). A chat is
rendered by the model's template and encoded as transformers does, except that control tokens inside
the client's own words (`<|im_end|>` in a message) are encoded as plain text, as transformers'
`sanitize_control_tokens` does: nobody can speak as somebody else.

Long texts are encoded in a thread, which lets go of the interpreter; texts that cannot possibly fit
the context are refused by their size before that.
"""

import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import anyio
import anyio.to_thread
from tokenizers import Tokenizer as HfTokenizer

from common.errors import ConfigError, ContextLengthExceeded, InvalidRequest
from router.reading.json_body import is_within
from router.text.chat_template import ChatTemplate, Message, load_chat_template
from router.text.detokenizer import Detokenizer, TokenTexts
from router.text.slices import SLICE, matches

T = TypeVar("T")

_THREAD_FROM_CHARS = 2_000
MAX_TOKEN_ID = 2**24
"""Texts of tokens are kept by id; a hundred times the largest vocabularies of today."""
_MARKERS = "\ue000\ue001"
"""What the mark behind a message that is continued is made of."""


class Tokenizer:
    def __init__(
        self,
        tokenizer: HfTokenizer,
        plain: Callable[[], HfTokenizer],
        texts: TokenTexts,
        template: ChatTemplate,
    ) -> None:
        """`plain` makes the same tokenizer without control tokens, when one is first needed."""
        self._tokenizer = tokenizer
        self._make_plain = plain
        self._plain: HfTokenizer | None = None
        self.texts = texts
        self.template = template
        added = tokenizer.get_added_tokens_decoder().values()
        control = sorted((t.content for t in added if t.special), key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, control)) or "(?!)")
        self._longest_control = max(map(len, control), default=1)
        self._max_token_bytes = texts.max_bytes
        self._threads: anyio.CapacityLimiter | None = None

    async def encode(
        self, text: str, max_tokens: int, *, add_special_tokens: bool = True
    ) -> list[int]:
        """Token ids of `text`. Raises ContextLengthExceeded when it must be longer than
        `max_tokens`.
        """
        (found,) = await self.encode_all([text], max_tokens, add_special_tokens=add_special_tokens)
        return found

    async def encode_all(
        self, texts: Sequence[str], max_tokens: int, *, add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Those of several texts, each of which may have up to `max_tokens`."""
        for text in texts:
            self._check_size(text, max_tokens)
        return await self._run(
            sum(map(len, texts)) >= _THREAD_FROM_CHARS,
            lambda: [self._encode(text, add_special_tokens) for text in texts],
        )

    def encode_words(self, text: str) -> list[int]:
        """Of a few words, as they would stand inside a text."""
        return self._encode(text, False)

    async def encode_chat(
        self,
        messages: list[Message],
        max_tokens: int,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: dict[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a chat. Raises InvalidRequest with the template's reason."""
        given: dict[str, Any] = {"messages": messages} | (variables or {})

        def work() -> list[int]:
            num_chars = sum(len(str(m.get("content"))) for m in messages)
            if num_chars > max_tokens * self._max_token_bytes:
                raise _too_long(num_chars, self._max_token_bytes, max_tokens)
            ending = _Ending(given) if continue_final_message else None
            chat = given if ending is None else ending.chat
            marked = None
            if self._has_control(chat):
                marked = _Marked.around(chat, self._control, self._longest_control)
                chat = marked.chat
            text = self.template.render(
                chat["messages"], chat | {"add_generation_prompt": add_generation_prompt}
            )
            if ending is not None:
                text = ending.cut(text)
            self._check_size(text, max_tokens)
            if marked is None:
                return self._encode(text, False)
            return self._encode_pieces(marked.split(text))

        # control tokens take a second tokenizer, which may have to be loaded
        is_large = not is_within(given, _THREAD_FROM_CHARS) or self._has_control(given)
        return await self._run(is_large, work)

    def decode(self, token_ids: list[int]) -> str:
        detokenizer = Detokenizer(self.texts)
        return "".join([*map(detokenizer.push, token_ids), detokenizer.flush()])

    def _check_size(self, text: str, max_tokens: int) -> None:
        try:
            num_bytes = len(text.encode())
        except UnicodeEncodeError:
            raise InvalidRequest(
                "the text holds half of a surrogate pair", param="prompt"
            ) from None
        if num_bytes > max_tokens * self._max_token_bytes:
            raise _too_long(num_bytes, self._max_token_bytes, max_tokens)

    async def _run(self, is_large: bool, work: Callable[[], T]) -> T:
        if not is_large:
            return work()
        if self._threads is None:
            self._threads = anyio.CapacityLimiter(2)
        return await anyio.to_thread.run_sync(work, limiter=self._threads)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # the batch call is the one that lets go of the interpreter lock
        (encoding,) = self._tokenizer.encode_batch_fast(
            [text], add_special_tokens=add_special_tokens
        )
        return list(encoding.ids)

    def _has_control(self, value: Any) -> bool:
        if isinstance(value, str):
            return next(matches(self._control, value, self._longest_control), None) is not None
        if isinstance(value, dict):
            return any(map(self._has_control, value.values()))
        return isinstance(value, list) and any(map(self._has_control, value))

    def _encode_pieces(self, pieces: list[str | None]) -> list[int]:
        """Text and control tokens by turns; these as plain text, as transformers does."""
        if self._plain is None:
            self._plain = self._make_plain()
        first, *others = pieces
        token_ids = self._encode(first or "", False)
        for number, piece in enumerate(others, start=1):
            if piece:
                tokenizer = self._plain if number % 2 else self._tokenizer
                token_ids += self._encode_inner(tokenizer, piece)
        return token_ids

    def _encode_inner(self, tokenizer: HfTokenizer, piece: str) -> list[int]:
        """Encoded after a newline, which is taken away again: some tokenizers add a space at the
        very start.
        """
        newline = self._encode("\n", False)
        token_ids = list(tokenizer.encode("\n" + piece, add_special_tokens=False).ids)
        if token_ids[: len(newline)] == newline:
            return token_ids[len(newline) :]
        return list(tokenizer.encode(piece, add_special_tokens=False).ids)


class _Ending:
    """Finds the end of the last message's words in the rendered chat, so that the model goes on
    with them: a mark that occurs nowhere else follows the words.
    """

    def __init__(self, chat: dict[str, Any]) -> None:
        """Raises InvalidRequest when there are no words."""
        *others, last = chat["messages"]
        content = last.get("content")
        parts = content if isinstance(content, list) else [{"text": content}]
        words = parts[-1].get("text") if parts else None
        if not isinstance(words, str) or not words.strip():
            raise _no_end("the last message has no words")
        used = json.dumps(chat, ensure_ascii=False)
        marks = (f"{_MARKERS[0]}{number}{_MARKERS[1]}" for number in itertools.count())
        self._mark = next(mark for mark in marks if mark not in used)
        self._space = words[len(words.rstrip()) :]
        marked: Any = f"{words}{self._mark} "
        if isinstance(content, list):
            marked = [*parts[:-1], {**parts[-1], "text": marked}]
        self.chat = chat | {"messages": [*others, {**last, "content": marked}]}

    def cut(self, text: str) -> str:
        """Some templates trim what a message says; the space after the mark tells."""
        before, mark, after = text.rpartition(self._mark)
        if not mark:
            raise _no_end("the last message's content is not in the rendered chat")
        return before if after.startswith(" ") else before.removesuffix(self._space)


def _no_end(reason: str) -> InvalidRequest:
    param = "continue_final_message"
    return InvalidRequest(f"{param}: {reason}", param=param)


def _private_characters() -> Iterator[int]:
    return itertools.chain(
        range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE)
    )


class _Marked:
    """A chat whose control tokens are wrapped in two characters that occur nowhere else in it."""

    def __init__(self, chat: dict[str, Any], pattern: re.Pattern[str], longest: int) -> None:
        self.chat = chat
        self._pattern = pattern
        self._longest = longest

    @classmethod
    def around(cls, chat: dict[str, Any], control: re.Pattern[str], longest: int) -> "_Marked":
        used: set[str] = set()
        words = json.dumps(chat, ensure_ascii=False)
        for at in range(0, len(words), SLICE):
            used.update(words[at : at + SLICE])
        free = (mark for mark in map(chr, _private_characters()) if mark not in used)
        start, end = next(free, None), next(free, None)
        if start is None or end is None:
            raise InvalidRequest(
                "the chat holds all of Unicode's private characters", param="messages"
            )

        def mark(value: Any) -> Any:
            if isinstance(value, str):
                parts, at = [], 0
                for match in matches(control, value, longest):
                    parts += [value[at : match.start()], start, match[0], end]
                    at = match.end()
                return "".join([*parts, value[at:]])
            if isinstance(value, dict):
                return {key: mark(inner) for key, inner in value.items()}
            return [mark(inner) for inner in value] if isinstance(value, list) else value

        pattern = re.compile(f"{start}({control.pattern}){end}|[{start}{end}]")
        return cls(mark(chat), pattern, longest + 2)

    def split(self, text: str) -> list[str | None]:
        """Text, marked token, text, ...; a template may have cut a mark in half, then the token is
        None.
        """
        found: list[str | None] = []
        at = 0
        for match in matches(self._pattern, text, self._longest):
            found += [text[at : match.start()], match[1]]
            at = match.end()
        return [*found, text[at:]]


def load_tokenizer(directory: Path, chat_template: Path | None = None) -> Tokenizer:
    """Raises ConfigError, or UnsupportedModel for a decoder that is not known."""
    path = directory / "tokenizer.json"
    try:
        source = path.read_text(encoding="utf-8")
        tokenizer = _read(source)
    except Exception as error:  # the library raises plain exceptions of its own
        raise ConfigError(f"cannot read the tokenizer {path}: {error}") from None
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    largest = max(vocabulary.values(), default=0)
    if largest > MAX_TOKEN_ID:
        raise ConfigError(f"{path} has a token of id {largest}; the limit is {MAX_TOKEN_ID}")
    texts = TokenTexts.of(json.loads(source), vocabulary)
    template = load_chat_template(directory, chat_template)
    return Tokenizer(tokenizer, lambda: _read_plain(source), texts, template)


def _read(source: str) -> HfTokenizer:
    tokenizer = HfTokenizer.from_str(source)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _read_plain(source: str) -> HfTokenizer:
    tokenizer = _read(source)
    tokenizer.encode_special_tokens = True
    return tokenizer


def _too_long(num_bytes: int, max_token_bytes: int, max_tokens: int) -> ContextLengthExceeded:
    return ContextLengthExceeded(
        f"the prompt has {num_bytes} bytes and so at least {-(-num_bytes // max_token_bytes)} "
        f"tokens; the context holds {max_tokens}",
        param="prompt",
    )
