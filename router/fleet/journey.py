"""One request from end to end: submit, admitted, route, prefilled, tokens, finish; and again when a
worker is lost.

A journey has legs (router/fleet/leg.py). The first leg carries all outputs of the request. When a
leg fails in a way that a retry can help, every output that has not finished goes on in a leg of its
own: `prompt + tokens so far`, with the original prompt length, on another pair of workers. What the
client sees is a pause; no token is lost or comes twice, because a leg that has failed is never
listened to again.
After `MAX_ATTEMPTS` without progress, or `RECOVERY_S` without a worker, the error stands
(router/fleet/recovery.py decides).

`generation` starts a journey and reads its events; the session calls the legs (they are its sinks).
All of it runs on the event loop and nothing here waits.
"""

import asyncio
import dataclasses
from collections.abc import Callable

from common.clock import Timer, Timers
from common.errors import (
    DeadlineExceeded,
    DecodeFull,
    InternalError,
    NotReady,
    Preempted,
    TandemError,
)
from common.messages import GenerateRequest, pack_tokens
from common.types import FinishReason, PromptLogprobs, TokenLogprobs
from router.fleet.dispatch import Placement, Placing
from router.fleet.leg import Leg
from router.fleet.recovery import RECOVERY_S, Blame, Loss, blame, next_attempt

Event = tuple[int, int, int, FinishReason | None, TokenLogprobs | None]
"""Prompt index, output index, token id, finish reason, logprobs."""


class Inbox:
    """Where the events of all journeys of one client call arrive. One reader, which wakes at most
    once per batch.
    """

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._error: TandemError | None = None
        self._reader: asyncio.Future[None] | None = None

    def put(self, event: Event) -> None:
        self._events.append(event)
        self._wake()

    def fail(self, error: TandemError) -> None:
        """The reader gets what came before, then `error`. The first error stands."""
        if self._error is None:
            self._error = error
            self._wake()

    async def take(self) -> list[Event]:
        """All that has arrived, at least one event. Raises the error that ended a journey."""
        while not self._events:
            if self._error is not None:
                raise self._error
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        events, self._events = self._events, []
        return events

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


@dataclasses.dataclass(slots=True)
class _Output:
    token_ids: list[int] = dataclasses.field(default_factory=list)
    has_finished: bool = False


