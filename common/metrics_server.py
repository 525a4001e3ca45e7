"""A registry of metrics, and what is wrong with the process, on a port of its own, in one thread
with an event loop of its own: it answers while the process's own loop is busy or hangs, and a
connection costs no thread.
"""

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import uvicorn
from prometheus_client import CollectorRegistry, make_asgi_app

from common.addresses import listen
from common.http_protocol import BoundedProtocol
from common.limits import MAX_METRICS_CONNECTIONS

KEEP_ALIVE_S = 75


class _Protocol(BoundedProtocol):
    max_connections = MAX_METRICS_CONNECTIONS


class QuietServer(uvicorn.Server):
    """Takes no signals: the process's composition root does."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class MetricsServer:
    """Serves a registry at /metrics until closed; `port` is the one really taken."""

    def __init__(self, server: uvicorn.Server, listening: socket.socket) -> None:
        self._server = server
        self._socket = listening
        self.port: int = listening.getsockname()[1]
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()

    def _run(self) -> None:
        asyncio.run(self._server.serve([self._socket]))


Reason = Callable[[], str]
"""Why the answer is 503; empty for 200."""


class WithHealth:
    """`/metrics` and, by path, whether all is well."""

    def __init__(self, metrics: Any, health: Mapping[str, Reason]) -> None:
        self._metrics = metrics
        self._health = health

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        found = self._health.get(scope.get("path", ""))
        if found is None:
            await self._metrics(scope, receive, send)
            return
        reason = found()
        shown = {"status": "not ok", "reason": reason} if reason else {"status": "ok"}
        headers = [(b"content-type", b"application/json")]
        status = 503 if reason else 200
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(shown).encode()})


def serve_metrics(
    address: str, registry: CollectorRegistry, health: Mapping[str, Reason] = MappingProxyType({})
) -> MetricsServer:
    """Raises ConfigError when the address cannot be had."""
    config = uvicorn.Config(
        WithHealth(make_asgi_app(registry), health),
        http=_Protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=1,
    )
    server = MetricsServer(QuietServer(config), listen(address, "--metrics"))
    server.start()
    return server
