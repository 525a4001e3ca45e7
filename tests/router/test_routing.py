"""Where a request is decoded and where its prompt is computed, from what workers report."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.messages import PoolLoad, WorkerState
from common.scheduling.step_time import StepTimes
from common.types import Role
from router.fleet.fleet import Fleet
from router.fleet.predict import Demand, crowding_s, delay_cost_s, local_s, remote_s
from router.fleet.routing import Predicting
from router.fleet.worker import Worker
from tests.router.test_fleet import C, D, P, fleet_of, state

TIMES = StepTimes(
    fixed_s=0.02, prefill_token_s=1e-4, pair_s=1e-8, decode_s=1e-4, context_token_s=1e-7
)
ROOM = {"max_model_len": 100_000, "max_prompt_tokens": 100_000}
POOL = PoolLoad(total=10_000, free=10_000, cached=0, held=0)


def worker_state(role: Role, incarnation: str, **changes: object) -> WorkerState:
    plain = {"step_times": TIMES, "blocks": POOL, "chunk_tokens": 512, **ROOM}
    return state(role, incarnation, **{**plain, **changes})


def busy(role: Role, incarnation: str, num_decodes: int, **changes: object) -> WorkerState:
    changes = {"num_context_tokens": 1000 * num_decodes, **changes}
    return worker_state(role, incarnation, running=num_decodes, num_decodes=num_decodes, **changes)


def worker(given: WorkerState) -> Worker:
    return Worker("address", given, 0)


def route(fleet: Fleet, demand: Demand, policy: Predicting | None = None) -> tuple[str, str | None]:
    """The decode worker and the prefill worker, None when the former computes."""
    policy = policy or Predicting()
    prefill = fleet.all_prefill_workers(demand.num_tokens)
    decode = policy.choose_decode(fleet.decode_workers(), demand, prefill)
    assert decode is not None
    if decode.state.role is C:
        return decode.address, None  # it does not ask
    candidates = fleet.prefill_workers(decode, demand.num_tokens)
    chosen = policy.choose_prefill(decode, candidates, demand).worker
    return decode.address, None if chosen is None else chosen.address


def cached(fleet: Fleet, **num_tokens: int) -> dict[int, int]:
    return {fleet.get(address).order: count for address, count in num_tokens.items()}  # type: ignore[union-attr]


# --- predictions ----------------------------------------------------------------------------------


def test_an_idle_prefill_worker_needs_its_steps_and_nothing_else() -> None:
    demand = Demand(num_tokens=1024)
    expected = TIMES.prefill_s(0, 1024, 512)
    assert remote_s(worker(worker_state(P, "p")), TIMES, demand) == pytest.approx(expected)
    assert expected == pytest.approx(2 * 0.02 + 1024e-4 + 1024 * 1025 / 2 * 1e-8)


def test_a_queue_is_computed_first_and_tokens_just_placed_are_part_of_it() -> None:
    demand = Demand(num_tokens=512)
    queued = worker(worker_state(P, "p", num_queued_tokens=1024, waiting=2))
    alone = remote_s(worker(worker_state(P, "p")), TIMES, demand)
    two_others = 2 * 0.02 + 1024e-4 + 2 * 512 * 512 / 2 * 1e-8
    assert remote_s(queued, TIMES, demand) == pytest.approx(alone + two_others)
    placed = worker(worker_state(P, "p"))
    placed.num_in_flight, placed.unseen = 2, (512, 512)
    assert remote_s(placed, TIMES, demand) == pytest.approx(alone + two_others)


def test_what_a_worker_holds_it_does_not_compute_but_attends_to() -> None:
    demand = Demand(num_tokens=1024, cached_tokens={0: 960})
    expected = 0.02 + 64e-4 + (64 * 960 + 64 * 65 / 2) * 1e-8
    for role, predict in ((P, remote_s), (D, local_s)):
        assert predict(worker(worker_state(role, "w")), TIMES, demand) == pytest.approx(expected)


def test_beside_running_decodes_each_chunk_waits_for_them() -> None:
    demand = Demand(num_tokens=1024)
    times = replace(TIMES, pair_s=0.0)
    idle = local_s(worker(worker_state(D, "d")), times, demand)
    beside = local_s(worker(busy(D, "d", 10)), times, demand)
    assert beside - idle == pytest.approx(2 * (10 * 1e-4 + 10_000 * 1e-7))


def test_running_streams_cost_little_within_the_target_and_their_delay_beyond() -> None:
    demand = Demand(num_tokens=512)
    times = replace(TIMES, pair_s=0.0)
    decode = worker(busy(D, "d", 10))
    work_s = 512e-4
    assert delay_cost_s(worker(worker_state(D, "d")), times, demand, 0.05) == 0
    assert delay_cost_s(decode, times, demand, 1.0) == pytest.approx(10 * work_s / 16)
    quiet_s = 0.02 + 10 * 1e-4 + 10_000 * 1e-7
    assert delay_cost_s(decode, times, demand, quiet_s) == pytest.approx(10 * work_s)
    assert (
        10 * work_s / 16 < delay_cost_s(decode, times, demand, quiet_s + work_s / 2) < (10 * work_s)
    )


def test_a_full_pool_means_waiting_for_a_stream_to_end() -> None:
    demand = Demand(num_tokens=512)
    full = replace(POOL, free=0, held=10_000)
    room = crowding_s(worker(busy(D, "d", 4)), TIMES, demand)
    assert crowding_s(worker(busy(D, "d", 4, blocks=full)), TIMES, demand) > room + 1.0


# --- the decode worker ----------------------------------------------------------------------------


def test_a_hit_saves_its_prefill() -> None:
    fleet = fleet_of(worker_state(D, "a"), worker_state(D, "b"), worker_state(P, "p"))
    demand = Demand(num_tokens=2000, cached_tokens=cached(fleet, b=1600))
    assert [route(fleet, demand)[0] for _ in range(4)] == ["b"] * 4


def test_small_hits_do_not_break_turns() -> None:
    fleet = fleet_of(worker_state(D, "a"), worker_state(D, "b"), worker_state(P, "p"))
    demand = Demand(num_tokens=1000, cached_tokens=cached(fleet, b=16))
    policy = Predicting()
    assert [route(fleet, demand, policy)[0] for _ in range(4)] == ["a", "b", "a", "b"]


@pytest.mark.parametrize("is_measured", [True, False])
def test_b111_a_hit_does_not_pile_everything_on_one_worker(is_measured: bool) -> None:
    times = TIMES if is_measured else None
    fleet = fleet_of(*(worker_state(C, name, step_times=times) for name in "abcd"))
    policy = Predicting()
    demand = Demand(num_tokens=1000, cached_tokens=cached(fleet, a=960))
    for _ in range(100):
        chosen = policy.choose_decode(fleet.decode_workers(), demand, [])
        assert chosen is not None
        fleet.place(chosen)
    counts = {w.address: w.num_in_flight for w in fleet.linked()}
    assert counts["a"] == max(counts.values())
    assert counts["a"] <= 60, counts
    assert min(counts.values()) >= 10, counts


@pytest.mark.parametrize("times", [TIMES, None])
def test_b111_unseen_prompts_go_to_the_idle_worker_however_much_it_has_cached(
    times: StepTimes | None,
) -> None:
    full_of_prefixes = PoolLoad(total=10_000, free=100, cached=9_900, held=0)
    fleet = fleet_of(
        busy(C, "busy", 8, step_times=times),
        worker_state(C, "idle", step_times=times, blocks=full_of_prefixes),
    )
    assert Counter(route(fleet, Demand(num_tokens=300))[0] for _ in range(20)) == {"idle": 20}


@pytest.mark.parametrize("times", [TIMES, None])
def test_b110_paced_unique_prompts_spread_evenly(times: StepTimes | None) -> None:
    """Though the workers' measurements differ a little, and nothing is in flight at any time."""
    slower = None if times is None else replace(times, fixed_s=times.fixed_s * 1.05)
    fleet = fleet_of(
        worker_state(D, "a", step_times=times),
        worker_state(D, "b", step_times=slower),
        worker_state(P, "p", step_times=times),
        worker_state(P, "q", step_times=slower),
    )
    policy = Predicting()
    chosen = [route(fleet, Demand(num_tokens=400), policy) for _ in range(100)]
    for counts in (Counter(d for d, _ in chosen), Counter(p for _, p in chosen)):
        assert sorted(counts.values()) == [50, 50], counts


