"""`tandem serve` as a user starts it: real processes, the demo model, NIXL. Used by benches and by
tests/system.
"""

import contextlib
import json
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

START_TIMEOUT_S = 180.0


@dataclass(slots=True, eq=False)
class Serving:
    """A running server and what can be asked of it."""

    url: str
    http: httpx.Client

    @property
    def model(self) -> str:
        name: str = self.http.get("/v1/models").json()["data"][0]["id"]
        return name

    def fleet(self) -> list[dict[str, Any]]:
        workers: list[dict[str, Any]] = self.http.get("/v1/fleet").json()["workers"]
        return workers

    def worker(self, role: str) -> dict[str, Any]:
        """Waits for it: `ready` comes with the first workers that can answer together."""
        found: list[dict[str, Any]] = []

        def look() -> bool:
            found[:] = [worker for worker in self.fleet() if worker["role"] == role]
            return bool(found)

        assert wait_for(look, START_TIMEOUT_S), f"no {role} worker"
        return found[0]

    def metric(self, role: str, name: str, **labels: str) -> float:
        """The sum over all workers of the role."""
        total = 0.0
        for worker in self.fleet():
            if worker["role"] == role:
                total += _sample(httpx.get(worker["metrics"]).text, name, labels)
        return total

    def wait_until_at_rest(self, within_s: float = 5.0) -> None:
        """Nothing runs, nothing waits, every page is free or cached; by the fleet view and by the
        gauges.
        """

        def is_at_rest() -> bool:
            return self._fleet_is_at_rest() and not self._busy_gauges()

        if not wait_for(is_at_rest, within_s):
            raise AssertionError(f"not at rest: {self._busy_gauges()}, {self.fleet()}")

    def _fleet_is_at_rest(self) -> bool:
        return all(
            worker["running"] == worker["waiting"] == worker["blocks"]["held"] == 0
            and worker["blocks"]["free"] + worker["blocks"]["cached"] == worker["blocks"]["total"]
            for worker in self.fleet()
        )

    def _busy_gauges(self) -> dict[str, float]:
        """What the workers themselves say; a router's view may be a moment old."""
        gauges: list[tuple[str, dict[str, str]]] = [
            ("tandem_requests_running", {}),
            ("tandem_requests_waiting", {}),
            ("tandem_kv_blocks", {"state": "held"}),
            ("tandem_handoffs_active", {}),
            ("tandem_landing_slots", {"state": "in_use"}),
            ("tandem_landing_slots", {"state": "quarantined"}),
        ]
        found = {
            f"{role} {name} {labels}": self.metric(role, name, **labels)
            for role in {worker["role"] for worker in self.fleet()}
            for name, labels in gauges
        }
        return {name: value for name, value in found.items() if value}


@dataclass(slots=True, eq=False)
class Launched(Serving):
    """The same, started with `tandem serve`."""

    process: subprocess.Popen[str]
    log: list[str]
    event_log: Path
    grpc: str

    def events(self) -> list[dict[str, Any]]:
        lines = self.event_log.read_text().splitlines()
        return sorted((json.loads(line) for line in lines), key=lambda event: event["time"])


def _sample(text: str, name: str, labels: dict[str, str]) -> float:
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


def wait_for(condition: Callable[[], bool], within_s: float) -> bool:
    """Asks again every 20 ms: other processes cannot wake us."""
    deadline = time.monotonic() + within_s
    pause = threading.Event()
    while not condition():
        if time.monotonic() > deadline:
            return False
        pause.wait(0.02)
    return True


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def serving(
    *arguments: str, tables: Mapping[str, str] = MappingProxyType({})
) -> Iterator[Launched]:
    """Runs until the block ends, then stops it as Ctrl-C does. `tables`: more lines of the file of
    options, by command.
    """
    with tempfile.TemporaryDirectory() as directory:
        events = Path(directory, "events.jsonl")
        config = Path(directory, "tandem.toml")
        logged = f'event-log = "{events}"\n'
        roles = [f"[{name}]\n{logged}{tables.get(name, '')}" for name in ("prefill", "decode")]
        config.write_text("".join(roles))
        port = free_port()
        grpc = f"127.0.0.1:{free_port()}"
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "tandem", "serve", "--config", str(config)),
                *("--http", f"127.0.0.1:{port}"),
                *("--grpc", grpc),
                *("--metrics", f"127.0.0.1:{free_port()}"),
                *arguments,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            log = _read_until_ready(process)
            url = f"http://127.0.0.1:{port}"
            with httpx.Client(base_url=url, timeout=60) as http:
                yield Launched(
                    url=url, http=http, process=process, log=log, event_log=events, grpc=grpc
                )
        finally:
            process.terminate()
            try:
                process.wait(timeout=40)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdout is not None
            process.stdout.close()


def _read_until_ready(process: subprocess.Popen[str]) -> list[str]:
    """Keeps reading afterwards, so that the child never blocks on a full pipe."""
    log: list[str] = []
    is_ready = threading.Event()

    def read() -> None:
        assert process.stdout is not None
        with contextlib.suppress(ValueError):
            for line in process.stdout:
                log.append(line.rstrip("\n"))
                if line.startswith("ready "):
                    is_ready.set()
        is_ready.set()

    threading.Thread(target=read, daemon=True).start()
    assert is_ready.wait(START_TIMEOUT_S), "\n".join(log)
    assert any(line.startswith("ready ") for line in log), "\n".join(log)
    return log
