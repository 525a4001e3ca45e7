"""The pages of one rank: the records of its KV heads. They are cleared, copied, tagged, and landed
from the zone that pulls write to.

Called on the thread that owns the device. Page numbers are the same in all ranks of a worker; all
arguments are columns, so that they can be sent to another rank as they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.pages import TAG_BYTES, PageKind, PageTag, tag_mismatch, with_heads
from engine.backend import Backend
from engine.device_inputs import InputBuffer
from engine.pools import LandingArenas, PageArena

NUM_SENT = 16
"""Host buffers: a step sends at most six things beside its batch, and two steps may be under way.
"""

Mismatch = tuple[int, int, str]
"""Number of the page among those that land, KV head, and what is wrong with its record."""


class RankPages:
    """`pool` and the `landing` zone, and the way of small arrays to where they lie."""

    def __init__(self, pool: PageArena, landing: PageArena, heads: Sequence[int]) -> None:
        """`heads`: whose records a page of the arenas has, in their order."""
        assert pool.layout.num_kv_heads == len(heads)
        self.pool = pool
        self.landing = landing
        self.landings = LandingArenas(landing)
        self.heads = tuple(heads)
        self.sender = InputBuffer(pool.packed.device, num_host_buffers=NUM_SENT)
        self._beside: Any = None
        """A stream of its own for landings: what comes back of them is waited for, steps that were
        launched before are not. Nobody names a page that is being landed in.
        """
        if pool.packed.is_cuda:
            self._beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def clear_tags(self, kind: PageKind, pages: NDArray[np.int64]) -> None:
        [which] = self.sender.send_arrays([pages])
        self.pool.records(kind)[which, :, -TAG_BYTES:] = 0

    def copy_exact(self, pairs: NDArray[np.int64]) -> None:
        """`pairs` [2, copies]: sources and destinations."""
        [which] = self.sender.send_arrays([pairs])
        sources, destinations = which
        records = self.pool.records(PageKind.EXACT)
        records[destinations, :, :-TAG_BYTES] = records[sources, :, :-TAG_BYTES]

    def tag(
        self, kind: PageKind, pages: NDArray[np.int64], tags: NDArray[np.uint8], backend: Backend
    ) -> None:
        """The tags [pages, TAG_BYTES] with no checksum yet, then the checksums of the records as
        they are now.
        """
        words = with_heads(tags, self.heads).view(np.int64)
        which, sent = self.sender.send_arrays([self._records(pages), words])
        records = self.pool.records(kind).flatten(0, 1)
        of_records = records.view(torch.int64)
        of_records[which, -TAG_BYTES // 8 :] = sent
        of_records[which, -1] = backend.checksums(records, which)

    def settle(self) -> None:
        """Until pages are complete: whoever is told of them may read them by other ways."""
        if self.pool.packed.is_cuda:
            torch.cuda.current_stream().synchronize()

    def erase(self) -> None:
        """Everything in the pool is zero."""
        self.pool.packed[:] = 0
        self.pool.exact[:] = 0

    def land(
        self,
        kind: PageKind,
        slots: NDArray[np.int64],
        pages: NDArray[np.int64],
        tags: NDArray[np.uint8],
        heads: Sequence[Sequence[int]],
        backend: Backend,
    ) -> list[Mismatch]:
        """Check first, copy then, record by record; their tags stay behind, since this worker has
        not vouched for them. `heads`: whose records are wanted of each page; empty: all.
        """
        wanted = self._wanted(slots, tags, heads)
        if not len(wanted.tags):
            return []
        source = self.landing.records(kind).flatten(0, 1)
        target = self.pool.records(kind).flatten(0, 1)
        to_records = pages[wanted.numbers] * len(self.heads) + wanted.places
        with torch.cuda.stream(self._beside):
            accepted, sums = backend.land(source, target, wanted.records, to_records, wanted.tags)
        return wanted.mismatches(source, accepted, sums)

    def convert(
        self,
        kind: PageKind,
        codec: str,
        slots: NDArray[np.int64],
        places: NDArray[np.int64],
        tags: NDArray[np.uint8],
        heads: Sequence[Sequence[int]],
        backend: Backend,
    ) -> list[Mismatch]:
        """As `land`, of pages of another codec: what is copied is made anew in this worker's.
        `places` [pages, 2] are the pages, and the numbers of their blocks.
        """
        wanted = self._wanted(slots, tags, heads)
        if not len(wanted.tags):
            return []
        landing = self.landings.of(codec)
        source = landing.records(kind).flatten(0, 1)
        pages, blocks = places[wanted.numbers].T
        moves = np.ascontiguousarray(
            np.stack([wanted.records, pages, wanted.places, blocks], axis=1)
        )
        assert backend.converter is not None, "such a link is refused"
        element = landing.layout.element_kind(kind)
        accepted, sums = backend.converter(source, element, kind, moves, wanted.tags)
        return wanted.mismatches(source, accepted, sums)

    def _wanted(
        self, slots: NDArray[np.int64], tags: NDArray[np.uint8], heads: Sequence[Sequence[int]]
    ) -> "_Wanted":
        """The records of this rank that are wanted of pages in these slots."""
        count = len(self.heads)
        numbers = np.repeat(np.arange(len(slots)), count)
        places = np.tile(np.arange(count), len(slots))
        of_heads = with_heads(tags, self.heads)
        if any(heads):
            rows = [[not wanted or head in wanted for head in self.heads] for wanted in heads]
            is_wanted = np.array(rows, dtype=np.bool_).reshape(-1)
            numbers, places, of_heads = numbers[is_wanted], places[is_wanted], of_heads[is_wanted]
        return _Wanted(numbers, places, slots[numbers] * count + places, of_heads)

    def _records(self, pages: NDArray[np.int64]) -> NDArray[np.int64]:
        """Numbers of all records of these pages, in an arena that is seen as records."""
        count = len(self.heads)
        return (pages[:, None] * count + np.arange(count)).reshape(-1)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Records in a landing zone, and what each must be."""

    numbers: NDArray[np.int64]
    """Of their pages, among those that land."""
    places: NDArray[np.int64]
    """Of their heads, in a page."""
    records: NDArray[np.int64]
    """Where they are, in an arena that is seen as records."""
    tags: NDArray[np.uint8]

    def mismatches(
        self, source: Tensor, accepted: NDArray[np.bool_], sums: NDArray[np.uint64]
    ) -> list[Mismatch]:
        found = []
        for row in np.flatnonzero(~accepted).tolist():
            wanted = PageTag.unpack(self.tags[row].tobytes())
            tag = source[self.records[row], -TAG_BYTES:].cpu().numpy().tobytes()
            mismatch = tag_mismatch(PageTag.unpack(tag), wanted.with_checksum(int(sums[row])))
            found.append((int(self.numbers[row]), wanted.head, str(mismatch)))
        return found