# --- the place of the prefill ---------------------------------------------------------------------


def test_a_free_prefill_worker_computes() -> None:
    fleet = fleet_of(worker_state(D, "d"), worker_state(P, "p"))
    assert route(fleet, Demand(num_tokens=4000)) == ("d", "p")


def test_b110_the_prefill_worker_with_the_shorter_queue_computes() -> None:
    fleet = fleet_of(
        busy(D, "d", 8),
        worker_state(P, "p", num_queued_tokens=8000, waiting=2),
        worker_state(P, "q", num_queued_tokens=2000, waiting=1),
    )
    assert route(fleet, Demand(num_tokens=1000)) == ("d", "q")


def test_a_hit_at_a_prefill_worker_is_worth_a_short_queue_there() -> None:
    def fleet(num_queued: int) -> Fleet:
        queued = worker_state(P, "p", num_queued_tokens=num_queued, waiting=1)
        return fleet_of(busy(D, "d", 8), queued, worker_state(P, "q"))

    short, long = fleet(500), fleet(20_000)
    assert route(short, Demand(num_tokens=4000, cached_tokens=cached(short, p=3200)))[1] == "p"
    assert route(long, Demand(num_tokens=4000, cached_tokens=cached(long, p=3200)))[1] == "q"


def test_behind_a_long_queue_the_decode_worker_computes_itself() -> None:
    queued = worker_state(P, "p", num_queued_tokens=20_000, waiting=5)
    assert route(fleet_of(worker_state(D, "d"), queued), Demand(num_tokens=1000)) == ("d", None)
    # but not when that costs its streams more than the wait costs this request
    crowded = busy(D, "d", 200)
    policy = Predicting(itl_target_s=0.05)
    assert route(fleet_of(crowded, queued), Demand(num_tokens=1000), policy) == ("d", "p")


