"""A worker's pages, as plans speak of them: what they say becomes columns, which go to every rank.

Called by the runner, on the device thread.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from common.pages import PageKind, tags_of
from common.scheduling.plan import (
    ForeignPages,
    LandingMove,
    LandingResult,
    Refused,
    TagOrder,
)
from common.types import BlockId
from engine.backend import Backend
from engine.rank_pages import Mismatch, RankPages
from engine.ranks.commands import Clear, Convert, Copy, Erase, Land, Settle, Tag
from engine.ranks.followers import ALONE, Followers


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What made a worker's pages: others may read them only where this is what they have, too."""

    fingerprint: bytes
    """Of model, layout, weights and all below: `PageLayout.fingerprint`."""
    offsets_hash: bytes
    arithmetic: str = ""
    """What decides the last bits, where a worker promises those."""
    incarnation: int


class WorkerPages:
    """`own` are those of this process, rank 0; the followers do what it does."""

    def __init__(self, own: RankPages, origin: Origin, followers: Followers = ALONE) -> None:
        self.own = own
        self.origin = origin
        self._followers = followers

    def clear_tags(self, clears: Sequence[tuple[PageKind, BlockId]]) -> None:
        for kind in PageKind:
            pages = [page for of_kind, page in clears if of_kind is kind]
            if pages:
                numbers = np.array(pages, dtype=np.int64)
                self._followers.tell(Clear(kind, numbers))
                self.own.clear_tags(kind, numbers)

    def copy_exact(self, copies: Sequence[tuple[BlockId, BlockId]]) -> None:
        if copies:
            pairs = np.ascontiguousarray(np.array(copies, dtype=np.int64).T)
            self._followers.tell(Copy(pairs))
            self.own.copy_exact(pairs)

    def tag(self, orders: Sequence[TagOrder], backend: Backend) -> None:
        for kind in PageKind:
            of_kind = [order for order in orders if order.kind is kind]
            if of_kind:
                _, pages, hashes, num_tokens, generations = zip(*of_kind, strict=True)
                tags = tags_of(
                    hashes,
                    self.origin.fingerprint,
                    num_tokens,
                    self.origin.incarnation,
                    generations,
                )
                numbers = np.array(pages, dtype=np.int64)
                self._followers.tell(Tag(kind, numbers, tags))
                self.own.tag(kind, numbers, tags, backend)

    def settle(self) -> None:
        """Until the pages of all ranks are complete: whoever is told of them may read them by other
        ways.
        """
        asked = self._followers.ask(Settle())
        self.own.settle()
        asked.answers()

    def erase(self) -> None:
        """Everything in the pool is zero."""
        self._followers.tell(Erase())
        self.own.erase()

    def land(self, moves: Sequence[LandingMove], backend: Backend) -> LandingResult:
        """Check first, copy then, record by record; their tags stay behind, since this worker has
        not vouched for them.
        """
        refusals: list[Refused | None] = [None] * len(moves)
        groups: dict[tuple[PageKind, ForeignPages | None], list[int]] = {}
        for index, move in enumerate(moves):
            groups.setdefault((move.kind, move.foreign), []).append(index)
        for (kind, foreign), indexes in groups.items():
            for number, refused in self._land(kind, foreign, [moves[i] for i in indexes], backend):
                refusals[indexes[number]] = refused
        return LandingResult(refusals=tuple(refusals))

    def _land(
        self,
        kind: PageKind,
        foreign: ForeignPages | None,
        moves: Sequence[LandingMove],
        backend: Backend,
    ) -> list[tuple[int, Refused]]:
        """Of moves of one kind and form: what was refused, by the move's number."""
        slots = np.array([move.slot for move in moves], dtype=np.int64)
        tags = tags_of(
            [move.content_hash for move in moves],
            self.origin.fingerprint if foreign is None else foreign.fingerprint,
            [move.num_tokens for move in moves],
            [move.incarnation for move in moves],
            [move.generation for move in moves],
        )
        heads = tuple(move.heads for move in moves)
        if foreign is None:
            pages = np.array([move.block_id for move in moves], dtype=np.int64)
            asked = self._followers.ask(Land(kind, slots, pages, tags, heads))
            found = self.own.land(kind, slots, pages, tags, heads, backend)
        else:
            codec = foreign.codec
            places = np.array([(move.block_id, move.block) for move in moves], dtype=np.int64)
            asked = self._followers.ask(Convert(kind, codec, slots, places, tags, heads))
            found = self.own.convert(kind, codec, slots, places, tags, heads, backend)
        return merged([*found, *(mismatch for part in asked.answers() for mismatch in part)])


def merged(mismatches: Sequence[Mismatch]) -> list[tuple[int, Refused]]:
    """Of all ranks: by page, each head once. Ranks that hold the same head may both have it."""
    heads: dict[int, dict[int, str]] = {}
    for number, head, reason in mismatches:
        heads.setdefault(number, {}).setdefault(head, reason)
    found = []
    for number, reasons in sorted(heads.items()):
        first = min(reasons)
        refused = Refused(heads=tuple(sorted(reasons)), reason=f"head {first}: {reasons[first]}")
        found.append((number, refused))
    return found
