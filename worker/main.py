"""The part of a worker process that both roles share: open the engine and the network, serve,
drain, close.

    prefill_worker/__main__.py, decode_worker/__main__.py    run(config), assemble(parts)
        v
    run_worker(config, assemble)                             opens parts, serves what was assembled
"""

import logging
import os
import sys
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import IO, Protocol

import anyio

from common.addresses import join_address, split_address
from common.clock import Clock, MonotonicClock
from common.errors import ConfigError, InternalError, TandemError, UnsupportedModel
from common.events import EventLog, open_events
from common.internal_tls import InternalTls, may_call
from common.layout_facts import LayoutFacts
from common.metrics_server import MetricsServer, serve_metrics
from common.model_config import ModelConfig
from common.pages import PageLayout
from common.process import until_signal
from common.ranks import Ownership, ownership
from common.rpc import Handler, serve
from common.scheduling.kv_cache import KvCache
from common.scheduling.step_time import StepTimes
from common.types import Role
from common.watch_thread import UNFIT, WatchThread
from common.watchdog import START_BOUND_S
from engine.config import EngineConfig
from engine.device import EngineDevice
from engine.device_thread import DeviceThread
from engine.ranks.group import RankGroup
from engine.runner import ModelRunner
from engine.weights import model_fingerprint
from worker.config import WorkerConfig
from worker.context import WorkerContext
from worker.metrics import WorkerMetrics
from worker.start import (
    Sizes,
    engine_config,
    open_group,
    open_runner,
    overlaps_steps,
    plan_memory,
)
from worker.watch import Identity, new_incarnation
from worker.watched_device import StepBounds, WatchedDevice

log = logging.getLogger(__name__)

ANY_GRAMMAR = 'start: "a"'

LEAVE_S = 1.0
"""For telling others that this worker leaves."""