def test_the_rest_of_a_chat_is_computed_where_its_pages_are() -> None:
    fleet = fleet_of(busy(D, "d", 4), worker_state(P, "p"))
    demand = Demand(num_tokens=4000, cached_tokens=cached(fleet, d=3872))
    assert route(fleet, demand) == ("d", None)
    both = replace(demand, cached_tokens=cached(fleet, d=2000, p=2000))
    assert route(fleet, both) == ("d", "p")


def test_a_slow_hand_off_counts() -> None:
    demand = Demand(num_tokens=100)
    assert route(fleet_of(worker_state(D, "d"), worker_state(P, "p")), demand) == ("d", "p")
    slow = fleet_of(worker_state(D, "d", handoff_s=0.5), worker_state(P, "p"))
    assert route(slow, demand) == ("d", None)


def test_remote_means_a_prefill_worker_whenever_there_is_one() -> None:
    policy = Predicting(always_remote=True)
    fleet = fleet_of(
        worker_state(D, "d", handoff_s=9.0),
        worker_state(P, "p", num_queued_tokens=50_000, waiting=9),
    )
    demand = Demand(num_tokens=1000, cached_tokens=cached(fleet, d=900))
    assert route(fleet, demand, policy) == ("d", "p")
    fleet.lose("p")
    assert route(fleet, demand, policy) == ("d", None)


def test_without_measurements_the_least_loaded_prefill_worker_computes() -> None:
    fleet = fleet_of(
        worker_state(D, "d", step_times=None),
        worker_state(P, "p", step_times=None, num_queued_tokens=9000),
        worker_state(P, "q", step_times=None),
    )
    assert route(fleet, Demand(num_tokens=1000)) == ("d", "q")
    # unless that would compute much again of what the decode worker holds
    demand = Demand(num_tokens=1000, cached_tokens=cached(fleet, d=800))
    assert route(fleet, demand) == ("d", None)


def test_a_prefill_worker_not_yet_measured_is_taken_to_be_like_its_sisters() -> None:
    fleet = fleet_of(
        busy(D, "d", 8),
        worker_state(P, "old", num_queued_tokens=4000, waiting=1),
        worker_state(P, "new", step_times=None),
    )
    assert route(fleet, Demand(num_tokens=1000)) == ("d", "new")


@pytest.mark.parametrize("decode_s", [1e-7, 1e-2])
def test_a_decode_worker_that_never_prefilled_is_taken_to_be_like_prefill_workers(
    decode_s: float,
) -> None:
    never = replace(TIMES, decode_s=decode_s, prefill_token_s=decode_s, pair_s=0.0)
    decode = worker_state(D, "d", step_times=never)
    assert route(fleet_of(decode, worker_state(P, "p")), Demand(num_tokens=4000)) == ("d", "p")
    queued = worker_state(P, "p", num_queued_tokens=4000, waiting=1)
    assert route(fleet_of(decode, queued), Demand(num_tokens=4000)) == ("d", None)


def test_a_prefill_worker_that_would_compute_more_gets_no_bonus() -> None:
    fleet = fleet_of(worker_state(D, "d"), worker_state(P, "p"))
    demand = Demand(num_tokens=1200, cached_tokens=cached(fleet, d=800, p=784))
    assert route(fleet, demand) == ("d", None)
    other = replace(demand, cached_tokens=cached(fleet, d=784, p=784))
    assert route(fleet, other) == ("d", "p")


