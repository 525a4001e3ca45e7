"""What a worker's service stands in: who it is, its time, and whom it tells."""

from collections.abc import Callable
from dataclasses import dataclass

from common.clock import Clock
from common.device import Device
from common.events import EventLog
from common.scheduling.kv_cache import KvCache
from worker.metrics import WorkerMetrics
from worker.watch import Identity


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerContext:
    identity: Identity
    device: Device
    cache: KvCache
    clock: Clock
    metrics: WorkerMetrics
    events: EventLog
    unfit: Callable[[str], None]
    """Called with the reason when the worker must not serve any more."""
