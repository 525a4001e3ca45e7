"""What the published comparison stands on: equal memory on both sides, and how it is counted."""

import pytest

from bench import grid
from bench.load import Seen
from bench.table import (
    AT_ONCE,
    PUBLISHED,
    column_of,
    errors,
    kv_bytes,
    legacy_system,
    our_system,
    simulated,
    waste,
)
from router.fleet.routing import LeastLoaded


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
    assert "output tokens/s" in errors(ours, PUBLISHED[1])[1]


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
