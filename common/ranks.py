"""Ranks: what each rank of a tensor-parallel worker holds, and whose records a rank reads.

Nobody works out what another worker holds: each says which KV heads its ranks have (*ownership*, a
tuple of head numbers for each rank), and the reader chooses from what it was told.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from common.errors import ConfigError

Ownership = tuple[tuple[int, ...], ...]
"""For each rank the KV heads whose records it has, in the order in which they lie in its pages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShare:
    """The attention heads of one rank. Query heads of a KV head are consecutive."""

    rank: int
    num_ranks: int
    kv_heads: range
    heads: range


def shares(num_ranks: int, num_heads: int, num_kv_heads: int) -> tuple[RankShare, ...]:
    """Up to as many ranks as KV heads: these are dealt as evenly as can be, with their queries.
    More ranks: each has one KV head, which several hold, and an equal part of its queries.

    Raises ConfigError, with the numbers of ranks that would do.
    """
    if num_ranks not in possible_ranks(num_heads, num_kv_heads):
        raise ConfigError(
            f"--tensor-parallel {num_ranks} does not divide {num_heads} query and {num_kv_heads} "
            f"KV heads; {_shown(possible_ranks(num_heads, num_kv_heads))} would do",
            param="tensor_parallel",
        )
    group = num_heads // num_kv_heads
    if num_ranks <= num_kv_heads:
        dealt = deal(num_kv_heads, num_ranks)
        queries = [range(kv.start * group, kv.stop * group) for kv in dealt]
    else:
        replicas = num_ranks // num_kv_heads
        dealt = [range(rank // replicas, rank // replicas + 1) for rank in range(num_ranks)]
        queries = deal(num_heads, num_ranks)
    return tuple(
        RankShare(rank=rank, num_ranks=num_ranks, kv_heads=kv_heads, heads=heads)
        for rank, (kv_heads, heads) in enumerate(zip(dealt, queries, strict=True))
    )


def possible_ranks(num_heads: int, num_kv_heads: int) -> tuple[int, ...]:
    """All numbers of ranks that a model with so many heads can have."""
    beyond = (
        count
        for count in range(2 * num_kv_heads, num_heads + 1, num_kv_heads)
        if num_heads % count == 0
    )
    return (*range(1, num_kv_heads + 1), *beyond)


def deal(count: int, num_ranks: int) -> list[range]:
    """`range(count)` in consecutive parts, as even as can be, the larger ones first."""
    size, larger = divmod(count, num_ranks)
    starts = [rank * size + min(rank, larger) for rank in range(num_ranks + 1)]
    return [range(*part) for part in itertools.pairwise(starts)]


def ownership(of: Sequence[RankShare]) -> Ownership:
    return tuple(tuple(share.kv_heads) for share in of)


def alone(num_kv_heads: int) -> Ownership:
    """Of the one rank that has all heads."""
    return (tuple(range(num_kv_heads)),)


def sources_of(mine: Ownership, theirs: Ownership, reader: int) -> Mapping[int, int]:
    """From which of their ranks rank `reader` reads each head that it holds.

    Readers of one head are spread over those who hold it. Raises ConfigError where a head has no
    holder.
    """
    found: dict[int, int] = {}
    for head in mine[reader]:
        holders = [rank for rank, heads in enumerate(theirs) if head in heads]
        readers = [rank for rank, heads in enumerate(mine) if head in heads]
        if not holders:
            raise ConfigError(f"no rank of the other worker holds KV head {head}")
        found[head] = holders[readers.index(reader) * len(holders) // len(readers)]
    return found


def _shown(numbers: Sequence[int]) -> str:
    """1, 2, 3 as "1 to 3"; what follows with gaps stays a list."""
    end = 1
    while end < len(numbers) and numbers[end] == numbers[end - 1] + 1:
        end += 1
    first = f"1 to {numbers[end - 1]}" if end > 2 else ", ".join(map(str, numbers[:end]))
    return ", ".join([first, *map(str, numbers[end:])])
