"""The hand-offs of a decode worker, from the route to the last page: what each of them decides.

    begin -> Connect -> connected -> Send(HandoffRequest)
    heard, on -> Read, Land, Send(PagesTaken) ... -> Finish
              -> Sampled, Lost: for the core, which tells the router

`HandoffDestination` decides about pages; here is what is around it. Reads and landings belong to
the worker, not to the request: when the request has ended, what they come to is taken until nothing
can be written any more. Used by `DecodeCore` alone.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from common.errors import MalformedMessage, PrefillLost, TandemError, WorkerLost
from common.handoff_messages import (
    FirstTokens,
    HandoffRequest,
    PagesReady,
    PagesTaken,
    WantParams,
    Working,
)
from common.shared_params import LargeParams, SharedKeys, is_large, without_large
from common.types import RequestId
from decode_worker import actions as do
from decode_worker.actions import Action, Link, PullId
from decode_worker.entries import Facts
from decode_worker.flights import Pin
from decode_worker.pull_order import PullOrder
from decode_worker.remote_prompts import RemotePrompts
from kvtransfer import destination
from kvtransfer.destination import HandoffDestination
from kvtransfer.landing import LandingZone

HANDOFF_WEIGHT = 0.1
"""Of the latest hand-off in the average."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """First tokens have come."""

    facts: Facts


@dataclass(frozen=True, slots=True)
class Lost:
    """The request's prompt will not come over this hand-off."""

    request_id: RequestId
    error: TandemError


Outcome = Action | Sampled | Lost


@dataclass(slots=True, eq=False)
class _Pull:
    id: PullId
    order: PullOrder
    link: Link | None = None
    destination: HandoffDestination | None = None
    """Since the link is there."""
    pins: dict[int, Pin] = field(default_factory=dict)
    """By the reads whose pages are landing."""
    first_tokens_at: float | None = None
    has_key: bool = False
    is_over: bool = False
    """The request has ended, or its prompt is here."""


