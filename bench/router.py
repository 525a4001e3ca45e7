"""The router alone: a process of its own between a fake worker and raw HTTP clients, both in here.

Paced, the time that the router adds to each token is measured; unpaced, tokens for each second of
the router's processor time, which does not depend on what else the machine does.
"""

import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from bench.serving import free_port, wait_for
from commands.demo_model import prepare
from common.environment import home
from common.messages import (
    Admitted,
    Cancel,
    Hello,
    PoolLoad,
    PrefillDone,
    Submit,
    TokenBatch,
    Watch,
    WorkerState,
)
from common.rpc import Stream, serve
from common.types import FinishReason, Role

CONCURRENCY = 256
STEP_S = 0.05
"""A step of the paced run: 5,120 tokens a second."""
PACED_TOKENS = 60
FREE_TOKENS = 400
TOKEN_ID = 260
"""Some whole word."""
START_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    name: str
    tokens: int
    tokens_per_s: float
    tokens_per_core_s: float
    added_ms: tuple[float, float] | None
    """Median and p99."""


@dataclass(slots=True)
class _Worker:
    """Gives each of its requests a token per step."""

    step_s: float = 0.0
    sent: dict[str, list[float]] = field(default_factory=dict)
    left: dict[str, int] = field(default_factory=dict)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    num_expected: int = CONCURRENCY

    async def watch(self, stream: Stream) -> None:
        assert isinstance(await stream.receive(), Watch)
        await stream.send(_state())
        await stream.receive()

    async def session(self, stream: Stream) -> None:
        assert isinstance(await stream.receive(), Hello)
        async with asyncio.TaskGroup() as group:
            stepping = group.create_task(self._step_for_ever(stream))
            while (message := await stream.receive()) is not None:
                match message:
                    case Submit(request=request):
                        request_id = request.request_id
                        await stream.send(
                            Admitted(request_id=request_id, num_cached_tokens=0, needs_route=False)
                        )
                        await stream.send(PrefillDone(request_id=request_id, num_cached_tokens=0))
                        self.sent[request_id] = []
                        self.left[request_id] = request.sampling.max_tokens
                        if len(self.left) >= self.num_expected:
                            self.arrived.set()
                    case Cancel(request_id=request_id):
                        self.left.pop(request_id, None)
            stepping.cancel()

    async def _step_for_ever(self, stream: Stream) -> None:
        """Begins when all requests are there."""
        while True:
            await self.arrived.wait()
            self.arrived.clear()
            due = time.perf_counter()
            while self.left:
                due += self.step_s
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                await stream.send(self._step())

    def _step(self) -> TokenBatch:
        ids = tuple(self.left)
        now = time.perf_counter()
        for request_id in ids:
            self.sent[request_id].append(now)
            self.left[request_id] -= 1
        ends = tuple(None if self.left[i] else FinishReason.LENGTH for i in ids)
        self.left = {request_id: left for request_id, left in self.left.items() if left}
        return TokenBatch(
            request_ids=ids,
            output_indices=(0,) * len(ids),
            token_ids=(TOKEN_ID,) * len(ids),
            finish_reasons=ends,
        )


def run() -> list[Row]:
    return asyncio.run(_run())


async def _run() -> list[Row]:
    worker = _Worker()
    server = await serve("127.0.0.1:0", {"Watch": worker.watch, "Session": worker.session})
    rows = []
    try:
        with _router(f"127.0.0.1:{server.port}") as (port, process):
            ready = asyncio.to_thread(wait_for, lambda: _is_ready(port), START_TIMEOUT_S)
            assert await ready, "the router did not become ready"
            await _measure("warm-up", worker, port, process, 0.0, 20)
            rows.append(await _measure("paced", worker, port, process, STEP_S, PACED_TOKENS))
            rows.append(await _measure("unpaced", worker, port, process, 0.0, FREE_TOKENS))
    finally:
        await server.stop(0)
    return rows


async def _measure(
    name: str,
    worker: _Worker,
    port: int,
    process: "subprocess.Popen[bytes]",
    step_s: float,
    num_tokens: int,
) -> Row:
    worker.step_s = step_s
    worker.sent.clear()
    began, used = time.perf_counter(), _processor_s(process.pid)
    async with asyncio.TaskGroup() as group:
        clients = [group.create_task(_client(port, num_tokens)) for _ in range(CONCURRENCY)]
    wall_s, used_s = time.perf_counter() - began, _processor_s(process.pid) - used
    added = [
        arrived - sent
        for client in clients
        for sent, arrived in zip(worker.sent[client.result()[0]], client.result()[1], strict=True)
    ]
    tokens = CONCURRENCY * num_tokens
    centiles = statistics.quantiles(added, n=100)
    return Row(
        name=name,
        tokens=tokens,
        tokens_per_s=tokens / wall_s,
        tokens_per_core_s=tokens / used_s,
        added_ms=(1e3 * centiles[49], 1e3 * centiles[98]) if step_s else None,
    )


async def _client(port: int, num_tokens: int) -> tuple[str, list[float]]:
    """The request's id, and when each of its events came."""
    body = json.dumps({"prompt": "x", "max_tokens": num_tokens, "stream": True}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n" % len(body) + body
    )
    found = b""
    times: list[float] = []
    request_id = ""
    while not found.endswith(b"[DONE]\n\n\r\n0\r\n\r\n"):
        data = await reader.read(65536)
        assert data, "the router closed the connection"
        now = time.perf_counter()
        found = found[-64:] + data if request_id else found + data
        if not request_id and b'"cmpl-' in found:
            request_id = found.split(b'"cmpl-')[1].split(b'"')[0].decode()
        times += [now] * data.count(b'data: {"id"')
    writer.close()
    return request_id, times


def _state() -> WorkerState:
    return WorkerState(
        role=Role.COLOCATED,
        incarnation="bench",
        pid=os.getpid(),
        metrics="http://127.0.0.1:1/metrics",
        model_fingerprint="bench",
        layout="bench",
        block_size=16,
        max_model_len=8192,
        max_prompt_tokens=100_000,
        draining=False,
        blocks=PoolLoad(total=1, free=1, cached=0, held=0),
        running=0,
        waiting=0,
        num_queued_tokens=0,
    )


@contextlib.contextmanager
def _router(worker: str) -> Iterator[tuple[int, "subprocess.Popen[bytes]"]]:
    port = free_port()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "tandem", "router"),
                *("--model", str(prepare(home(), lambda text: None)), "--decode", worker),
                *("--http", f"127.0.0.1:{port}", "--metrics", f"127.0.0.1:{free_port()}"),
            ],
            stdout=log,
            stderr=log,
        )
        try:
            yield port, process
        finally:
            process.terminate()
            process.wait(timeout=40)


def _is_ready(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 200
    except httpx.TransportError:
        return False


def _processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
