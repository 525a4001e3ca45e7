"""Whether a request that a worker has failed is tried again, and whose fault it was: pure
decisions. `journey` carries them out.

Attempts count since the last progress. A worker that leaves on purpose (`Draining`) or makes room
(`Preempted`) costs no attempt, so rolling restarts of any length end no stream. An internal error
is tried elsewhere only while nothing was generated, and within the fleet's `RetryBudget`.
"""

from dataclasses import dataclass

from common.errors import (
    DecodeFull,
    DecodeLost,
    Draining,
    InternalError,
    LayoutMismatch,
    PageRefused,
    Preempted,
    PrefillLost,
    PullFailed,
    TandemError,
)

MAX_ATTEMPTS = 3
RECOVERY_S = 10.0
"""Without a worker, counted from the latest loss."""
PROGRESS_TOKENS = 4
"""So many new tokens are progress: attempts and suspicions begin anew. (A request that ends its
worker at a certain token makes one more with each attempt.)
"""

_PLANNED = (Draining, Preempted)
_HANDOFF = (PrefillLost, PullFailed, PageRefused, LayoutMismatch)
_RECOVERABLE = (*_PLANNED, *_HANDOFF, DecodeLost, DecodeFull)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A leg has failed. `attempt` is its number, `num_new_tokens` what it has generated."""

    error: TandemError
    attempt: int
    num_new_tokens: int
    has_begun: bool
    """The request has tokens, of this leg or of earlier ones."""
    was_remote: bool
    """A prefill worker was computing its prompt, or had computed it."""
    at_prefill: bool = False
    """The decode worker says that the error is the prefill worker's."""

    @property
    def has_progressed(self) -> bool:
        return self.num_new_tokens >= PROGRESS_TOKENS


@dataclass(frozen=True, slots=True)
class Blame:
    """What a loss counts against the two workers, in failures (router/fleet/breaker.py)."""

    decode: float = 0.0
    prefill: float = 0.0


def next_attempt(loss: Loss) -> int | None:
    """The number of the attempt that follows; None when the error stands."""
    before = 0 if loss.has_progressed else loss.attempt
    if isinstance(loss.error, InternalError):
        return None if loss.has_begun or before + 1 > MAX_ATTEMPTS else before + 1
    if isinstance(loss.error, _PLANNED):
        return max(1, before)
    if not isinstance(loss.error, _RECOVERABLE) or before + 1 > MAX_ATTEMPTS:
        return None
    return before + 1


def avoids_prefill(loss: Loss) -> bool:
    """Whether the next attempt should go to another prefill worker."""
    return loss.was_remote and (loss.at_prefill or isinstance(loss.error, _HANDOFF))


def avoids_decode(loss: Loss) -> bool:
    """Whether the next attempt should go to another decode worker. One that was lost is not in the
    fleet any more.
    """
    if isinstance(loss.error, DecodeFull):
        return True
    return isinstance(loss.error, Draining | InternalError) and not avoids_prefill(loss)


def blame(loss: Loss) -> Blame:
    """A failed hand-off is more likely the prefill worker's fault: it has more to do in it. A
    decode worker whose every hand-off fails comes to its turn. A pair that does not fit together is
    nobody's failure.
    """
    if isinstance(loss.error, LayoutMismatch):
        return Blame()
    if isinstance(loss.error, InternalError):
        if loss.at_prefill:
            return Blame(prefill=1.0)
        return Blame(decode=1.0, prefill=0.5 if loss.was_remote else 0.0)
    if isinstance(loss.error, _HANDOFF):
        return Blame(decode=0.5, prefill=1.0) if loss.was_remote else Blame()
    return Blame()
