"""A fleet inside one process, on the in-process transport and memory streams: real schedulers, real
services, real hand-off; only the model, the network and (on a VirtualTimeLoop) time are not.

    async with fleet(num_prefill=1, num_decode=1) as f:
        outputs = await f.client().generate(prompt, max_tokens=20)
"""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import anyio
import numpy as np
from anyio.abc import TaskGroup

from common.device import LoopCall
from common.errors import InternalError, TandemError
from common.events import EventLog
from common.layout_facts import PAGE_FORMAT, LayoutFacts
from common.messages import (
    Admitted,
    Cancel,
    Failed,
    GenerateRequest,
    Hello,
    PrefillDone,
    Route,
    Submit,
    TokenBatch,
    pack_tokens,
)
from common.pages import TAG_BYTES, PageTag, checksum
from common.ranks import alone
from common.rpc import Stream
from common.scheduling.block_hash import HashRoots
from common.scheduling.kv_cache import KvCache
from common.scheduling.plan import LandingMove, LandingResult, StepPlan, StepResult
from common.scheduling.step_time import StepShape, StepTimes
from common.types import FinishReason, PromptLogprobs, Role, SamplingParams, TokenLogprobs
from common.watchdog import LOOK_EVERY_S, Watchdog
from decode_worker.core import DecodeCore
from decode_worker.handoffs import Wire
from decode_worker.links import Links
from decode_worker.pulls import Pulls
from decode_worker.scheduler import BatchScheduler
from decode_worker.service import DecodeService
from kvtransfer.landing import LandingZone
from prefill_worker.core import PrefillCore
from prefill_worker.service import PrefillService
from tests.fakes.hash_model import LAYOUT_FINGERPRINT, VOCAB_SIZE, HashRunner
from tests.fakes.memory_network import MemoryNetwork
from tests.fakes.memory_transport import MemoryFabric, MemoryTransport
from tests.fakes.virtual_time import LoopClock
from worker.context import WorkerContext
from worker.metrics import WorkerMetrics
from worker.watch import Identity
from worker.watched_device import StepBounds, WatchedDevice

STEP_S = 0.02
MODEL_FINGERPRINT = b"hash-model"
FACTS = LayoutFacts(
    page_format=PAGE_FORMAT,
    model=MODEL_FINGERPRINT.hex(),
    num_layers=1,
    num_kv_heads=1,
    head_dim=64,
    codec="fp8_e3m4",
    block_size=16,
    weights="auto",
    offsets="",
)
MAX_MODEL_LEN = 4096


def flip_a_byte(row: Any) -> None:
    row[0] ^= 1


def make_stale(row: Any) -> None:
    """The page as an earlier use of its block would have left it: a whole page, rightly signed."""
    tag = PageTag.unpack(row[-TAG_BYTES:].tobytes())
    old = replace(tag, generation=tag.generation - 1, checksum=0)
    row[-TAG_BYTES:] = np.frombuffer(old.pack(), dtype=np.uint8)
    signed = old.with_checksum(checksum(row))
    row[-TAG_BYTES:] = np.frombuffer(signed.pack(), dtype=np.uint8)


