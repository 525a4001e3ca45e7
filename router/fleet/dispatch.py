"""Places requests on workers: joins the fleet, the policy and the open sessions.

`journey` submits through `Dispatcher` and gets a `Placement`, its handle on the request at one
decode worker. `discovery` tells it which sessions are open and calls `fleet_changed` so that
journeys which wait for a worker go on. What was chosen, and how well the time to the first token
was foreseen, is told to a `RouteTally` (router/fleet/metrics.py).
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Protocol

from common.clock import MonotonicClock, Timers
from common.errors import DecodeLost
from common.messages import GenerateRequest
from router.fleet.breaker import RetryBudget
from router.fleet.fleet import Expected, Fleet
from router.fleet.metrics import RouteTally
from router.fleet.predict import Demand
from router.fleet.prompt_hashes import HashBook, PromptHashes
from router.fleet.recovery import Blame
from router.fleet.routing import PrefillChoice, RoutingPolicy
from router.fleet.session import Session, Sink
from router.fleet.worker import Worker


class Placing(Protocol):
    """What a journey needs of the dispatcher."""

    async def prepare(self, token_ids: bytes, salt: str) -> None: ...

    def submit(
        self, request: GenerateRequest, sink: Sink, avoid: Collection[str]
    ) -> "Placement | None": ...

    def may_retry(self) -> bool:
        """Whether the fleet affords another try after an internal error, which then counts."""
        ...

    def call_on_change(self, callback: Callable[[], None]) -> None: ...

    def do_not_call(self, callback: Callable[[], None]) -> None: ...


@dataclass(slots=True)
class Context:
    """What placing requests needs."""

    fleet: Fleet
    policy: RoutingPolicy
    book: HashBook
    tally: RouteTally
    clock: Timers
    retries: RetryBudget = field(default_factory=RetryBudget)


class Dispatcher:
    def __init__(
        self,
        fleet: Fleet,
        policy: RoutingPolicy,
        *,
        tally: RouteTally | None = None,
        clock: Timers | None = None,
    ) -> None:
        self._context = Context(
            fleet=fleet,
            policy=policy,
            book=HashBook(fleet),
            tally=tally or RouteTally(),
            clock=clock or MonotonicClock(),
        )
        self._sessions: dict[str, Session] = {}
        self._waiting: dict[Callable[[], None], None] = {}

    # --- from discovery ---------------------------------------------------------------------------

    def session_opened(self, incarnation: str, session: Session) -> None:
        self._sessions[incarnation] = session

    def session_closed(self, incarnation: str) -> None:
        self._sessions.pop(incarnation, None)

    def session(self, incarnation: str) -> Session | None:
        """The open one with that life of a worker."""
        return self._sessions.get(incarnation)

    def fleet_changed(self) -> None:
        for callback in list(self._waiting):
            callback()

    # --- from journeys ----------------------------------------------------------------------------

    async def prepare(self, token_ids: bytes, salt: str) -> None:
        """May be called before `submit`: what takes long with a large prompt is done then."""
        await self._context.book.prepare(token_ids, salt)

    def submit(
        self, request: GenerateRequest, sink: Sink, avoid: Collection[str]
    ) -> "Placement | None":
        """None when no worker can take it now."""
        context = self._context
        candidates = context.fleet.decode_workers(avoid)
        if not candidates:
            return None
        num_tokens = len(request.token_ids) // 4
        hashes = context.book.hashes(request)
        demand = Demand(
            num_tokens=num_tokens,
            max_tokens=request.sampling.max_tokens + request.num_prompt_tokens - num_tokens,
            num_outputs=request.sampling.n,
            cached_tokens=context.book.hits(hashes) if len(candidates) > 1 else {},
        )
        prefill = context.fleet.all_prefill_workers(num_tokens, avoid)
        worker = context.policy.choose_decode(candidates, demand, prefill)
        if worker is None:
            return None
        session = self.session(worker.state.incarnation)
        if session is None:
            return None
        try:
            session.submit(request, sink, shares=worker.state.shares_parameters)
        except DecodeLost:
            return None
        context.fleet.place(worker)
        context.retries.accepted()
        return Placement(context, session, worker, request, demand, hashes)

    def may_retry(self) -> bool:
        return self._context.retries.take(self._context.clock.now())

    def call_on_change(self, callback: Callable[[], None]) -> None:
        self._waiting[callback] = None

    def do_not_call(self, callback: Callable[[], None]) -> None:
        self._waiting.pop(callback, None)


@dataclass(slots=True, eq=False)
class Placement:
    """A request at a decode worker and, from `route` to `prefilled`, at a prefill worker."""

    _context: Context
    _session: Session
    _worker: Worker
    _request: GenerateRequest
    _demand: Demand
    _hashes: list[PromptHashes]
    _prefill: Worker | None = None
    _routed: Worker | None = None
    """The prefill worker, also after it has computed the prompt."""
    _expected: Expected | None = None
    _prediction: tuple[float, float] | None = None
    """When it was made, and how long until the first token."""
    _has_ended: bool = False

    @property
    def decode_incarnation(self) -> str:
        return self._worker.state.incarnation

    @property
    def prefill_incarnation(self) -> str | None:
        """Also after it has computed the prompt."""
        return None if self._routed is None else self._routed.state.incarnation

    def admitted(
        self, num_cached_tokens: int, avoid: Collection[str], *, needs_route: bool
    ) -> bool:
        """The decode worker has room, and has `num_cached_tokens` of the prompt. If it asks, it is
        told where the rest is computed; with no prefill worker at hand that is itself. False when
        that is forbidden.
        """
        self._context.tally.hit("decode", num_cached_tokens)
        if not needs_route:
            self._begun(self._worker, num_cached_tokens)
            return True
        choice = self._choose_prefill(num_cached_tokens, avoid)
        if choice.predicted_s is not None:
            self._prediction = (self._context.clock.now(), choice.predicted_s)
        request_id, prefill = self._request.request_id, choice.worker
        if prefill is None:
            if self._context.fleet.is_remote_only:
                return False
            self._begun(self._worker, num_cached_tokens)
            self._session.route(request_id, None, None)
            return True
        self._prefill = self._routed = prefill
        self._context.fleet.place(prefill)
        held = self._demand.cached_tokens.get(prefill.order, 0)
        self._context.tally.hit("prefill", held)
        self._begun(prefill, held)
        self._session.route(request_id, prefill.address, prefill.state.incarnation)
        return True

    def _choose_prefill(self, num_cached_tokens: int, avoid: Collection[str]) -> PrefillChoice:
        """With fresh loads and hits: the request may have waited for room since it was placed."""
        context = self._context
        cached = {**context.book.hits(self._hashes), self._worker.order: num_cached_tokens}
        self._demand = replace(self._demand, cached_tokens=cached)
        num_tokens = self._demand.num_tokens
        candidates = context.fleet.prefill_workers(self._worker, num_tokens, avoid)
        if not candidates and context.fleet.is_remote_only:
            candidates = context.fleet.prefill_workers(self._worker, num_tokens)
        return context.policy.choose_prefill(self._worker, candidates, self._demand)

    def _begun(self, worker: Worker, num_cached_tokens: int) -> None:
        self._context.tally.prefill_begun(is_local=worker is self._worker)
        num_left = max(0, self._demand.num_tokens - num_cached_tokens)
        self._expected = self._context.fleet.expect(worker, num_left)

    def prefilled(self) -> None:
        """The first token is there."""
        if self._prediction is not None:
            asked_at, predicted_s = self._prediction
            self._prediction = None
            self._context.tally.first_token(predicted_s, self._context.clock.now() - asked_at)
        self._leave_prefill()

    def _leave_prefill(self) -> None:
        if self._expected is not None:
            self._context.fleet.computed(self._expected)
            self._expected = None
        if self._prefill is not None:
            self._context.fleet.release(self._prefill)
            self._prefill = None
        self._hashes = []

    def failed(self, blame: Blame) -> None:
        """The request has failed here."""
        self._context.fleet.failed(self._worker, blame.decode)
        if self._routed is not None:
            self._context.fleet.failed(self._routed, blame.prefill)

    def forgive(self, blame: Blame) -> None:
        """It fails elsewhere too: the workers are not to blame."""
        self._context.fleet.forgive(self._worker, blame.decode)
        if self._routed is not None:
            self._context.fleet.forgive(self._routed, blame.prefill)

    def cancel_output(self, output_index: int) -> None:
        self._session.cancel_output(self._request.request_id, output_index)

    def end(
        self, *, is_complete: bool, has_failed: bool = False, has_stopped: bool = False
    ) -> None:
        """The request is over here. If it is not complete the worker must stop. Idempotent."""
        if self._has_ended:
            return
        self._has_ended = True
        self._leave_prefill()
        self._context.fleet.release(self._worker)
        if (is_complete and not has_failed) or has_stopped:
            self._succeeded()
        if is_complete:
            self._session.forget(self._request.request_id)
        else:
            self._session.cancel(self._request.request_id, has_stopped=has_stopped)

    def _succeeded(self) -> None:
        self._context.fleet.succeeded(self._worker)
        if self._routed is not None:
            self._context.fleet.succeeded(self._routed)
