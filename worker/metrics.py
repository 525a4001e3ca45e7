"""What a worker measures. One registry per worker object, served on the worker's own port
(common/metrics_server.py).

Times are measured where they happen: TTFT and ITL here are those of this worker, the client's are
the router's.
"""

from collections.abc import Callable, Iterable
from dataclasses import fields
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from common.scheduling.step_time import StepTimes
from worker.watch import Load

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class WorkerMetrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def histogram(name: str, text: str, buckets: Iterable[float] = SECONDS) -> Histogram:
            return Histogram(f"tandem_{name}", text, buckets=tuple(buckets), registry=self.registry)

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"tandem_{name}", text, labels, registry=self.registry)

        def gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
            return Gauge(f"tandem_{name}", text, labels, registry=self.registry)

        self.ttft = histogram(
            "time_to_first_token_seconds", "From arrival at this worker to the first token"
        )
        self.itl = histogram("inter_token_latency_seconds", "Gap between two tokens of an output")
        self.tpot = histogram(
            "time_per_output_token_seconds", "Mean gap between tokens of a finished request"
        )
        self.queue = histogram("queue_seconds", "From arrival until KV blocks are allocated")
        self.step = histogram("step_seconds", "Forward passes")
        self.prompt_tokens = counter(
            "prompt_tokens_computed", "Prompt tokens computed by this worker"
        )
        self.cached_tokens = counter(
            "prompt_tokens_cached", "Prompt tokens found in this worker's prefix cache"
        )
        self.output_tokens = counter("output_tokens", "Tokens sampled by this worker")
        self.running = gauge("requests_running", "Requests that hold KV blocks")
        self.waiting = gauge("requests_waiting", "Requests that wait for KV blocks")
        self.blocks = gauge("kv_blocks", "Pages of the pool by state", ("state",))
        self.pull_bytes = counter("pull_bytes", "Bytes of pages read from other workers")
        self.pull_pages = counter("pull_pages", "Pages read from other workers")
        self.pull_seconds = histogram("pull_seconds", "One read of pages, until its end")
        self.exposed = histogram(
            "exposed_transfer_seconds",
            "From the first token's arrival until the last page is usable",
        )
        self.handoffs = gauge("handoffs_active", "Hand-offs in progress")
        self.handoff_stream_bytes = counter(
            "handoff_stream_bytes", "Bytes of messages in hand-off streams, both directions"
        )
        self.landing = gauge("landing_slots", "Slots of the landing zone by state", ("state",))
        self.refused = counter("pages_refused", "Pages that failed verification")
        self.links_refused = counter("links_refused", "Prefill workers that cannot be read from")
        self.link_bandwidth = gauge(
            "link_bytes_per_second", "Speed of the test read when a link came up", ("source",)
        )
        self.preemptions = counter("preemptions", "Requests evicted to make room")
        self.step_times = gauge(
            "step_time_model_seconds",
            "Fitted time of a step, and of each unit of work in it (0 until measured)",
            ("unit",),
        )
        self.chunk_tokens = gauge("chunk_tokens", "Most prompt tokens in a step, at present")
        self.finished = counter("requests_finished", "Requests by how they ended", ("reason",))
        self.rank_memory = gauge(
            "rank_memory_bytes", "What each rank of this worker holds", ("rank", "of")
        )
        self.errors = counter("errors", "Errors by type", ("code",))

    def watch_load(self, load: Callable[[], Load]) -> None:
        """Gauges of the load are read when they are scraped, so they are never behind."""
        self.running.set_function(lambda: load().running)
        self.waiting.set_function(lambda: load().waiting)
        self.chunk_tokens.set_function(lambda: load().chunk_tokens)
        for unit in fields(StepTimes):
            name = unit.name
            self.step_times.labels(name.removesuffix("_s")).set_function(
                partial(_step_time, load, name)
            )
        self.blocks.labels("free").set_function(lambda: load().blocks.free)
        self.blocks.labels("cached").set_function(lambda: load().blocks.cached)
        self.blocks.labels("held").set_function(lambda: load().blocks.held)


def _step_time(load: Callable[[], Load], name: str) -> float:
    return getattr(load().step_times, name, 0.0)
