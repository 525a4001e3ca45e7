"""One output as text: token ids in, pieces of text out, and where the output ends.

The same code makes streamed and whole answers, so they are equal when joined. A token whose text is
held back (half a character, or the start of a stop string) makes no piece; its logprobs wait for
the next one.
"""

from dataclasses import dataclass

from common.types import FinishReason, TokenLogprobs
from router.text.detokenizer import Detokenizer, TokenTexts
from router.text.stop import StopMatcher, StopSet

TokenEntry = tuple[int, TokenLogprobs | None]
"""A token and its logprobs. (An echoed prompt's first token has none.)"""


@dataclass(frozen=True, slots=True)
class Piece:
    """What one output gains: text, the logprobs of the tokens behind it, or its end."""

    choice: int
    text: str
    finish_reason: FinishReason | None
    entries: tuple[TokenEntry, ...] = ()
    token_ids: tuple[int, ...] = ()
    """The tokens behind the text, if they are wanted."""
    stop: str | None = None
    """The stop string that ended the output."""


class TextOutput:
    def __init__(
        self,
        choice: int,
        texts: TokenTexts,
        *,
        stops: StopSet | None,
        include_stop: bool,
        min_tokens: int,
        keeps_ids: bool = False,
    ) -> None:
        self._choice = choice
        self._detokenizer = Detokenizer(texts)
        self._matcher = None if stops is None else StopMatcher(stops, include_stop=include_stop)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._entries: list[TokenEntry] = []
        self._keeps_ids = keeps_ids
        self._token_ids: list[int] = []
        self.num_tokens = 0
        self.has_finished = False

    def end_unseen(self) -> Piece | None:
        """The output ends before its first token, which nobody asked for."""
        if self.has_finished:
            return None
        self.has_finished = True
        return Piece(self._choice, "", FinishReason.LENGTH)

    def push(
        self, token_id: int, finish_reason: FinishReason | None, logprobs: TokenLogprobs | None
    ) -> Piece | None:
        """None when there is nothing to say yet, or nothing any more."""
        if self.has_finished:
            return None
        self.num_tokens += 1
        if logprobs is not None:
            self._entries.append((token_id, logprobs))
        if self._keeps_ids:
            self._token_ids.append(token_id)
        text = ""
        if finish_reason is not FinishReason.STOP or self._include_stop:
            text = self._detokenizer.push(token_id)
        if finish_reason is not None:
            text += self._detokenizer.flush()
        if self._matcher is not None:
            may_stop = self.num_tokens >= self._min_tokens
            text, is_stopped = self._matcher.push(text, may_stop=may_stop)
            if is_stopped:
                finish_reason = FinishReason.STOP
            elif finish_reason is not None:
                text += self._matcher.flush()
        if not text and finish_reason is None:
            return None
        self.has_finished = finish_reason is not None
        entries: tuple[TokenEntry, ...] = ()
        if self._entries:
            entries = tuple(self._entries)
            self._entries.clear()
        token_ids, self._token_ids = tuple(self._token_ids), []
        stop = None if self._matcher is None else self._matcher.matched
        return Piece(self._choice, text, finish_reason, entries, token_ids, stop)
