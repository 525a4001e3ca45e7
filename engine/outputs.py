"""What the runner remembers of each output between steps, as columns, so that a decode step touches
no objects.

A row belongs to one output from its `OutputStart` until it is dropped. `tables[row]` is its block
table (entry 0 an exact page, the others packed); `num_tokens[row]` counts prompt and generated
tokens, the last of which is the next to be fed. On a GPU that one may not have been read yet: then
`unread[row]` says which of the latest step's tokens it is.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.scheduling.plan import OutputStart, PrefillChunk
from common.types import BlockId, OutputKey, SamplingParams, output_seed
from engine.extras import Biases, Extras
from engine.sampler import SamplingRows

FIRST_ROWS = 64
NO_PAGE = -1
READ = -1


@dataclass(slots=True)
class Prompt:
    """Tokens of an output that still has chunks to compute."""

    token_ids: NDArray[np.int32]
    sampling: SamplingParams
    output_index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Outputs that get a token from a step: their rows, where the tokens are among the step's, and
    who had the rows then.
    """

    rows: NDArray[np.int64]
    places: NDArray[np.int64]
    owners: NDArray[np.int64]


class OutputTable:
    def __init__(
        self, *, max_blocks: int, num_packed: int, num_exact: int, vocab_size: int, device: str
    ) -> None:
        self._num_packed = num_packed
        self._num_exact = num_exact
        self._vocab_size = vocab_size
        self._device = device
        self._row_of: dict[OutputKey, int] = {}
        self._free = list(range(FIRST_ROWS - 1, -1, -1))
        self._prompts: dict[int, Prompt] = {}
        self.extras: dict[int, Extras] = {}
        self._biases = Biases()
        self.tables = np.zeros((FIRST_ROWS, max_blocks), dtype=np.int32)
        self.num_blocks = np.zeros(FIRST_ROWS, dtype=np.int32)
        self.tail = np.full(FIRST_ROWS, NO_PAGE, dtype=np.int32)
        self.num_tokens = np.zeros(FIRST_ROWS, dtype=np.int64)
        self.num_prompt_tokens = np.zeros(FIRST_ROWS, dtype=np.int64)
        self.last_token = np.zeros(FIRST_ROWS, dtype=np.int32)
        self.unread = np.full(FIRST_ROWS, READ, dtype=np.int64)
        self._owner = np.zeros(FIRST_ROWS, dtype=np.int64)
        self._num_started = 0
        self.temperature = np.zeros(FIRST_ROWS, dtype=np.float64)
        self.top_k = np.zeros(FIRST_ROWS, dtype=np.int64)
        self.top_p = np.zeros(FIRST_ROWS, dtype=np.float64)
        self.min_p = np.zeros(FIRST_ROWS, dtype=np.float64)
        self.seed = np.zeros(FIRST_ROWS, dtype=np.uint64)
        self.num_logprobs = np.zeros(FIRST_ROWS, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._row_of)

    def __contains__(self, key: OutputKey) -> bool:
        return key in self._row_of

    def row(self, key: OutputKey) -> int:
        return self._row_of[key]

    def rows(self, keys: tuple[OutputKey, ...]) -> NDArray[np.int64]:
        row_of = self._row_of
        return np.array([row_of[key] for key in keys], dtype=np.int64)

    def start(self, start: OutputStart) -> None:
        assert start.key not in self._row_of, f"{start.key} is already started"
        tokens, sampling = np.asarray(start.token_ids, dtype=np.int32), start.sampling
        assert len(tokens) > 0
        assert tokens.min() >= 0
        assert tokens.max() < self._vocab_size
        if not self._free:
            self._grow()
        row = self._free.pop()
        self._row_of[start.key] = row
        self._num_started += 1
        self._owner[row] = self._num_started
        self.unread[row] = READ
        self._set_table(row, start.block_ids)
        self.tail[row] = NO_PAGE
        if start.tail is not None:
            self._set_tail(row, start.tail)
        self.num_tokens[row] = len(tokens)
        self.num_prompt_tokens[row] = start.num_prompt_tokens
        self.last_token[row] = tokens[-1]
        self.temperature[row] = sampling.temperature
        self.top_k[row] = sampling.top_k
        self.top_p[row] = sampling.top_p
        self.min_p[row] = sampling.min_p
        self.seed[row] = output_seed(sampling.seed, start.output_index)
        self.num_logprobs[row] = -1 if sampling.logprobs is None else sampling.logprobs
        prompt, output = tokens[: start.num_prompt_tokens], tokens[start.num_prompt_tokens :]
        if extras := Extras.of(
            sampling, prompt, output, self._vocab_size, self._device, self._biases
        ):
            self.extras[row] = extras
        if not start.block_ids:
            self._prompts[row] = Prompt(tokens, sampling, start.output_index)

    def drop(self, key: OutputKey) -> None:
        """Forget an output. One that never started (aborted before) is no mistake."""
        row = self._row_of.pop(key, None)
        if row is None:
            return
        self._free.append(row)
        self._owner[row] = 0
        self._prompts.pop(row, None)
        self.extras.pop(row, None)

    def place_chunk(self, chunk: PrefillChunk) -> tuple[int, NDArray[np.int32]]:
        """Take over a chunk's table; its row and its tokens."""
        row = self._row_of[chunk.key]
        self._set_table(row, chunk.block_ids)
        if chunk.tail is not None:
            self._set_tail(row, chunk.tail)
        return row, self._prompts[row].token_ids[chunk.start : chunk.start + chunk.num_tokens]

    def append_block(self, key: OutputKey, block_id: BlockId) -> None:
        row = self._row_of[key]
        assert 0 <= block_id < self._num_packed, f"{key} grows by block {block_id}"
        self.tables[row, self.num_blocks[row]] = block_id
        self.num_blocks[row] += 1

    def give_tail(self, key: OutputKey, block_id: BlockId) -> None:
        self._set_tail(self._row_of[key], block_id)

    def scored(self, chunk: PrefillChunk) -> tuple[NDArray[np.int32], int] | None:
        """The prompt tokens that the chunk's rows predict, and how many alternatives are wanted for
        each; None when none are.
        """
        prompt = self._prompts[self._row_of[chunk.key]]
        num_top = prompt.sampling.prompt_logprobs
        if num_top is None:
            return None
        return prompt.token_ids[chunk.start + 1 : chunk.start + chunk.num_tokens + 1], num_top

    def first_seeds(self, chunk: PrefillChunk) -> list[int]:
        """Seeds of the first tokens that a prompt's last chunk yields."""
        prompt = self._prompts[self._row_of[chunk.key]]
        return [
            output_seed(prompt.sampling.seed, prompt.output_index + i)
            for i in range(chunk.num_outputs)
        ]

    def sampling_rows(self, rows: NDArray[np.int64], seeds: NDArray[np.uint64]) -> SamplingRows:
        extras = {}
        if self.extras:
            extras = {
                i: self.extras[row] for i, row in enumerate(rows.tolist()) if row in self.extras
            }
        return SamplingRows(
            temperature=self.temperature[rows],
            top_k=self.top_k[rows],
            top_p=self.top_p[rows],
            min_p=self.min_p[rows],
            seed=seeds,
            position=self.num_tokens[rows],
            num_output_tokens=self.num_tokens[rows] - self.num_prompt_tokens[rows],
            num_logprobs=self.num_logprobs[rows],
            extras=extras,
        )

    def sampled(self, rows: NDArray[np.int64], places: NDArray[np.int64]) -> "Sampling":
        """These outputs (each row once) have one more token, which is on its way: that at `places`
        among the step's tokens. `record` must follow.
        """
        self.num_tokens[rows] += 1
        self.unread[rows] = places
        return Sampling(rows=rows, places=places, owners=self._owner[rows])

    def record(
        self, sampling: "Sampling", token_ids: NDArray[np.int64], is_finite: NDArray[np.bool_]
    ) -> NDArray[np.int64]:
        """The step's tokens; the places of those that were taken. Outputs that were dropped
        meanwhile, and those whose token means nothing, stay as they are.
        """
        is_kept = (self._owner[sampling.rows] == sampling.owners) & is_finite[sampling.places]
        rows: NDArray[np.int64] = sampling.rows[is_kept]
        places: NDArray[np.int64] = sampling.places[is_kept]
        self.last_token[rows] = token_ids[places]
        self.unread[rows] = READ
        if self._prompts or self.extras:
            for row, token_id in zip(rows.tolist(), token_ids[places].tolist(), strict=True):
                self._prompts.pop(row, None)
                if row in self.extras:
                    self.extras[row].record(token_id)
        return places

    def _set_tail(self, row: int, block_id: BlockId) -> None:
        assert 0 <= block_id < self._num_exact, f"exact page {block_id} as a tail"
        self.tail[row] = block_id

    def _set_table(self, row: int, block_ids: tuple[BlockId, ...]) -> None:
        """Kernels follow these ids without looking, so a wrong one must end here."""
        if block_ids:
            assert 0 <= block_ids[0] < self._num_exact, f"exact page {block_ids[0]} as block 0"
        if len(block_ids) > 1:
            assert min(block_ids[1:]) >= 0
            assert max(block_ids[1:]) < self._num_packed
        self.tables[row, : len(block_ids)] = block_ids
        self.num_blocks[row] = len(block_ids)

    def _grow(self) -> None:
        rows = len(self.tail)
        for name, column in vars(self).items():
            if isinstance(column, np.ndarray):
                setattr(self, name, _doubled(column))
        self._free.extend(range(2 * rows - 1, rows - 1, -1))


def _doubled(column: NDArray[Any]) -> NDArray[Any]:
    return np.concatenate([column, np.zeros_like(column)])
