"""A worker's pages: cleared, copied, tagged, and landed from the zone that pulls write to.

Called by the runner, on the device thread.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from common.pages import TAG_BYTES, PageKind, PageTag, tag_mismatch
from common.scheduling.plan import LandingMove, LandingResult, Refused, TagOrder
from common.types import BlockId
from engine.backend import Backend
from engine.device_inputs import InputBuffer
from engine.pools import PageArena

NUM_SENT = 16
"""Host buffers: a step sends at most six things beside its batch, and two steps may be under way.
"""


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
    """`pool` and the `landing` zone, and the way of small arrays to where they lie."""

    def __init__(self, pool: PageArena, landing: PageArena, origin: Origin) -> None:
        self.pool = pool
        self.landing = landing
        self.origin = origin
        self.sender = InputBuffer(pool.packed.device, num_host_buffers=NUM_SENT)
        self._beside: Any = None
        """A stream of its own for landings: what comes back of them is waited for, steps that were
        launched before are not. Nobody names a page that is being landed in.
        """
        if pool.packed.is_cuda:
            self._beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def clear_tags(self, clears: Sequence[tuple[PageKind, BlockId]]) -> None:
        for kind in PageKind:
            pages = [page for of_kind, page in clears if of_kind is kind]
            if pages:
                [which] = self.sender.send_arrays([np.array(pages, dtype=np.int64)])
                self.pool.records(kind)[which, :, -TAG_BYTES:] = 0

    def copy_exact(self, copies: Sequence[tuple[BlockId, BlockId]]) -> None:
        if copies:
            [which] = self.sender.send_arrays([np.array(copies, dtype=np.int64).T])
            sources, destinations = which
            records = self.pool.records(PageKind.EXACT)
            records[destinations, :, :-TAG_BYTES] = records[sources, :, :-TAG_BYTES]

    def tag(self, orders: Sequence[TagOrder], backend: Backend) -> None:
        for kind in PageKind:
            of_kind = [order for order in orders if order.kind is kind]
            if of_kind:
                self._write_tags(kind, of_kind, backend)

    def _write_tags(self, kind: PageKind, orders: Sequence[TagOrder], backend: Backend) -> None:
        """The tags with no checksum yet, then the checksums of the records as they are now."""
        rows = [(order, head) for order in orders for head in self._every_head]
        packed = b"".join(
            self._tag(order, head, self.origin.incarnation).pack() for order, head in rows
        )
        words = np.frombuffer(packed, dtype=np.int64).reshape(len(rows), -1)
        numbers = self._numbers((order.block_id, head) for order, head in rows)
        which, sent = self.sender.send_arrays([numbers, words])
        records = self.pool.records(kind).flatten(0, 1)
        of_records = records.view(torch.int64)
        of_records[which, -TAG_BYTES // 8 :] = sent
        of_records[which, -1] = backend.checksums(records, which)

    def settle(self) -> None:
        """Until pages are complete: whoever is told of them may read them by other ways."""
        if self.pool.packed.is_cuda:
            torch.cuda.current_stream().synchronize()

    def land(self, moves: Sequence[LandingMove], backend: Backend) -> LandingResult:
        """Check first, copy then, record by record; their tags stay behind, since this worker has
        not vouched for them.
        """
        refusals: list[Refused | None] = [None] * len(moves)
        with torch.cuda.stream(self._beside):
            for kind in PageKind:
                rows = [
                    (index, head)
                    for index, move in enumerate(moves)
                    if move.kind is kind
                    for head in move.heads or self._every_head
                ]
                if rows:
                    for index, refused in self._land(kind, moves, rows, backend).items():
                        refusals[index] = refused
        return LandingResult(refusals=tuple(refusals))

    def _land(
        self,
        kind: PageKind,
        moves: Sequence[LandingMove],
        rows: Sequence[tuple[int, int]],
        backend: Backend,
    ) -> dict[int, Refused]:
        """Of records `rows` (number of the move, head): what was refused, by the move's number."""
        wanted = [self._tag(moves[index], head, moves[index].incarnation) for index, head in rows]
        tags = b"".join(tag.pack() for tag in wanted)
        source = self.landing.records(kind).flatten(0, 1)
        slots = self._numbers((moves[index].slot, head) for index, head in rows)
        accepted, sums = backend.land(
            source,
            self.pool.records(kind).flatten(0, 1),
            slots,
            self._numbers((moves[index].block_id, head) for index, head in rows),
            np.frombuffer(tags, dtype=np.uint8).reshape(len(rows), TAG_BYTES),
        )
        refused: dict[int, Refused] = {}
        for row in np.flatnonzero(~accepted).tolist():
            index, head = rows[row]
            before = refused.get(index)
            if before is not None:
                refused[index] = replace(before, heads=(*before.heads, head))
                continue
            found = PageTag.unpack(source[slots[row], -TAG_BYTES:].cpu().numpy().tobytes())
            mismatch = tag_mismatch(found, wanted[row].with_checksum(int(sums[row])))
            refused[index] = Refused(heads=(head,), reason=f"head {head}: {mismatch}")
        return refused

    def _tag(self, page: TagOrder | LandingMove, head: int, incarnation: int) -> PageTag:
        return PageTag(
            content_hash=page.content_hash,
            fingerprint=self.origin.fingerprint,
            num_tokens=page.num_tokens,
            head=head,
            incarnation=incarnation,
            generation=page.generation,
        )

    @property
    def _every_head(self) -> range:
        return range(self.pool.layout.num_kv_heads)

    def _numbers(self, records: Iterable[tuple[int, int]]) -> NDArray[np.int64]:
        """Of records (page, head) in an arena that is seen as records."""
        count = self.pool.layout.num_kv_heads
        return np.array([page * count + head for page, head in records], dtype=np.int64)