class Journey:
    def __init__(
        self,
        request: GenerateRequest,
        *,
        prompt_index: int,
        inbox: Inbox,
        dispatcher: Placing,
        clock: Timers,
        on_admitted: Callable[[], None],
    ) -> None:
        self._request = request
        self._prompt_index = prompt_index
        self._inbox = inbox
        self._dispatcher = dispatcher
        self._clock = clock
        self._on_admitted = on_admitted
        self._outputs = [_Output() for _ in range(request.sampling.n)]
        self._legs: list[Leg] = []
        self._num_unfinished = request.sampling.n
        self._num_legs = 0
        self.num_retries = 0
        """Further attempts after a loss or a failure."""
        self.num_preemptions = 0
        self._blamed: list[tuple[Placement, Blame]] = []
        """Whom the request's internal errors were laid to."""
        self._avoid: set[str] = set()
        self._started_at = 0.0
        self._deadline: Timer | None = None
        self._has_ended = False
        self._has_prefilled = False
        self.num_cached_tokens = 0
        self.prompt_logprobs: PromptLogprobs | None = None

    def start(self) -> None:
        """Raises NotReady when there is no worker to begin with."""
        self._started_at = self._clock.now()
        if self._request.deadline_s is not None:
            self._deadline = self._clock.call_later(self._request.deadline_s, self._expire)
        leg = Leg(self, self._request, list(range(len(self._outputs))), attempt=1)
        if not self._place(leg):
            self.stop()
            raise NotReady("no worker is ready to take the request", retry_after_s=1.0)

    def stop(self, *, has_stopped: bool = False) -> None:
        """Ends the journey in whatever phase it is: workers are told, nothing more is reported.
        Idempotent. `has_stopped`: the client has all it asked for.
        """
        self._has_ended = True
        if self._deadline is not None:
            self._deadline.cancel()
        self._dispatcher.do_not_call(self._retry)
        legs, self._legs = self._legs, []
        for leg in legs:
            leg.end(has_stopped=has_stopped)

    def finish_output(self, output_index: int) -> None:
        """The router itself ended this output (a stop string): no more tokens are wanted for it."""
        output = self._outputs[output_index]
        if not output.has_finished:
            output.has_finished = True
            self._num_unfinished -= 1
        if self._num_unfinished == 0:
            self.stop(has_stopped=True)
        for leg in list(self._legs):
            if self.leg_done(leg):
                self._legs.remove(leg)
                leg.end(has_stopped=True)
            else:
                leg.cancel_output(output_index)

    @property
    def avoid(self) -> set[str]:
        """Incarnations that have failed this request."""
        return self._avoid

    # --- from legs --------------------------------------------------------------------------------

    def admitted(self) -> None:
        self._on_admitted()

    def prefilled(self, num_cached_tokens: int, prompt_logprobs: PromptLogprobs | None) -> None:
        if not self._has_prefilled:
            self._has_prefilled = True
            self.num_cached_tokens = min(num_cached_tokens, self._request.num_prompt_tokens)
            self.prompt_logprobs = prompt_logprobs

    def token(
        self,
        output_index: int,
        token_id: int,
        finish_reason: FinishReason | None,
        logprobs: TokenLogprobs | None,
    ) -> None:
        output = self._outputs[output_index]
        if output.has_finished:
            return
        output.token_ids.append(token_id)
        if finish_reason is not None:
            output.has_finished = True
            self._num_unfinished -= 1
        self._inbox.put((self._prompt_index, output_index, token_id, finish_reason, logprobs))
        if self._num_unfinished == 0:
            self.stop()

    def leg_done(self, leg: Leg) -> bool:
        return all(self._outputs[i].has_finished for i in leg.output_indices)

    def leg_failed(self, leg: Leg, error: TandemError, *, at_prefill: bool) -> None:
        self._legs.remove(leg)
        leg.end()
        loss = leg.loss(error, has_begun=self._has_begun, at_prefill=at_prefill)
        self._lay_blame(leg, loss)
        attempt = next_attempt(loss)
        if attempt is None or not self._affords(error):
            self._fail(error)
            return
        if loss.has_progressed:
            self._avoid.clear()
        self._avoid.update(leg.suspects(loss))
        self.num_preemptions += isinstance(error, Preempted)
        legs = self._resume(leg, attempt)
        self.num_retries += 0 if isinstance(error, Preempted) else len(legs)
        self._legs.extend(legs)
        self._retry()
        waiting = [new for new in legs if not new.is_placed]
        if waiting and isinstance(error, DecodeFull | InternalError):
            self._fail(error)
            return
        for new in waiting:
            self._dispatcher.call_on_change(self._retry)
            new.gives_up_by(self._clock.call_later(RECOVERY_S, lambda: self._fail(error)))

    # --- inside -----------------------------------------------------------------------------------

    @property
    def _has_begun(self) -> bool:
        return any(output.token_ids for output in self._outputs)

    def num_tokens(self, output_indices: list[int]) -> int:
        """Generated so far."""
        return sum(len(self._outputs[i].token_ids) for i in output_indices)

    def _lay_blame(self, leg: Leg, loss: Loss) -> None:
        """A request that fails on several workers is itself the reason: then none is to blame."""
        found, placement = blame(loss), leg.placement
        if not isinstance(loss.error, InternalError):
            placement.failed(found)
        elif self._blamed:
            for before, laid in self._blamed:
                before.forgive(laid)
            self._blamed = [(placement, Blame())]
        else:
            placement.failed(found)
            self._blamed.append((placement, found))

    def _affords(self, error: TandemError) -> bool:
        return not isinstance(error, InternalError) or self._dispatcher.may_retry()

    def _resume(self, failed: Leg, attempt: int) -> list[Leg]:
        """Legs that carry on with what `failed` has not finished."""
        unfinished = [i for i in failed.output_indices if not self._outputs[i].has_finished]
        if not self._has_begun:
            return [Leg(self, self._renamed(self._request), unfinished, attempt)]
        return [Leg(self, self._renamed(self._resubmission(i)), [i], attempt) for i in unfinished]

    def _resubmission(self, output_index: int) -> GenerateRequest:
        so_far = pack_tokens(self._outputs[output_index].token_ids)
        return dataclasses.replace(
            self._request,
            token_ids=self._request.token_ids + so_far,
            output_index=output_index,
            sampling=dataclasses.replace(self._request.sampling, n=1, prompt_logprobs=None),
        )

    def _renamed(self, request: GenerateRequest) -> GenerateRequest:
        """The worker may still know the earlier attempt, so each attempt has an id of its own."""
        self._num_legs += 1
        age_s = self._clock.now() - self._started_at
        deadline_s = request.deadline_s
        if deadline_s is not None:
            deadline_s = max(deadline_s - age_s, 0.001)
        return dataclasses.replace(
            request,
            age_s=age_s,
            request_id=f"{self._request.request_id}~{self._num_legs}",
            deadline_s=deadline_s,
        )

    def _retry(self) -> None:
        for leg in self._legs:
            if not leg.is_placed:
                self._place(leg)
        if all(leg.is_placed for leg in self._legs):
            self._dispatcher.do_not_call(self._retry)

    def _place(self, leg: Leg) -> bool:
        placement = self._dispatcher.submit(leg.request, leg, self._avoid)
        if placement is None:
            return False
        leg.placed(placement)
        if leg not in self._legs:
            self._legs.append(leg)
        return True

    def _expire(self) -> None:
        limit = self._request.deadline_s
        self._fail(DeadlineExceeded(f"the request took longer than its limit of {limit:g} s"))

    def _fail(self, error: TandemError) -> None:
        if not self._has_ended:
            self.stop()
            self._inbox.fail(error)