class Pulls:
    def __init__(
        self, prompts: RemotePrompts, zone: LandingZone, *, incarnation: str, stall_s: float
    ) -> None:
        """A hand-off whose reads bring nothing for `stall_s` is given up."""
        self._prompts = prompts
        self._zone = zone
        self._stall_s = stall_s
        self._pulls: dict[PullId, _Pull] = {}
        self._by_request: dict[RequestId, _Pull] = {}
        """Those that are not over."""
        self._keys = SharedKeys(prefix=f"{incarnation}:")
        """Of parameters that hand-offs under way have in common."""
        self._num_pulls = 0
        self._num_handoffs = 0
        self.handoff_s = 0.0
        """What a hand-off adds: request and first token on their way, and the time from there until
        the last page is usable; a moving average.
        """

    @property
    def num_wanted(self) -> int:
        return len(self._by_request)

    # --- facts -----------------------------------------------------------------------------------

    def begin(self, order: PullOrder, address: str, incarnation: str | None) -> list[Outcome]:
        self._num_pulls += 1
        pull = _Pull(PullId(self._num_pulls), order)
        self._pulls[pull.id] = self._by_request[order.request_id] = pull
        return [do.Connect(pull.id, order.request_id, address, incarnation)]

    def connected(self, pull_id: PullId, link: Link) -> list[Outcome]:
        pull = self._pulls.get(pull_id)
        if pull is None:
            return []  # its request has ended
        pull.link = link
        pull.destination = HandoffDestination(
            expected=pull.order.pages,
            first_block=pull.order.first_block,
            incarnation=link.numeric_incarnation,
            zone=self._zone,
            foreign=link.foreign,
        )
        if link.foreign is not None and pull.order.pages:
            self._prompts.keep_apart(pull.order.request_id)
        request = pull.order.request
        if link.shares_parameters and is_large(request.sampling):
            # the prefill worker may know them from another hand-off; else it asks
            pull.has_key = True
            key, _ = self._keys.hold(request.sampling)
            request = without_large(request, key)
        opening = HandoffRequest(
            request=request,
            incarnation=link.incarnation,
            num_held_blocks=pull.order.first_block,
            heartbeat_s=link.heartbeat_s,
        )
        return [do.Send(pull_id, opening)]

    def heard(self, pull_id: PullId, message: object | None, now: float) -> list[Outcome]:
        """From the prefill worker; None: it says nothing more."""
        pull = self._pulls.get(pull_id)
        if pull is None or pull.is_over:
            return []
        match message:
            case Working():
                return []
            case PagesReady():
                return self._on(pull, message, now)
            case FirstTokens():
                return self._first_tokens(pull, message, now)
            case WantParams(key=key):
                large = LargeParams.of(pull.order.request.sampling)
                return [do.Send(pull_id, large.message(key))]
            case None:
                return self._on(pull, destination.StreamEnded(), now)
            case _:
                nonsense = MalformedMessage(f"{type(message).__name__} in a hand-off")
                return self._fail(pull, nonsense)

    def on(self, pull_id: PullId, fact: destination.Fact, now: float) -> list[Outcome]:
        """What came of its link and stream, of its reads and landings: these may be over later than
        the pull.
        """
        pull = self._pulls.get(pull_id)
        if pull is None:
            return []
        if isinstance(fact, destination.Landed):
            self._prompts.unpin(pull.pins.pop(fact.read_id))
        outcomes = self._on(pull, fact, now)
        self._forget_if_quiet(pull)
        return outcomes

    def offer_slots(self, now: float) -> list[Outcome]:
        """Lets pulls that wait for landing slots go on, oldest first."""
        outcomes: list[Outcome] = []
        while self._zone.take_freed():
            for pull in list(self._by_request.values()):
                if pull.destination is not None:
                    outcomes += self._on(pull, destination.SlotsFreed(), now)
        if self._zone.is_exhausted:
            why = "every landing slot is quarantined by reads that were given up and have not ended"
            outcomes.append(do.GiveUp(why))
        return outcomes

    def request_ended(self, request_id: RequestId) -> list[Outcome]:
        """Nothing is wanted any more."""
        pull = self._by_request.get(request_id)
        if pull is None:
            return []
        self._over(pull)
        return [do.Cut(pull.id)]

    # --- decisions -------------------------------------------------------------------------------

    def _first_tokens(self, pull: _Pull, message: FirstTokens, now: float) -> list[Outcome]:
        """Forwards them at once; when they end the request, nothing more is wanted."""
        num_outputs = pull.order.request.sampling.n
        if (
            pull.first_tokens_at is not None
            or not len(message.token_ids) == len(message.logprobs) == num_outputs
        ):
            return self._fail(pull, MalformedMessage("unexpected first tokens"))
        assert pull.destination is not None
        pull.first_tokens_at = now
        request_id = pull.order.request_id
        note = do.NoteFirstTokens(request_id, pull.destination.num_missing)
        facts = self._prompts.first_tokens(request_id, message)
        if request_id in facts.ended:
            return [note, Sampled(facts)]
        return [note, Sampled(facts), *self._on(pull, destination.FirstTokensKnown(), now)]

    def _on(self, pull: _Pull, fact: destination.Fact, now: float) -> list[Outcome]:
        if pull.destination is None:  # there is no link yet
            assert isinstance(fact, destination.StreamEnded)
            assert fact.error is not None
            return self._fail(pull, fact.error)
        outcomes = self._translated(pull, pull.destination.on(fact), now)
        if not pull.is_over:
            is_reading = pull.destination.num_reading > 0
            outcomes.append(do.Expect(pull.id, self._stall_s if is_reading else None))
        return outcomes

    def _translated(
        self, pull: _Pull, actions: Iterable[destination.Action], now: float
    ) -> list[Outcome]:
        request_id, outcomes = pull.order.request_id, list[Outcome]()
        assert pull.link is not None
        for action in actions:
            match action:
                case destination.StartRead():
                    read = do.Read(pull.id, request_id, pull.link, action)
                    outcomes.append(read)
                case destination.Land(read_id=read_id):
                    pull.pins[read_id] = self._prompts.pin(request_id)
                    outcomes.append(do.Land(pull.id, request_id, action))
                case destination.Acknowledge(blocks=blocks, num_leading=num_leading):
                    self._prompts.landed(request_id, num_leading)
                    outcomes.append(do.Send(pull.id, PagesTaken(blocks=blocks)))
                case destination.Complete():
                    outcomes += self._complete(pull, pull.link, now)
                case destination.Fail(error=error):
                    outcomes += self._fail(pull, error)
        return outcomes

    def _complete(self, pull: _Pull, link: Link, now: float) -> list[Outcome]:
        assert pull.first_tokens_at is not None
        exposed_s = max(0.0, now - pull.first_tokens_at)
        # the first hand-offs are averaged, later ones replace what is old
        self._num_handoffs += 1
        weight = max(HANDOFF_WEIGHT, 1 / self._num_handoffs)
        self.handoff_s += weight * (exposed_s + link.round_trip_s - self.handoff_s)
        self._prompts.landed_all(pull.order.request_id)
        self._over(pull)
        return [do.NotePulled(pull.order.request_id, exposed_s), do.Finish(pull.id)]

    def _fail(self, pull: _Pull, error: TandemError) -> list[Outcome]:
        self._over(pull)
        outcomes: list[Outcome] = [do.Cut(pull.id)]
        if isinstance(error, WorkerLost):
            if pull.link is not None:
                outcomes.append(do.DropLink(pull.link))
            error = PrefillLost(error.message)
        return [*outcomes, Lost(pull.order.request_id, error)]

    def _over(self, pull: _Pull) -> None:
        pull.is_over = True
        del self._by_request[pull.order.request_id]
        if pull.destination is not None:
            pull.destination.close()
        if pull.has_key:
            self._keys.release(pull.order.request.sampling)
        self._forget_if_quiet(pull)

    def _forget_if_quiet(self, pull: _Pull) -> None:
        """Whatever is still under way needs it."""
        if pull.is_over and (pull.destination is None or pull.destination.is_quiet):
            self._pulls.pop(pull.id, None)

    def check_invariants(self) -> None:
        assert list(self._by_request.values()) == [p for p in self._pulls.values() if not p.is_over]
        assert len(self._keys) <= sum(pull.has_key for pull in self._by_request.values())
        for pull in self._pulls.values():
            if pull.destination is not None:
                pull.destination.check_invariants()
        self._zone.check_invariants()
