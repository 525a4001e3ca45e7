"""Who gets a request: the decode worker first, the prefill worker once the decode worker has room.

A policy is pure and replaceable: it picks one of the candidates it is given. `LeastLoaded` goes by
load and breaks ties by turns, so that paced traffic (nothing in flight at any decision) spreads
evenly too.
"""

from collections.abc import Sequence
from typing import Protocol

from router.fleet import Worker

_TOKENS_PER_REQUEST = 1024
"""So many prompt tokens still to compute weigh as much as one running request."""
_FULL_POOL = 4.0
"""A pool held completely weighs as much as this many requests."""


class RoutingPolicy(Protocol):
    def choose_decode(self, candidates: Sequence[Worker]) -> Worker | None: ...

    def choose_prefill(self, candidates: Sequence[Worker]) -> Worker | None: ...


class LeastLoaded:
    def __init__(self) -> None:
        self._num_choices = 0
        self._last_choice: dict[str, int] = {}

    def choose_decode(self, candidates: Sequence[Worker]) -> Worker | None:
        return self._choose(candidates)

    def choose_prefill(self, candidates: Sequence[Worker]) -> Worker | None:
        return self._choose(candidates)

    def _choose(self, candidates: Sequence[Worker]) -> Worker | None:
        if not candidates:
            return None
        chosen = min(candidates, key=lambda w: (load(w), self._turn(w), w.order))
        self._num_choices += 1
        known = {w.state.incarnation for w in candidates}
        if len(self._last_choice) > 4 * len(known) + 64:
            self._last_choice = {k: v for k, v in self._last_choice.items() if k in known}
        self._last_choice[chosen.state.incarnation] = self._num_choices
        return chosen

    def _turn(self, worker: Worker) -> int:
        return self._last_choice.get(worker.state.incarnation, 0)


def load(worker: Worker) -> float:
    """How busy a worker is, in requests. Our own count is fresh; the worker's own covers other
    routers' requests.
    """
    state = worker.state
    num_requests = max(worker.num_in_flight, state.running + state.waiting)
    held = state.blocks.held / max(state.blocks.total, 1)
    return num_requests + state.num_queued_tokens / _TOKENS_PER_REQUEST + _FULL_POOL * held