class SteppedDevice:
    """Runs a runner in the loop itself; a step takes `step_s` of the loop's time (or, and then it
    says so, what `step_times` gives without context), a landing none. `logits_share` of a step
    comes after its pages are stored.
    """

    def __init__(
        self,
        runner: Any,
        step_s: float,
        step_times: StepTimes | None = None,
        logits_share: float = 0.1,
    ) -> None:
        self.runner = runner
        self._step_s = step_s
        self._logits_share = logits_share
        self._step_times = step_times
        self.may_run = asyncio.Event()
        self.may_run.set()
        self.num_tokens_computed = 0
        self.is_sick: Callable[[StepPlan | None], bool] = lambda plan: False
        """Whether a step's numbers are not finite; of the self-test, for None."""
        self.num_self_tests = 0
        self._one_at_a_time = anyio.Lock()

    def slow_down(self, factor: float) -> None:
        self._step_s *= factor

    async def execute(
        self, plan: StepPlan, on_stored: Callable[[], None] | None = None
    ) -> StepResult:
        async with self._one_at_a_time:
            return await self._execute(plan, on_stored)

    async def _execute(self, plan: StepPlan, on_stored: Callable[[], None] | None) -> StepResult:
        await self.may_run.wait()
        step_s = self._step_s
        if self._step_times is not None:
            step_s = self._step_times.step_s(StepShape.of(plan, 0))
        await anyio.sleep((1 - self._logits_share) * step_s)
        self.num_tokens_computed += sum(chunk.num_tokens for chunk in plan.chunks)
        result: StepResult = self.runner.execute(plan)
        if self.is_sick(plan):
            result = replace(
                result, keys=(), token_ids=(), logprobs=(), failed=tuple(dict.fromkeys(result.keys))
            )
        told = LoopCall(on_stored or (lambda: None))
        told()
        await anyio.sleep(self._logits_share * step_s)
        await self.may_run.wait()
        told.check()
        return result if self._step_times is None else replace(result, duration_s=step_s)

    async def prepare(self, grammar: str) -> None:
        """Nothing is compiled."""

    async def land(self, moves: Sequence[LandingMove]) -> LandingResult:
        await self.may_run.wait()
        await asyncio.sleep(0)
        result: LandingResult = self.runner.land(moves)
        return result

    async def self_test(self, block_ids: tuple[int, ...], tail: int) -> None:
        assert len({*block_ids[:1], tail}) == 2
        async with self._one_at_a_time:
            await self.may_run.wait()
            await anyio.sleep(self._step_s)
            self.num_self_tests += 1
            if self.is_sick(None):
                raise InternalError("self-test: the model's logits are not finite")


class _Watched(WatchedDevice):
    """As a worker's main function wraps its device. Steps take hundredths of a second."""

    def __init__(self, device: SteppedDevice, watchdog: Watchdog) -> None:
        bounds = StepBounds(
            lambda: None, lambda: 0, block_size=16, self_test_s=STEP_S, may_compile=False
        )
        super().__init__(device, self._job_of(watchdog), bounds)
        self.runner = device.runner

    @staticmethod
    def _job_of(
        watchdog: Watchdog,
    ) -> Callable[[float], contextlib.AbstractContextManager[None]]:
        @contextlib.contextmanager
        def job(bound_s: float) -> Iterator[None]:
            number = watchdog.job_began(LoopClock().now(), bound_s)
            try:
                yield
            finally:
                watchdog.job_ended(LoopClock().now(), number)

        return job


@dataclass(eq=False)
class Worker:
    address: str
    identity: Identity
    cache: KvCache
    scheduler: Any
    core: Any
    service: Any
    device: SteppedDevice
    runner: Any
    metrics: WorkerMetrics
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    zone: LandingZone | None = None
    transport: Any = None

    def check(self) -> None:
        self.core.check_invariants()

    def check_at_rest(self) -> None:
        """Nothing is held, nothing is remembered."""
        self.check()
        assert self.cache.load.held == 0, self.cache.load
        assert self.scheduler.num_running == 0
        assert self.scheduler.num_waiting == 0
        assert self.core.num_handoffs == 0
        if self.zone is not None:
            assert self.zone.num_in_use == 0
            assert self.zone.num_quarantined == 0

    def metric(self, name: str, labels: dict[str, str] | None = None) -> float:
        return self.metrics.registry.get_sample_value(f"tandem_{name}", labels or {}) or 0.0


def _landing_of(runner: Any) -> Callable[[str], Any] | None:
    """Of a real engine."""
    pages = getattr(runner, "pages", None)
    return None if pages is None else pages.own.landings.of


def _facts_of(runner: Any) -> LayoutFacts:
    pages = getattr(runner, "pages", None)
    if pages is None:
        return FACTS
    return LayoutFacts.of(
        runner.layout,
        model=MODEL_FINGERPRINT,
        weights="auto",
        offsets=pages.origin.offsets_hash,
        converts=True,
    )


def _num_heads(runner: Any) -> int:
    """Records of a page; the hash model's pages have one."""
    layout = getattr(runner, "layout", None)
    return 1 if layout is None else int(layout.num_kv_heads)


