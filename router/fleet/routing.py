"""Who gets a request: the decode worker first; the place of its prefill once that one has room.

A policy is pure and replaceable: it picks one of the candidates it is given. `LeastLoaded` goes by
load and breaks ties by turns, so that paced traffic (nothing in flight at any decision) spreads
evenly too. `Predicting` weighs, in seconds, what is held in prefix caches against load, and a free
prefill worker against the decode worker itself (router/fleet/predict.py); candidates that come out
about equal are left to `LeastLoaded`, as is everything while no worker has measured its steps.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from typing import Protocol, TypeVar

from common.scheduling.step_time import StepTimes
from common.types import Role
from router.fleet.pairs import misfit
from router.fleet.predict import (
    DEFAULT_CHUNK_TOKENS,
    Demand,
    crowding_s,
    delay_cost_s,
    local_s,
    remote_s,
    with_prefill,
)
from router.fleet.worker import KvIdentity, Worker

_TOKENS_PER_REQUEST = 1024
"""So many prompt tokens still to compute weigh as much as one running request."""
_FULL_POOL = 4.0
"""A pool held completely weighs as much as this many requests."""
_NEAR = 0.1
_NEAR_S = 0.005
"""Predictions that differ by less than this share and this time are about equal."""
_NOTABLE_HIT = 128
"""Prompt tokens: more than chat templates have in common."""
_NEAR_REQUESTS = 1 / 16
_SHORT = 8
"""In a large fleet, so many of the least loaded workers are compared, and of those with hits."""
_REMOTE_BONUS = 0.2
"""Prefilling locally must be better by this share and `_NEAR_S`, since the decode worker's time is
wanted by those who come next, too; unless its prefix cache saves it work that a prefill worker
would have to do."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillChoice:
    """Where a prompt is computed. `worker` None: by the decode worker itself. `predicted_s` is the
    time from now to the first token, where it can be told.
    """

    worker: Worker | None
    predicted_s: float | None = None


class RoutingPolicy(Protocol):
    def choose_decode(
        self, candidates: Sequence[Worker], demand: Demand, prefill: Sequence[Worker]
    ) -> Worker | None:
        """`prefill` lists the prefill workers that could take the prompt."""
        ...

    def choose_prefill(
        self, decode: Worker, candidates: Sequence[Worker], demand: Demand
    ) -> PrefillChoice: ...


class LeastLoaded:
    def __init__(self) -> None:
        self._num_choices = 0
        self._last_choice: dict[str, int] = {}

    def choose_decode(
        self,
        candidates: Sequence[Worker],
        demand: Demand | None = None,
        prefill: Sequence[Worker] = (),
    ) -> Worker | None:
        return self.choose(candidates)

    def choose_prefill(
        self, decode: Worker, candidates: Sequence[Worker], demand: Demand | None = None
    ) -> PrefillChoice:
        return PrefillChoice(worker=self.choose(candidates))

    def choose(self, candidates: Sequence[Worker]) -> Worker | None:
        if not candidates:
            return None
        chosen = min(candidates, key=self._rank)
        self._num_choices += 1
        known = {w.state.incarnation for w in candidates}
        if len(self._last_choice) > 4 * len(known) + 64:
            self._last_choice = {k: v for k, v in self._last_choice.items() if k in known}
        self._last_choice[chosen.state.incarnation] = self._num_choices
        return chosen

    def shortlist(self, candidates: Sequence[Worker], demand: Demand) -> Sequence[Worker]:
        """Those that are worth a closer look: the least loaded, and those that hold most of the
        prompt.
        """
        if len(candidates) <= 2 * _SHORT:
            return candidates
        listed = {w.order for w in nsmallest(_SHORT, candidates, key=self._rank)}
        holders = [w for w in candidates if w.order in demand.cached_tokens]
        listed.update(w.order for w in nsmallest(_SHORT, holders, key=demand.num_left))
        return [w for w in candidates if w.order in listed]

    def _rank(self, worker: Worker) -> tuple[float, int, int]:
        return (load(worker), self._last_choice.get(worker.state.incarnation, 0), worker.order)


