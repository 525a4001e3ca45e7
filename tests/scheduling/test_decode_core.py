"""What a decode worker decides, told as stories: facts in, actions out. (Whole fleets, with every
fault at every phase, are in tests/faults; here one sees what each fact leads to.)
"""

from typing import Any

import numpy as np
import pytest

from common.errors import DecodeLost, Draining, MalformedMessage, WorkerLost
from common.handoff_messages import FirstTokens, HandoffRequest, PagesReady, PagesTaken, WantParams
from common.messages import (
    Admitted,
    Cancel,
    ChunkBudget,
    Failed,
    GenerateRequest,
    PrefillDone,
    Route,
    TokenBatch,
    pack_tokens,
)
from common.pages import PageKind
from common.scheduling.block_hash import HashRoots
from common.scheduling.kv_cache import KvCache
from common.types import FinishReason, SamplingParams
from decode_worker import actions as do
from decode_worker.actions import Action, Link, PullId, SessionId
from decode_worker.core import DecodeCore
from decode_worker.pulls import Pulls
from decode_worker.scheduler import BatchScheduler
from kvtransfer.destination import Landed, ReadEnded, Stalled, StreamEnded
from kvtransfer.landing import LandingZone
from kvtransfer.transport import ReadEnd
from tests.scheduling.test_schedulers import null_step

BLOCK, STALL_S = 4, 30.0
LINK = Link(
    address="p0", incarnation="00aa", numeric_incarnation=0xAA, round_trip_s=0.5,
    shares_parameters=True, heartbeat_s=2.0,
)  # fmt: skip
PULL = PullId(1)
KINDS = bytes([PageKind.EXACT, PageKind.PACKED, PageKind.EXACT])
"""Of a prompt of ten tokens: block 0, a full one, and the open one."""


class Core(DecodeCore):
    """A decode worker with one router's session, and a few more words for tests."""

    def __init__(self, num_slots: int = 8) -> None:
        cache = KvCache(num_packed=32, num_exact=16, block_size=BLOCK)
        scheduler = BatchScheduler(
            cache, chunk_tokens=16, max_num_seqs=8, max_waiting=100, max_model_len=1000,
            is_colocated=False,
        )  # fmt: skip
        self.zone = LandingZone(num_packed=num_slots, num_exact=num_slots)
        pulls = Pulls(scheduler.remote, self.zone, incarnation="00dd", stall_s=STALL_S)
        super().__init__(cache, scheduler, roots=HashRoots(b"model", BLOCK), pulls=pulls)
        self.cache = cache
        self.router = self.open_session()

    def add(
        self, name: str, num_tokens: int = 10, session: SessionId | None = None, **sampling: Any
    ) -> None:
        tokens = np.arange(num_tokens, dtype=np.int32)
        request = GenerateRequest(
            request_id=name,
            token_ids=pack_tokens(tokens),
            num_prompt_tokens=num_tokens,
            sampling=SamplingParams(**{"max_tokens": 8, **sampling}),
        )
        self.submit(session or self.router, request, tokens, self.chain("", tokens), 0.0)

    def routed(self, name: str = "a", **sampling: Any) -> list[Action]:
        """Submitted, admitted, sent to p0, linked."""
        self.add(name, **sampling)
        assert self.admit(0.0) == [
            do.Tell(self.router, Admitted(request_id=name, num_cached_tokens=0, needs_route=True))
        ]
        route = Route(request_id=name, prefill="p0", incarnation="00aa")
        assert self.receive(self.router, route, 1.0) == [do.Connect(PULL, name, "p0", "00aa")]
        return self.connected(PULL, LINK, 1.0)

    def announced(self) -> do.Read:
        """All pages of a prompt of ten tokens; the read that begins."""
        ready = PagesReady(first_block=0, kinds=KINDS, block_ids=(5, 6, 7), generations=(1, 1, 1))
        read, expect = self.heard(PULL, ready, 2.0)
        assert expect == do.Expect(PULL, STALL_S)
        assert isinstance(read, do.Read)
        return read

    def landing(self, read: do.Read) -> do.Land:
        land, expect = self.on(PULL, ReadEnded(read_id=read.read.read_id, end=ReadEnd.DONE), 3.0)
        assert expect == do.Expect(PULL, None)
        assert isinstance(land, do.Land)
        return land

    def landed(self, land: do.Land, now: float = 4.0) -> list[Action]:
        fact = Landed(read_id=land.land.read_id, refusals=(None,) * len(land.land.moves))
        return self.on(PULL, fact, now)

    def at_rest(self) -> None:
        self.check_invariants()
        assert (self.num_requests, self.num_handoffs) == (0, 0)
        assert self.cache.load.held == 0
        assert self.zone.num_in_use == self.zone.num_quarantined == 0


