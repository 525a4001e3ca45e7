"""Workers of several ranks in the planner: what each rank holds, computes, exchanges and reads."""

import itertools
from dataclasses import replace
from typing import Any

import pytest

from common.pages import PageKind
from common.ranks import ownership, possible_ranks, shares
from common.scheduling.step_time import StepShape, num_pairs
from common.types import Role
from engine.model_share import gpu_share
from simulator.costs import FittedCosts, ModelSize
from simulator.deployment import Deployment, RoleRanks
from simulator.hardware import GPUS, MODELS, model_named
from simulator.lanes import read_share, sent_share
from simulator.planner import gpu_counts, shapes
from simulator.ring import Ring
from simulator.simulation import Simulation
from simulator.workload import closed_loop, fixed
from tests.simulator.fleets import COSTS, layout, worker
from tests.simulator.test_costs import roofline
from tests.simulator.test_plan import site

SHAPES = (
    StepShape(num_decodes=1, num_context_tokens=100),
    StepShape(num_decodes=64, num_context_tokens=64 * 3000),
    StepShape(num_prefill_tokens=2048, num_pairs=num_pairs(1024, 2048)),
    StepShape(
        num_prefill_tokens=512, num_pairs=num_pairs(0, 512), num_decodes=8, num_context_tokens=9000
    ),
)


def held(num_ranks: int, num_heads: int = 64, num_kv_heads: int = 8) -> tuple[tuple[int, ...], ...]:
    return ownership(shares(num_ranks, num_heads, num_kv_heads))


# --- what a rank holds ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_ranks", "heads", "kv_heads", "feed_forward", "vocabulary"),
    [
        (1, 64, 8, 28672, 128256),
        (4, 16, 2, 7168, 32064),
        (3, 24, 3, 9558, 42752),  # 3 + 3 + 2 KV heads, and a third of the rest, rounded up
        (8, 8, 1, 3584, 16032),
        (16, 4, 1, 1792, 8016),  # two ranks hold each KV head
    ],
)
def test_a_rank_holds_its_heads_and_its_part_of_everything_else(
    num_ranks: int, heads: int, kv_heads: int, feed_forward: int, vocabulary: int
) -> None:
    costs = roofline("llama-3-70b", "h100", num_ranks)
    attention = 8192 * (2 * heads * 128 + 2 * kv_heads * 128)
    linear = 80 * (attention + 3 * 8192 * feed_forward)
    assert costs.weight_bytes == 2 * (linear + 2 * 8192 * vocabulary)
    # 16 tokens of 128 numbers of 2 bytes, K and V, in 80 layers, and a tag, for each KV head
    assert costs.rank_layout.page_bytes(PageKind.PACKED) == kv_heads * (80 * 2 * 16 * 128 * 2 + 64)


@pytest.mark.parametrize("model", list(MODELS))
@pytest.mark.parametrize("num_ranks", range(1, 9))
def test_it_is_what_a_rank_on_a_gpu_takes_but_for_whole_tiles(model: str, num_ranks: int) -> None:
    config = model_named(model)
    heads = shares(num_ranks, config.num_heads, config.num_kv_heads)
    share = gpu_share(config, heads[0])
    query, kv = len(share.heads) * config.head_dim, len(share.kv_heads) * config.head_dim
    linear = config.hidden_size * (2 * query + 2 * kv + 3 * len(share.inter))
    tables = (1 if config.tie_word_embeddings else 2) * len(share.vocab) * config.hidden_size
    size = ModelSize.of(config, num_ranks)
    assert size.attention_width == config.num_layers * query
    assert 1 <= (config.num_layers * linear + tables) / size.num_parameters < 1.02


@pytest.mark.parametrize("num_ranks", [3, 4, 8, 16])
def test_the_fullest_rank_has_as_many_pages_as_fit_it(num_ranks: int) -> None:
    place = site("llama-3-70b", "h100")
    ranks = RoleRanks(prefill=1, decode=num_ranks)
    deployment = Deployment(decode=1, ranks=ranks)
    memory = place.memory(deployment)[Role.DECODE]
    (setup,) = place.workers(deployment)
    costs = roofline("llama-3-70b", "h100", num_ranks, "fp8_e3m4")
    one = costs.rank_layout
    assert memory.weights == costs.weight_bytes
    assert memory.pages == (
        setup.num_packed * one.page_bytes(PageKind.PACKED)
        + setup.num_exact * one.page_bytes(PageKind.EXACT)
    )
    room = 0.82 * 80e9 - memory.weights
    more = one.page_bytes(PageKind.PACKED) + one.page_bytes(PageKind.EXACT)
    assert room - more < memory.pages <= room + one.page_bytes(PageKind.EXACT)
    assert setup.ownership == held(num_ranks)


