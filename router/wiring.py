"""A router put together: `open_router` binds every address, `Router.run` serves until told to stop.

`__main__` runs one per process; tests run as many as they like.
"""

import contextlib
import logging
import random
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import anyio
import anyio.to_thread

from common.addresses import listen
from common.clock import Clock, MonotonicClock
from common.environment import keys_of_environment
from common.errors import Draining
from common.internal_tls import check_pair, check_readable
from common.limits import MAX_BODY_BYTES
from common.metrics_server import MetricsServer, serve_metrics
from common.model_config import ModelConfig
from common.rpc import Connect, connect
from common.watch_thread import WatchThread
from router.admission.admission import Admission
from router.admission.keys import KeyRing, read_priorities
from router.api.app import HttpServer, make_app, make_server
from router.api.grpc_front import GrpcFront, open_grpc
from router.config import RouterConfig
from router.fleet.discovery import Discovery
from router.fleet.dispatch import Dispatcher
from router.fleet.fleet import Fleet
from router.fleet.interleave import Interleave
from router.fleet.metrics import RouterMetrics
from router.fleet.reach import Reach
from router.fleet.routing import Predicting
from router.generation.access import Access
from router.generation.generation import Surroundings
from router.generation.sampling_defaults import NEUTRAL, SamplingDefaults
from router.generation.served_model import ServedModel
from router.generation.service import TextService
from router.grammar.compiler import CompileChild, GrammarCompiler
from router.text.chat_template import ChatTemplate
from router.text.parsers import guessed_tool_parser
from router.text.tokenizer import Tokenizer, load_tokenizer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """Listens on all its ports; nothing is served before `run`."""

    config: RouterConfig
    service: TextService
    discovery: Discovery
    http_socket: socket.socket
    http_server: HttpServer
    metrics_server: MetricsServer
    watch: WatchThread
    grpc_front: GrpcFront | None

    @property
    def http_port(self) -> int:
        port: int = self.http_socket.getsockname()[1]
        return port

    async def run(self, stop: anyio.Event) -> None:
        """Until `stop`; then what runs may finish for `drain_s`, and nothing new is taken."""
        try:
            with self.watch:
                self.watch.serves(lambda fault: None)
                await self._serve(stop)
        finally:
            self.http_socket.close()
            self.metrics_server.close()
            self.service.compiler.close()

    async def _serve(self, stop: anyio.Event) -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(self.discovery.run)
            group.start_soon(self.http_server.serve, [self.http_socket])
            if self.grpc_front is not None:
                await self.grpc_front.start()
            log.info("listening on http://%s", self.config.http)
            warn_of_hidden_tools(self.service.model.tokenizer.template)
            await stop.wait()
            await self._drain()
            if self.grpc_front is not None:
                await self.grpc_front.stop()
            group.cancel_scope.cancel()

    async def _drain(self) -> None:
        admission, bound_s = self.service.admission, self.config.drain_s
        log.info("draining for at most %g s", bound_s)
        admission.drain()
        with self.service.clock.deadline(bound_s) as bound:
            await admission.drained.wait()
        if bound.cancelled_caught:
            log.warning("still busy after %g s: ending what runs", bound_s)
            self.service.end_all(Draining("the router is shutting down"))
        async with anyio.create_task_group() as ending:
            ending.start_soon(self.http_server.drain)
            ending.start_soon(anyio.to_thread.run_sync, self.metrics_server.close)


def warn_of_hidden_tools(template: ChatTemplate) -> None:
    if template.source and not template.shows_tools():
        log.warning(
            "the model's chat template does not show tools: calls that tool_choice forces keep to "
            "their schemas, but the model never reads what a tool is for; --chat-template FILE "
            "gives another template"
        )


def tls_pair(config: RouterConfig) -> tuple[bytes, bytes] | None:
    """Private key and certificate chain. Raises ConfigError when they cannot be used."""
    if config.tls_cert is None or config.tls_key is None:
        return None
    certificate, key = Path(config.tls_cert), Path(config.tls_key)
    chain = check_readable("--tls-cert", certificate)
    private = check_readable("--tls-key", key)
    check_pair("--tls-cert, --tls-key", certificate, key)
    return private, chain


