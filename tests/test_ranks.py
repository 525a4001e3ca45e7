"""Who holds what, and who reads from whom: over all numbers up to 16."""

import itertools

import pytest

from common.errors import ConfigError
from common.ranks import RankShare, deal, ownership, possible_ranks, shares, sources_of

UP_TO = range(1, 17)


def all_shares() -> list[tuple[int, int, tuple[RankShare, ...]]]:
    """Every group of up to 16 ranks, for every model of up to 16 KV heads and 1 to 4 queries
    each.
    """
    return [
        (num_heads, num_kv_heads, shares(num_ranks, num_heads, num_kv_heads))
        for num_kv_heads in UP_TO
        for num_heads in (num_kv_heads * group for group in (1, 2, 3, 8, 16))
        for num_ranks in possible_ranks(num_heads, num_kv_heads)
        if num_ranks <= 16
    ]


def test_every_query_has_one_rank_and_its_kv_head_is_there() -> None:
    found = all_shares()
    assert len(found) > 500
    for num_heads, num_kv_heads, group in found:
        queries = [head for share in group for head in share.heads]
        assert queries == list(range(num_heads))
        assert {head for share in group for head in share.kv_heads} == set(range(num_kv_heads))
        for share in group:
            assert len(share.heads) % len(share.kv_heads) == 0
            of_rank = {head * num_kv_heads // num_heads for head in share.heads}
            assert of_rank == set(share.kv_heads)


def test_heads_are_dealt_as_evenly_as_can_be() -> None:
    for _, num_kv_heads, group in all_shares():
        held = [len(share.kv_heads) for share in group]
        assert max(held) - min(held) <= 1
        if len(group) <= num_kv_heads:
            assert sum(held) == num_kv_heads
        else:
            assert {len(share.heads) for share in group} == {len(group[0].heads)}


def test_a_reader_gets_every_head_from_a_holder_and_replicas_share_the_work() -> None:
    num_seen = 0
    for num_kv_heads in UP_TO:
        num_heads = 16 * num_kv_heads
        groups = [
            ownership(shares(count, num_heads, num_kv_heads))
            for count in possible_ranks(num_heads, num_kv_heads)
            if count <= 16
        ]
        for mine, theirs in itertools.product(groups, repeat=2):
            reads = [sources_of(mine, theirs, reader) for reader in range(len(mine))]
            for reader, sources in enumerate(reads):
                assert tuple(sources) == mine[reader]
                assert all(head in theirs[rank] for head, rank in sources.items())
            for head in range(num_kv_heads):
                used = [sources[head] for sources in reads if head in sources]
                holders = [rank for rank, heads in enumerate(theirs) if head in heads]
                asked = [used.count(rank) for rank in holders]
                assert max(asked) - min(asked) <= 1
            num_seen += 1
    assert num_seen > 500


def test_a_group_like_the_other_reads_each_rank_from_its_twin() -> None:
    for _, _, group in all_shares():
        held = ownership(group)
        for reader in range(len(held)):
            assert set(sources_of(held, held, reader).values()) == {reader}


def test_what_does_not_divide_is_refused_with_what_would() -> None:
    with pytest.raises(ConfigError) as error:
        shares(4, 9, 3)
    assert error.value.message == (
        "--tensor-parallel 4 does not divide 9 query and 3 KV heads; 1 to 3, 9 would do"
    )
    assert [list(share.kv_heads) for share in shares(2, 9, 3)] == [[0, 1], [2]]
    assert [list(share.heads) for share in shares(2, 9, 3)] == [[0, 1, 2, 3, 4, 5], [6, 7, 8]]
    assert possible_ranks(64, 8) == (1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64)
    assert possible_ranks(1, 1) == (1,)
    with pytest.raises(ConfigError):
        shares(0, 9, 3)


def test_a_head_that_nobody_holds_is_an_error() -> None:
    with pytest.raises(ConfigError, match="KV head 2"):
        sources_of(((0, 1, 2),), ((0,), (1,)), 0)


def test_deal() -> None:
    assert deal(7, 3) == [range(3), range(3, 5), range(5, 7)]
    assert deal(2, 3) == [range(1), range(1, 2), range(2, 2)]
