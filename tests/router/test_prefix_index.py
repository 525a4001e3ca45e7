"""The router's index of prefix caches, against a naive model."""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.errors import MalformedMessage
from router.fleet.prefix_index import PrefixIndex


def name(number: int) -> bytes:
    return number.to_bytes(16, "little")


def names(numbers: list[int]) -> bytes:
    return b"".join(map(name, numbers))


WORKERS = st.integers(0, 5)
NUMBERS = st.lists(st.integers(0, 9), max_size=8)


class IndexMachine(RuleBasedStateMachine):
    """The model: a set of hashes per worker."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.model: dict[int, set[int]] = {}

    @rule(worker=WORKERS)
    def reset(self, worker: int) -> None:
        self.index.reset(worker)
        self.model[worker] = set()

    @rule(worker=WORKERS)
    def drop(self, worker: int) -> None:
        self.index.drop(worker)
        self.model.pop(worker, None)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), stored=NUMBERS, removed=NUMBERS)
    def change(self, data: st.DataObject, stored: list[int], removed: list[int]) -> None:
        worker = data.draw(st.sampled_from(sorted(self.model)))
        self.index.change(worker, names(stored), names(removed))
        self.model[worker] -= set(removed)
        self.model[worker] |= set(stored)

    @rule(chain=st.lists(st.integers(0, 9), max_size=6, unique=True))
    def match(self, chain: list[int]) -> None:
        expected = {}
        for worker, held in self.model.items():
            count = next((i for i, n in enumerate(chain) if n not in held), len(chain))
            if count:
                expected[worker] = count
        assert self.index.match(map(name, chain)) == expected
        assert self.index.longest(map(name, chain)) == max(expected.values(), default=0)

    @invariant()
    def agrees(self) -> None:
        self.index.check_invariants()
        assert len(self.index) == len(set().union(*self.model.values()))
        assert self.index.workers == set(self.model)
        for worker, held in self.model.items():
            assert self.index.num_held(worker) == len(held)


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def test_the_longest_match_of_each_worker() -> None:
    index = PrefixIndex()
    for worker in range(3):
        index.reset(worker)
    index.change(0, names([1, 2, 3]), b"")
    index.change(1, names([1, 3]), b"")
    index.change(2, names([2, 3]), b"")
    assert index.match(map(name, [1, 2, 3, 4])) == {0: 3, 1: 1}
    assert index.match([]) == {}


def test_no_more_of_a_chain_is_made_than_somebody_holds() -> None:
    index = PrefixIndex()
    index.reset(0)
    index.change(0, names([0, 1]), b"")
    made: list[int] = []

    def chain() -> object:
        for number in range(1000):
            made.append(number)
            yield name(number)

    assert index.match(chain()) == {0: 2}  # type: ignore[arg-type]
    assert made == [0, 1, 2]


def test_a_lost_workers_memory_is_given_back() -> None:
    index = PrefixIndex()
    for worker in range(2):
        index.reset(worker)
        index.change(worker, names(list(range(1000 * worker, 1000 * worker + 1500))), b"")
    assert len(index) == 2500
    index.drop(0)
    assert len(index) == 1500
    assert index.num_held(0) == 0
    index.drop(1)
    assert (len(index), index.workers) == (0, frozenset())
    assert [index.held(worker) for worker in range(2)] == [set(), set()]
    index.check_invariants()


@pytest.mark.parametrize("stored", [b"x", bytes(17), bytes(31)])
def test_hashes_of_the_wrong_length_are_refused_as_a_whole(stored: bytes) -> None:
    index = PrefixIndex()
    index.reset(0)
    for wrong in ({"stored": stored, "removed": b""}, {"stored": bytes(16), "removed": stored}):
        with pytest.raises(MalformedMessage):
            index.change(0, **wrong)
        assert len(index) == 0


@pytest.mark.parametrize(("num_workers", "num_hashes"), [(2, 1_000), (64, 1_000), (2, 30_000)])
def test_a_match_looks_at_the_chain_only(num_workers: int, num_hashes: int) -> None:
    """Counted by what is looked up: the chain, whatever the fleet and the number of hashes."""
    rng = random.Random(5)
    index = PrefixIndex()
    for worker in range(num_workers):
        index.reset(worker)
        index.change(worker, rng.randbytes(16 * num_hashes), b"")
    index.change(0, names(list(range(100))), b"")
    looked_up = []

    class Watched(bytes):
        def __hash__(self) -> int:
            looked_up.append(self)
            return super().__hash__()

    assert index.match(Watched(name(n)) for n in range(1000)) == {0: 100}
    assert looked_up == [name(n) for n in range(101)]
