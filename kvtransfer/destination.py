"""The hand-off as the decode worker sees it. Facts in, actions out; one object per request and
source.

    PULLING --every page in the pool, first tokens known--> DONE
       |----refused too often, read failed, stream lost, nonsense--> FAILED
       |----close (cancelled)--> FAILED

The receiver knows the prompt's tokens, so it knows the name that each page must carry. An announced
page is read into a landing slot as soon as there is one, checked there and copied into the pool,
record by record (one for each KV head). Records that are refused are read again, they alone, a page
at most `MAX_REFETCHES` times. Slots whose read was given up are quarantined in the landing zone.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from common.errors import MalformedMessage, PageRefused, PrefillLost, PullFailed, TandemError
from common.handoff_messages import PagesReady
from common.scheduling.plan import ForeignPages, LandingMove, Refused
from common.scheduling.prompt_pages import PromptPage
from common.types import BlockId
from kvtransfer.landing import LandingZone, Slot
from kvtransfer.transport import PageRead, ReadEnd

MAX_REFETCHES = 2


class State(Enum):
    PULLING = auto()
    DONE = auto()
    FAILED = auto()


LEGAL = {State.PULLING: {State.DONE, State.FAILED}, State.DONE: set(), State.FAILED: set()}


# --- facts ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadEnded:
    read_id: int
    end: ReadEnd


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadFailed:
    """The read could not be started; nothing is written."""

    read_id: int
    error: TandemError


@dataclass(frozen=True, slots=True, kw_only=True)
class Landed:
    """The checks of one read's pages: None where the page is in the pool now, else why not."""

    read_id: int
    refusals: Sequence[Refused | None]


@dataclass(frozen=True, slots=True)
class SlotsFreed:
    """Somebody gave landing slots back."""


@dataclass(frozen=True, slots=True)
class FirstTokensKnown:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamEnded:
    error: TandemError | None = None


@dataclass(frozen=True, slots=True)
class Stalled:
    """Nothing has moved for too long."""


Fact = (
    PagesReady
    | ReadEnded
    | ReadFailed
    | Landed
    | SlotsFreed
    | FirstTokensKnown
    | StreamEnded
    | Stalled
)