class Fleet:
    def __init__(self, group: TaskGroup, **settings: Any) -> None:
        self.group = group
        self.fabric = MemoryFabric()
        self.network = MemoryNetwork(group)
        self.given_up: list[str] = []
        self.unfit: list[str] = []
        self.workers: dict[str, Worker] = {}
        self._settings = settings
        self._incarnations = itertools.count(1)

    def add(self, role: Role, address: str, **overrides: Any) -> Worker:
        s = {**self._settings, **overrides}
        number = next(self._incarnations)
        incarnation = f"{number:016x}"
        block_size = s.get("block_size", 16)
        num_packed = s.get("num_packed", 256)
        num_exact = s.get("num_exact", 64)
        num_landing = s.get("num_landing", 64)
        make = s.get("runner", HashRunner)
        runner = make(
            num_packed=num_packed,
            num_exact=num_exact,
            num_landing=num_landing,
            block_size=block_size,
            incarnation=number,
        )
        identity = Identity(
            role=role,
            incarnation=incarnation,
            metrics="",
            model_fingerprint=s.get("model_fingerprint", MODEL_FINGERPRINT),
            layout=s.get("layout", "the test layout"),
            layout_fingerprint=s.get(
                "layout_fingerprint", getattr(runner, "layout_fingerprint", LAYOUT_FINGERPRINT)
            ),
            facts=s.get("facts", _facts_of(runner)),
            num_ranks=s.get("num_ranks", 1),
            block_size=block_size,
            max_model_len=MAX_MODEL_LEN,
            vocab_size=getattr(getattr(runner, "config", None), "vocab_size", VOCAB_SIZE),
        )
        cache = KvCache(num_packed=num_packed, num_exact=num_exact, block_size=block_size)
        device = SteppedDevice(
            runner, s.get("step_s", STEP_S), s.get("step_times"), s.get("logits_share", 0.1)
        )
        transport = MemoryTransport(
            self.fabric,
            incarnation,
            runner.pool,
            runner.landing,
            alone(_num_heads(runner)),
            landing_of=_landing_of(runner),
        )
        watchdog = Watchdog(LoopClock().now())
        parts = {
            "identity": identity,
            "cache": cache,
            "device": _Watched(device, watchdog) if s.get("is_watched") else device,
            "clock": LoopClock(),
            "metrics": WorkerMetrics(),
            "events": s.get("events") or EventLog(LoopClock()),
            "unfit": partial(self._unfit, address, incarnation),
        }
        build = self._prefill if role is Role.PREFILL else self._decode
        worker = build(role, address, s, parts, device, transport, num_landing)
        self.workers[address] = worker
        self.network.serve(address, worker.service.handlers())
        self.group.start_soon(self._run, worker)
        if s.get("is_watched"):
            self.group.start_soon(self._look, worker, watchdog)
        return worker

    async def _look(self, worker: Worker, watchdog: Watchdog) -> None:
        """The watchdog's thread (common/watch_thread.py), on virtual time."""
        fault = ""
        while self.workers.get(worker.address) is worker:
            await asyncio.sleep(LOOK_EVERY_S)
            if not self.network.runs(worker.address):
                continue
            verdict = watchdog.look(LoopClock().now())
            if verdict.must_exit:
                self.given_up.append(verdict.fault)
                self.kill(worker.address)
                return
            if bool(verdict.fault) != bool(fault):
                fault = verdict.fault
                worker.service.stalled(fault)

    def _prefill(
        self,
        role: Role,
        address: str,
        s: dict[str, Any],
        parts: dict[str, Any],
        device: SteppedDevice,
        transport: Any,
        _: int,
    ) -> Worker:
        stall_s = s.get("handoff_stall_s", 30.0)
        core = PrefillCore(
            parts["cache"],
            roots=HashRoots(parts["identity"].model_fingerprint, parts["identity"].block_size),
            chunk_tokens=s.get("chunk_tokens", 64),
            max_model_len=MAX_MODEL_LEN,
            handoff_stall_s=stall_s,
        )
        service = PrefillService(WorkerContext(**parts), core, transport, handoff_stall_s=stall_s)
        return Worker(
            address=address,
            identity=parts["identity"],
            cache=parts["cache"],
            scheduler=core.scheduler,
            service=service,
            device=device,
            runner=device.runner,
            core=core,
            metrics=parts["metrics"],
        )

    def _decode(
        self,
        role: Role,
        address: str,
        s: dict[str, Any],
        parts: dict[str, Any],
        device: SteppedDevice,
        transport: Any,
        num_landing: int,
    ) -> Worker:
        scheduler = BatchScheduler(
            parts["cache"],
            chunk_tokens=s.get("chunk_tokens", 64),
            max_num_seqs=s.get("max_num_seqs", 16),
            max_waiting=s.get("max_waiting", 64),
            max_model_len=MAX_MODEL_LEN,
            is_colocated=role is Role.COLOCATED,
            is_chunk_auto=s.get("is_chunk_auto", False),
        )
        zone = LandingZone(num_packed=num_landing, num_exact=num_landing)
        identity = parts["identity"]
        stall_s = s.get("handoff_stall_s", 30.0)
        pulls = Pulls(scheduler.remote, zone, incarnation=identity.incarnation, stall_s=stall_s)
        roots = HashRoots(identity.model_fingerprint, identity.block_size)
        core = DecodeCore(parts["cache"], scheduler, roots=roots, pulls=pulls)
        links = Links(
            identity=identity,
            transport=transport,
            zone=zone,
            connect=self.network.connect_from(address),
            clock=parts["clock"],
            metrics=parts["metrics"],
        )
        num_heads = _num_heads(device.runner)
        wire = Wire(
            transport=transport,
            zone=zone,
            links=links,
            num_heads=num_heads,
            give_up=self.given_up.append,
        )
        service = DecodeService(
            WorkerContext(**parts), core, wire, overlaps_steps=s.get("overlaps_steps", False)
        )
        return Worker(
            address=address,
            identity=identity,
            cache=parts["cache"],
            scheduler=scheduler,
            service=service,
            device=device,
            runner=device.runner,
            core=core,
            metrics=parts["metrics"],
            zone=zone,
            transport=transport,
        )

    async def _run(self, worker: Worker) -> None:
        with worker.scope:
            await worker.service.run()

    def _unfit(self, address: str, incarnation: str, reason: str) -> None:
        """The process takes itself out."""
        self.unfit.append(reason)
        self.group.start_soon(self._take_out, address, incarnation)

    async def _take_out(self, address: str, incarnation: str) -> None:
        worker = self.workers.get(address)
        if worker is not None and worker.identity.incarnation == incarnation:
            worker.service.watch.drain()
            await worker.service.leave()
            self.kill(address)

    def kill(self, address: str) -> None:
        """The process is gone: streams break, its memory cannot be read, nothing of it runs on."""
        worker = self.workers.pop(address)
        worker.scope.cancel()
        self.fabric.kill(worker.identity.incarnation)
        self.network.kill(address)

    def freeze(self, address: str) -> None:
        """SIGSTOP: it computes nothing, says nothing, and its memory does not answer."""
        worker = self.workers[address]
        worker.device.may_run.clear()
        self.fabric.hold(worker.identity.incarnation)
        self.network.freeze(address)

    def resume(self, address: str) -> None:
        worker = self.workers[address]
        self.network.resume(address)
        self.fabric.resume(worker.identity.incarnation)
        worker.device.may_run.set()

    def client(self, decode: str = "d0", prefill: str | None = "p0") -> "Client":
        return Client(self, decode, prefill)

    def check_at_rest(self) -> None:
        for worker in self.workers.values():
            worker.check_at_rest()


