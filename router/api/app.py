"""All HTTP endpoints of the router, and the server they run in."""

import asyncio
import socket
from dataclasses import asdict
from functools import partial
from typing import Any

import uvicorn
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from common.addresses import join_address, split_address
from common.environment import tandem_version
from common.errors import InternalError, MethodNotAllowed, NotFound, TandemError
from common.metrics_server import QuietServer
from router.api.anthropic.messages import CountTokens, MessagesEndpoint
from router.api.kserve import http as kserve_http
from router.api.kserve.generate import Generate, GenerateStream
from router.api.kserve.http import kserve_error
from router.api.openai.generate import ChatEndpoint, CompletionEndpoint, Invocations, chat_prompt
from router.api.openai.responses import ResponsesEndpoint
from router.api.openapi import document
from router.fleet.fleet import Fleet, Worker
from router.generation.generation import TextService
from router.reading.fields import Fields
from router.reading.json_body import is_within, shortened
from router.server.bodies import Bodies
from router.server.exchange import (
    BODIES_IN_SCOPE,
    KEY_IN_SCOPE,
    Endpoint,
    Exchange,
    error_body,
    large_json,
)
from router.server.http_protocol import HttpProtocol
from router.text.chat_messages import normalized_messages

MAX_DETOKENIZED = 262_144
"""Token ids, where the context does not hold more of them."""
_LARGE = 2048
_WITHOUT_KEY = ("/health", "/ready", "/ping", "/v2/health/live", "/v2/health/ready")


def make_app(service: TextService, max_body_bytes: int) -> ASGIApp:
    app = FastAPI(
        title="Tandem",
        version=tandem_version(),
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        exception_handlers={HTTPException: partial(_explain, service)},
    )
    posts: list[tuple[str, Endpoint]] = [
        ("/v1/chat/completions", ChatEndpoint(service, max_body_bytes)),
        ("/v1/completions", CompletionEndpoint(service, max_body_bytes)),
        ("/v1/responses", ResponsesEndpoint(service, max_body_bytes)),
        ("/v1/messages", MessagesEndpoint(service, max_body_bytes)),
        ("/v1/messages/count_tokens", CountTokens(service, max_body_bytes)),
        ("/invocations", Invocations(service, max_body_bytes)),
        ("/ping", Health(service)),
        ("/tokenize", Tokenize(service, max_body_bytes)),
        ("/detokenize", Detokenize(service, max_body_bytes)),
        ("/v2/repository/index", kserve_http.RepositoryIndex(service)),
        ("/v2/models/{model:path}/infer", kserve_http.ModelInfer(service, max_body_bytes)),
        ("/v2/models/{model:path}/generate", Generate(service, max_body_bytes)),
        ("/v2/models/{model:path}/generate_stream", GenerateStream(service, max_body_bytes)),
    ]
    gets: list[tuple[str, Endpoint]] = [
        ("/v1/models", Models(service)),
        ("/v1/models/{model:path}", OneModel(service)),
        ("/v1/fleet", FleetView(service)),
        ("/health", Health(service)),
        ("/ping", Health(service)),
        ("/load", Load(service)),
        ("/ready", Ready(service)),
        ("/version", Version(service)),
        ("/openapi.json", Document(service)),
        ("/v2", kserve_http.ServerMetadata(service, tandem_version())),
        ("/v2/health/live", kserve_http.Live(service)),
        ("/v2/health/ready", kserve_http.ServerReady(service)),
        ("/v2/models/{model:path}/config", kserve_http.ModelConfig(service)),
        ("/v2/models/{model:path}/ready", kserve_http.ModelReady(service)),
        ("/v2/models/{model:path}/infer", OnlyPost(service)),
        ("/v2/models/{model:path}/generate", OnlyPost(service)),
        ("/v2/models/{model:path}/generate_stream", OnlyPost(service)),
        ("/v2/models/{model:path}", kserve_http.ModelMetadata(service)),
    ]
    app.router.routes += [Route(path, endpoint, methods=["POST"]) for path, endpoint in posts]
    app.router.routes += [Route(path, endpoint, methods=["GET"]) for path, endpoint in gets]
    return Direct(app, dict(posts), service)


class Direct:
    """Takes POSTs past the framework's middleware, through which every token would go otherwise."""

    def __init__(self, app: ASGIApp, posts: dict[str, Endpoint], service: TextService) -> None:
        self._app = app
        self._posts = posts
        self._service = service
        self._bodies = Bodies()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app: ASGIApp = self._app
        if scope["type"] == "http":
            scope[BODIES_IN_SCOPE] = self._bodies
            if scope["method"] == "POST":
                app = self._posts.get(scope["path"], app)
            if not self._service.keys.is_open:
                headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]}
                try:
                    scope[KEY_IN_SCOPE] = self._service.keys.check(headers)
                except TandemError as error:
                    if scope["path"] in _WITHOUT_KEY:
                        return await app(scope, receive, send)
                    asked = app if isinstance(app, Endpoint) else None
                    app = Refuse(error, asked, self._service, is_kserve=_is_kserve(scope["path"]))
        await app(scope, receive, send)


