"""What few outputs ask of the sampler beside a temperature and filters: biases, bad words, minimum
lengths and penalties, and what they have to remember for that.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.types import SamplingParams
from engine.transfers import sent

NUM_LATEST_BIASES = 4
"""Kept on the device without an output that uses them."""


@dataclass(slots=True, weakref_slot=True, eq=False)
class Bias:
    """A bias on the device, shared by all outputs whose parameters are the same object."""

    given: tuple[tuple[int, float], ...]
    ids: Tensor
    values: Tensor

    @staticmethod
    def of(given: tuple[tuple[int, float], ...], vocab_size: int, place: torch.device) -> "Bias":
        pairs = np.array(given, dtype=np.float64).reshape(-1, 2)
        pairs = pairs[(pairs[:, 0] >= 0) & (pairs[:, 0] < vocab_size)]
        return Bias(
            given,
            sent(pairs[:, 0].astype(np.int64), place),
            sent(pairs[:, 1].astype(np.float32), place),
        )


class Biases:
    """Those that outputs use, by the identity of what the request holds; the latest few also when
    nobody does, since a prefill worker computes one prompt after the other.
    """

    def __init__(self) -> None:
        self._known: WeakValueDictionary[int, Bias] = WeakValueDictionary()
        self._latest: deque[Bias] = deque(maxlen=NUM_LATEST_BIASES)

    def __len__(self) -> int:
        return len(self._known)

    def of(
        self, given: tuple[tuple[int, float], ...], vocab_size: int, place: torch.device
    ) -> Bias:
        found = self._known.get(id(given))
        if found is None:
            found = self._known[id(given)] = Bias.of(given, vocab_size, place)
            self._latest.append(found)
        return found


@dataclass(slots=True)
class Extras:
    """What only some requests ask for: bias, bad words, minimum length, penalties. One per such
    output.
    """

    params: SamplingParams
    bias: Bias
    stop_ids: Tensor
    in_prompt: Tensor | None = None
    """[vocab] bool; kept only with a repetition penalty."""
    output_counts: Tensor | None = None
    """[vocab] float32; kept only with penalties."""
    recent: list[int] = field(default_factory=list)
    """The last tokens of the output, as many as bad words look back."""

    @classmethod
    def of(
        cls,
        params: SamplingParams,
        prompt: NDArray[np.int32],
        output: NDArray[np.int32],
        vocab_size: int,
        device: str,
        biases: "Biases | None" = None,
    ) -> "Extras | None":
        """None for a request that asks for nothing of this kind."""
        has_penalties = bool(
            params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty
        )
        if not (has_penalties or params.logit_bias or params.min_tokens or params.bad_words):
            return None

        place = torch.device(device)

        def ids(values: Sequence[int]) -> Tensor:
            return sent(np.array([v for v in values if 0 <= v < vocab_size], dtype=np.int64), place)

        extras = cls(
            params=params,
            bias=(Biases() if biases is None else biases).of(params.logit_bias, vocab_size, place),
            stop_ids=ids(params.stop_token_ids),
        )
        extras._remember(output.tolist())
        if has_penalties:
            counts = np.bincount(output, minlength=vocab_size).astype(np.float32)
            extras.output_counts = sent(counts, place)
            seen = np.zeros(vocab_size, dtype=bool)
            seen[prompt] = True
            extras.in_prompt = sent(seen, place)
        return extras

    def record(self, token_id: int) -> None:
        self._remember([token_id])
        if self.output_counts is not None:
            self.output_counts[token_id] += 1

    def apply(self, row: Tensor, num_output_tokens: int) -> None:
        """Change one row of logits [vocab] in place."""
        if num_output_tokens < self.params.min_tokens and len(self.stop_ids):
            row[self.stop_ids] = -torch.inf
        if self.params.bad_words:
            self._ban(row)
        if len(self.bias.ids):
            row.index_add_(0, self.bias.ids, self.bias.values)
        if self.output_counts is not None and self.in_prompt is not None:
            self._penalise(row, self.output_counts, self.in_prompt)

    def _remember(self, token_ids: list[int]) -> None:
        if self.params.bad_words:
            longest = max(map(len, self.params.bad_words))
            self.recent = [*self.recent, *token_ids][-longest:]

    def _ban(self, row: Tensor) -> None:
        for *before, last in self.params.bad_words:
            if self.recent[len(self.recent) - len(before) :] == before and last < len(row):
                row[last] = -torch.inf

    def _penalise(self, row: Tensor, counts: Tensor, in_prompt: Tensor) -> None:
        appeared = counts > 0
        if self.params.repetition_penalty != 1.0:
            factor = self.params.repetition_penalty
            penalised = torch.where(row > 0, row / factor, row * factor)
            row.copy_(torch.where(appeared | in_prompt, penalised, row))
        row -= self.params.frequency_penalty * counts
        row -= self.params.presence_penalty * appeared
