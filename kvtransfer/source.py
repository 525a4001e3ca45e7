"""The hand-off as the prefill worker sees it. Facts in, actions out; one object per stream.

    COMPUTING --PromptDone--> HANDING_OVER --all pages taken, or the peer finished--> ENDED
          any state --Lost, PromptLost--> ENDED

The stream is the lease: pages are held from their announcement until the receiver took them or the
stream ended, whichever is first. Ending releases everything, once.
"""

from dataclasses import dataclass, field
from enum import Enum, auto

from common.errors import TandemError
from common.handoff_messages import FirstTokens, PagesReady
from common.pages import PageKind
from common.types import BlockId


class State(Enum):
    COMPUTING = auto()
    HANDING_OVER = auto()
    ENDED = auto()


LEGAL = {
    State.COMPUTING: {State.HANDING_OVER, State.ENDED},
    State.HANDING_OVER: {State.ENDED},
    State.ENDED: set(),
}

# --- facts ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    index: int
    kind: PageKind
    block_id: BlockId
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PagesFinished:
    """Pages of consecutive blocks, each with a reference that is ours to give back."""

    pages: tuple[Page, ...]


@dataclass(frozen=True, slots=True)
class PromptDone:
    first_tokens: FirstTokens


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLost:
    """The prompt cannot be computed here."""

    error: TandemError


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PeerFinished:
    """The receiver wants nothing more."""


@dataclass(frozen=True, slots=True)
class StreamLost:
    """Broken, cancelled or out of time."""


Fact = PagesFinished | PromptDone | PromptLost | Taken | PeerFinished | StreamLost

# --- actions --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    message: PagesReady | FirstTokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    pages: tuple[tuple[PageKind, BlockId], ...]


@dataclass(frozen=True, slots=True)
class AbortPrompt:
    """Stop computing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndStream:
    """Cleanly, or with an error."""

    error: TandemError | None = None


Action = Send | Release | AbortPrompt | EndStream


@dataclass(slots=True)
class HandoffSource:
    state: State = State.COMPUTING
    held: dict[int, Page] = field(default_factory=dict)
    """Announced pages that the receiver has not taken, by block index."""

    def on(self, fact: Fact) -> list[Action]:
        if self.state is State.ENDED:
            return self._late(fact)
        match fact:
            case PagesFinished(pages=pages):
                return self._announce(pages)
            case PromptDone(first_tokens=first_tokens):
                return self._first_tokens(first_tokens)
            case PromptLost(error=error):
                return self._end(EndStream(error=error))
            case Taken(blocks=blocks):
                return self._taken(blocks)
            case PeerFinished() if self.state is State.HANDING_OVER:
                return self._end(EndStream())
            case PeerFinished() | StreamLost():
                return self._end(AbortPrompt(), EndStream())

    def _announce(self, pages: tuple[Page, ...]) -> list[Action]:
        if not pages:
            return []
        self.held.update((page.index, page) for page in pages)
        return [
            Send(
                message=PagesReady(
                    first_block=pages[0].index,
                    kinds=bytes(page.kind for page in pages),
                    block_ids=tuple(page.block_id for page in pages),
                    generations=tuple(page.generation for page in pages),
                )
            )
        ]

    def _first_tokens(self, message: FirstTokens) -> list[Action]:
        self._move(State.HANDING_OVER)
        return [Send(message=message)]

    def _taken(self, blocks: tuple[int, ...]) -> list[Action]:
        """Blocks we do not hold (a repeat, nonsense) are none of our business."""
        pages = [self.held.pop(index) for index in dict.fromkeys(blocks) if index in self.held]
        return [Release(pages=tuple((page.kind, page.block_id) for page in pages))] if pages else []

    def _late(self, fact: Fact) -> list[Action]:
        """The step that was running when the stream ended may still finish pages."""
        if isinstance(fact, PagesFinished) and fact.pages:
            return [Release(pages=tuple((page.kind, page.block_id) for page in fact.pages))]
        return []

    def _end(self, *actions: Action) -> list[Action]:
        self._move(State.ENDED)
        release = Release(pages=tuple((page.kind, page.block_id) for page in self.held.values()))
        self.held.clear()
        return [*([release] if release.pages else []), *actions]

    def _move(self, state: State) -> None:
        assert state in LEGAL[self.state], f"{self.state} -> {state}"
        self.state = state

    def check_invariants(self) -> None:
        assert self.state is not State.ENDED or not self.held
        assert all(index == page.index for index, page in self.held.items())