def _is_kserve(path: str) -> bool:
    return path == "/v2" or path.startswith("/v2/")


class Refuse(Endpoint):
    """Answers with an error, in the form of the endpoint that was asked."""

    def __init__(
        self, error: TandemError, asked: Endpoint | None, service: TextService, *, is_kserve: bool
    ) -> None:
        super().__init__("Refuse", service.new_request_id)
        self._error = error
        self._asked = asked
        self._is_kserve = is_kserve

    async def answer(self, exchange: Exchange, scope: Scope) -> None:
        raise self._error

    def error_body(self, error: TandemError) -> bytes:
        if self._is_kserve:
            return kserve_error(error)
        return error_body(error) if self._asked is None else self._asked.error_body(error)

    def ended(self, error: TandemError | None) -> None:
        if self._asked is not None:
            self._asked.ended(error)


class _View(Endpoint):
    """A GET that shows something of the service."""

    def __init__(self, service: TextService) -> None:
        super().__init__(type(self).__name__, service.new_request_id)
        self._service = service


class Models(_View):
    async def answer(self, exchange: Exchange, scope: Scope) -> None:
        models = [model_object(self._service)]
        await exchange.reply_json(200, {"object": "list", "data": models})


class OneModel(_View):
    async def answer(self, exchange: Exchange, scope: Scope) -> None:
        self._service.check_model(scope["path_params"]["model"])
        await exchange.reply_json(200, model_object(self._service))


class FleetView(_View):
    async def answer(self, exchange: Exchange, scope: Scope) -> None:
        fleet = self._service.fleet
        workers = [worker_object(fleet, worker) for worker in fleet.linked()]
        await exchange.reply_json(200, {"workers": workers})


class Health(_View):
    """The process lives; whether it can serve is for /ready to say."""

    async def answer(self, exchange: Exchange, scope: Scope) -> None:
        await exchange.reply_json(200, {"status": "ok"})


class Load(_View):
    """Outputs that wait or run, as vLLM shows them."""

    async def answer(self, exchange: Exchange, scope: Scope) -> None:
        admission = self._service.admission
        load = admission.num_waiting + admission.num_running
        await exchange.reply_json(200, {"server_load": load})


class Ready(_View):
    async def answer(self, exchange: Exchange, scope: Scope) -> None:
        service = self._service
        reasons = service.reasons(exchange.key)
        status = "ready" if service.is_ready else "not ready"
        await exchange.reply_json(
            200 if service.is_ready else 503, {"status": status, "reasons": reasons}
        )


class Version(_View):
    async def answer(self, exchange: Exchange, scope: Scope) -> None:
        await exchange.reply_json(200, {"version": tandem_version()})


class OnlyPost(_View):
    """Stands before a wider path, which would take this one for a name."""

    async def answer(self, exchange: Exchange, scope: Scope) -> None:
        error = MethodNotAllowed(f"{shortened(scope['path'])} takes POST only")
        body = kserve_error(error)
        await exchange.reply(error.http_status, body, [(b"allow", b"POST")])


class Document(_View):
    async def answer(self, exchange: Exchange, scope: Scope) -> None:
        service = self._service
        size = service.vocabulary.size
        await exchange.reply_json(
            200, document(tandem_version(), service.model_name, size, service.priorities)
        )


class _TokenizerCall(Endpoint):
    def __init__(self, service: TextService, max_body_bytes: int) -> None:
        super().__init__(type(self).__name__, service.new_request_id)
        self._service = service
        self._max_body_bytes = max_body_bytes

    async def answer(self, exchange: Exchange, scope: Scope) -> None:
        body = await exchange.json_object(self._max_body_bytes)
        fields = Fields(body)
        self._service.check_model(fields.text("model"))
        result = await self.result(fields)
        if is_within(result, _LARGE):
            await exchange.reply_json(200, result)
        else:
            written = await self._service.in_thread(partial(large_json, result))
            await exchange.reply(200, written)

    async def result(self, fields: Fields) -> dict[str, Any]:
        raise NotImplementedError


