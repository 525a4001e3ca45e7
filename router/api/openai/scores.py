"""Log-probabilities as OpenAI's and vLLM's answers show them."""

import contextlib
from typing import Any

from router.api.answering import Answering
from router.generation.scores import PromptEntry
from router.text.detokenizer import Detokenizer, TokenTexts

LOWEST_LOGPROB = -9999.0
"""JSON has no infinity."""


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
            "logprob": max(logprob, LOWEST_LOGPROB),
            "rank": rank,
            "decoded_token": texts.raw(i).decode("utf-8", "replace"),
        }
        for i, (logprob, rank) in found.items()
    }


def numbered(token_id: int) -> str:
    return f"token_id:{token_id}"


def token_name(texts: TokenTexts, token_id: int) -> str:
    raw = texts.raw(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class Offsets:
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
