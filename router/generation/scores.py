"""Log-probabilities of prompts, and prompts that an answer repeats (`echo`)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from common.types import PromptLogprobs, TokenLogprobs
from router.generation.options import Options
from router.reading.side_threads import SideThreads
from router.text.text_output import Piece, TokenEntry

LARGE_SCORES = 4096
"""From so many on they are put together, and written, in a thread."""


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A prompt token's log-probability, its rank (from 1) and the most likely alternatives."""

    logprobs: TokenLogprobs
    rank: int


PromptEntry = ScoredToken | None


def prompt_entries(scores: PromptLogprobs) -> list[ScoredToken]:
    logprobs = np.frombuffer(scores.logprobs, dtype="<f4").tolist()
    ranks = np.frombuffer(scores.ranks, dtype="<i4").tolist()
    shape = (len(logprobs), scores.num_top)
    top_ids = np.frombuffer(scores.top_ids, dtype="<i4").reshape(shape).tolist()
    top_logprobs = np.frombuffer(scores.top_logprobs, dtype="<f4").reshape(shape).tolist()
    return [
        ScoredToken(
            TokenLogprobs(logprob=own, top_ids=tuple(ids), top_logprobs=tuple(values)), rank
        )
        for own, rank, ids, values in zip(logprobs, ranks, top_ids, top_logprobs, strict=True)
    ]


def num_scores(pieces: Sequence[Piece], options: Options, num_prompt_tokens: int) -> int:
    """How many scores an answer of these pieces shows, about."""
    sampling = options.sampling
    num_tokens = 0
    if sampling.logprobs is not None:
        num_tokens += sum(len(piece.entries) for piece in pieces)
    if options.prompt_logprobs is not None:
        num_tokens += num_prompt_tokens * sampling.n
    return num_tokens * (1 + max(sampling.logprobs or 0, sampling.prompt_logprobs or 0))


class PromptScores:
    """The scores of one prompt, and the prompt as an answer's first piece, for all its outputs."""

    def __init__(
        self, ids: list[int], text: str | None, found: Callable[[], PromptLogprobs | None]
    ) -> None:
        """`text`: as the client wrote it. `found` gives what a worker has said so far."""
        self.ids = ids
        self.text = text
        self._found = found
        self._entries: list[PromptEntry] | None = None
        self._echo: tuple[str, tuple[TokenEntry, ...]] | None = None

    @property
    def entries(self) -> list[PromptEntry]:
        """For each token of the prompt, once a token has come; the first one has none."""
        if self._entries is None:
            found = self._found()
            if found is None:
                return []
            self._entries = [None, *prompt_entries(found)]
        return self._entries

    async def echo(
        self,
        choice: int,
        num_top: int | None,
        decode: Callable[[list[int]], str],
        threads: SideThreads,
    ) -> Piece:
        if self._echo is None:
            is_large = len(self.ids) * (1 + (num_top or 0)) >= LARGE_SCORES
            self._echo = await threads.run_if(is_large, lambda: self._echoed(num_top, decode))
        text, entries = self._echo
        return Piece(choice, text, None, entries)

    def _echoed(
        self, num_top: int | None, decode: Callable[[list[int]], str]
    ) -> tuple[str, tuple[TokenEntry, ...]]:
        text = decode(self.ids) if self.text is None else self.text
        if num_top is None:
            return text, ()
        scores = [
            None if entry is None else entry.logprobs.first(num_top) for entry in self.entries
        ]
        return text, tuple(zip(self.ids, scores, strict=True))