class Service(Protocol):
    def handlers(self) -> dict[str, Handler]: ...

    async def run(self) -> None: ...

    async def drained(self) -> None: ...

    async def leave(self) -> None: ...

    def stalled(self, fault: str) -> None:
        """The process hangs, as `fault` says; "" when it is well again."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a service is made of."""

    config: WorkerConfig
    identity: Identity
    sizes: Sizes
    runner: ModelRunner
    layout: PageLayout
    """Of whole pages; the runner's is that of rank 0's part."""
    ownership: Ownership
    group: RankGroup | None
    """The other ranks, where there are some."""
    device: EngineDevice
    cache: KvCache
    clock: Clock
    metrics: WorkerMetrics
    watch: WatchThread
    events: EventLog
    give_up: Callable[[str], None]
    """The worker cannot go on: it drains and ends with exit code 1. Takes the reason."""
    unfit: Callable[[str], None]
    """What it computes cannot be trusted: everything goes elsewhere at once, and it ends with
    `UNFIT`. Takes the reason.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembly:
    service: Service
    close: Callable[[], Awaitable[None]]


class Steps(Protocol):
    """What a scheduler says of its steps."""

    @property
    def step_times(self) -> StepTimes | None: ...

    @property
    def num_context_tokens(self) -> int: ...


def watched(parts: Parts, steps: Steps) -> WatchedDevice:
    """The device, with an eye on what it was handed and for how long."""
    bounds = StepBounds(
        lambda: steps.step_times,
        lambda: steps.num_context_tokens,
        block_size=parts.identity.block_size,
        self_test_s=parts.sizes.self_test_s,
        may_compile=parts.runner.pool.packed.is_cuda,
    )
    return WatchedDevice(parts.device, parts.watch.job, bounds)


def context_of(parts: Parts, steps: Steps) -> WorkerContext:
    return WorkerContext(
        identity=parts.identity,
        device=watched(parts, steps),
        cache=parts.cache,
        clock=parts.clock,
        metrics=parts.metrics,
        events=parts.events,
        unfit=parts.unfit,
    )


Assemble = Callable[[Parts], Awaitable[Assembly]]


def run_worker(config: WorkerConfig, assemble: Assemble) -> int:
    """The process's exit code: 0 after a drain, 1 after a crash, 2 for what the operator must
    change, 3 when the worker found itself unfit.
    """
    logging.basicConfig(
        level=config.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    try:
        anyio.run(_run, config, assemble, backend_options={"use_uvloop": True})
    except BaseExceptionGroup as group:
        return _explain(_leaves(group))
    except (ConfigError, UnsupportedModel) as error:
        log.error("%s", error)
        return 2
    except TandemError as error:
        log.error("%s", error)
        return UNFIT if isinstance(error, Unfit) else 1
    return 0


async def _run(config: WorkerConfig, assemble: Assemble) -> None:
    metrics = WorkerMetrics()
    watch = WatchThread(MonotonicClock())
    health = {"/health": lambda: watch.fault, "/ready": lambda: watch.not_ready}
    metrics_server = serve_metrics(config.metrics, metrics.registry, health)
    try:
        with (
            watch,
            ExitStack() as ranks,
            DeviceThread(config.role) as thread,
            open_events(config.event_log) as events_file,
        ):
            ending = _Ending()
            with watch.job(START_BOUND_S):
                parts = await _open(
                    config, thread, watch, metrics, metrics_server, events_file, ending, ranks
                )
            await _serve(config, parts, assemble, ending)
    finally:
        metrics_server.close()


async def _open(
    config: WorkerConfig,
    thread: DeviceThread,
    watch: WatchThread,
    metrics: WorkerMetrics,
    metrics_server: MetricsServer,
    events_file: IO[str] | None,
    ending: "_Ending",
    ranks: ExitStack,
) -> Parts:
    model = ModelConfig.load(config.model)
    plan = plan_memory(config, model)
    incarnation = new_incarnation()
    engine = engine_config(config, plan, int(incarnation, 16))
    group = ranks.enter_context(open_group(engine, has_transfers=config.role != "colocated"))
    runner, sizes = await thread.run(open_runner, engine, plan, group)
    if group is not None:
        group.when_lost(die)
        _log_memory(sizes)
    for rank, memory in enumerate(sizes.memory):
        metrics.rank_memory.labels(str(rank), "weights").set(memory.weights)
        metrics.rank_memory.labels(str(rank), "pages").set(memory.pages)
    runner.prepare(ANY_GRAMMAR)  # not waited for: the tokenizer is there before the first request
    host = split_address(config.advertise or config.listen)[0]
    clock = MonotonicClock()
    identity = Identity(
        role=Role(config.role),
        incarnation=incarnation,
        metrics=f"http://{join_address(host, metrics_server.port)}/metrics",
        model_fingerprint=model_fingerprint(config.model),
        layout=layout_text(config, runner),
        layout_fingerprint=runner.layout_fingerprint,
        facts=layout_facts(engine, runner),
        block_size=config.block_size,
        max_model_len=sizes.max_model_len,
        vocab_size=model.vocab_size,
        num_ranks=engine.num_ranks,
    )
    return Parts(
        config=config,
        identity=identity,
        sizes=sizes,
        runner=runner,
        layout=engine.layout(model),
        ownership=ownership(engine.shares(model)),
        group=group,
        device=EngineDevice(thread, runner, overlaps_steps=overlaps_steps(config, plan)),
        cache=KvCache(
            num_packed=sizes.num_blocks, num_exact=sizes.num_exact, block_size=config.block_size
        ),
        clock=clock,
        metrics=metrics,
        watch=watch,
        events=EventLog(clock, events_file, role=config.role, worker=incarnation),
        give_up=ending.give_up,
        unfit=ending.unfit,
    )


def _log_memory(sizes: Sizes) -> None:
    for rank, memory in enumerate(sizes.memory):
        weights, pages = memory.weights / 1e6, memory.pages / 1e6
        log.info("rank %d holds %.1f MB of weights and %.1f MB of pages", rank, weights, pages)


def die(reason: str) -> None:
    """A rank is gone. Peers and the router see what they see of any worker that dies."""
    log.critical("%s: so does this worker", reason)
    os._exit(1)


def layout_facts(config: EngineConfig, runner: ModelRunner) -> LayoutFacts:
    origin = runner.pages.origin
    return LayoutFacts.of(
        config.layout(runner.config),
        model=model_fingerprint(config.model),
        weights=config.weight_dtype,
        offsets=origin.offsets_hash,
        arithmetic=origin.arithmetic,
        is_batch_invariant=config.batch_invariant,
        converts=runner.backend.converter is not None,
    )


def layout_text(config: WorkerConfig, runner: ModelRunner) -> str:
    """All that two workers must agree on, for a person who has to find where they do not."""
    model, origin = runner.config, runner.pages.origin
    return (
        f"{config.kv_codec}, blocks of {config.block_size}, {model.num_layers} layers, "
        f"{model.num_kv_heads} KV heads of {model.head_dim}, weights {config.weight_dtype}, "
        f"{origin.arithmetic and f'batch-invariant on {origin.arithmetic}, '}"
        f"offsets {origin.offsets_hash.hex()[:12]}, layout {runner.layout_fingerprint.hex()[:12]}"
    )


async def _serve(config: WorkerConfig, parts: Parts, assemble: Assemble, ending: "_Ending") -> None:
    """Until a signal (or the worker gives up), then until drained or `drain_s` have passed."""
    async with anyio.create_task_group() as group:
        assembly = await assemble(parts)
        tls = InternalTls.of(config.internal_tls)
        credentials = None if tls is None else tls.server_credentials()
        server = await serve(
            config.listen,
            assembly.service.handlers(),
            credentials,
            None if tls is None else may_call,
        )
        log.info(
            "%s worker %s listens on %s", config.role, parts.identity.incarnation, config.listen
        )
        parts.watch.serves(assembly.service.stalled)
        group.start_soon(assembly.service.run)
        group.start_soon(until_signal, ending.event.set)
        await ending.event.wait()
        parts.watch.drains()
        await _drain(config, assembly.service, ending)
        await server.stop(grace_s=0.2)
        group.cancel_scope.cancel()
    await assembly.close()
    if ending.reason is not None:
        raise Unfit(ending.reason) if ending.is_unfit else InternalError(ending.reason)


async def _drain(config: WorkerConfig, service: Service, ending: "_Ending") -> None:
    drain_s = 0.0 if ending.is_unfit else config.drain_s
    log.info("draining for at most %g s", drain_s)
    with anyio.move_on_after(drain_s) as bound:
        await service.drained()
    if bound.cancelled_caught:
        log.warning("still busy after %g s: what runs goes elsewhere", drain_s)
        with anyio.move_on_after(LEAVE_S):
            await service.leave()


class Unfit(InternalError):
    """The worker has found that it must not serve."""


class _Ending:
    """Set when the worker has to stop, with the reason if that is not a signal."""

    def __init__(self) -> None:
        self.event = anyio.Event()
        self.reason: str | None = None
        self.is_unfit = False

    def give_up(self, reason: str) -> None:
        if self.reason is None:
            log.error("giving up: %s", reason)
        self.reason = self.reason or reason
        self.event.set()

    def unfit(self, reason: str) -> None:
        self.is_unfit = True
        self.give_up(reason)


def _explain(errors: list[BaseException]) -> int:
    """Logs what ended the worker; a traceback only where it is a defect of ours."""
    for error in errors:
        expected = isinstance(error, TandemError)
        log.error("%s", error, exc_info=None if expected else error)
    kinds = (ConfigError, UnsupportedModel)
    if any(isinstance(error, Unfit) for error in errors):
        return UNFIT
    return 2 if all(isinstance(error, kinds) for error in errors) else 1


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    found: list[BaseException] = []
    for error in group.exceptions:
        found += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found