# --- actions --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRead:
    read_id: int
    pages: tuple[PageRead, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Land:
    read_id: int
    moves: tuple[LandingMove, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Acknowledge:
    """These blocks are in the pool. The first `num_leading` blocks of the prompt all are."""

    blocks: tuple[int, ...]
    num_leading: int


@dataclass(frozen=True, slots=True)
class Complete:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Fail:
    error: TandemError


Action = StartRead | Land | Acknowledge | Complete | Fail


@dataclass(frozen=True, slots=True)
class _Announced:
    index: int
    block_id: BlockId
    generation: int
    heads: tuple[int, ...] = ()
    """Whose records are still wanted; empty: all."""


@dataclass(slots=True)
class HandoffDestination:
    """`expected` lists the pages wanted, consecutive blocks from the first one not held; empty to
    pull nothing.
    """

    expected: Sequence[PromptPage]
    first_block: int
    incarnation: int
    zone: LandingZone
    foreign: ForeignPages | None = None
    """What the source's pages are, where they are converted."""
    state: State = State.PULLING
    _next_announced: int = 0
    _wanted: deque[_Announced] = field(default_factory=deque)
    _reads: dict[int, list[tuple[_Announced, Slot]]] = field(default_factory=dict)
    _landing: set[int] = field(default_factory=set)
    _refusals: dict[int, int] = field(default_factory=dict)
    _done: set[int] = field(default_factory=set)
    _num_leading: int = 0
    _has_first_tokens: bool = False
    _num_reads: int = 0

    def __post_init__(self) -> None:
        self._next_announced = self._num_leading = self.first_block

    @property
    def is_quiet(self) -> bool:
        """Nothing that it asked for is under way."""
        return not self._reads

    @property
    def num_reading(self) -> int:
        """Reads that have not ended."""
        return len(self._reads) - len(self._landing)

    @property
    def num_missing(self) -> int:
        return len(self.expected) - len(self._done)

    def on(self, fact: Fact) -> list[Action]:
        if self.state is not State.PULLING:
            self._late(fact)
            return []
        match fact:
            case PagesReady():
                return self._announced(fact)
            case SlotsFreed():
                return self._start_reads()
            case ReadEnded(read_id=read_id, end=end):
                return self._read_ended(read_id, end)
            case ReadFailed(read_id=read_id, error=error):
                self._give_back(read_id)
                return self._fail(error)
            case Landed(read_id=read_id, refusals=refusals):
                return self._landed(read_id, refusals)
            case FirstTokensKnown():
                self._has_first_tokens = True
                return self._complete_if_all()
            case StreamEnded(error=error):
                return self._fail(
                    error or PrefillLost("the prefill worker ended the hand-off too early")
                )
            case Stalled():
                return self._fail(PullFailed(f"{self.num_missing} pages have not arrived in time"))

    def close(self) -> None:
        """Not wanted any more. Reads in flight are given up; a landing in flight must still be
        reported.
        """
        if self.state is State.PULLING:
            self._fail(PullFailed("cancelled"))

    def _announced(self, fact: PagesReady) -> list[Action]:
        last = fact.first_block + len(fact.kinds)
        if not self.expected:
            return []
        expected = self.expected[fact.first_block - self.first_block : last - self.first_block]
        kinds = bytes(page.kind for page in expected)
        lengths = {len(fact.kinds), len(fact.block_ids), len(fact.generations)}
        if fact.first_block != self._next_announced or fact.kinds != kinds or len(lengths) != 1:
            return self._fail(
                MalformedMessage(
                    f"the prefill worker announced blocks {fact.first_block} to {last}, expected "
                    f"{self._next_announced} to at most {self.first_block + len(self.expected)}"
                )
            )
        self._next_announced = last
        names = zip(expected, fact.block_ids, fact.generations, strict=True)
        self._wanted.extend(_Announced(page.block, block_id, gen) for page, block_id, gen in names)
        return self._start_reads()

    def _start_reads(self) -> list[Action]:
        """One read for as many wanted pages as there are free slots."""
        pages: list[tuple[_Announced, Slot]] = []
        while self._wanted:
            slot = self.zone.take(self._expected(self._wanted[0].index).kind)
            if slot is None:
                break
            pages.append((self._wanted.popleft(), slot))
        if not pages:
            return []
        self._num_reads += 1
        self._reads[self._num_reads] = pages
        reads = tuple(
            PageRead(kind=slot[0], block_id=page.block_id, slot=slot, heads=page.heads)
            for page, slot in pages
        )
        return [StartRead(read_id=self._num_reads, pages=reads)]

    def _read_ended(self, read_id: int, end: ReadEnd) -> list[Action]:
        if end is ReadEnd.DONE:
            self._landing.add(read_id)
            moves = tuple(self._move(page, slot) for page, slot in self._reads[read_id])
            return [Land(read_id=read_id, moves=moves)]
        if end is ReadEnd.DISCONNECTED:
            self._give_back(read_id)
            return self._fail(PrefillLost("the prefill worker is gone, its pages cannot be read"))
        return self._fail(PullFailed("a read of pages failed"))

    def _move(self, page: _Announced, slot: Slot) -> LandingMove:
        expected = self._expected(page.index)
        return LandingMove(
            kind=expected.kind,
            slot=slot[1],
            block_id=expected.block_id,
            content_hash=expected.content_hash,
            num_tokens=expected.num_tokens,
            incarnation=self.incarnation,
            generation=page.generation,
            heads=page.heads,
            block=page.index,
            foreign=self.foreign,
        )

    def _landed(self, read_id: int, refusals: Sequence[Refused | None]) -> list[Action]:
        self._landing.discard(read_id)
        pages = self._reads[read_id]
        good: list[int] = []
        for (page, _), refusal in zip(pages, refusals, strict=True):
            if refusal is None:
                good.append(page.index)
                continue
            self._refusals[page.index] = self._refusals.get(page.index, 0) + 1
            if self._refusals[page.index] > MAX_REFETCHES:
                self._give_back(read_id)
                return self._fail(
                    PageRefused(f"page of block {page.index} refused: {refusal.reason}")
                )
            self._wanted.append(replace(page, heads=refusal.heads))
        self._done.update(good)
        while self._num_leading in self._done:
            self._num_leading += 1
        self._give_back(read_id)
        acknowledge = (
            [Acknowledge(blocks=tuple(good), num_leading=self._num_leading)] if good else []
        )
        return [*acknowledge, *self._start_reads(), *self._complete_if_all()]

    def _complete_if_all(self) -> list[Action]:
        if self._has_first_tokens and self.num_missing == 0:
            self._to(State.DONE)
            return [Complete()]
        return []

    def _fail(self, error: TandemError) -> list[Action]:
        """Reads in flight may still write: their slots are quarantined. What is landing was read
        completely.
        """
        self._to(State.FAILED)
        self._wanted.clear()
        for read_id, pages in self._reads.items():
            if read_id not in self._landing:
                self.zone.quarantine(slot for _, slot in pages)
        return [Fail(error=error)]

    def _late(self, fact: Fact) -> None:
        """Facts about reads and landings that were under way when the hand-off ended."""
        match fact:
            case ReadEnded(read_id=read_id, end=end) if read_id in self._reads:
                if end is not ReadEnd.UNKNOWN:
                    self.zone.read_ended(slot for _, slot in self._reads.pop(read_id))
            case ReadFailed(read_id=read_id) if read_id in self._reads:
                self.zone.read_ended(slot for _, slot in self._reads.pop(read_id))
            case Landed(read_id=read_id) if read_id in self._reads:
                self._landing.discard(read_id)
                self._give_back(read_id)
            case _:
                pass

    def _give_back(self, read_id: int) -> None:
        self.zone.give_back(slot for _, slot in self._reads.pop(read_id))

    def _expected(self, index: int) -> PromptPage:
        return self.expected[index - self.first_block]

    def _to(self, state: State) -> None:
        assert state in LEGAL[self.state], f"{self.state} -> {state}"
        self.state = state

    def check_invariants(self) -> None:
        assert self._landing <= set(self._reads)
        assert self.state is not State.DONE or (not self._reads and self.num_missing == 0)
        assert self._done <= {page.block for page in self.expected}
        assert self.state is State.PULLING or not self._wanted
