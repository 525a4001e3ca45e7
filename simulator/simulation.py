"""A fleet and a workload, from the first arrival to the last token.

    outcome = Simulation([prefill, decode], workload).run()

The router, the schedulers, the prefix caches and the hand-off are the product's own objects; only
how long a step and a transfer take comes from the workers' cost models.
"""

from collections.abc import Callable, Sequence

from common.types import RequestId, Role
from router.fleet.routing import Predicting, RoutingPolicy
from simulator.clients import Clients
from simulator.decode_host import DecodeHost
from simulator.events import EventQueue
from simulator.host import Host, WorkerSetup
from simulator.prefill_host import PrefillHost
from simulator.records import Gaps, Outcome, Record
from simulator.router_host import RouterHost
from simulator.workload import SimulatedRequest, Workload


class Simulation:
    def __init__(
        self,
        workers: Sequence[WorkerSetup],
        workload: Workload,
        *,
        policy: Callable[[], RoutingPolicy] = Predicting,
        itl_target_s: float | None = None,
        at_once: bool = True,
        keep_tokens: bool = False,
    ) -> None:
        """`itl_target_s` is what the router is told with --itl-target. `at_once` False takes every
        step by itself: the same results, more slowly. `keep_tokens` keeps the instant of every
        token in the records.
        """
        self.events = EventQueue()
        self._requests = iter(workload.requests)
        self._concurrency = workload.concurrency
        self._keep_tokens = keep_tokens
        self._by_id: dict[RequestId, Record] = {}
        self._records: list[Record] = []
        self._gaps = Gaps()
        self._sources: dict[str, PrefillHost] = {}
        self.router = RouterHost(
            self.events, policy(), itl_target_s=itl_target_s, on_end=self._ended
        )
        self.hosts = [self._host(setup, order, at_once) for order, setup in enumerate(workers)]
        for host in self.hosts:
            self.router.add(host)

    def _host(self, setup: WorkerSetup, order: int, at_once: bool) -> Host:
        if setup.role is Role.PREFILL:
            source = PrefillHost(setup, order, self.events)
            self._sources[source.address] = source
            return source
        return DecodeHost(
            setup,
            order,
            self.events,
            clients=Clients(self._by_id, self._gaps),
            sources=self._sources,
            deliver=self.router.deliver,
            at_once=at_once,
        )

    def run(self) -> Outcome:
        for _ in range(1 if self._concurrency is None else self._concurrency):
            self._next_arrival()
        self.events.run()
        first = min((record.arrival_s for record in self._records), default=0.0)
        last = max((record.last_token_s for record in self._records), default=0.0)
        return Outcome(
            records=self._records,
            gaps=self._gaps,
            workers=[host.record for host in self.hosts],
            duration_s=last - first,
            num_events=self.events.num_events,
        )

    def _next_arrival(self) -> None:
        """Enters the next request's arrival: one at a time, in order."""
        request = next(self._requests, None)
        if request is not None:
            at = self.events.now if self._concurrency is not None else request.arrival_s
            self.events.send(at, self._arrive, request)

    def _arrive(self, request: SimulatedRequest) -> None:
        record = Record(
            number=len(self._records),
            arrival_s=self.events.now,
            prompt_tokens=request.prompt_tokens,
            output_tokens=request.output_tokens,
            token_times=[] if self._keep_tokens else None,
        )
        self._records.append(record)
        self._by_id[str(record.number)] = record
        if self._concurrency is None:
            self._next_arrival()
        self.router.arrive(request, record)

    def _ended(self, record: Record) -> None:
        del self._by_id[str(record.number)]
        if self._concurrency is not None:
            self._next_arrival()