@dataclass
class Outputs:
    tokens: dict[int, list[int]] = field(default_factory=dict)
    finish_reasons: dict[int, FinishReason] = field(default_factory=dict)
    num_cached_tokens: int | None = None
    prompt_logprobs: PromptLogprobs | None = None
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    error: Failed | None = None
    num_admitted: int = 0
    times: list[float] = field(default_factory=list)


class Client:
    """One session with a decode worker, in the router's place: routes every request to one prefill
    worker.
    """

    def __init__(self, fleet: Fleet, decode: str, prefill: str | None) -> None:
        self._fleet = fleet
        self._prefill = prefill
        self._worker = fleet.workers[decode]
        self.stream: Stream = fleet.network.connect_from("client")(decode).open("Session")
        self._outputs: dict[str, tuple[Outputs, asyncio.Event, asyncio.Event]] = {}
        self._numbers = itertools.count()
        self._has_begun = False

    async def begin(self) -> None:
        self._has_begun = True
        await self.stream.send(
            Hello(router_id="test", incarnation=self._worker.identity.incarnation)
        )
        self._fleet.group.start_soon(self._receive)

    async def submit(
        self, prompt: Sequence[int], sampling: SamplingParams, **fields: Any
    ) -> tuple[str, Outputs, asyncio.Event, asyncio.Event]:
        """(id, what has come so far, set at the first token, set at the end)"""
        if not self._has_begun:
            await self.begin()
        request_id = f"{id(self):x}-{next(self._numbers)}"
        state = (Outputs(), asyncio.Event(), asyncio.Event())
        self._outputs[request_id] = state
        await self.stream.send(
            Submit(
                request=GenerateRequest(
                    request_id=request_id,
                    token_ids=pack_tokens(list(prompt)),
                    num_prompt_tokens=fields.pop("num_prompt_tokens", len(prompt)),
                    sampling=sampling,
                    **fields,
                )
            )
        )
        return (request_id, *state)

    async def generate(
        self, prompt: Sequence[int], sampling: SamplingParams, **fields: Any
    ) -> Outputs:
        _, outputs, _, end = await self.submit(prompt, sampling, **fields)
        await end.wait()
        return outputs

    async def cancel(self, request_id: str) -> None:
        await self.stream.send(Cancel(request_id=request_id))
        self._outputs[request_id][2].set()

    async def _receive(self) -> None:
        with contextlib.suppress(TandemError):
            while (message := await self.stream.receive()) is not None:
                await self._on(message)
        for _, first, end in self._outputs.values():
            first.set()
            end.set()

    async def _on(self, message: object) -> None:
        now = asyncio.get_running_loop().time()
        match message:
            case Admitted(request_id=request_id, needs_route=needs_route):
                self._outputs[request_id][0].num_admitted += 1
                if needs_route:
                    worker = self._fleet.workers.get(self._prefill or "")
                    incarnation = None if worker is None else worker.identity.incarnation
                    await self.stream.send(
                        Route(request_id=request_id, prefill=self._prefill, incarnation=incarnation)
                    )
            case PrefillDone(request_id=request_id):
                outputs = self._outputs[request_id][0]
                outputs.num_cached_tokens = message.num_cached_tokens
                outputs.prompt_logprobs = message.prompt_logprobs
            case TokenBatch():
                for row, request_id in enumerate(message.request_ids):
                    self._token(message, row, request_id, now)
            case Failed(request_id=request_id):
                outputs, first, end = self._outputs[request_id]
                outputs.error = message
                first.set()
                end.set()

    def _token(self, batch: TokenBatch, row: int, request_id: str, now: float) -> None:
        outputs, first, end = self._outputs[request_id]
        index = batch.output_indices[row]
        outputs.tokens.setdefault(index, []).append(batch.token_ids[row])
        entry = batch.logprobs[row] if batch.logprobs else None
        if entry is not None:
            outputs.logprobs.setdefault(index, []).append(entry)
        outputs.times.append(now)
        first.set()
        reason = batch.finish_reasons[row]
        if reason is not None:
            outputs.finish_reasons[index] = reason
            if set(outputs.finish_reasons) == set(outputs.tokens):
                end.set()


@contextlib.asynccontextmanager
async def fleet(
    num_prefill: int = 1, num_decode: int = 1, num_colocated: int = 0, **settings: Any
) -> AsyncIterator[Fleet]:
    async with anyio.create_task_group() as group:
        made = Fleet(group, **settings)
        for number in range(num_prefill):
            made.add(Role.PREFILL, f"p{number}")
        for number in range(num_decode):
            made.add(Role.DECODE, f"d{number}")
        for number in range(num_colocated):
            made.add(Role.COLOCATED, f"c{number}")
        yield made
        group.cancel_scope.cancel()
