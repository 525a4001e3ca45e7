"""One submission of some of a request's outputs: the sink that a session talks to."""

from enum import StrEnum
from typing import Protocol

from common.clock import Timer
from common.errors import PrefillLost, TandemError
from common.messages import GenerateRequest
from common.types import FinishReason, PromptLogprobs, TokenLogprobs
from router.fleet.dispatch import Placement
from router.fleet.recovery import Loss, avoids_decode, avoids_prefill


class Phase(StrEnum):
    NEW = "new"
    SUBMITTED = "submitted"
    ADMITTED = "admitted"
    PREFILLED = "prefilled"
    ENDED = "ended"


LEGAL = {
    Phase.NEW: {Phase.SUBMITTED, Phase.ENDED},
    Phase.SUBMITTED: {Phase.ADMITTED, Phase.PREFILLED, Phase.ENDED},
    Phase.ADMITTED: {Phase.PREFILLED, Phase.ENDED},
    Phase.PREFILLED: {Phase.ENDED},
    Phase.ENDED: set(),
}


class Traveller(Protocol):
    """The journey that a leg belongs to, as far as the leg needs it."""

    @property
    def avoid(self) -> set[str]: ...

    def num_tokens(self, output_indices: list[int]) -> int: ...

    def admitted(self) -> None: ...

    def prefilled(self, num_cached_tokens: int, prompt_logprobs: PromptLogprobs | None) -> None: ...

    def token(
        self,
        output_index: int,
        token_id: int,
        finish_reason: FinishReason | None,
        logprobs: TokenLogprobs | None,
    ) -> None: ...

    def leg_done(self, leg: "Leg") -> bool: ...

    def leg_failed(self, leg: "Leg", error: TandemError, *, at_prefill: bool) -> None: ...


class Leg:
    def __init__(
        self, journey: Traveller, request: GenerateRequest, output_indices: list[int], attempt: int
    ) -> None:
        self.attempt = attempt
        self.request = request
        self.output_indices = output_indices
        self._journey = journey
        self._num_tokens_before = journey.num_tokens(output_indices)
        self._running = set(output_indices)
        self._placement: Placement | None = None
        self._give_up: Timer | None = None
        self._phase = Phase.NEW
        self._has_failed = False

    @property
    def is_placed(self) -> bool:
        return self._phase is not Phase.NEW

    @property
    def placement(self) -> Placement:
        assert self._placement is not None
        return self._placement

    def loss(self, error: TandemError, *, has_begun: bool, at_prefill: bool) -> Loss:
        return Loss(
            error=error,
            attempt=self.attempt,
            num_new_tokens=self._journey.num_tokens(self.output_indices) - self._num_tokens_before,
            has_begun=has_begun,
            was_remote=self.placement.prefill_incarnation is not None,
            at_prefill=at_prefill,
        )

    def suspects(self, loss: Loss) -> list[str]:
        """Incarnations that the next attempt should avoid."""
        found = []
        prefill = self.placement.prefill_incarnation
        if prefill is not None and avoids_prefill(loss):
            found.append(prefill)
        if avoids_decode(loss):
            found.append(self.placement.decode_incarnation)
        return found

    def gives_up_by(self, timer: Timer) -> None:
        """It is cancelled when the leg is placed before it rings."""
        self._give_up = timer

    def _waits_no_more(self) -> None:
        if self._give_up is not None:
            self._give_up.cancel()
            self._give_up = None

    def placed(self, placement: Placement) -> None:
        self._placement = placement
        self._waits_no_more()
        self._move(Phase.SUBMITTED)

    def end(self, *, has_stopped: bool = False) -> None:
        """Idempotent. A worker that is still running outputs of this leg is told to stop."""
        self._waits_no_more()
        if self._phase is not Phase.ENDED:
            self._move(Phase.ENDED)
            if self._placement is not None:
                self._placement.end(
                    is_complete=not self._running,
                    has_failed=self._has_failed,
                    has_stopped=has_stopped,
                )

    def cancel_output(self, output_index: int) -> None:
        """The router has ended this output; the leg's others go on."""
        if output_index in self._running and self._placement is not None:
            self._running.discard(output_index)
            self._placement.cancel_output(output_index)

    # --- Sink -------------------------------------------------------------------------------------

    def admitted(self, num_cached_tokens: int, needs_route: bool) -> None:
        if self._phase is not Phase.SUBMITTED:
            return
        self._move(Phase.ADMITTED)
        self._journey.admitted()
        if self._placement is not None:
            avoid = self._journey.avoid
            if not self._placement.admitted(num_cached_tokens, avoid, needs_route=needs_route):
                self._has_failed = True
                nobody = PrefillLost("there is no prefill worker, and --prefill-where is remote")
                self._journey.leg_failed(self, nobody, at_prefill=False)

    def prefill_done(self, num_cached_tokens: int, prompt_logprobs: PromptLogprobs | None) -> None:
        if self._phase in (Phase.SUBMITTED, Phase.ADMITTED):
            self._prefilled()
            self._journey.prefilled(num_cached_tokens, prompt_logprobs)

    def token(
        self,
        output_index: int,
        token_id: int,
        finish_reason: FinishReason | None,
        logprobs: TokenLogprobs | None,
    ) -> None:
        if self._phase is not Phase.PREFILLED:
            if self._phase is Phase.ENDED:
                return
            self._prefilled()
        if output_index not in self.output_indices:
            return
        if finish_reason is not None:
            self._running.discard(output_index)
        self._journey.token(output_index, token_id, finish_reason, logprobs)
        if finish_reason is not None and self._journey.leg_done(self):
            self.end()

    def failed(self, error: TandemError, *, at_prefill: bool = False) -> None:
        if self._phase is not Phase.ENDED:
            self._has_failed = True
            self._running.clear()
            self._journey.leg_failed(self, error, at_prefill=at_prefill)

    def _prefilled(self) -> None:
        if self._phase is Phase.SUBMITTED:
            self._journey.admitted()
        self._move(Phase.PREFILLED)
        assert self._placement is not None
        self._placement.prefilled()

    def _move(self, to: Phase) -> None:
        assert to in LEGAL[self._phase], (self._phase, to)
        self._phase = to