def first(token_id: int = 7, num_cached_tokens: int = 4) -> FirstTokens:
    return FirstTokens(token_ids=(token_id,), logprobs=(None,), num_cached_tokens=num_cached_tokens)


def messages(actions: list[Action]) -> list[object]:
    """To routers."""
    return [action.message for action in actions if isinstance(action, do.Tell)]


def test_a_prompt_comes_over_a_hand_off_and_runs() -> None:
    core = Core()
    (opening,) = core.routed()
    assert isinstance(opening, do.Send)
    assert isinstance(opening.message, HandoffRequest)
    assert (opening.message.incarnation, opening.message.num_held_blocks) == ("00aa", 0)
    read = core.announced()
    assert [page.block_id for page in read.read.pages] == [5, 6, 7]
    land = core.landing(read)
    assert [move.kind for move in land.land.moves] == list(KINDS)
    note, prefilled, tokens, _ = core.heard(PULL, first(), 3.5)
    assert note == do.NoteFirstTokens("a", 3)
    assert isinstance(prefilled, do.Tell)
    assert prefilled.message == PrefillDone(request_id="a", num_cached_tokens=4)
    assert isinstance(tokens, do.Tell)
    assert tokens.is_from_prefill
    assert core.plan(3.5) == (None, []), "its pages are not here yet"
    assert core.landed(land) == [
        do.Send(PULL, PagesTaken(blocks=(0, 1, 2))),
        do.NotePulled("a", 0.5),
        do.Finish(PULL),
    ]
    assert core.load().handoff_s == 0.5 + LINK.round_trip_s
    told = []
    for _ in range(7):
        plan, _ = core.plan(5.0)
        assert plan is not None
        assert plan.decodes == ("a/0",)
        told += core.apply(plan, null_step(plan), 5.0)
    *_, last, ended = told
    assert isinstance(last, do.Tell)
    assert isinstance(last.message, TokenBatch)
    assert last.message.finish_reasons == (FinishReason.LENGTH,)
    assert ended == do.Ended("a", "length")
    core.plan(6.0)  # the runner is told to forget it
    assert core.num_requests == 0


def test_a_request_that_is_cancelled_leaves_its_pages_until_nothing_writes_them() -> None:
    core = Core()
    core.routed()
    land = core.landing(core.announced())
    assert core.receive(core.router, Cancel(request_id="a"), 3.5) == [
        do.Cut(PULL),
        do.Ended("a", "abort"),
    ]
    assert core.cache.load.held > 0, "the device is copying into them"
    assert core.zone.num_in_use == 3
    assert core.landed(land) == []
    core.at_rest()


def test_a_read_of_a_hand_off_that_failed_keeps_its_slots_until_it_ends() -> None:
    core = Core()
    core.routed()
    read = core.announced()
    cut, told, ended = core.on(PULL, Stalled(), 40.0)
    assert cut == do.Cut(PULL)
    assert messages([told]) == [
        Failed(
            request_id="a", code="pull_failed", message="3 pages have not arrived in time",
            at_prefill=True,
        )
    ]  # fmt: skip
    assert ended == do.Ended("a", "error")
    assert core.zone.num_quarantined == 3
    late = ReadEnded(read_id=read.read.read_id, end=ReadEnd.DISCONNECTED)
    assert core.on(PULL, late, 50.0) == []
    core.at_rest()


def test_a_prefill_worker_that_is_gone_loses_its_link() -> None:
    core = Core()
    core.routed()
    cut, drop, told, _ = core.on(PULL, StreamEnded(error=WorkerLost("no answer")), 2.0)
    assert (cut, drop) == (do.Cut(PULL), do.DropLink(LINK))
    assert messages([told]) == [
        Failed(request_id="a", code="prefill_lost", message="no answer", at_prefill=True)
    ]
    assert core.heard(PULL, first(), 3.0) == [], "too late"
    core.at_rest()


def test_a_link_that_cannot_be_is_the_requests_failure_alone() -> None:
    core = Core()
    core.add("a")
    core.admit(0.0)
    core.receive(core.router, Route(request_id="a", prefill="p0"), 1.0)
    why = MalformedMessage("it speaks another protocol")
    cut, told, _ = core.on(PULL, StreamEnded(error=why), 2.0)
    assert cut == do.Cut(PULL)
    (failed,) = messages([told])
    assert isinstance(failed, Failed)
    assert (failed.code, failed.at_prefill) == ("malformed_message", True)
    assert core.connected(PULL, LINK, 2.0) == [], "its request has ended"
    core.at_rest()


