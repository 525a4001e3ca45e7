"""The router's table of workers: who there is, which of them fit together, and whether a request
could be served.

`discovery` reports what it sees of each address (`observe`, `lose`, `refuse`, `forget`) and of its
session (`session_up`, `session_down`), and passes on what workers say of their prefix caches
(`cache_changed`); `dispatch` asks who may take a request and reports what it placed. A worker is
one incarnation: when another process answers at the same address, the old entry is gone with all
its counts and hashes.

Ready means: a colocated worker, or a decode worker and a prefill worker that store KV alike. A
fleet that has lost its prefill workers, or never had any for a while (`accept_local`), serves all
the same, since decode workers can prefill by themselves, and says that it is degraded; unless only
prefill workers may compute prompts (`is_remote_only`).

Workers that fail requests are taken out for a while (`failed`, `succeeded`;
router/fleet/breaker.py), but at most half of those that decode: when most of them fail, they are
hardly to blame.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from common.clock import MonotonicClock, Timers
from common.errors import MalformedMessage
from common.messages import KvEvents, WorkerState
from common.types import Role
from router.fleet.pairs import misfit
from router.fleet.prefix_index import PrefixIndex
from router.fleet.view import View, view_of
from router.fleet.worker import BlockNaming, Worker


@dataclass(frozen=True, slots=True)
class Expected:
    """Prompt tokens that were sent to `worker`."""

    worker: Worker
    num_tokens: int
    num_states: int


class Fleet:
    def __init__(self, clock: Timers | None = None, *, is_remote_only: bool = False) -> None:
        self.prefix_index = PrefixIndex()
        """By `Worker.order`."""
        self.on_opened: Callable[[Worker], None] = lambda worker: None
        """Called when a worker has failed too often and is to be tested."""
        self.num_failures = dict.fromkeys(Role, 0)
        """Laid to workers of each role."""
        self.num_opened = dict.fromkeys(Role, 0)
        """How often one was taken out."""
        self._clock = clock or MonotonicClock()
        self._workers: dict[str, Worker] = {}
        self._refused: dict[str, str] = {}
        self._next_order = 0
        self.is_remote_only = is_remote_only
        self._accepts_local = False
        self._cached_view: View | None = None

    # --- facts from discovery ---------------------------------------------------------------------

    def observe(self, address: str, state: WorkerState) -> Worker:
        """A worker at `address` told its state. The worker is a new object when its incarnation is
        new.
        """
        self._refused.pop(address, None)
        worker = self._workers.get(address)
        if worker is None or worker.state.incarnation != state.incarnation:
            self._forget_hashes(worker)
            worker = self._workers[address] = Worker(address, state, self._next_order)
            self._next_order += 1
        worker.state = state
        worker.num_states += 1
        worker.unseen = (0, worker.unseen[0])
        worker.is_linked = True
        self._changed()
        return worker

    def cache_changed(self, address: str, events: KvEvents) -> None:
        """What the worker at `address`, observed before, says of its prefix cache. Without a
        snapshot first it is not believed, nor that it holds more than its pool. Raises
        MalformedMessage.
        """
        worker = self._workers[address]
        if events.is_snapshot:
            self.prefix_index.reset(worker.order)
        if self.prefix_index.knows(worker.order):
            self.prefix_index.change(worker.order, events.stored, events.removed)
        if self.prefix_index.num_held(worker.order) > worker.state.blocks.total:
            raise MalformedMessage("more blocks in the prefix cache than in the pool")

    def _forget_hashes(self, worker: Worker | None) -> None:
        if worker is not None:
            self.prefix_index.drop(worker.order)

    def lose(self, address: str) -> None:
        """The watch of `address` has ended: nothing new goes there until it is observed again."""
        worker = self._workers.get(address)
        if worker is not None:
            self._forget_hashes(worker)
            worker.is_linked = False
            self._changed()

    def refuse(self, address: str, reason: str) -> None:
        """`address` cannot be used, and why."""
        self.lose(address)
        self._refused[address] = reason

    def forget(self, address: str) -> None:
        self._forget_hashes(self._workers.pop(address, None))
        self._refused.pop(address, None)
        self._changed()

    def session_up(self, address: str, incarnation: str) -> None:
        self._set_session(address, incarnation, True)

    def session_down(self, address: str, incarnation: str) -> None:
        self._set_session(address, incarnation, False)

    def _set_session(self, address: str, incarnation: str, is_up: bool) -> None:
        worker = self._workers.get(address)
        if worker is not None and worker.state.incarnation == incarnation:
            worker.has_session = is_up
            self._changed()

    # --- facts from journeys and probes -----------------------------------------------------------

    def failed(self, worker: Worker, weight: float) -> None:
        """`worker` has failed a request; 1 for a failure that is surely its own."""
        if weight == 0:
            return
        self.num_failures[worker.state.role] += 1
        if worker.breaker.failed(self._clock.now(), weight):
            self.num_opened[worker.state.role] += 1
            self._changed()
            self.on_opened(worker)

    def forgive(self, worker: Worker, weight: float) -> None:
        worker.breaker.forgive(self._clock.now(), weight)

    def succeeded(self, worker: Worker) -> None:
        worker.breaker.succeeded(self._clock.now())

    def probe_in_s(self, worker: Worker) -> float:
        return max(0.0, worker.breaker.probe_at - self._clock.now())

    def probe_begun(self, worker: Worker) -> None:
        worker.breaker.probe_begun()
        self._changed()

    def probe_ended(self, worker: Worker, *, has_passed: bool) -> None:
        worker.breaker.probe_ended(self._clock.now(), has_passed=has_passed)
        self._changed()

    # --- questions --------------------------------------------------------------------------------

    def get(self, address: str) -> Worker | None:
        return self._workers.get(address)

    def linked(self) -> list[Worker]:
        """Workers that answer now, oldest first."""
        return list(self._view().linked)

    def decode_workers(self, avoid: Collection[str] = ()) -> list[Worker]:
        """Who may take a new request; `avoid` names incarnations. Empty while the fleet is not
        ready.
        """
        if not self.is_ready():
            return []
        return [w for w in self._view().decoding if w.state.incarnation not in avoid]

    def prefill_workers(
        self, decode: Worker, num_tokens: int, avoid: Collection[str] = ()
    ) -> list[Worker]:
        """Who may compute a prompt of `num_tokens` for `decode`."""
        return [w for w in self.all_prefill_workers(num_tokens, avoid) if misfit(w, decode) is None]

    def all_prefill_workers(self, num_tokens: int, avoid: Collection[str] = ()) -> list[Worker]:
        """Who may compute a prompt of `num_tokens` for one decode worker or another."""
        return [
            w
            for w in self._view().prefilling
            if w.state.max_prompt_tokens >= num_tokens and w.state.incarnation not in avoid
        ]

    def block_namings(self) -> tuple[BlockNaming, ...]:
        """The ways in which workers in use name blocks; nearly always one."""
        return self._view().namings

    def is_ready(self) -> bool:
        view = self._view()
        return view.has_full_path or self.is_degraded()

    def is_degraded(self) -> bool:
        """Decode workers compute all prompts, since nobody else does."""
        view = self._view()
        if self.is_remote_only or view.has_full_path or not view.decoding:
            return False
        return self._accepts_local

    def lacks_prefill(self) -> bool:
        """Decode workers wait for a prefill worker."""
        view = self._view()
        return bool(view.decoding) and not view.has_full_path and not self.is_degraded()

    def accept_local(self) -> None:
        """No prefill worker has come for long enough: decode workers may do without."""
        self._accepts_local = True

    def reasons(self, *, with_workers: bool = True) -> list[str]:
        """What keeps the fleet from being whole: excluded or unreachable workers (how many, or
        which and why), missing roles.
        """
        view = self._view()
        found = [f"{address}: {reason}" for address, reason in sorted(self._refused.items())]
        for worker in view.linked:
            reason = view.excluded[worker.order]
            if reason is not None:
                found.append(f"{worker.state.role} {worker.address}: {reason}")
        if found and not with_workers:
            found = [f"{len(found)} workers cannot be reached or are not in use"]
        if not view.decoding:
            found.append("no decode or colocated worker is available")
        elif not view.has_full_path:
            found.append("no prefill worker is available")
        return found

    def excluded(self, worker: Worker) -> str | None:
        """Why `worker` is given no requests although it answers; None when it is in use."""
        return self._view().excluded.get(worker.order, "does not answer")

    # --- counts -----------------------------------------------------------------------------------

    def place(self, worker: Worker) -> None:
        worker.num_in_flight += 1

    def release(self, worker: Worker) -> None:
        worker.num_in_flight -= 1

    def expect(self, worker: Worker, num_tokens: int) -> Expected:
        """`worker` has been sent a prompt of which it computes `num_tokens`."""
        worker.unseen = (worker.unseen[0] + num_tokens, worker.unseen[1])
        return Expected(worker, num_tokens, worker.num_states)

    def computed(self, expected: Expected) -> None:
        """They are computed, or not wanted any more: states need not show them first."""
        worker = expected.worker
        fresh, older = worker.unseen
        if expected.num_states == worker.num_states:
            worker.unseen = (fresh - expected.num_tokens, older)
        elif expected.num_states == worker.num_states - 1:
            worker.unseen = (fresh, older - expected.num_tokens)

    def check_invariants(self) -> None:
        known = {worker.order for worker in self._workers.values() if worker.is_linked}
        self.prefix_index.check_invariants()
        assert self.prefix_index.workers <= known
        for address, worker in self._workers.items():
            assert worker.address == address
            assert worker.num_in_flight >= 0
            assert min(worker.unseen) >= 0
            assert worker.can_decode or not worker.has_session
        orders = [w.order for w in self._workers.values()]
        assert len(set(orders)) == len(orders)
        view = self._view()
        assert view == view_of(list(self._workers.values()), self.is_remote_only)
        for worker in view.decoding + view.prefilling:
            assert worker.is_linked
            assert view.excluded[worker.order] is None

    # --- inside -----------------------------------------------------------------------------------

    def _changed(self) -> None:
        self._cached_view = None
        self._accepts_local = self._accepts_local or self._view().has_full_path

    def _view(self) -> View:
        if self._cached_view is None:
            self._cached_view = view_of(list(self._workers.values()), self.is_remote_only)
        return self._cached_view
