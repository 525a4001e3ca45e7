"""Which workers fit together, when the fleet is ready, and who gets the next request."""

import dataclasses
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from common.messages import PoolLoad, WorkerState
from common.types import Role
from router.fleet.fleet import Fleet
from router.fleet.routing import LeastLoaded
from router.fleet.worker import Worker


def state(role: Role, incarnation: str, **changes: object) -> WorkerState:
    plain = WorkerState(
        role=role,
        incarnation=incarnation,
        pid=1,
        metrics="",
        model_fingerprint="m",
        layout="fp8",
        block_size=16,
        max_model_len=100,
        max_prompt_tokens=100,
        draining=False,
        blocks=PoolLoad(total=100, free=100, cached=0, held=0),
        running=0,
        waiting=0,
        num_queued_tokens=0,
    )
    return dataclasses.replace(plain, **changes)  # type: ignore[arg-type]


def fleet_of(*states: WorkerState) -> Fleet:
    """Each at the address that is its incarnation, with its session open."""
    fleet = Fleet()
    for each in states:
        fleet.observe(each.incarnation, each)
        if each.role is not Role.PREFILL:
            fleet.session_up(each.incarnation, each.incarnation)
        fleet.check_invariants()
    return fleet


def names(workers: Sequence[Worker]) -> list[str]:
    return [worker.address for worker in workers]


D, P, C = Role.DECODE, Role.PREFILL, Role.COLOCATED


def test_b103_ready_when_a_full_path_exists() -> None:
    assert not fleet_of().is_ready()
    assert not fleet_of(state(D, "d")).is_ready()
    assert not fleet_of(state(P, "p")).is_ready()
    assert fleet_of(state(D, "d"), state(P, "p")).is_ready()
    assert fleet_of(state(C, "c")).is_ready()


def test_not_ready_before_the_session_is_open() -> None:
    fleet = Fleet()
    fleet.observe("c", state(C, "c"))
    assert fleet.reasons() == [
        "colocated c: has no session yet",
        "no decode or colocated worker is available",
    ]


def test_a_fleet_that_lost_its_prefill_workers_serves_on_and_says_so() -> None:
    fleet = fleet_of(state(D, "d"), state(P, "p"))
    fleet.lose("p")
    assert fleet.is_ready()
    assert fleet.reasons() == ["no prefill worker is available"]
    assert names(fleet.decode_workers()) == ["d"]
    assert fleet.prefill_workers(fleet.decode_workers()[0], 1) == []


def test_b62_b120_another_block_size_is_excluded_and_says_why() -> None:
    fleet = fleet_of(state(D, "d"), state(P, "p", block_size=32))
    assert not fleet.is_ready()
    reason = fleet.excluded(fleet.linked()[1])
    assert reason is not None
    assert "blocks of 32" in reason
    assert "--block-size" in reason


def test_b120_another_model_is_excluded_and_says_why() -> None:
    fleet = fleet_of(state(C, "c"), state(D, "d", model_fingerprint="other"), state(P, "p"))
    assert names(fleet.decode_workers()) == ["c"]
    assert "other" in str(fleet.excluded(fleet.linked()[1]))


def test_a_draining_worker_gets_nothing_new() -> None:
    fleet = fleet_of(state(C, "c1"), state(C, "c2"))
    fleet.observe("c1", state(C, "c1", draining=True))
    assert names(fleet.decode_workers()) == ["c2"]


def test_b60_a_new_incarnation_is_a_new_worker() -> None:
    fleet = fleet_of(state(C, "c"))
    old = fleet.linked()[0]
    fleet.place(old)
    new = fleet.observe("c", state(C, "c-again"))
    assert new is not old
    assert (new.num_in_flight, new.has_session) == (0, False)
    fleet.session_down("c", "c")
    fleet.session_up("c", "c-again")
    fleet.release(old)
    fleet.check_invariants()
    assert names(fleet.decode_workers()) == ["c"]


def test_one_process_under_two_addresses_counts_once() -> None:
    fleet = fleet_of(state(C, "c"))
    fleet.observe("other-name", state(C, "c"))
    fleet.session_up("other-name", "c")
    assert names(fleet.decode_workers()) == ["c"]
    assert "same process" in fleet.reasons()[0]


def test_another_protocol_is_excluded() -> None:
    assert "protocol 99" in fleet_of(state(C, "c", protocol=99)).reasons()[0]


def test_a_prefill_worker_with_too_small_a_pool_is_passed_over() -> None:
    fleet = fleet_of(state(D, "d"), state(P, "small", max_prompt_tokens=10), state(P, "large"))
    decode = fleet.decode_workers()[0]
    assert names(fleet.prefill_workers(decode, 11)) == ["large"]
    assert names(fleet.prefill_workers(decode, 11, avoid={"large"})) == []


FACTS = st.tuples(
    st.sampled_from(["observe", "drain", "lose", "forget", "refuse", "up", "down"]),
    st.sampled_from(["a", "b", "c"]),
    st.sampled_from([D, P, C]),
    st.integers(0, 2),
    st.sampled_from([16, 32]),
)


@given(facts=st.lists(FACTS, max_size=30))
def test_any_order_of_facts_keeps_the_invariants(
    facts: list[tuple[str, str, Role, int, int]],
) -> None:
    fleet = Fleet()
    for what, address, role, life, block_size in facts:
        incarnation = f"{address}{life}{role.value}"
        match what:
            case "observe" | "drain":
                given = state(role, incarnation, draining=what == "drain", block_size=block_size)
                fleet.observe(address, given)
            case "lose":
                fleet.lose(address)
            case "forget":
                fleet.forget(address)
            case "refuse":
                fleet.refuse(address, "why")
            case "up":
                if role is not P:
                    fleet.session_up(address, incarnation)
            case "down":
                fleet.session_down(address, incarnation)
        fleet.check_invariants()
        assert fleet.is_ready() == bool(fleet.decode_workers())


# --- routing --------------------------------------------------------------------------------------


def test_b110_ties_go_round() -> None:
    fleet, policy = fleet_of(state(C, "a"), state(C, "b"), state(C, "c")), LeastLoaded()
    chosen = [policy.choose_decode(fleet.decode_workers()) for _ in range(9)]
    assert [w.address for w in chosen if w is not None] == ["a", "b", "c"] * 3


def test_b110_a_hundred_at_once_spread_evenly() -> None:
    fleet, policy = fleet_of(state(C, "a"), state(C, "b")), LeastLoaded()
    for _ in range(100):
        worker = policy.choose_decode(fleet.decode_workers())
        assert worker is not None
        fleet.place(worker)
    assert [w.num_in_flight for w in fleet.linked()] == [50, 50]


def test_b111_the_idle_worker_is_preferred() -> None:
    busy = state(C, "busy", running=8, blocks=PoolLoad(total=100, free=20, cached=0, held=80))
    cached = state(C, "idle", blocks=PoolLoad(total=100, free=10, cached=90, held=0))
    fleet, policy = fleet_of(busy, cached), LeastLoaded()
    for _ in range(8):
        worker = policy.choose_decode(fleet.decode_workers())
        assert worker is not None
        fleet.place(worker)
        assert worker.address == "idle"


def test_queued_tokens_count_as_load() -> None:
    fleet, policy = fleet_of(state(P, "p1", num_queued_tokens=8000), state(P, "p2")), LeastLoaded()
    chosen = policy.choose(fleet.linked())
    assert chosen is not None
    assert chosen.address == "p2"


def test_nobody_there() -> None:
    assert LeastLoaded().choose_decode([]) is None
