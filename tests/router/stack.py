"""A router over fake workers, all in one thread with an event loop of its own; tests talk to it
over loopback.
"""

import asyncio
import functools
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import anyio
import httpx
import uvloop

from router.config import RouterConfig
from router.text.tokenizer import load_tokenizer
from router.wiring import Router, open_router
from tests.router.fake_worker import FakeWorker

T = TypeVar("T")
DEADLINE_S = 10.0


_tokenizer = functools.lru_cache(maxsize=8)(load_tokenizer)
"""Loading takes most of a start; each directory's files stay as they are while tests run."""


class Stack:
    """`with Stack(model, FakeWorker()) as stack: stack.http.post(...)`."""

    def __init__(self, model: Path, *workers: FakeWorker, host: str = "127.0.0.1", **config: Any):
        self.model = model
        self.workers = list(workers)
        self._host = host
        self._settings = config
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._stop: anyio.Event
        self._running: Future[None]
        self.router: Router
        self.http: httpx.Client

    def __enter__(self) -> "Stack":
        self._thread.start()
        self.call(self._open)
        self._running = asyncio.run_coroutine_threadsafe(self.router.run(self._stop), self._loop)
        self.http = httpx.Client(base_url=self.url, timeout=DEADLINE_S, trust_env=False)
        if any(worker.address for worker in self.workers):
            self.until(self._all_known)
        return self

    def open_and_close(self) -> None:
        """For what cannot be opened."""
        self._thread.start()
        try:
            self.call(self._open)
        finally:
            self._end_thread()

    def _end_thread(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _open(self) -> None:
        self._stop = anyio.Event()
        for worker in self.workers:
            if not worker.address:
                await worker.start(f"{self._host}:0")
        addresses = {"prefill": [], "decode": []}  # type: dict[str, list[str]]
        for worker in self.workers:
            kind = "prefill" if worker.state.role == "prefill" else "decode"
            addresses[kind].append(worker.address)
        settings = {
            "model": str(self.model),
            "http": f"{self._host}:0",
            "metrics": f"{self._host}:0",
            "prefill": tuple(addresses["prefill"]),
            "decode": tuple(addresses["decode"]) or ("127.0.0.1:1",),
            "drain_s": 5.0,
        }
        config = RouterConfig(**{**settings, **self._settings})
        self.router = open_router(config, tokenizer=_tokenizer(self.model))

    def _all_known(self) -> bool:
        known = {w.address: w for w in self.router.service.fleet.linked()}
        return all(
            w.address in known and (not known[w.address].can_decode or known[w.address].has_session)
            for w in self.workers
        )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.http.close()
        try:
            self.stop()
            self._running.result(DEADLINE_S)
            self.call(self._close_workers)
            if kind is None:
                self.check_idle()
        finally:
            self._end_thread()

    async def _close_workers(self) -> None:
        for worker in self.workers:
            await worker.stop()

    # --- for tests --------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        return f"http://{self._host}:{self.router.http_port}"

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)

    def wait_stopped(self) -> None:
        self._running.result(DEADLINE_S)

    def call(self, work: Callable[..., Awaitable[T]], *args: Any) -> T:
        async def run() -> T:
            return await work(*args)

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(DEADLINE_S)

    def do(self, work: Callable[[], T]) -> T:
        """Runs `work` on the loop."""

        async def run() -> T:
            return work()

        return self.call(run)

    def until(self, condition: Callable[[], bool], within_s: float = DEADLINE_S) -> None:
        """Looks again after each turn of the loop; fails after `within_s`."""

        async def wait() -> None:
            with anyio.fail_after(within_s):
                while not condition():  # noqa: ASYNC110 - conditions on several objects
                    await anyio.sleep(0.002)

        self.call(wait)

    def check_idle(self) -> None:
        """Nothing is left over in the router."""
        service = self.router.service
        service.fleet.check_invariants()
        service.admission.check_invariants()
        assert service.admission.is_idle
        assert all(w.num_in_flight == 0 for w in service.fleet.linked())

    def chat(self, content: str = "Say it", **fields: Any) -> httpx.Response:
        messages = [{"role": "user", "content": content}]
        return self.http.post("/v1/chat/completions", json={"messages": messages, **fields})

    def complete(self, prompt: Any = "Say it again", **fields: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json={"prompt": prompt, **fields})

    def canary(self) -> str:
        """A fixed greedy request; its text must never change."""
        response = self.complete("The canary sings", max_tokens=8, temperature=0)
        assert response.status_code == 200, response.text
        return str(response.json()["choices"][0]["text"])

    def metric(self, name: str, **labels: str) -> float:
        registry = self.router.service.metrics.registry
        return registry.get_sample_value(name, labels) or 0.0
