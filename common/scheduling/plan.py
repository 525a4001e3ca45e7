"""The decision for one forward pass, and what came of it.

A scheduler makes a `StepPlan`; the runner executes it and returns a `StepResult`; the scheduler
applies that. A plan names everything decided, so it can be printed, asserted on and replayed.

Where KV lives (see common/pages.py). A request's *block table* lists its blocks in order: entry 0
is the id of an **exact** page (block 0 is read exact for ever), every later entry the id of a
**packed** page. The block that is still open is written to the request's *tail*, an exact page, and
sealed into its packed page once, when its last token is written. While block 0 is the open block
there is no tail: block 0's own exact page takes the tokens. So a request holds at most two exact
pages.

Order inside one step: drops, clears, copies, starts, growth and tails, the forward pass (store,
seal, attend), tags; then logits and samples.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from common.errors import GrammarFailed, InternalError, TandemError
from common.pages import PageKind
from common.types import BlockId, OutputKey, PromptLogprobs, SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputStart:
    """The runner begins to keep state for an output: its tokens, its sampling state, its table.

    `token_ids` [num_tokens] int32 holds the prompt and everything generated so far.
    `num_prompt_tokens` is the original prompt length; it stays the same over resubmissions, so that
    penalties and limits do not shift. When KV was computed elsewhere, `block_ids` and `tail` hold
    it already, and the last token of `token_ids` is the next one to be fed. For an output that
    begins with a chunk they are empty; the chunk brings the table.
    """

    key: OutputKey
    token_ids: NDArray[np.int32]
    num_prompt_tokens: int
    sampling: SamplingParams
    output_index: int = 0
    block_ids: tuple[BlockId, ...] = ()
    tail: BlockId | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillChunk:
    """Consecutive prompt tokens computed in this step.

    `start` is the position of the first one; it is a multiple of the block size. `block_ids` is the
    table up to the last block that the chunk touches. `tail` is set when the chunk leaves a block
    other than block 0 open. `num_outputs` > 0 marks the last chunk: that many first tokens are
    sampled, for output indices `output_index`, `output_index + 1`, ...; the first of them continues
    under `key`.
    """

    key: OutputKey
    start: int
    num_tokens: int
    block_ids: tuple[BlockId, ...]
    tail: BlockId | None = None
    num_outputs: int = 0


class TagOrder(NamedTuple):
    """Write the tag and checksum of a finished page, so that another process may read and believe
    it.
    """

    kind: PageKind
    block_id: BlockId
    content_hash: bytes
    num_tokens: int
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One forward pass. `decodes` are columns: one new token for each key, fed with its last
    token.
    """

    step: int
    starts: tuple[OutputStart, ...] = ()
    chunks: tuple[PrefillChunk, ...] = ()
    decodes: tuple[OutputKey, ...] = ()
    grown: tuple[tuple[OutputKey, BlockId], ...] = ()
    """Block table entries appended in this step: the packed page that the open block will be sealed
    into.
    """
    tails: tuple[tuple[OutputKey, BlockId], ...] = ()
    """Tails given in this step to outputs whose block 1 opens."""
    copies: tuple[tuple[BlockId, BlockId], ...] = ()
    """(source, destination) exact pages copied before the pass: outputs of one prompt part ways."""
    clears: tuple[tuple[PageKind, BlockId], ...] = ()
    """Pages whose old tag is erased before anything is written to them."""
    tags: tuple[TagOrder, ...] = ()
    drops: tuple[OutputKey, ...] = ()
    """Outputs the runner forgets (before the pass; their pages may already belong to others)."""

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + sum(chunk.num_tokens for chunk in self.chunks)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Columns over sampled tokens: the outputs of each finished prompt in chunk order, then the
    decodes in order.

    A prompt with `num_outputs` > 1 appears that many times under the chunk's key, in output order.
    `failed` names outputs whose logits were not finite, or whose grammar gave up; they have no row
    in the columns.
    """

    step: int
    keys: tuple[OutputKey, ...] = ()
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    failed: tuple[OutputKey, ...] = ()
    failed_grammars: tuple[tuple[OutputKey, str], ...] = ()
    """Those of `failed` whose grammar gave up, and why."""
    prompt_logprobs: tuple[tuple[OutputKey, PromptLogprobs], ...] = ()
    """For each chunk whose request asks for them."""
    slow_masks: tuple[tuple[OutputKey, float], ...] = ()
    """Seconds that one mask took, for outputs whose grammars are slow."""
    mask_wait_s: float = 0.0
    """Part of `duration_s` in which the device waited for masks."""
    duration_s: float = 0.0

    @property
    def not_finite(self) -> tuple[OutputKey, ...]:
        """Outputs for which the model gave no usable numbers."""
        grammars = {key for key, _ in self.failed_grammars}
        return tuple(key for key in self.failed if key not in grammars)

    def failure(self, key: OutputKey) -> TandemError:
        """Why an output of `failed` has failed."""
        for name, reason in self.failed_grammars:
            if name == key:
                return GrammarFailed.because(reason)
        return InternalError("the model's output is not finite for this request")


@dataclass(frozen=True, slots=True)
class ForeignPages:
    """Exact pages of another codec than this worker's, and what their tags say of it."""

    codec: str
    fingerprint: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LandingMove:
    """Check the page in a landing slot against what it must be, and copy it into the pool. With
    `heads`, their records only: the others are there already. A page that is `foreign` is converted
    on the way; `block` is its number among its request's blocks.
    """

    kind: PageKind
    slot: int
    block_id: BlockId
    content_hash: bytes
    num_tokens: int
    incarnation: int
    generation: int
    heads: tuple[int, ...] = ()
    block: int = 0
    foreign: ForeignPages | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Records of these KV heads are not what they must be, and were not copied; those of other
    heads are in the pool. `reason` is the first one's.
    """

    heads: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LandingResult:
    """For each move, None when all of it is in the pool."""

    refusals: Sequence[Refused | None]
