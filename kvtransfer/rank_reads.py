"""What one rank reads from the ranks of a worker it is linked to, row by row. Pure.

    planned = plan_reads(held, rank, source.ranks, landing)     # at the link
    for part in planned.of(pages):                              # for a read
        ... rows `part.remote` of source rank `part.rank` into rows `part.local` of the landing zone

A rank that has the same heads in the same order as one of the source's reads pages whole, a row
each. Else a row is a record: the heads of a page may come from several ranks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from common.errors import ConfigError, LayoutMismatch, PullFailed
from common.handoff_messages import PoolAddress
from common.pages import PageKind
from common.ranks import Ownership, sources_of
from kvtransfer.descriptors import WHOLE, Cut, Region
from kvtransfer.transport import PageRead


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRead:
    """Rows to read from one rank of the source: row `remote[i]` into row `local[i]`, of pages cut
    so.
    """

    rank: int
    here: Cut
    there: Cut
    local: list[int]
    remote: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRank:
    """A rank of the source, and which heads come from it: their places in pages on both sides."""

    rank: int
    heads: tuple[int, ...]
    here: Cut
    there: Cut

    @property
    def is_twin(self) -> bool:
        return self.here == self.there and self.here.places == tuple(range(self.here.num))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedReads:
    sources: tuple[SourceRank, ...]
    num_packed: int
    """Pages in the source's pool."""
    num_exact: int
    num_slots: int
    """Packed ones; the exact ones come behind them."""

    @property
    def is_whole(self) -> bool:
        """Pages are read as they are."""
        return len(self.sources) == 1 and self.sources[0].is_twin

    def cuts(self, source: SourceRank) -> tuple[Cut, Cut]:
        """Into which pages are cut for most reads, here and there."""
        return (WHOLE, WHOLE) if self.is_whole else (source.here, source.there)

    def of(self, pages: Sequence[PageRead]) -> list[PartRead]:
        """Raises PullFailed for a page that the source does not have."""
        limits = {PageKind.PACKED: self.num_packed, PageKind.EXACT: self.num_exact}
        if any(not 0 <= page.block_id < limits[page.kind] for page in pages):
            raise PullFailed("a page was announced that is not in the prefill worker's pool")
        behind = {PageKind.PACKED: (0, 0), PageKind.EXACT: (self.num_slots, self.num_packed)}
        local = [page.slot[1] + behind[page.kind][0] for page in pages]
        remote = [page.block_id + behind[page.kind][1] for page in pages]
        if self.is_whole and not any(page.heads for page in pages):
            [source] = self.sources
            return [PartRead(rank=source.rank, here=WHOLE, there=WHOLE, local=local, remote=remote)]
        parts = [_records(source, pages, local, remote) for source in self.sources]
        return [part for part in parts if part.local]


def _records(
    source: SourceRank, pages: Sequence[PageRead], local: list[int], remote: list[int]
) -> PartRead:
    count = len(source.heads)
    wanted = [
        (number, index)
        for number, page in enumerate(pages)
        for index, head in enumerate(source.heads)
        if not page.heads or head in page.heads
    ]
    return PartRead(
        rank=source.rank,
        here=source.here,
        there=source.there,
        local=[local[number] * count + index for number, index in wanted],
        remote=[remote[number] * count + index for number, index in wanted],
    )


def plan_reads(
    held: Ownership, rank: int, pools: Sequence[PoolAddress], landing: Sequence[Region]
) -> PlannedReads:
    """Reads of rank `rank` of a worker whose ranks hold `held` into its landing zone. Raises
    LayoutMismatch where what the source says of its pools does not fit.
    """
    if not pools or any(len(pool.pages) != 2 or not pool.heads for pool in pools):
        raise LayoutMismatch("the prefill worker does not say what its ranks hold")
    if len({tuple(num for _, _, num in pool.pages) for pool in pools}) != 1:
        raise LayoutMismatch("the prefill worker's ranks have pools of different sizes")
    mine = held[rank]
    theirs = tuple(pool.heads for pool in pools)
    try:
        found = sources_of(held, theirs, rank)
    except ConfigError as error:
        raise LayoutMismatch(error.message) from None
    ranks = sorted(set(found.values()))
    for used in ranks:
        _check_records(mine, pools[used], landing)
    sources = tuple(_source(mine, theirs[used], used, found) for used in ranks)
    (_, _, num_packed), (_, _, num_exact) = pools[0].pages
    return PlannedReads(
        sources=sources, num_packed=num_packed, num_exact=num_exact, num_slots=landing[0][2]
    )


def whole_page_bytes(pools: Sequence[PoolAddress]) -> tuple[int, int]:
    """Bytes of a packed and of an exact page with the records of all heads, of a worker that can be
    read from.
    """
    num_heads = len({head for pool in pools for head in pool.heads})
    (_, packed, _), (_, exact, _) = pools[0].pages
    num_here = len(pools[0].heads)
    return packed // num_here * num_heads, exact // num_here * num_heads


def _check_records(mine: Sequence[int], pool: PoolAddress, landing: Sequence[Region]) -> None:
    for (_, ours, _), (_, theirs, _) in zip(landing, pool.pages, strict=True):
        if ours * len(pool.heads) != theirs * len(mine):
            raise LayoutMismatch(
                f"a record has {ours / len(mine):g} bytes here and {theirs / len(pool.heads):g} at "
                "the prefill worker"
            )


def _source(
    mine: tuple[int, ...], theirs: tuple[int, ...], rank: int, found: Mapping[int, int]
) -> SourceRank:
    heads = tuple(head for head in mine if found[head] == rank)
    return SourceRank(
        rank=rank,
        heads=heads,
        here=Cut(len(mine), tuple(map(mine.index, heads))),
        there=Cut(len(theirs), tuple(map(theirs.index, heads))),
    )
