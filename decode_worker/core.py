"""Everything that a decode worker decides. Facts in, actions out; no clock, no streams, no device.

    open_session, close_session       a router's lease of its requests
    submit, receive                   what it says: Submit, Route, Cancel, ChunkBudget
    admit, plan, apply                a step: who comes in, what is computed, what came of it
    connected, heard, on              what came of a hand-off: its link, messages, reads, landings

Life of a request: submit -> Admitted -> Route -> a hand-off (pulls.py), or chunks of its own
-> PrefillDone, TokenBatch ... -> Ended. `BatchScheduler` decides about blocks and steps, `Pulls`
about hand-offs; the core joins the two, knows whose request each one is, and tells its router.

A session is the lease of its requests: when it closes, all of them are aborted. Actions are to be
carried out at once and in order: the service (service.py) does so over gRPC and NIXL, the
simulator's host on virtual time.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from common.errors import DecodeLost, Draining, MalformedMessage, Preempted, TandemError
from common.messages import Cancel, ChunkBudget, Failed, GenerateRequest, Route
from common.scheduling.block_hash import HashChain, HashRoots
from common.scheduling.kv_cache import KvCache
from common.scheduling.plan import StepPlan, StepResult
from common.types import RequestId
from decode_worker.actions import Action, Ended, Link, PullId, SessionId, Tell
from decode_worker.entries import Facts
from decode_worker.pulls import Lost, Outcome, Pulls, Sampled
from decode_worker.scheduler import BatchScheduler
from kvtransfer import destination
from worker.watch import Load


@dataclass(slots=True, eq=False)
class _Session:
    id: SessionId
    request_ids: dict[RequestId, None] = field(default_factory=dict)
    """In their order."""
    chunk_budget: int | None = None


@dataclass(slots=True, eq=False)
class _Request:
    session: _Session
    reason: str = "abort"
    """How it ends, as far as is known."""


class DecodeCore:
    def __init__(
        self,
        cache: KvCache,
        scheduler: BatchScheduler,
        *,
        roots: HashRoots,
        pulls: Pulls | None,
    ) -> None:
        """Without `pulls` every prompt is computed here."""
        self.scheduler = scheduler
        self._cache = cache
        self._roots = roots
        self._pulls = pulls
        self._requests: dict[RequestId, _Request] = {}
        self._sessions: dict[SessionId, _Session] = {}
        self._num_sessions = 0
        self._actions: list[Action] = []
        self.is_draining = False
        self.fault = ""
        """Why nothing new is taken, though the process is there."""

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    @property
    def num_handoffs(self) -> int:
        """That somebody waits for."""
        return 0 if self._pulls is None else self._pulls.num_wanted

    def load(self) -> Load:
        scheduler = self.scheduler
        return Load(
            blocks=self._cache.load,
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            num_queued_tokens=scheduler.num_queued_tokens,
            max_prompt_tokens=scheduler.max_request_tokens,
            num_decodes=scheduler.num_decodes,
            num_context_tokens=scheduler.num_context_tokens,
            chunk_tokens=scheduler.chunk_tokens,
            step_times=scheduler.step_times,
            handoff_s=0.0 if self._pulls is None else self._pulls.handoff_s,
        )

    # --- sessions ---------------------------------------------------------------------------------

    def open_session(self) -> SessionId:
        self._num_sessions += 1
        session = _Session(SessionId(self._num_sessions))
        self._sessions[session.id] = session
        return session.id

    def close_session(self, session_id: SessionId) -> list[Action]:
        session = self._sessions[session_id]
        for request_id in list(session.request_ids):
            self._abort(request_id, "abort")
        del self._sessions[session_id]
        self._limit_chunks()
        return self._taken()

    def chain(self, salt: str, token_ids: NDArray[np.int32]) -> HashChain:
        """Names of a prompt's blocks."""
        chain = HashChain(self._roots.root(salt), self._cache.block_size)
        chain.extend(token_ids)
        return chain

    def submit(
        self,
        session_id: SessionId,
        request: GenerateRequest,
        token_ids: NDArray[np.int32],
        chain: HashChain,
        now: float,
    ) -> None:
        """Raises when the request cannot be taken; `chain` covers its tokens."""
        if self.is_draining:
            raise Draining("this decode worker is draining")
        if self.fault:
            raise DecodeLost(f"this decode worker hangs: {self.fault}")
        if request.request_id in self._requests:
            raise MalformedMessage(f"request {request.request_id} is here already")
        self.scheduler.add(request, token_ids, chain, now)
        session = self._sessions[session_id]
        self._requests[request.request_id] = _Request(session)
        session.request_ids[request.request_id] = None

    def receive(self, session_id: SessionId, message: object, now: float) -> list[Action]:
        """What a router says of its requests. One that has ended meanwhile is no mistake."""
        session = self._sessions[session_id]
        match message:
            case ChunkBudget(max_tokens=max_tokens) if max_tokens > 0:
                session.chunk_budget = max_tokens
                self._limit_chunks()
            case Route(request_id=request_id):
                if request_id in session.request_ids:
                    self._route(message, now)
            case Cancel(request_id=request_id, output_index=None):
                if request_id in session.request_ids:
                    self._abort(request_id, "stop" if message.has_stopped else "abort")
            case Cancel(request_id=request_id, output_index=int(index)):
                if request_id in session.request_ids:
                    self._tell(self.scheduler.end_output(request_id, index))
            case _:
                raise MalformedMessage(f"{type(message).__name__} in a session")
        return self._taken()

    def _limit_chunks(self) -> None:
        """The smallest budget of all sessions holds."""
        budgets = [s.chunk_budget for s in self._sessions.values() if s.chunk_budget is not None]
        self.scheduler.set_chunk_budget(min(budgets, default=None))

    def _route(self, route: Route, now: float) -> None:
        if not self.scheduler.is_waiting_for_route(route.request_id):
            return
        if route.prefill is None or self._pulls is None:
            self.scheduler.route_local(route.request_id)
            return
        order = self.scheduler.route_remote(route.request_id, now)
        self._do(self._pulls.begin(order, route.prefill, route.incarnation))

    def _abort(self, request_id: RequestId, reason: str) -> None:
        """Ends a request without a word; its pages are free when nothing in flight names them."""
        self._requests[request_id].reason = reason
        self.scheduler.abort(request_id)
        self._forget(request_id)

    # --- steps ------------------------------------------------------------------------------------

    def admit(self, now: float) -> list[Action]:
        """Blocks for those who wait, as far as there are some."""
        for admitted in self.scheduler.admit(now):
            self._tell_one(admitted.request_id, admitted)
        return self._taken()

    def plan(self, now: float) -> tuple[StepPlan | None, list[Action]]:
        """The next step; None when there is nothing to do, or something under way must end before.
        At most `MAX_IN_FLIGHT` are under way at a time.
        """
        plan, facts = self.scheduler.plan(now)
        self._tell(facts)
        return plan, self._taken()

    def apply(self, plan: StepPlan, result: StepResult, now: float) -> list[Action]:
        """What came of the oldest step under way."""
        self._tell(self.scheduler.apply(plan, result, now))
        return self._taken()

    def look_again_in(self, now: float) -> float | None:
        """When `admit` may do more although nothing has happened; None: never."""
        return self.scheduler.place_freed_in(now)

    # --- hand-offs --------------------------------------------------------------------------------

    @property
    def _handoffs(self) -> Pulls:
        assert self._pulls is not None
        return self._pulls

    def connected(self, pull: PullId, link: Link, now: float) -> list[Action]:
        return self._pulled(self._handoffs.connected(pull, link), now)

    def heard(self, pull: PullId, message: object | None, now: float) -> list[Action]:
        """From the prefill worker; None: it says nothing more."""
        return self._pulled(self._handoffs.heard(pull, message, now), now)

    def on(self, pull: PullId, fact: destination.Fact, now: float) -> list[Action]:
        """What came of its link and stream, of its reads and landings."""
        return self._pulled(self._handoffs.on(pull, fact, now), now)

    def slots_freed(self, now: float) -> list[Action]:
        """Somebody else gave landing slots back."""
        return self._pulled([], now)

    def _pulled(self, outcomes: list[Outcome], now: float) -> list[Action]:
        self._do(outcomes)
        self._do(self._handoffs.offer_slots(now))
        return self._taken()

    def _do(self, outcomes: Iterable[Outcome]) -> None:
        for outcome in outcomes:
            match outcome:
                case Sampled(facts=facts):
                    self._tell(facts, is_from_prefill=True)
                case Lost(request_id=request_id, error=error):
                    self._fail(request_id, error, at_prefill=True)
                    self.scheduler.abort(request_id)
                    self._forget(request_id)
                case _:
                    self._actions.append(outcome)

    # --- to the routers ---------------------------------------------------------------------------

    def _tell(self, facts: Facts, *, is_from_prefill: bool = False) -> None:
        """What came of a step, or of a hand-off's first tokens."""
        for done in facts.prefilled:
            self._tell_one(done.request_id, done)
        if facts.request_ids:
            self._tell_tokens(facts, is_from_prefill=is_from_prefill)
        for request_id, error in facts.failed:
            self._fail(request_id, error)
        for request_id in facts.ended:
            self._forget(request_id)

    def _tell_one(self, request_id: RequestId, message: object) -> None:
        self._actions.append(Tell(self._requests[request_id].session.id, message))

    def _tell_tokens(self, facts: Facts, *, is_from_prefill: bool) -> None:
        """One batch for each session."""
        for request_id, reason in zip(facts.request_ids, facts.finish_reasons, strict=True):
            if reason is not None:
                self._requests[request_id].reason = reason
        sessions = [self._requests[request_id].session for request_id in facts.request_ids]
        for session in dict.fromkeys(sessions):
            own = [row for row, its in enumerate(sessions) if its is session]
            self._actions.append(Tell(session.id, facts.batch(own), is_from_prefill))

    def _fail(self, request_id: RequestId, error: TandemError, *, at_prefill: bool = False) -> None:
        reason = "preempted" if isinstance(error, Preempted) else "error"
        self._requests[request_id].reason = reason
        self._tell_one(request_id, Failed.of(request_id, error, at_prefill=at_prefill))

    def _forget(self, request_id: RequestId) -> None:
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        del request.session.request_ids[request_id]
        if self._pulls is not None:
            self._do(self._pulls.request_ended(request_id))
        self._actions.append(Ended(request_id, request.reason))

    def _taken(self) -> list[Action]:
        actions, self._actions = self._actions, []
        return actions

    def check_invariants(self) -> None:
        self.scheduler.check_invariants()
        if self._pulls is not None:
            self._pulls.check_invariants()
        sessions = self._sessions.values()
        own = [request_id for session in sessions for request_id in session.request_ids]
        assert sorted(own) == sorted(self._requests)