def test_a_mixed_fleet_is_one_fleet() -> None:
    """A colocated worker is chosen by what it needs itself; a pair by its better place."""
    states = [worker_state(C, "c"), worker_state(D, "d"), worker_state(P, "p")]
    policy = Predicting()
    places = Counter(route(fleet_of(*states), Demand(num_tokens=500), policy) for _ in range(10))
    assert places == {("c", None): 5, ("d", "p"): 5}
    states[2] = worker_state(P, "p", num_queued_tokens=30_000, waiting=10)
    states[1] = worker_state(D, "d", num_queued_tokens=30_000, waiting=10)
    assert route(fleet_of(*states), Demand(num_tokens=500)) == ("c", None)


# --- what states do not show yet ------------------------------------------------------------------


def test_a_burst_between_two_states_is_spread_over_prefill_workers() -> None:
    names = ("p", "q", "r")
    fleet = fleet_of(busy(D, "d", 64), *(worker_state(P, name) for name in names))
    policy = Predicting()
    decode = fleet.decode_workers()[0]
    demand = Demand(num_tokens=1000)
    for _ in range(30):
        chosen = policy.choose_prefill(decode, fleet.prefill_workers(decode, 1000), demand).worker
        assert chosen is not None
        fleet.place(chosen)
        fleet.expect(chosen, 1000)
    assert [fleet.get(name).num_in_flight for name in names] == [10] * 3  # type: ignore[union-attr]


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["place", "state", "computed"]), st.integers(0, 9)), max_size=40
    )
)
@settings(max_examples=100, deadline=None)
def test_placed_tokens_count_until_the_second_state_or_their_end(
    steps: list[tuple[str, int]],
) -> None:
    given_state = worker_state(P, "p")
    fleet = fleet_of(given_state)
    seen = fleet.get("p")
    assert seen is not None
    unseen: dict[int, tuple[int, object]] = {}
    for number, (what, which) in enumerate(steps):
        if what == "place":
            unseen[number] = (0, fleet.expect(seen, 10 + number))
        elif what == "state":
            fleet.observe("p", given_state)
            unseen = {n: (age + 1, e) for n, (age, e) in unseen.items() if age < 1}
        elif unseen:
            key = sorted(unseen)[which % len(unseen)]
            fleet.computed(unseen.pop(key)[1])  # type: ignore[arg-type]
        assert seen.num_unseen_tokens == sum(10 + n for n in unseen)
        fleet.check_invariants()


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_fleet_gets_an_answer_among_its_candidates(data: st.DataObject) -> None:
    def drawn(role: Role, name: str) -> WorkerState:
        times = data.draw(st.sampled_from([None, TIMES, replace(TIMES, fixed_s=0.0, decode_s=0.0)]))
        num_decodes = data.draw(st.integers(0, 300)) if role is not P else 0
        held = data.draw(st.integers(0, 100))
        return busy(
            role,
            name,
            num_decodes,
            step_times=times,
            waiting=data.draw(st.integers(0, 9)),
            num_queued_tokens=data.draw(st.integers(0, 50_000)),
            chunk_tokens=data.draw(st.sampled_from([0, 16, 512])),
            blocks=PoolLoad(total=100, free=0, cached=100 - held, held=held),
            handoff_s=data.draw(st.floats(0, 1)),
        )

    roles = data.draw(st.lists(st.sampled_from([D, P, C]), min_size=1, max_size=24))
    fleet = fleet_of(*(drawn(role, f"{role}{number}") for number, role in enumerate(roles)))
    num_tokens = data.draw(st.integers(1, 100_000))
    hits = st.dictionaries(st.integers(0, len(roles) - 1), st.integers(1, 50_000), max_size=5)
    given_hits = {n: min(count, num_tokens - 1) for n, count in data.draw(hits).items()}
    demand = Demand(num_tokens=num_tokens, cached_tokens=given_hits)
    policy = Predicting(always_remote=data.draw(st.booleans()))
    candidates = fleet.decode_workers()
    chosen = policy.choose_decode(candidates, demand, fleet.all_prefill_workers(num_tokens))
    assert (chosen is None) == (not candidates)
    if chosen is not None:
        prefill = fleet.prefill_workers(chosen, num_tokens)
        choice = policy.choose_prefill(chosen, prefill, demand)
        assert choice.worker is None or choice.worker in prefill
        assert choice.predicted_s is None or choice.predicted_s >= 0