def test_replicated_kv_heads_leave_room_for_no_more_tokens_than_their_weights_do() -> None:
    """From 8 to 16 ranks a rank's pages stay as large: only its weights are fewer."""
    place = site("llama-3-70b", "h100")

    def packed(num_ranks: int) -> int:
        ranks = RoleRanks(prefill=1, decode=num_ranks)
        return place.workers(Deployment(decode=1, ranks=ranks))[0].num_packed

    weights = [roofline("llama-3-70b", "h100", count).weight_bytes for count in (8, 16)]
    page = roofline("llama-3-70b", "h100", 8, "fp8_e3m4").rank_layout
    bytes_each = page.page_bytes(PageKind.PACKED) + page.page_bytes(PageKind.EXACT) / 16
    assert packed(16) - packed(8) == pytest.approx((weights[0] - weights[1]) / bytes_each, abs=2)


# --- what a step takes ----------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_one_rank_takes_what_one_gpu_takes_and_exchanges_nothing(shape: StepShape) -> None:
    costs = roofline("llama-3-8b", "h100")
    size = ModelSize.of(model_named("llama-3-8b"))
    flops, bandwidth = 989.5e12 * 0.6, 3350e9 * 0.75
    rows = shape.num_prefill_tokens + shape.num_decodes
    products = 2.0 * size.linear_parameters / flops * rows
    products += 2.0 * size.head_parameters / flops * shape.num_decodes
    reading = (size.linear_parameters + size.head_parameters) * 2.0 / bandwidth
    kv_token = 8 * (32 * 2 * 16 * 128 * 2 + 64) / 16
    assert costs.exchange_s(shape) == 0.0
    assert costs.step_s(shape) == (
        max(products, reading)
        + 4.0 * (32 * 4096) / flops * shape.num_pairs
        + kv_token / bandwidth * shape.num_context_tokens
        + 1e-3
    )


@pytest.mark.parametrize("gpu", list(GPUS))
@pytest.mark.parametrize("model", list(MODELS))
def test_more_ranks_compute_no_longer_and_hold_no_more(model: str, gpu: str) -> None:
    config = model_named(model)
    possible = possible_ranks(config.num_heads, config.num_kv_heads)
    assert len(possible) >= 10
    for fewer, more in itertools.pairwise(roofline(model, gpu, count) for count in possible):
        assert more.weight_bytes <= fewer.weight_bytes
        assert more.kv_token_bytes <= fewer.kv_token_bytes
        for shape in SHAPES:
            assert more.compute_s(shape) <= fewer.compute_s(shape)
            assert more.exchange_s(shape) > fewer.exchange_s(shape)


def test_the_fullest_rank_decides() -> None:
    """Of 8 KV heads two of three ranks have 3: attention takes 3/8 of the time, not a third."""
    attention = StepShape(num_pairs=10**9)
    nothing = StepShape()
    one, three = (roofline("llama-3-70b", "h100", count) for count in (1, 3))

    def attention_s(costs: Any) -> float:
        return float(costs.compute_s(attention) - costs.compute_s(nothing))

    assert attention_s(three) == pytest.approx(3 / 8 * attention_s(one))


def test_exchanges_of_a_step_by_hand() -> None:
    """Two all-reduces in each of 80 layers and one of the embedding, and one gathering of logits;
    four ranks in a ring: 3 steps to sum and 3 to hand on, over 450 GB/s of which 80 % are reached.
    """
    costs = roofline("llama-3-70b", "h100", 4)
    reduced_bytes = 6 / 4 * 8192 * 2
    gathered_bytes = 3 / 4 * 128256 * 2
    fixed_s = 161 * (6.6e-6 + 6 * 0.6e-6) + 6.6e-6
    assert costs.exchange_s(StepShape()) == pytest.approx(fixed_s, rel=1e-12)
    decodes = StepShape(num_decodes=10, num_context_tokens=1000)
    assert costs.exchange_s(decodes) == pytest.approx(
        fixed_s + 10 * (161 * reduced_bytes + gathered_bytes) / 360e9, rel=1e-12
    )
    chunk = StepShape(num_prefill_tokens=512, num_pairs=1000)
    assert costs.exchange_s(chunk) == pytest.approx(
        fixed_s + 512 * 161 * reduced_bytes / 360e9, rel=1e-12
    )
    assert costs.step_s(chunk) == costs.compute_s(chunk) + costs.exchange_s(chunk) + 1e-3


def test_a_ring_of_two_and_of_eight_by_hand() -> None:
    two, eight = (Ring(num_ranks=count, bandwidth=100e9) for count in (2, 8))
    assert two.all_reduce_s(1000) == pytest.approx(6.6e-6 + 2 * 0.6e-6 + 2000 / 100e9)
    assert eight.all_reduce_s(1000) == pytest.approx(6.6e-6 + 14 * 0.6e-6 + 14 / 8 * 2000 / 100e9)
    assert two.gather_s(1000) == pytest.approx(6.6e-6 + 1000 / 100e9)
    assert Ring(num_ranks=1, bandwidth=100e9).all_reduce_s(10**9) == 0.0
    assert Ring(num_ranks=1, bandwidth=100e9).gather_s(10**9) == 0.0