@pytest.mark.parametrize(
    "tokens",
    [
        FirstTokens(token_ids=(), logprobs=(), num_cached_tokens=0),
        FirstTokens(token_ids=(7, 7), logprobs=(None, None), num_cached_tokens=0),
        FirstTokens(token_ids=(7,), logprobs=(), num_cached_tokens=0),
    ],
)
def test_first_tokens_that_do_not_fit_the_request_are_nonsense(tokens: FirstTokens) -> None:
    core = Core()
    core.routed()
    (failed,) = messages(core.heard(PULL, tokens, 2.0))
    assert isinstance(failed, Failed)
    assert failed.code == "malformed_message"
    core.at_rest()


def test_a_first_token_that_is_the_last_one_ends_the_hand_off() -> None:
    core = Core()
    core.routed(max_tokens=1)
    actions = core.heard(PULL, first(), 2.0)
    assert actions[0] == do.NoteFirstTokens("a", 0)
    assert actions[-2:] == [do.Cut(PULL), do.Ended("a", "length")]
    core.at_rest()


def test_pulls_take_turns_at_the_landing_slots() -> None:
    """One slot of each kind: a read for what there is room for, the next one when that has
    landed.
    """
    core = Core(num_slots=1)
    core.routed()
    read = core.announced()
    assert [page.block_id for page in read.read.pages] == [5, 6]
    taken, again, *expect = core.landed(core.landing(read))
    assert set(expect) == {do.Expect(PULL, STALL_S)}
    assert taken == do.Send(PULL, PagesTaken(blocks=(0, 1)))
    assert isinstance(again, do.Read)
    assert [page.block_id for page in again.read.pages] == [7]


def test_large_parameters_are_named_to_who_understands_and_told_to_who_asks() -> None:
    core = Core()
    bias = tuple((token_id, 1.0) for token_id in range(5000))
    (opening,) = core.routed(logit_bias=bias)
    assert isinstance(opening, do.Send)
    assert isinstance(opening.message, HandoffRequest)
    assert opening.message.request.shared == "00dd:1"
    assert opening.message.request.sampling.logit_bias == ()
    (told,) = core.heard(PULL, WantParams(key="00dd:1"), 2.0)
    assert isinstance(told, do.Send)
    assert len(told.message.bias_ids) == 4 * len(bias)  # type: ignore[attr-defined]
    core.receive(core.router, Cancel(request_id="a"), 3.0)
    core.at_rest()


# --- sessions -------------------------------------------------------------------------------------


def test_a_session_is_the_lease_of_its_requests() -> None:
    core = Core()
    other = core.open_session()
    core.add("a")
    core.add("b", session=other)
    core.admit(0.0)
    assert core.receive(core.router, Cancel(request_id="b"), 0.0) == [], "not its own"
    assert core.close_session(other) == [do.Ended("b", "abort")]
    assert core.num_requests == 1
    assert core.close_session(core.router) == [do.Ended("a", "abort")]
    core.at_rest()


def test_tokens_of_a_step_go_to_their_own_routers() -> None:
    core = Core()
    other = core.open_session()
    for name, session in (("a", core.router), ("b", other), ("c", core.router)):
        core.add(name, num_tokens=3, session=session)
    core.admit(0.0)
    for name, session in (("a", core.router), ("b", other), ("c", core.router)):
        assert core.receive(session, Route(request_id=name, prefill=None), 0.0) == []
    plan, _ = core.plan(0.0)
    assert plan is not None
    batches = [
        (action.session, action.message.request_ids)
        for action in core.apply(plan, null_step(plan), 0.0)
        if isinstance(action, do.Tell) and isinstance(action.message, TokenBatch)
    ]
    assert batches == [(core.router, ("a", "c")), (other, ("b",))]


def test_the_smallest_budget_of_all_sessions_holds() -> None:
    core = Core()
    other = core.open_session()
    told: list[int | None] = []
    core.scheduler.set_chunk_budget = told.append  # type: ignore[method-assign,assignment]
    core.receive(core.router, ChunkBudget(max_tokens=64), 0.0)
    core.receive(other, ChunkBudget(max_tokens=16), 0.0)
    core.close_session(other)
    core.close_session(core.router)
    assert told == [64, 16, 64, None]


def test_what_is_not_a_routers_to_say_is_nonsense() -> None:
    core = Core()
    for message in (ChunkBudget(max_tokens=0), PagesTaken(blocks=())):
        with pytest.raises(MalformedMessage):
            core.receive(core.router, message, 0.0)


def test_nothing_new_is_taken_by_who_leaves_or_hangs() -> None:
    core = Core()
    core.add("a")
    with pytest.raises(MalformedMessage, match="is here already"):
        core.add("a")
    core.fault = "its device has not moved"
    with pytest.raises(DecodeLost, match="its device has not moved"):
        core.add("b")
    core.is_draining = True
    with pytest.raises(Draining):
        core.add("b")
    assert core.num_requests == 1
