"""What the simulated workers share: their set-up, their state as the router is told it, links.

A host stands in a worker's service's place: messages come in, the worker's own core decides, a step
takes as long as the cost model says. `events` orders everything.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from common.layout_facts import LayoutFacts
from common.messages import KvEvents, WorkerState
from common.pages import NO_FINGERPRINT, PageKind, PageLayout
from common.ranks import Ownership
from common.scheduling.kv_cache import KvCache
from common.scheduling.plan import StepPlan, StepResult
from common.scheduling.step_time import StepTimes
from common.types import Role
from decode_worker.core import DecodeCore
from prefill_worker.core import PrefillCore
from simulator.costs import CostModel
from simulator.events import EventQueue
from simulator.records import WorkerRecord
from worker.watch import Identity, Load, WatchService

LATENCY_S: Final = 300e-6
"""Of every message between two processes."""
MODEL_FINGERPRINT: Final = b"simulated"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSetup:
    """A worker: what it costs and how it is configured (the words of `tandem prefill --help`)."""

    role: Role
    costs: CostModel
    step_times: StepTimes
    """What it tells the router about its steps."""
    layout: PageLayout
    """Of whole pages."""
    ownership: Ownership
    """What each of its ranks holds of them."""
    num_packed: int
    num_exact: int
    chunk_tokens: int
    max_num_seqs: int
    max_model_len: int
    is_chunk_auto: bool = False
    max_waiting: int = 1_000_000
    num_landing_packed: int = 256
    num_landing_exact: int = 16


class Host:
    """One worker. Subclasses make its core."""

    _core: DecodeCore | PrefillCore

    def __init__(self, setup: WorkerSetup, order: int, events: EventQueue) -> None:
        self.setup = setup
        self.order = order
        self.events = events
        self.address = f"{setup.role}-{order}"
        self.incarnation = f"{order + 1:016x}"
        self.cache = KvCache(
            num_packed=setup.num_packed,
            num_exact=setup.num_exact,
            block_size=setup.layout.block_size,
        )
        identity = Identity(
            role=setup.role,
            incarnation=self.incarnation,
            metrics="",
            model_fingerprint=MODEL_FINGERPRINT,
            layout=setup.layout.codec.name,
            layout_fingerprint=setup.layout.fingerprint(MODEL_FINGERPRINT),
            facts=LayoutFacts.of(
                setup.layout, model=MODEL_FINGERPRINT, weights="auto", offsets=NO_FINGERPRINT
            ),
            block_size=setup.layout.block_size,
            max_model_len=setup.max_model_len,
            vocab_size=2**31 - 1,
        )
        self._feed = self.cache.feed()
        self._watch = WatchService(identity, self._load, self.cache.feed)
        self.record = WorkerRecord(self.address)
        self.link_free_at = 0.0
        """When the NICs have read, or handed out, all that was asked for so far."""
        self.device_free_at = 0.0
        self.page_bytes = {kind: setup.layout.page_bytes(kind) for kind in PageKind}
        self._plan: StepPlan | None = None
        self._life = 0
        """Counts ends of steps that were entered; an older one means nothing any more."""

    def state(self) -> WorkerState:
        return self._watch.state()

    def kv_events(self) -> list[KvEvents]:
        """Changes of the prefix cache since the last call."""
        return self._feed.take()

    def settle(self) -> None:
        """Brings the host's state up to now."""

    def check_invariants(self) -> None:
        self._core.check_invariants()

    def _load(self) -> Load:
        return self._core.load()

    def _to(self, call: Callable[..., None], *arguments: object) -> None:
        """A message to another process."""
        self.events.send(self.events.now + LATENCY_S, call, *arguments)

    def _run(self, plan: StepPlan, planned_at: float, seconds: float) -> float:
        """The device begins the step as soon as it is free; returns when it ends."""
        self._plan = plan
        end = max(planned_at, self.device_free_at) + seconds
        self._ends(end, seconds, 1)
        return end

    def _ends(self, end: float, seconds: float, num_steps: int) -> None:
        self._life += 1
        self.record.busy_s += seconds
        self.record.num_steps += num_steps
        self.events.step_end(end, self.order, self._step_ended, self._life)

    def _step_ended(self, life: int) -> None:
        raise NotImplementedError

    def _observe_peak(self, num_running: int) -> None:
        self.record.peak_running = max(self.record.peak_running, num_running)
        self.record.peak_held_pages = max(self.record.peak_held_pages, self.cache.load.held)


def sampled(plan: StepPlan, token_of: Callable[[str], int]) -> StepResult:
    """What the step gives: each request's own token, again and again."""
    keys = [chunk.key for chunk in plan.chunks for _ in range(chunk.num_outputs)]
    keys += plan.decodes
    return StepResult(
        step=plan.step,
        keys=tuple(keys),
        token_ids=tuple(map(token_of, keys)),
        logprobs=(None,) * len(keys),
    )
