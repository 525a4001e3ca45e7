"""A worker's pages: cleared, copied, tagged, and landed from the zone that pulls write to.

Called by the runner, on the device thread.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from common.pages import TAG_BYTES, PageTag, tag_mismatch
from common.scheduling.plan import LandingMove, LandingResult, PageKind, TagOrder
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
                _of(self.pool, kind)[which, -TAG_BYTES:] = 0

    def copy_exact(self, copies: Sequence[tuple[BlockId, BlockId]]) -> None:
        if copies:
            [which] = self.sender.send_arrays([np.array(copies, dtype=np.int64).T])
            sources, destinations = which
            self.pool.exact[destinations, :-TAG_BYTES] = self.pool.exact[sources, :-TAG_BYTES]

    def tag(self, orders: Sequence[TagOrder], backend: Backend) -> None:
        for kind in PageKind:
            of_kind = [order for order in orders if order.kind is kind]
            if of_kind:
                self._write_tags(kind, of_kind, backend)

    def _write_tags(self, kind: PageKind, orders: Sequence[TagOrder], backend: Backend) -> None:
        """The tags with no checksum yet, then the checksums of the pages as they are now."""
        tags = [self._tag(order, self.origin.incarnation) for order in orders]
        packed = b"".join(tag.pack() for tag in tags)
        words = np.frombuffer(packed, dtype=np.int64).reshape(len(orders), -1)
        block_ids = np.array([order.block_id for order in orders], dtype=np.int64)
        which, sent = self.sender.send_arrays([block_ids, words])
        pages = _of(self.pool, kind)
        of_pages = pages.view(torch.int64)
        of_pages[which, -TAG_BYTES // 8 :] = sent
        of_pages[which, -1] = backend.checksums(pages, which)

    def settle(self) -> None:
        """Until pages are complete: whoever is told of them may read them by other ways."""
        if self.pool.packed.is_cuda:
            torch.cuda.current_stream().synchronize()

    def land(self, moves: Sequence[LandingMove], backend: Backend) -> LandingResult:
        """Check first, copy then; the pages' tags stay behind, since this worker has not vouched
        for them.
        """
        refusals: list[str | None] = [None] * len(moves)
        with torch.cuda.stream(self._beside):
            for kind in PageKind:
                which = [index for index, move in enumerate(moves) if move.kind is kind]
                if which:
                    found = self._land(kind, [moves[i] for i in which], backend)
                    for index, refusal in zip(which, found, strict=True):
                        refusals[index] = refusal
        return LandingResult(refusals=tuple(refusals))

    def _land(
        self, kind: PageKind, moves: Sequence[LandingMove], backend: Backend
    ) -> Iterator[str | None]:
        wanted = [self._tag(move, move.incarnation) for move in moves]
        source, tags = _of(self.landing, kind), b"".join(tag.pack() for tag in wanted)
        accepted, sums = backend.land(
            source,
            _of(self.pool, kind),
            np.array([move.slot for move in moves], dtype=np.int64),
            np.array([move.block_id for move in moves], dtype=np.int64),
            np.frombuffer(tags, dtype=np.uint8).reshape(len(moves), TAG_BYTES),
        )
        for move, tag, is_accepted, checksum in zip(moves, wanted, accepted, sums, strict=True):
            if is_accepted:
                yield None
            else:
                found = PageTag.unpack(source[move.slot, -TAG_BYTES:].cpu().numpy().tobytes())
                yield tag_mismatch(found, tag.with_checksum(int(checksum)))

    def _tag(self, page: TagOrder | LandingMove, incarnation: int) -> PageTag:
        return PageTag(
            content_hash=page.content_hash,
            fingerprint=self.origin.fingerprint,
            num_tokens=page.num_tokens,
            incarnation=incarnation,
            generation=page.generation,
        )


def _of(arena: PageArena, kind: PageKind) -> torch.Tensor:
    return arena.packed if kind is PageKind.PACKED else arena.exact
