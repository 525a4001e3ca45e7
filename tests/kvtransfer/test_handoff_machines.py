"""The two hand-off state machines and the landing zone, alone, under random schedules."""

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from common.errors import InternalError, MalformedMessage, PageRefused, PrefillLost
from common.handoff_messages import FirstTokens, PagesReady
from common.pages import PageKind
from common.scheduling.plan import Refused
from common.scheduling.prompt_pages import PromptPage
from kvtransfer.destination import (
    Acknowledge,
    Action,
    Complete,
    Fail,
    FirstTokensKnown,
    HandoffDestination,
    Land,
    Landed,
    ReadEnded,
    ReadFailed,
    SlotsFreed,
    Stalled,
    StartRead,
    StreamEnded,
)
from kvtransfer.destination import State as DestinationState
from kvtransfer.landing import LandingZone
from kvtransfer.source import (
    AbortPrompt,
    EndStream,
    HandoffSource,
    Page,
    PagesFinished,
    PeerFinished,
    PromptDone,
    PromptLost,
    Release,
    Send,
    StreamLost,
    Taken,
)
from kvtransfer.source import State as SourceState
from kvtransfer.transport import ReadEnd


def page(index: int) -> Page:
    kind = PageKind.PACKED if index else PageKind.EXACT
    return Page(index=index, kind=kind, block_id=100 + index, generation=index + 1)


TORN = Refused(heads=(0,), reason="checksum: torn")
DONE = PromptDone(FirstTokens(token_ids=(7,), logprobs=(None,), num_cached_tokens=0))


def test_pages_are_announced_in_order_and_let_go_when_taken() -> None:
    source = HandoffSource()
    (send,) = source.on(PagesFinished(pages=(page(0), page(1))))
    assert send == Send(
        message=PagesReady(
            first_block=0, kinds=b"\x01\x00", block_ids=(100, 101), generations=(1, 2)
        )
    )
    assert source.on(Taken(blocks=(1,))) == [Release(pages=((PageKind.PACKED, 101),))]
    assert source.on(Taken(blocks=(1, 99))) == [], "a repeat and nonsense are ignored"
    assert source.on(DONE) == [
        Send(message=FirstTokens(token_ids=(7,), logprobs=(None,), num_cached_tokens=0))
    ]
    assert source.on(PeerFinished()) == [Release(pages=((PageKind.EXACT, 100),)), EndStream()]
    assert source.state is SourceState.ENDED


def test_a_lost_stream_aborts_the_prompt_and_late_pages_are_let_go() -> None:
    source = HandoffSource()
    source.on(PagesFinished(pages=(page(0),)))
    assert source.on(StreamLost()) == [
        Release(pages=((PageKind.EXACT, 100),)),
        AbortPrompt(),
        EndStream(),
    ]
    assert source.on(PagesFinished(pages=(page(1),))) == [Release(pages=((PageKind.PACKED, 101),))]
    assert source.on(DONE) == source.on(PeerFinished()) == source.on(StreamLost()) == []


class SourceMachine(RuleBasedStateMachine):
    """Every page that was handed in is given back exactly once, whatever happens in whatever
    order.
    """

    @initialize()
    def start(self) -> None:
        self.source = HandoffSource()
        self.next_index = 0
        self.given: list[int] = []
        self.released: list[int] = []
        self.num_ends = 0

    def perform(self, actions: list[Any]) -> None:
        for action in actions:
            match action:
                case Release(pages=pages):
                    self.released += [block_id for _, block_id in pages]
                case EndStream():
                    self.num_ends += 1

    @rule(num=st.integers(0, 3))
    def finish_pages(self, num: int) -> None:
        pages = tuple(page(self.next_index + n) for n in range(num))
        self.next_index += num
        self.given += [p.block_id for p in pages]
        self.perform(self.source.on(PagesFinished(pages=pages)))

    @precondition(lambda self: self.source.state is SourceState.COMPUTING)
    @rule()
    def prompt_done(self) -> None:
        self.perform(self.source.on(DONE))

    @rule(blocks=st.lists(st.integers(0, 8), max_size=4))
    def taken(self, blocks: list[int]) -> None:
        self.perform(self.source.on(Taken(blocks=tuple(blocks))))

    @rule(
        fact=st.sampled_from([PeerFinished(), StreamLost(), PromptLost(error=InternalError("x"))])
    )
    def end(self, fact: Any) -> None:
        self.perform(self.source.on(fact))

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "source"):
            return
        self.source.check_invariants()
        held = [p.block_id for p in self.source.held.values()]
        assert sorted(self.released + held) == sorted(self.given)
        assert self.num_ends == (self.source.state is SourceState.ENDED)


TestSource = SourceMachine.TestCase
TestSource.settings = settings(max_examples=200, deadline=None)


