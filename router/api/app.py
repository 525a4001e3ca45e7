"""All HTTP endpoints of the router, and the server they run in."""

import asyncio
import socket
from functools import partial

import uvicorn
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from common.environment import tandem_version
from common.errors import InternalError, MethodNotAllowed, NotFound, TandemError
from common.metrics_server import QuietServer
from router.api import views
from router.api.anthropic.messages import CountTokens, MessagesEndpoint
from router.api.kserve import http as kserve_http
from router.api.kserve.generate import Generate, GenerateStream
from router.api.kserve.http import kserve_error
from router.api.openai.chat import ChatEndpoint
from router.api.openai.completions import CompletionEndpoint, Invocations
from router.api.openai.responses import ResponsesEndpoint
from router.api.tokenizing import Detokenize, Tokenize
from router.generation.service import TextService
from router.reading.json_body import shortened
from router.server.bodies import Bodies
from router.server.exchange import (
    BODIES_IN_SCOPE,
    KEY_IN_SCOPE,
    Endpoint,
    Exchange,
    error_body,
    headers_of,
    request_id_of,
)
from router.server.http_protocol import HttpProtocol

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
        ("/ping", views.Health(service)),
        ("/tokenize", Tokenize(service, max_body_bytes)),
        ("/detokenize", Detokenize(service, max_body_bytes)),
        ("/v2/repository/index", kserve_http.RepositoryIndex(service)),
        ("/v2/models/{model:path}/infer", kserve_http.ModelInfer(service, max_body_bytes)),
        ("/v2/models/{model:path}/generate", Generate(service, max_body_bytes)),
        ("/v2/models/{model:path}/generate_stream", GenerateStream(service, max_body_bytes)),
    ]
    gets: list[tuple[str, Endpoint]] = [
        ("/v1/models", views.Models(service)),
        ("/v1/models/{model:path}", views.OneModel(service)),
        ("/v1/fleet", views.FleetView(service)),
        ("/health", views.Health(service)),
        ("/ping", views.Health(service)),
        ("/load", views.Load(service)),
        ("/ready", views.Ready(service)),
        ("/version", views.Version(service)),
        ("/openapi.json", views.Document(service)),
        ("/v2", kserve_http.ServerMetadata(service, tandem_version())),
        ("/v2/health/live", kserve_http.Live(service)),
        ("/v2/health/ready", kserve_http.ServerReady(service)),
        ("/v2/models/{model:path}/config", kserve_http.ModelConfig(service)),
        ("/v2/models/{model:path}/ready", kserve_http.ModelReady(service)),
        ("/v2/models/{model:path}/infer", views.OnlyPost(service)),
        ("/v2/models/{model:path}/generate", views.OnlyPost(service)),
        ("/v2/models/{model:path}/generate_stream", views.OnlyPost(service)),
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
        self._bodies = Bodies(service.clock)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app: ASGIApp = self._app
        if scope["type"] == "http":
            scope[BODIES_IN_SCOPE] = self._bodies
            if scope["method"] == "POST":
                app = self._posts.get(scope["path"], app)
            if not self._service.access.keys.is_open:
                headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]}
                try:
                    scope[KEY_IN_SCOPE] = self._service.access.keys.check(headers)
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


async def _explain(service: TextService, request: Request, error: Exception) -> Response:
    """What routing itself refuses, in the shape of all other errors."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    method, path = request.method, shortened(request.url.path)
    found: TandemError = InternalError("internal error")
    request_id = request_id_of(headers_of(request.scope), service.new_request_id)
    headers = {"x-request-id": request_id}
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
