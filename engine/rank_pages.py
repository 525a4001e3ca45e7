"""The pages of one rank: the records of its KV heads. They are cleared, copied, tagged, and landed
from the zone that pulls write to.

Called on the thread that owns the device. Page numbers are the same in all ranks of a worker; all
arguments are columns, so that they can be sent to another rank as they are.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from common.pages import TAG_BYTES, PageKind, PageTag, tag_mismatch, with_heads
from engine.backend import Backend
from engine.device_inputs import InputBuffer
from engine.pools import PageArena

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
        of_heads = with_heads(tags, self.heads)
        from_records, to_records = self._records(slots), self._records(pages)
        is_wanted = self._wanted(heads)
        if is_wanted is not None:
            of_heads = of_heads[is_wanted]
            from_records, to_records = from_records[is_wanted], to_records[is_wanted]
        if not len(of_heads):
            return []
        source = self.landing.records(kind).flatten(0, 1)
        target = self.pool.records(kind).flatten(0, 1)
        with torch.cuda.stream(self._beside):
            accepted, sums = backend.land(source, target, from_records, to_records, of_heads)
        if accepted.all():
            return []
        numbers = np.repeat(np.arange(len(slots)), len(self.heads))
        numbers = numbers if is_wanted is None else numbers[is_wanted]
        found = []
        for row in np.flatnonzero(~accepted).tolist():
            wanted = PageTag.unpack(of_heads[row].tobytes())
            tag = source[from_records[row], -TAG_BYTES:].cpu().numpy().tobytes()
            mismatch = tag_mismatch(PageTag.unpack(tag), wanted.with_checksum(int(sums[row])))
            found.append((int(numbers[row]), wanted.head, str(mismatch)))
        return found

    def _wanted(self, heads: Sequence[Sequence[int]]) -> NDArray[np.bool_] | None:
        """[pages * heads of this rank]; None where all are."""
        if not any(heads):
            return None
        rows = [[not wanted or head in wanted for head in self.heads] for wanted in heads]
        return np.array(rows, dtype=np.bool_).reshape(-1)

    def _records(self, pages: NDArray[np.int64]) -> NDArray[np.int64]:
        """Numbers of all records of these pages, in an arena that is seen as records."""
        count = len(self.heads)
        return (pages[:, None] * count + np.arange(count)).reshape(-1)