def expected(num_pages: int) -> list[PromptPage]:
    return [
        PromptPage(
            block=index,
            kind=PageKind.PACKED if index else PageKind.EXACT,
            block_id=200 + index,
            content_hash=bytes([index]) * 16,
            num_tokens=16,
        )
        for index in range(num_pages)
    ]


def announce(first: int, num: int) -> PagesReady:
    return PagesReady(
        first_block=first,
        kinds=bytes(PageKind.PACKED if n else PageKind.EXACT for n in range(first, first + num)),
        block_ids=tuple(range(first, first + num)),
        generations=(1,) * num,
    )


def destination(num_pages: int = 4, num_slots: int = 8) -> HandoffDestination:
    zone = LandingZone(num_packed=num_slots, num_exact=num_slots)
    return HandoffDestination(expected=expected(num_pages), first_block=0, incarnation=5, zone=zone)


def test_a_page_is_checked_against_what_the_receiver_knows() -> None:
    d = destination()
    (read,) = d.on(announce(0, 2))
    assert isinstance(read, StartRead)
    (land,) = d.on(ReadEnded(read_id=read.read_id, end=ReadEnd.DONE))
    assert isinstance(land, Land)
    assert [move.content_hash for move in land.moves] == [bytes(16), b"\x01" * 16]
    assert [move.block_id for move in land.moves] == [200, 201]
    assert {move.incarnation for move in land.moves} == {5}
    assert d.on(Landed(read_id=read.read_id, refusals=(None, None))) == [
        Acknowledge(blocks=(0, 1), num_leading=2)
    ]


def test_the_third_refusal_of_a_page_ends_the_handoff() -> None:
    d = destination(num_pages=1)
    actions = d.on(announce(0, 1))
    for attempt in range(3):
        (read,) = actions
        assert isinstance(read, StartRead)
        d.on(ReadEnded(read_id=read.read_id, end=ReadEnd.DONE))
        actions = d.on(Landed(read_id=read.read_id, refusals=(TORN,)))
        assert (attempt == 2) == isinstance(actions[0], Fail)
    (fail,) = actions
    assert isinstance(fail, Fail)
    assert isinstance(fail.error, PageRefused)
    assert "checksum: torn" in fail.error.message


def test_records_that_are_refused_are_read_again_alone() -> None:
    """Of two pages one lands, of the other all but two heads; then one of these."""
    d = destination(num_pages=2)
    (read,) = d.on(announce(0, 2))
    refused: tuple[tuple[int, ...], ...] = ((1, 3), (3,))
    for attempt, heads in enumerate(refused):
        assert isinstance(read, StartRead)
        (land,) = d.on(ReadEnded(read_id=read.read_id, end=ReadEnd.DONE))
        assert isinstance(land, Land)
        landed = [None, Refused(heads=heads, reason="torn")][-len(land.moves) :]
        actions = d.on(Landed(read_id=read.read_id, refusals=landed))
        assert [type(action) for action in actions] == [Acknowledge, StartRead][attempt:]
        read = actions[-1]
        assert isinstance(read, StartRead)
        assert [page.heads for page in read.pages] == [heads]
    assert isinstance(read, StartRead)
    (land,) = d.on(ReadEnded(read_id=read.read_id, end=ReadEnd.DONE))
    assert isinstance(land, Land)
    assert [move.heads for move in land.moves] == [(3,)]
    assert d.on(Landed(read_id=read.read_id, refusals=(None,))) == [
        Acknowledge(blocks=(1,), num_leading=2)
    ]


def test_nonsense_from_the_source_ends_the_handoff() -> None:
    for message in (
        announce(1, 1),  # a gap
        announce(0, 5),  # more than the prompt has
        PagesReady(first_block=0, kinds=b"\x00", block_ids=(1,), generations=(1,)),  # wrong kind
        PagesReady(first_block=0, kinds=b"\x01", block_ids=(1, 2), generations=(1,)),
    ):
        (fail,) = destination().on(message)
        assert isinstance(fail, Fail)
        assert isinstance(fail.error, MalformedMessage)


def test_a_source_that_is_gone_ends_the_handoff_and_frees_its_slots() -> None:
    d = destination()
    d.on(announce(0, 4))
    (fail,) = d.on(ReadEnded(read_id=1, end=ReadEnd.DISCONNECTED))
    assert isinstance(fail, Fail)
    assert isinstance(fail.error, PrefillLost)
    assert d.zone.num_in_use == d.zone.num_quarantined == 0


