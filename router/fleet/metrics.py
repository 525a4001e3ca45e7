"""What the router measures: requests by outcome, the clients' latencies, tokens, and the fleet.

Each request is counted once, by how it ended: `success`, `abort` (the client went away), `rejected`
(its own fault or no room: 4xx) or `error` (5xx). TTFT has one entry per request that got a token.
Token counters count what was generated, also for requests that were aborted later. One registry per
object, so several routers fit in a process.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from common.errors import Cancelled, TandemError
from common.types import Role
from router.admission.admission import Admission
from router.fleet.fleet import Fleet
from router.fleet.pairs import misfits

_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0),
)
_RATIOS = (0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0)


class RouterMetrics:
    def __init__(self, fleet: Fleet, admission: Admission) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._counter(
            "requests", "Requests by endpoint and how they ended", ("endpoint", "outcome")
        )
        self.errors = self._counter("errors", "Errors answered, by code", ("code",))
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of accepted requests")
        self.retries = self._counter(
            "retries", "Resubmissions after a worker was lost or failed the request"
        )
        self.preemptions = self._counter(
            "preemptions", "Resubmissions after a decode worker made room for older requests"
        )
        self.ttft = self._histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token"
        )
        self.tokens = TokenTally()
        self.routes = RouteTally()
        self.tpot = self._histogram(
            "time_per_output_token_seconds", "Mean gap of the tokens of a finished request"
        )
        self.queue = self._histogram(
            "queue_seconds", "From a request's arrival until a decode worker has room for it"
        )
        self.e2e = self._histogram("request_seconds", "From arrival to the end of the answer")
        running = self._gauge("requests_running", "Outputs that a decode worker has room for")
        running.set_function(lambda: admission.num_running)
        waiting = self._gauge("requests_waiting", "Outputs that wait for a decode worker")
        waiting.set_function(lambda: admission.num_waiting)
        self.registry.register(_FleetCollector(fleet))
        self.registry.register(self.tokens)
        self.registry.register(self.routes)

    def ended(self, endpoint: str, error: TandemError | None) -> None:
        """A request is over."""
        if error is None:
            self.requests.labels(endpoint, "success").inc()
            return
        outcome = "error"
        if isinstance(error, Cancelled):
            outcome = "abort"
        elif error.http_status < 500:
            outcome = "rejected"
        self.requests.labels(endpoint, outcome).inc()
        self.errors.labels(error.code).inc()

    def _counter(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(f"tandem_router_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"tandem_router_{name}", text, registry=self.registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"tandem_router_{name}", text, buckets=_SECONDS, registry=self.registry)


class TokenTally:
    """What is counted for each token. The library's own objects lock and cost 5 us a token."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self._gaps = [0] * (len(_SECONDS) + 1)
        self._sum_s = 0.0

    def gap(self, seconds: float) -> None:
        self._gaps[bisect_left(_SECONDS, seconds)] += 1
        self._sum_s += seconds

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(
            "tandem_router_output_tokens", "Tokens received from workers", value=self.num_tokens
        )
        gaps = HistogramMetricFamily(
            "tandem_router_inter_token_latency_seconds", "Gap between two tokens of one output"
        )
        names = [*map(str, _SECONDS), "+Inf"]
        gaps.add_metric([], list(zip(names, accumulate(self._gaps), strict=True)), self._sum_s)
        yield gaps


class RouteTally:
    """What routing chose, and how well it foresaw times to first tokens."""

    def __init__(self) -> None:
        self.num_local = 0
        self.num_remote = 0
        self.num_hit_tokens = {"decode": 0, "prefill": 0}
        self._ratios = [0] * (len(_RATIOS) + 1)
        self._ratio_sum = 0.0

    def prefill_begun(self, *, is_local: bool) -> None:
        self.num_local += is_local
        self.num_remote += not is_local

    def hit(self, role: str, num_tokens: int) -> None:
        """Prompt tokens that the chosen worker had in its prefix cache."""
        self.num_hit_tokens[role] += num_tokens

    def first_token(self, predicted_s: float, real_s: float) -> None:
        ratio = real_s / max(predicted_s, 1e-6)
        self._ratios[bisect_left(_RATIOS, ratio)] += 1
        self._ratio_sum += ratio

    def collect(self) -> Iterator[Metric]:
        prefills = CounterMetricFamily(
            "tandem_router_prefills",
            "Prompts by where they are computed: at a prefill worker, or by the decode worker",
            labels=("where",),
        )
        prefills.add_metric(["prefill"], self.num_remote)
        prefills.add_metric(["decode"], self.num_local)
        yield prefills
        hits = CounterMetricFamily(
            "tandem_router_prefix_hit_tokens",
            "Prompt tokens that the chosen workers had cached",
            labels=("role",),
        )
        for role, count in self.num_hit_tokens.items():
            hits.add_metric([role], count)
        yield hits
        ratios = HistogramMetricFamily(
            "tandem_router_ttft_prediction_ratio",
            "Actual / predicted time, from the choice of a place to the first token",
        )
        names = [*map(str, _RATIOS), "+Inf"]
        ratios.add_metric(
            [], list(zip(names, accumulate(self._ratios), strict=True)), self._ratio_sum
        )
        yield ratios


class _FleetCollector:
    """Workers by role and state, and what is known of their prefix caches, read at each scrape."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterator[Metric]:
        workers = GaugeMetricFamily(
            "tandem_router_workers", "Workers that answer", labels=("role", "state")
        )
        counts = {(role, state): 0 for role in Role for state in ("ready", "draining", "excluded")}
        for worker in self._fleet.linked():
            state = "ready" if self._fleet.excluded(worker) is None else "excluded"
            counts[worker.state.role, "draining" if worker.state.draining else state] += 1
        for (role, state), count in counts.items():
            workers.add_metric((role.value, state), count)
        yield workers
        yield GaugeMetricFamily(
            "tandem_router_degraded",
            "1 while decode workers compute all prompts, since there is no prefill worker",
            value=int(self._fleet.is_degraded()),
        )
        linked = self._fleet.linked()
        yield GaugeMetricFamily(
            "tandem_router_misfits",
            "Pairs of a decode worker and a prefill worker whose pages it cannot read",
            value=sum(len(misfits(worker, linked)) for worker in linked),
        )
        yield _by_role(
            "tandem_router_worker_failures",
            "Failures of requests and sessions that were attributed to a worker",
            self._fleet.num_failures,
        )
        yield _by_role(
            "tandem_router_workers_taken_out",
            "Times that a worker had failed too often and got no requests for a while",
            self._fleet.num_opened,
        )
        yield GaugeMetricFamily(
            "tandem_router_prefix_index_hashes",
            "Distinct blocks known to be in the prefix caches of workers",
            value=len(self._fleet.prefix_index),
        )


def _by_role(name: str, text: str, counts: Mapping[Role, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=("role",))
    for role, count in counts.items():
        family.add_metric((role.value,), count)
    return family
