"""Ports of metrics: one thread, however many connect, and heads within bounds."""

import socket
import threading
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, Counter

from common.limits import MAX_METRICS_CONNECTIONS
from common.metrics_server import MetricsServer, serve_metrics


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    registry = CollectorRegistry()
    Counter("seen", "Something", registry=registry).inc(3)
    running = serve_metrics("127.0.0.1:0", registry)
    yield running
    running.close()


def connect(server: MetricsServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=10)


def metrics(server: MetricsServer) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=10) as answer:
        text: str = answer.read().decode()
    return text


def test_t04_idle_connections_cost_no_thread_and_are_bounded(server: MetricsServer) -> None:
    assert "seen_total 3.0" in metrics(server)
    before = threading.active_count()
    idle = [connect(server) for _ in range(MAX_METRICS_CONNECTIONS)]
    refused = [connect(server) for _ in range(20)]
    assert [one.recv(10) for one in refused] == [b""] * 20
    assert threading.active_count() == before
    for one in idle:
        one.close()
    for one in refused:
        one.close()
    # the server learns of the ends in the order of its loop: a new connection comes after them
    assert "seen_total 3.0" in metrics(server)


def test_t03_large_heads_are_refused(server: MetricsServer) -> None:
    with connect(server) as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\nhost: a\r\nx: " + b"a" * 70_000)
        assert client.recv(1000).startswith(b"HTTP/1.1 431 ")
