"""A registry of metrics on a port of its own, in one thread with an event loop of its own: it
answers while the process's own loop is busy, and a connection costs no thread.
"""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator

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


def serve_metrics(address: str, registry: CollectorRegistry) -> MetricsServer:
    """Raises ConfigError when the address cannot be had."""
    config = uvicorn.Config(
        make_asgi_app(registry),
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