class DestinationMachine(RuleBasedStateMachine):
    """Two pulls share a small landing zone: no slot is lost or used twice, and nothing completes
    early.
    """

    @initialize(num_slots=st.integers(1, 6))
    def start(self, num_slots: int) -> None:
        self.zone = LandingZone(num_packed=num_slots, num_exact=num_slots)
        self.pulls = [
            HandoffDestination(expected=expected(5), first_block=0, incarnation=1, zone=self.zone)
            for _ in range(2)
        ]
        self.announced = [0, 0]
        self.reads: list[tuple[int, StartRead]] = []
        self.lands: list[tuple[int, Land]] = []
        self.in_pool: list[set[int]] = [set(), set()]
        self.has_tokens = [False, False]
        self.completed = [False, False]
        self.unknown: set[tuple[PageKind, int]] = set()

    def perform(self, which: int, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case StartRead():
                    busy = {p.slot for _, read in self.reads for p in read.pages}
                    for read_page in action.pages:
                        assert read_page.slot not in busy, "two reads write to one slot"
                        assert read_page.slot not in self.unknown, (
                            "a slot that may still be written"
                        )
                    self.reads.append((which, action))
                case Land():
                    self.lands.append((which, action))
                case Acknowledge(blocks=blocks):
                    self.in_pool[which] |= set(blocks)
                case Complete():
                    assert self.in_pool[which] == set(range(5))
                    assert self.has_tokens[which]
                    self.completed[which] = True
                case Fail():
                    pass

    @rule(which=st.integers(0, 1), num=st.integers(1, 3))
    def announce(self, which: int, num: int) -> None:
        num = min(num, 5 - self.announced[which])
        if num:
            first = self.announced[which]
            self.announced[which] += num
            self.perform(which, self.pulls[which].on(announce(first, num)))

    @precondition(lambda self: self.reads)
    @rule(data=st.data(), end=st.sampled_from([ReadEnd.DONE] * 6 + list(ReadEnd)))
    def read_ended(self, data: st.DataObject, end: ReadEnd) -> None:
        which, read = self.reads.pop(data.draw(st.integers(0, len(self.reads) - 1)))
        if end is ReadEnd.UNKNOWN:
            self.unknown |= {p.slot for p in read.pages}
        self.perform(which, self.pulls[which].on(ReadEnded(read_id=read.read_id, end=end)))

    @precondition(lambda self: self.reads)
    @rule(data=st.data())
    def read_failed(self, data: st.DataObject) -> None:
        which, read = self.reads.pop(data.draw(st.integers(0, len(self.reads) - 1)))
        error = PrefillLost("not linked")
        self.perform(which, self.pulls[which].on(ReadFailed(read_id=read.read_id, error=error)))

    @precondition(lambda self: self.lands)
    @rule(data=st.data(), refuse=st.booleans())
    def landed(self, data: st.DataObject, refuse: bool) -> None:
        which, land = self.lands.pop(data.draw(st.integers(0, len(self.lands) - 1)))
        refusals = (TORN if refuse else None, *(None for _ in land.moves[1:]))
        self.perform(which, self.pulls[which].on(Landed(read_id=land.read_id, refusals=refusals)))

    @rule(which=st.integers(0, 1))
    def first_tokens(self, which: int) -> None:
        if self.announced[which] == 5 and not self.has_tokens[which]:
            self.has_tokens[which] = True
            self.perform(which, self.pulls[which].on(FirstTokensKnown()))

    @rule()
    def slots_freed(self) -> None:
        for which, pull in enumerate(self.pulls):
            self.perform(which, pull.on(SlotsFreed()))

    @rule(which=st.integers(0, 1), how=st.sampled_from(["stalled", "ended", "closed"]))
    def end(self, which: int, how: str) -> None:
        if how == "closed":
            self.pulls[which].close()
        else:
            fact = Stalled() if how == "stalled" else StreamEnded()
            self.perform(which, self.pulls[which].on(fact))

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "zone"):
            return
        self.zone.check_invariants()
        for pull, completed in zip(self.pulls, self.completed, strict=True):
            pull.check_invariants()
            assert completed == (pull.state is DestinationState.DONE)

    def teardown(self) -> None:
        """When every read has ended, only slots of unknown end are still in quarantine."""
        if not hasattr(self, "zone"):
            return
        for pull in self.pulls:
            pull.close()
        while self.reads:
            which, read = self.reads.pop()
            self.pulls[which].on(ReadEnded(read_id=read.read_id, end=ReadEnd.DONE))
        while self.lands:
            which, land = self.lands.pop()
            self.pulls[which].on(Landed(read_id=land.read_id, refusals=(None,) * len(land.moves)))
        assert self.zone.num_in_use == 0
        assert self.zone.num_quarantined == len(self.unknown)
        self.zone.check_invariants()


TestDestination = DestinationMachine.TestCase
TestDestination.settings = settings(max_examples=200, deadline=None)
