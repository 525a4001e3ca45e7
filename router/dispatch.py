"""Places requests on workers: joins the fleet, the policy and the open sessions.

`journey` submits through `Dispatcher` and gets a `Placement`, its handle on the request at one
decode worker. `discovery` tells it which sessions are open and calls `fleet_changed` so that
journeys which wait for a worker go on.
"""

from collections.abc import Callable, Collection
from typing import Protocol

from common.errors import DecodeLost
from common.messages import GenerateRequest
from router.fleet import Fleet, Worker
from router.routing import RoutingPolicy
from router.session import Session, Sink


class Placing(Protocol):
    """What a journey needs of the dispatcher."""

    def submit(
        self, request: GenerateRequest, sink: Sink, avoid: Collection[str]
    ) -> "Placement | None": ...

    def call_on_change(self, callback: Callable[[], None]) -> None: ...

    def do_not_call(self, callback: Callable[[], None]) -> None: ...


class Dispatcher:
    def __init__(self, fleet: Fleet, policy: RoutingPolicy) -> None:
        self._fleet = fleet
        self._policy = policy
        self._sessions: dict[str, Session] = {}
        self._waiting: dict[Callable[[], None], None] = {}

    # --- from discovery ---------------------------------------------------------------------------

    def session_opened(self, incarnation: str, session: Session) -> None:
        self._sessions[incarnation] = session

    def session_closed(self, incarnation: str) -> None:
        self._sessions.pop(incarnation, None)

    def fleet_changed(self) -> None:
        for callback in list(self._waiting):
            callback()

    # --- from journeys ----------------------------------------------------------------------------

    def submit(
        self, request: GenerateRequest, sink: Sink, avoid: Collection[str]
    ) -> "Placement | None":
        """None when no worker can take it now."""
        worker = self._policy.choose_decode(self._fleet.decode_workers(avoid))
        if worker is None:
            return None
        session = self._sessions.get(worker.state.incarnation)
        if session is None:
            return None
        try:
            session.submit(request, sink)
        except DecodeLost:
            return None
        return Placement(self._fleet, self._policy, session, worker, request)

    def call_on_change(self, callback: Callable[[], None]) -> None:
        self._waiting[callback] = None

    def do_not_call(self, callback: Callable[[], None]) -> None:
        self._waiting.pop(callback, None)


class Placement:
    """A request at a decode worker and, from `route` to `prefilled`, at a prefill worker."""

    def __init__(
        self,
        fleet: Fleet,
        policy: RoutingPolicy,
        session: Session,
        worker: Worker,
        request: GenerateRequest,
    ) -> None:
        self._fleet = fleet
        self._policy = policy
        self._session = session
        self._worker = worker
        self._request = request
        self._prefill: Worker | None = None
        self._has_ended = False
        fleet.place(worker)

    @property
    def decode_incarnation(self) -> str:
        return self._worker.state.incarnation

    @property
    def prefill_incarnation(self) -> str | None:
        return None if self._prefill is None else self._prefill.state.incarnation

    def route(self, avoid: Collection[str]) -> None:
        """Names the prefill worker; with none at hand the decode worker prefills by itself."""
        num_tokens = len(self._request.token_ids) // 4
        candidates = self._fleet.prefill_workers(self._worker, num_tokens, avoid)
        chosen = self._policy.choose_prefill(candidates)
        if chosen is None:
            self._session.route(self._request.request_id, None, None)
            return
        self._prefill = chosen
        self._fleet.place(chosen)
        self._session.route(self._request.request_id, chosen.address, chosen.state.incarnation)

    def prefilled(self) -> None:
        if self._prefill is not None:
            self._fleet.release(self._prefill)
            self._prefill = None

    def cancel_output(self, output_index: int) -> None:
        self._session.cancel_output(self._request.request_id, output_index)

    def end(self, *, is_complete: bool) -> None:
        """The request is over here. If it is not complete the worker must stop. Idempotent."""
        if self._has_ended:
            return
        self._has_ended = True
        self.prefilled()
        self._fleet.release(self._worker)
        if is_complete:
            self._session.forget(self._request.request_id)
        else:
            self._session.cancel(self._request.request_id)