def open_router(
    config: RouterConfig, *, connect: Connect = connect, tokenizer: Tokenizer | None = None
) -> Router:
    """Raises ConfigError when the model directory or an address is no good.

    `tokenizer` is the model's, where it has been loaded already.
    """
    clock = MonotonicClock()
    draw_bits = random.SystemRandom().getrandbits
    around, dispatcher = _surroundings(config, clock)
    service = _service(config, around, draw_bits, tokenizer)
    discovery = Discovery(
        (*config.decode, *config.prefill),
        fleet=around.fleet,
        dispatcher=dispatcher,
        reach=Reach(router_id=f"{draw_bits(64):016x}", connect=connect),
        interleave=Interleave(config.itl_target),
        clock=clock,
    )
    watch = WatchThread(clock)
    tls, pair = _tls_files(config), tls_pair(config)
    with contextlib.ExitStack() as opened:
        http_socket = opened.enter_context(listen(config.http, "--http"))
        health = {"/health": lambda: watch.fault}
        metrics_server = serve_metrics(config.metrics, around.metrics.registry, health)
        opened.callback(metrics_server.close)
        grpc_front = None
        if config.grpc is not None:
            grpc_front = open_grpc(config.grpc, service, MAX_BODY_BYTES, pair)
        opened.pop_all()
    return Router(
        config=config,
        service=service,
        discovery=discovery,
        http_socket=http_socket,
        http_server=make_server(make_app(service, MAX_BODY_BYTES), config.keep_alive_s, tls),
        metrics_server=metrics_server,
        watch=watch,
        grpc_front=grpc_front,
    )


def _surroundings(config: RouterConfig, clock: Clock) -> tuple[Surroundings, Dispatcher]:
    fleet = Fleet(clock, is_remote_only=config.prefill_where == "remote")
    admission = Admission(config.max_waiting)
    metrics = RouterMetrics(fleet, admission)
    policy = Predicting(always_remote=fleet.is_remote_only, itl_target_s=config.itl_target)
    dispatcher = Dispatcher(fleet, policy, tally=metrics.routes, clock=clock)
    around = Surroundings(
        fleet=fleet, dispatcher=dispatcher, admission=admission, metrics=metrics, clock=clock
    )
    return around, dispatcher


def _service(
    config: RouterConfig,
    around: Surroundings,
    draw_bits: Callable[[int], int],
    tokenizer: Tokenizer | None,
) -> TextService:
    directory = Path(config.model)
    model = ModelConfig.load(config.model)
    if tokenizer is None:
        template = None if config.chat_template is None else Path(config.chat_template)
        tokenizer = load_tokenizer(directory, template)
    served = ServedModel(
        config.served_model_name or directory.resolve().name,
        model,
        tokenizer,
        tool_parser=config.tool_parser or guessed_tool_parser(tokenizer.template.source),
        reasoning_parser=config.reasoning_parser,
        keeps_tools_open=config.tool_objects == "open",
        defaults=NEUTRAL if config.generation_config == "off" else SamplingDefaults.load(directory),
    )
    child = CompileChild.for_model(
        str(directory / "tokenizer.json"), model.vocab_size, model.eos_token_ids
    )
    return TextService(
        served,
        around,
        access=_access(config),
        compiler=GrammarCompiler(child),
        request_timeout_s=config.request_timeout_s,
        wall_time=time.time,
        draw_bits=draw_bits,
    )


def _access(config: RouterConfig) -> Access:
    path = None if config.api_keys is None else Path(config.api_keys)
    return Access(
        keys=KeyRing.open(path, keys_of_environment()),
        priorities=read_priorities(config.priorities, "--priorities"),
        salts_by_key=config.prefix_sharing != "all",
    )


def _tls_files(config: RouterConfig) -> tuple[str, str] | None:
    if config.tls_cert is None or config.tls_key is None:
        return None
    return config.tls_cert, config.tls_key
