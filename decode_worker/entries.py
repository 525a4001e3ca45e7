"""What the batch scheduler knows of a request: its state, its outputs, and what it tells of them.

Entry (a request) -> Output (a continuation with a block table of its own); `LEGAL` has the moves
Facts: what the scheduler tells the core
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np
from numpy.typing import NDArray

from common.errors import TandemError
from common.messages import GenerateRequest, PrefillDone, TokenBatch
from common.pages import PageKind
from common.scheduling.block_hash import HashChain
from common.scheduling.kv_cache import BlockTable
from common.types import (
    BlockId,
    FinishReason,
    OutputKey,
    PromptLogprobs,
    RequestId,
    TokenLogprobs,
)


class State(Enum):
    WAITING = auto()
    ADMITTED = auto()
    REMOTE = auto()
    LOCAL = auto()
    RUNNING = auto()
    ENDED = auto()


LEGAL = {
    State.WAITING: {State.ADMITTED, State.ENDED},
    State.ADMITTED: {State.REMOTE, State.LOCAL, State.ENDED},
    State.REMOTE: {State.RUNNING, State.ENDED},
    State.LOCAL: {State.RUNNING, State.ENDED},
    State.RUNNING: {State.ENDED},
    State.ENDED: set(),
}


@dataclass(slots=True)
class Facts:
    """What a step, or the arrival of first tokens, came to. Token columns as in `TokenBatch`."""

    request_ids: list[RequestId] = field(default_factory=list)
    output_indices: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reasons: list[FinishReason | None] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    prefilled: list[PrefillDone] = field(default_factory=list)
    """Requests whose prompt is computed now."""
    failed: list[tuple[RequestId, TandemError]] = field(default_factory=list)
    ended: list[RequestId] = field(default_factory=list)
    """Requests that the scheduler has forgotten, for whatever reason."""

    def batch(self, rows: list[int]) -> TokenBatch:
        logprobs = [self.logprobs[row] for row in rows]
        return TokenBatch(
            request_ids=tuple([self.request_ids[row] for row in rows]),
            output_indices=tuple([self.output_indices[row] for row in rows]),
            token_ids=tuple([self.token_ids[row] for row in rows]),
            finish_reasons=tuple([self.finish_reasons[row] for row in rows]),
            logprobs=tuple(logprobs) if any(item is not None for item in logprobs) else (),
        )


@dataclass(slots=True, eq=False)
class Output:
    """One continuation: its table, its chain of hashes, the tokens generated since the chain's
    end.
    """

    key: OutputKey
    entry: "Entry"
    index: int
    table: BlockTable
    chain: HashChain
    num_tokens: int
    """Tokens known, the last one not computed yet."""
    copy: tuple[BlockId, BlockId] | None = None
    last_tokens: list[int] = field(default_factory=list)
    is_started: bool = False
    has_ended: bool = False


@dataclass(slots=True, eq=False)
class Entry:
    request: GenerateRequest
    token_ids: NDArray[np.int32]
    chain: HashChain
    arrival: float
    order: tuple[int, float, int]
    state: State = State.WAITING
    table: BlockTable | None = None
    num_cached_tokens: int = 0
    outputs: list[Output] = field(default_factory=list)
    has_first_tokens: bool = False
    has_landed: bool = False
    has_place: bool = True
    """Its outputs count among those that run; not while its prompt is long under way."""
    num_pins: int = 0
    """Landings in flight that name the prompt's blocks."""
    dead_tables: list[BlockTable] = field(default_factory=list)

    def move(self, state: State) -> None:
        assert state in LEGAL[self.state], f"{self.state} -> {state}"
        self.state = state

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def most_tokens(self) -> int:
        """Of an output and its prompt, when the output reaches its limit."""
        return self.request.num_prompt_tokens + self.request.sampling.max_tokens

    def prefilled(self, num_cached_tokens: int, logprobs: PromptLogprobs | None) -> PrefillDone:
        return PrefillDone(
            request_id=self.request.request_id,
            num_cached_tokens=num_cached_tokens,
            prompt_logprobs=logprobs,
        )

    # --- in line, see common/scheduling/fair_line.py

    @property
    def client(self) -> str:
        return self.request.client

    @property
    def priority(self) -> int:
        return self.request.priority

    @property
    def place(self) -> tuple[float, int]:
        """Oldest first."""
        return self.order[1:]

    @property
    def cost(self) -> int:
        return self.num_tokens - self.num_cached_tokens

    def pages(self) -> Iterable[tuple[PageKind, BlockId]]:
        for output in self.outputs:
            yield from output.table.pages()
