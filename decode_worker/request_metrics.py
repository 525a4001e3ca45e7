"""What is measured of each request, from what its router is told."""

from dataclasses import dataclass, field

from common.errors import Preempted
from common.messages import Admitted, Failed, TokenBatch
from common.types import RequestId
from decode_worker.actions import Ended, Tell
from worker.metrics import WorkerMetrics


@dataclass(slots=True, eq=False)
class _Times:
    arrival: float
    num_outputs: int
    first_token: float | None = None
    last_token: dict[int, float] = field(default_factory=dict)
    num_tokens: int = 0


class RequestMetrics:
    def __init__(self, metrics: WorkerMetrics) -> None:
        self._metrics = metrics
        self._times: dict[RequestId, _Times] = {}

    def submitted(self, request_id: RequestId, num_outputs: int, now: float) -> None:
        self._times[request_id] = _Times(now, num_outputs)

    def told(self, told: Tell, now: float) -> None:
        match told.message:
            case TokenBatch() as batch:
                if not told.is_from_prefill:
                    self._metrics.output_tokens.inc(len(batch.token_ids))
                for request_id, index in zip(batch.request_ids, batch.output_indices, strict=True):
                    self._token(self._times[request_id], index, now)
            case Admitted(request_id=request_id, num_cached_tokens=num_cached_tokens):
                self._metrics.queue.observe(now - self._times[request_id].arrival)
                self._metrics.cached_tokens.inc(num_cached_tokens)
            case Failed(code=Preempted.code):
                self._metrics.preemptions.inc()
            case Failed(code=code):
                self._metrics.errors.labels(code).inc()

    def _token(self, times: _Times, index: int, now: float) -> None:
        times.num_tokens += 1
        if times.first_token is None:
            times.first_token = now
            self._metrics.ttft.observe(now - times.arrival)
        elif index in times.last_token:
            self._metrics.itl.observe(now - times.last_token[index])
        times.last_token[index] = now

    def ended(self, ended: Ended, now: float) -> None:
        self._metrics.finished.labels(ended.reason).inc()
        times = self._times.pop(ended.request_id)
        per_output = times.num_tokens / times.num_outputs
        if times.first_token is not None and per_output > 1:
            self._metrics.tpot.observe((now - times.first_token) / (per_output - 1))