class Predicting:
    """With `always_remote`, a prefill worker computes whenever there is one (and the decode worker
    asks for it, which it does not when its own cache has nearly all).
    """

    def __init__(self, *, always_remote: bool = False, itl_target_s: float | None = None) -> None:
        self._always_remote = always_remote
        self._itl_target_s = itl_target_s
        self._decode_turns = LeastLoaded()
        self._prefill_turns = LeastLoaded()

    def choose_decode(
        self, candidates: Sequence[Worker], demand: Demand, prefill: Sequence[Worker]
    ) -> Worker | None:
        if len(candidates) <= 1:
            return candidates[0] if candidates else None
        candidates = self._decode_turns.shortlist(candidates, demand)
        prefill = self._prefill_turns.shortlist(prefill, demand)
        fallback = _measured(candidates) or _measured(prefill)
        if fallback is None:
            near = _near(candidates, lambda w: _requests(w, demand), 0.0, _NEAR_REQUESTS)
            return self._decode_turns.choose(_holding_most(near, demand))
        best_remote = _best_remote(prefill, fallback, demand)

        def cost_s(worker: Worker) -> float:
            times = worker.state.step_times or fallback
            can_hand_over = worker.state.role is not Role.COLOCATED
            remote = _readable(best_remote, worker) if can_hand_over else None
            return crowding_s(worker, times, demand) + self._prefill_s(
                worker, times, remote, demand
            )

        near = _near(candidates, cost_s, _NEAR, _NEAR_S)
        return self._decode_turns.choose(_holding_most(near, demand))

    def choose_prefill(
        self, decode: Worker, candidates: Sequence[Worker], demand: Demand
    ) -> PrefillChoice:
        fallback = _measured(candidates)
        own = decode.state.step_times
        if not candidates:
            return PrefillChoice(
                worker=None, predicted_s=None if own is None else local_s(decode, own, demand)
            )
        if fallback is None:
            if not self._always_remote and _has_nearly_all(decode, candidates, demand):
                return PrefillChoice(worker=None)
            return PrefillChoice(worker=self._prefill_turns.choose(candidates))
        candidates = self._prefill_turns.shortlist(candidates, demand)

        def first_token_s(worker: Worker) -> float:
            return remote_s(worker, worker.state.step_times or fallback, demand)

        chosen = self._prefill_turns.choose(_near(candidates, first_token_s, _NEAR, _NEAR_S))
        assert chosen is not None
        remote = first_token_s(chosen) + decode.state.handoff_s
        if own is not None and not self._always_remote:
            own = with_prefill(own, fallback)
            local = local_s(decode, own, demand)
            cost = local + delay_cost_s(decode, own, demand, self._itl_target_s)
            if demand.num_left(decode) >= demand.num_left(chosen):
                cost = cost * (1 + _REMOTE_BONUS) + _NEAR_S
            if cost < remote:
                return PrefillChoice(worker=None, predicted_s=local)
        return PrefillChoice(worker=chosen, predicted_s=remote)

    def _prefill_s(
        self,
        decode: Worker,
        times: StepTimes,
        remote: "_Remote | None",
        demand: Demand,
    ) -> float:
        """The better of the two places, for choosing among decode workers."""
        if remote is not None:
            times = with_prefill(times, remote.times)
        local = local_s(decode, times, demand) + delay_cost_s(
            decode, times, demand, self._itl_target_s
        )
        if remote is None or demand.num_left(decode) <= decode.state.block_size:
            return local
        handed_over = remote.seconds + decode.state.handoff_s
        return handed_over if self._always_remote else min(local, handed_over)


def load(worker: Worker) -> float:
    """How busy a worker is, in requests."""
    state = worker.state
    held = state.blocks.held / max(state.blocks.total, 1)
    return worker.num_requests + worker.num_queued_tokens / _TOKENS_PER_REQUEST + _FULL_POOL * held


def _requests(worker: Worker, demand: Demand) -> float:
    return load(worker) + demand.num_left(worker) / _TOKENS_PER_REQUEST


def _near(
    candidates: Sequence[T], cost: Callable[[T], float], share: float, margin: float
) -> list[T]:
    """The candidates whose cost is about the least."""
    costs = [cost(candidate) for candidate in candidates]
    bound = min(costs) * (1 + share) + margin
    return [c for c, value in zip(candidates, costs, strict=True) if value <= bound]


def _holding_most(candidates: list[Worker], demand: Demand) -> list[Worker]:
    """What is handed over costs the network; hits that are too short for that are overlooked."""
    held = {w.order: demand.cached_tokens.get(w.order, 0) // _NOTABLE_HIT for w in candidates}
    most = max(held.values())
    return [w for w in candidates if held[w.order] == most]


def _measured(workers: Sequence[Worker]) -> StepTimes | None:
    """Step times of one of them: what a worker that has none yet is taken to need."""
    return next((w.state.step_times for w in workers if w.state.step_times is not None), None)


@dataclass(frozen=True, slots=True)
class _Remote:
    """How soon a prefill worker could have the first token, and its times."""

    seconds: float
    times: StepTimes
    worker: Worker


def _best_remote(
    prefill: Sequence[Worker], fallback: StepTimes, demand: Demand
) -> dict[KvIdentity, _Remote]:
    """For each form of KV."""
    found: dict[KvIdentity, _Remote] = {}
    for worker in prefill:
        times = worker.state.step_times or fallback
        seconds = remote_s(worker, times, demand)
        best = found.get(worker.kv_identity)
        if best is None or seconds < best.seconds:
            found[worker.kv_identity] = _Remote(seconds, times, worker)
    return found


def _readable(best: dict[KvIdentity, _Remote], decode: Worker) -> _Remote | None:
    """The best whose pages `decode` can read."""
    found = [remote for remote in best.values() if misfit(remote.worker, decode) is None]
    return min(found, key=lambda remote: remote.seconds, default=None)


def _has_nearly_all(decode: Worker, candidates: Sequence[Worker], demand: Demand) -> bool:
    """Without measurements: what is left is a chunk at most, and prefill workers would compute at
    least twice as much.
    """
    left = demand.num_left(decode)
    return left <= (decode.state.chunk_tokens or DEFAULT_CHUNK_TOKENS) and all(
        demand.num_left(worker) >= 2 * left for worker in candidates
    )
