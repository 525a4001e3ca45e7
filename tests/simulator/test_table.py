"""What the published comparison stands on: equal memory on both sides, and how it is counted."""

import pytest

from bench import grid, splits
from bench.load import Seen
from bench.published import (
    AT_ONCE,
    PUBLISHED,
    deviations,
    kv_bytes,
    legacy_system,
    our_system,
    simulated,
    waste,
)
from bench.table import column_of
from common.types import Role
from router.fleet.routing import LeastLoaded
from simulator.deployment import Deployment, RankMemory, RoleRanks


def test_both_rows_have_the_same_kv_memory() -> None:
    legacy, ours = legacy_system(), our_system()
    sizes = [system.pool.num_bytes(system.layout) for system in (legacy, ours)]
    assert sizes == pytest.approx([18 * 4.8e9] * 2, rel=0.001)
    assert kv_bytes(legacy, 10) == kv_bytes(legacy, 3500) == pytest.approx(4.8e9, rel=1e-4)
    # 218 packed pages of half the size, and two exact ones
    assert kv_bytes(ours, 3500) == pytest.approx(3500 * 163_840, rel=0.02)


def test_paged_memory_wastes_less_than_four_percent_and_reservations_most_of_it() -> None:
    assert waste(our_system(), 3000, 500) < 0.04
    assert waste(legacy_system(), 3000, 500) > 0.7


def test_more_requests_run_and_none_stalls_in_the_same_memory() -> None:
    legacy = simulated(legacy_system(), 0.346, 0.103)
    ours = simulated(our_system(), 0.346, 0.103)
    assert (legacy.concurrent, ours.concurrent) == (18, AT_ONCE)
    assert ours.output_tokens_per_s > 2.5 * legacy.output_tokens_per_s
    assert legacy.spikes is not None
    assert ours.spikes is not None
    assert ours.spikes < 0.25 * legacy.spikes
    assert "output tokens/s" in deviations(ours, PUBLISHED[1])[1]


def test_a_measured_column_counts_what_clients_saw() -> None:
    """One request after another, a token every 0.1 s and one pause of a second."""
    seen = [
        Seen(sent=float(i), tokens=tuple(i + 0.5 + 0.1 * k for k in range(10)))
        for i in range(AT_ONCE + 11)
    ]
    seen[-1] = Seen(sent=seen[-1].sent, tokens=(*seen[-1].tokens, seen[-1].tokens[-1] + 1.0))
    column = column_of(our_system(), seen)
    assert column.ttft_arrival_p99_s == pytest.approx(0.5)
    assert column.concurrent == 1  # each has its last token before the next one has its first
    assert column.output_tokens_per_s == pytest.approx(10, rel=0.1)
    assert column.spikes == pytest.approx(1 / (9 * (AT_ONCE + 11) + 1))


def test_the_grid_has_every_cell_and_its_loads_are_shares_of_what_workers_can_do() -> None:
    cells = grid.cells()
    assert len(cells) == 60
    assert len(set(cells)) == 60
    for prompt in grid.PROMPTS:
        capacities = [grid.capacity(grid.Cell(prompt, output, 0.6)) for output in grid.OUTPUTS]
        assert capacities == sorted(capacities, reverse=True)


def test_so_little_load_is_no_matter_to_any_system() -> None:
    few = grid.Cell(128, 32, 0.3)
    offered = few.load * grid.capacity(few)
    for deployment, policy in (
        (grid.AGGREGATED, LeastLoaded),
        (grid.SPLIT[0], grid.ALWAYS_REMOTE),
        (grid.COLOCATED, grid.MIXED),
    ):
        found = grid.goodput(few, deployment, policy, seed=1, share=0.2)
        assert found == pytest.approx(offered, rel=0.3)


def test_splits_are_all_fleets_of_eight_ranks() -> None:
    fleets = list(splits.fleets())
    names = [fleet.shape for fleet in fleets]
    assert {fleet.num_gpus for fleet in fleets} == {8}
    assert len(set(names)) == len(names)
    assert {"2 x P2 + 1 x D4", "1 x P4 + 1 x D4", "1 x P2 + 1 x D6", "2 x C4", "1 x C8"} <= set(
        names
    )
    # 141 GB on two H100 leave no room; on two H200 they do
    assert [fleet.shape for fleet in splits.fitting("h100")] == [
        "2 x C4",
        "1 x C8",
        "1 x P3 + 1 x D5",
        "1 x P4 + 1 x D4",
        "1 x P5 + 1 x D3",
    ]
    assert len(splits.fitting("h200")) == 15


@pytest.mark.parametrize("capacity", [0.6, 3.7, 18.0])
def test_goodput_is_the_highest_rate_that_keeps_to_the_targets(capacity: float) -> None:
    found = splits.highest(lambda rate: rate <= capacity)
    assert capacity / (1 + splits.PRECISION) <= found <= capacity


def test_goodput_is_nothing_where_the_lowest_rate_misses() -> None:
    assert splits.highest(lambda _: False) == 0.0


def test_the_best_split_of_each_load_stands_out() -> None:
    rows = [
        splits.Row(
            gpu="h100",
            deployment=Deployment(colocated=2, ranks=RoleRanks(prefill=4, decode=4)),
            memory={Role.COLOCATED: RankMemory(weights=35.3e9, pages=30.3e9)},
            goodput=dict.fromkeys(splits.LOADS, rate),
        )
        for rate in (2.0, 3.5)
    ]
    written = splits.markdown(rows)
    assert "| 2 x C4 | colocated: 35.3 + 30.3 | 2.00 | 2.00 | 2.00 |" in written
    assert "| 2 x C4 | colocated: 35.3 + 30.3 | **3.50** | **3.50** | **3.50** |" in written