class Tokenize(_TokenizerCall):
    """The ids that a prompt, or the messages of a chat, would have."""

    async def result(self, fields: Fields) -> dict[str, Any]:
        service = self._service
        messages = fields.take("messages")
        prompt = fields.text("prompt")
        add_special_tokens = fields.boolean("add_special_tokens", True)
        add_generation_prompt = fields.boolean("add_generation_prompt", True)
        variables = fields.object("chat_template_kwargs") or {}
        fields.finish()
        if (messages is None) == (prompt is None):
            raise fields.wrong("prompt", "or messages must be given, and not both", prompt)
        limit = service.max_model_len
        if prompt is None:
            chat = normalized_messages(messages, takes_parts=service.tokenizer.template.takes_parts)
            ids = await chat_prompt(service, chat, add_generation_prompt, variables)
        else:
            ids = await service.tokenizer.encode(
                prompt, limit, add_special_tokens=add_special_tokens
            )
        return {"count": len(ids), "max_model_len": limit, "tokens": ids}


class Detokenize(_TokenizerCall):
    """The text of token ids, special tokens left out."""

    async def result(self, fields: Fields) -> dict[str, Any]:
        service = self._service
        given = fields.take("tokens")
        fields.finish()
        limit = max(MAX_DETOKENIZED, service.max_model_len)
        if isinstance(given, list) and len(given) > limit:
            raise fields.wrong("tokens", f"must hold at most {limit} token ids", len(given))

        def decode() -> str:
            ids = fields.token_ids("tokens", given, service.vocabulary.size)
            return service.tokenizer.decode(ids)

        is_large = isinstance(given, list) and len(given) > _LARGE
        return {"prompt": await service.in_thread(decode) if is_large else decode()}


def model_object(service: TextService) -> dict[str, Any]:
    return {
        "id": service.model_name,
        "object": "model",
        "created": service.started_at,
        "owned_by": "tandem",
        "max_model_len": service.max_model_len,
    }


def worker_object(fleet: Fleet, worker: Worker) -> dict[str, Any]:
    """The operator's view. `excluded` is there only for a worker that gets no requests, and says
    why.
    """
    state = worker.state
    shown: dict[str, Any] = {
        "role": state.role,
        "address": worker.address,
        "metrics": metrics_url(worker),
        "pid": state.pid,
        "incarnation": state.incarnation,
        "draining": state.draining,
        "blocks": {
            "total": state.blocks.total,
            "free": state.blocks.free,
            "cached": state.blocks.cached,
            "held": state.blocks.held,
        },
        "running": state.running,
        "waiting": state.waiting,
        "queued_tokens": state.num_queued_tokens,
        "decodes": state.num_decodes,
        "context_tokens": state.num_context_tokens,
        "chunk_tokens": state.chunk_tokens,
        "step_times": None if state.step_times is None else asdict(state.step_times),
        "handoff_s": state.handoff_s,
        "prefix_blocks": fleet.prefix_index.num_held(worker.order),
    }
    reason = fleet.excluded(worker)
    if reason is not None and not state.draining:
        shown["excluded"] = reason
    return shown


def metrics_url(worker: Worker) -> str:
    """A worker that listens on every address cannot know the one it is reached by; we do."""
    url = worker.state.metrics
    host, _ = split_address(worker.address)
    for everywhere in ("//0.0.0.0:", "//[::]:"):
        url = url.replace(everywhere, f"//{join_address(host, 0)[:-1]}")
    return url


async def _explain(service: TextService, request: Request, error: Exception) -> Response:
    """What routing itself refuses, in the shape of all other errors."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    method, path = request.method, shortened(request.url.path)
    found: TandemError = InternalError("internal error")
    exchange = Exchange(request.scope, request.receive, request._send, service.new_request_id)
    headers = {"x-request-id": exchange.request_id}
    if status == 404:
        found = NotFound(f"there is no {path} here")
    elif status == 405:
        found = MethodNotAllowed(f"{path} does not take {method}")
        headers |= getattr(error, "headers", None) or {}
    body = kserve_error(found) if _is_kserve(request.url.path) else error_body(found)
    return Response(body, status, headers, media_type="application/json")


class HttpServer(QuietServer):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._has_stopped = asyncio.Event()

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().serve(sockets)
        finally:
            self._has_stopped.set()

    async def drain(self) -> None:
        """Connections close when their answers are out."""
        self.should_exit = True
        await self._has_stopped.wait()


def make_server(
    app: ASGIApp, keep_alive_s: float, tls: tuple[str, str] | None = None
) -> HttpServer:
    """`tls` is the files of a certificate chain and its key. Raises ConfigError."""
    config = uvicorn.Config(
        app,
        http=HttpProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=keep_alive_s,  # type: ignore[arg-type]  # a delay like any other
        timeout_graceful_shutdown=1,
        ssl_certfile=None if tls is None else tls[0],
        ssl_keyfile=None if tls is None else tls[1],
    )
    return HttpServer(config)