# --- hand-offs ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prefill", "decode", "read", "sent"),
    [
        (1, 1, 1, 1),
        (4, 4, 1 / 4, 1 / 4),
        (4, 2, 1 / 2, 1 / 4),
        (2, 4, 1 / 4, 1 / 2),
        (1, 8, 1 / 8, 1),
        (3, 1, 1, 3 / 8),
        (3, 2, 1 / 2, 3 / 8),
        (1, 16, 1 / 8, 2),  # every head is read twice
        (16, 1, 1, 1 / 8),  # one of the two that hold a head
        (16, 16, 1 / 8, 1 / 8),  # each from a holder of its own
        (8, 16, 1 / 8, 2 / 8),
    ],
)
def test_the_fullest_nic_of_each_side(prefill: int, decode: int, read: float, sent: float) -> None:
    assert read_share(held(decode)) == read
    assert sent_share(held(decode), held(prefill)) == sent


@pytest.mark.parametrize(
    ("prefill", "decode"), list(itertools.product(possible_ranks(64, 8), repeat=2))
)
def test_no_side_moves_less_than_its_even_part(prefill: int, decode: int) -> None:
    records = sum(map(len, held(decode)))
    assert read_share(held(decode)) * decode >= records / 8
    assert sent_share(held(decode), held(prefill)) * prefill >= records / 8


def last_token_s(prefill: int, decode: int) -> float:
    """Of one request whose pages take far longer to read than everything else; 2 KV heads."""
    ranks = {1: ((0, 1),), 2: ((0,), (1,))}
    costs = FittedCosts(times=COSTS.times, read_s=0.0, read_byte_s=1e-4, land_byte_s=0.0)
    fleet = [
        worker(Role.PREFILL, costs=costs, ownership=ranks[prefill]),
        worker(Role.DECODE, costs=costs, ownership=ranks[decode]),
    ]
    load = closed_loop(num_requests=1, concurrency=1, prompt=fixed(200), output=fixed(4), seed=0)
    outcome = Simulation(fleet, load).run()
    assert outcome.records[0].num_local_prefills == 0
    return outcome.records[0].last_token_s


def test_a_hand_off_takes_as_long_as_its_fullest_nic() -> None:
    both = last_token_s(2, 2)
    assert last_token_s(1, 1) == last_token_s(1, 2) == last_token_s(2, 1)
    # 13 blocks: the first one and the open one exact
    page = layout()
    num_bytes = 11 * page.page_bytes(PageKind.PACKED) + 2 * page.page_bytes(PageKind.EXACT)
    assert last_token_s(1, 1) - both == pytest.approx(num_bytes / 2 * 1e-4, rel=1e-9)


def test_a_rank_lands_its_own_records() -> None:
    """3 passes over half of the bytes: two heads on two ranks."""
    costs = replace(COSTS, read_byte_s=0.0, land_byte_s=1e-4)
    load = closed_loop(num_requests=1, concurrency=1, prompt=fixed(200), output=fixed(4), seed=0)

    def busy_s(ranks: Any) -> float:
        fleet = [worker(Role.PREFILL, costs=costs), worker(Role.DECODE, costs=costs)]
        fleet[1] = replace(fleet[1], ownership=ranks)
        return Simulation(fleet, load).run().workers[1].busy_s

    page = layout()
    num_bytes = 11 * page.page_bytes(PageKind.PACKED) + 2 * page.page_bytes(PageKind.EXACT)
    saved = busy_s(((0, 1),)) - busy_s(((0,), (1,)))
    assert saved == pytest.approx(num_bytes / 2 * 1e-4, rel=1e-9)


# --- the search -----------------------------------------------------------------------------------


def test_shapes_keep_to_the_number_of_gpus_and_leave_room_for_no_other_worker() -> None:
    ranks = RoleRanks(prefill=2, decode=4)
    found = list(shapes(12, ranks))
    assert [shape.shape for shape in found] == [
        "3 x C4",
        "2 x P2 + 2 x D4",
        "4 x P2 + 1 x D4",
    ]
    assert [shape.num_gpus for shape in found] == [12, 12, 12]
    assert [shape.shape for shape in shapes(7, ranks)] == ["1 x C4", "1 x P2 + 1 x D4"]
    assert [shape.num_gpus for shape in shapes(7, ranks)] == [4, 6]
    assert list(shapes(3, ranks)) == []


@pytest.mark.parametrize("num_gpus", range(1, 33))
@pytest.mark.parametrize(
    "ranks", [RoleRanks(prefill=a, decode=b) for a in (1, 3, 4) for b in (2, 3)]
)
def test_no_shape_takes_more_gpus_than_there_are(num_gpus: int, ranks: RoleRanks) -> None:
    for shape in shapes(num_gpus, ranks):
        left = num_gpus - shape.num_gpus
        assert left >= 0
        assert left < (ranks.decode if shape.colocated else min(ranks.prefill, ranks.decode))


def test_the_search_tries_as_many_gpus_as_workers_need() -> None:
    assert gpu_counts(RoleRanks()) == [1, 2, 3, 4, 6, 8, 12, 16]
    four = RoleRanks(prefill=4, decode=4)
    assert gpu_counts(four) == [4 * count for count in (1, 2, 3, 4, 6, 8, 12, 16)]
    mixed = gpu_counts(RoleRanks(prefill=1, decode=4))
    assert {5, 10, 15} <= set(mixed)  # pairs
    assert max(mixed) == 64
