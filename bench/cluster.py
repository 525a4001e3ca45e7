"""Router and workers as processes started one by one, so that each can be killed, frozen and
replaced.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from bench.serving import Serving, free_port, wait_for

START_TIMEOUT_S = 180.0


@dataclass(slots=True, eq=False)
class Cluster:
    """Workers have names (`p0`, `d0`, ...) with a fixed address each; `served` asks through the
    router.
    """

    directory: Path
    model: Path
    options: tuple[str, ...]
    environment: dict[str, str]
    addresses: dict[str, str]
    everywhere: tuple[str, ...] = ()
    """Options of the router and of every worker."""
    program: tuple[str, ...] = ("tandem",)
    """The module that workers run, and what stands before its options."""
    own: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Options of single workers."""
    processes: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)
    url: str = ""

    def start(self, name: str) -> None:
        """A worker, on the address that belongs to its name."""
        command = {"p": ("prefill",), "d": ("decode",), "c": ("decode", "--colocated")}[name[0]]
        self._run(
            name,
            *self.program,
            *command,
            *("--model", str(self.model), "--listen", self.addresses[name]),
            *("--metrics", f"127.0.0.1:{free_port()}", "--threads", "1", *self.options),
            *self.own.get(name, ()),
        )

    def start_router(self) -> None:
        by_role = {
            role: ",".join(a for n, a in self.addresses.items() if n[0] in names)
            for role, names in (("prefill", "p"), ("decode", "dc"))
        }
        http = f"127.0.0.1:{free_port()}"
        self.url = f"http://{http}"
        prefill = ["--prefill-where", "remote"]  # so that there are hand-offs to disturb
        if by_role["prefill"]:
            prefill += ["--prefill", by_role["prefill"]]
        self._run(
            "router",
            *(
                "tandem",
                "router",
                "--model",
                str(self.model),
                "--http",
                http,
                "--decode",
                by_role["decode"],
            ),
            *("--metrics", f"127.0.0.1:{free_port()}", *prefill),
        )

    def _run(self, name: str, *arguments: str) -> None:
        log = (self.directory / f"{name}.log").open("ab")
        with log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", *arguments, *self.everywhere],
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1", **self.environment},
            )

    def signal(self, name: str, number: signal.Signals) -> None:
        self.processes[name].send_signal(number)

    def kill(self, name: str) -> None:
        self.signal(name, signal.SIGKILL)
        self.processes[name].wait()

    def log(self, name: str) -> str:
        return (self.directory / f"{name}.log").read_text()

    def num_workers_up(self) -> int:
        try:
            return len(httpx.get(f"{self.url}/v1/fleet", timeout=2).json()["workers"])
        except httpx.HTTPError:
            return 0

    def wait_for_workers(self, count: int) -> None:
        assert wait_for(lambda: self.num_workers_up() == count, START_TIMEOUT_S), self.logs()

    def logs(self) -> str:
        return "\n".join(f"== {name}\n{self.log(name)[-1500:]}" for name in self.processes)

    @contextlib.contextmanager
    def served(self) -> Iterator[Serving]:
        with httpx.Client(base_url=self.url, timeout=120) as http:
            yield Serving(url=self.url, http=http)

    def stop(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()


@contextlib.contextmanager
def cluster(
    directory: Path,
    model: Path,
    *names: str,
    options: tuple[str, ...] = (),
    everywhere: tuple[str, ...] = (),
    program: tuple[str, ...] = ("tandem",),
    own: Mapping[str, tuple[str, ...]] | None = None,
    **environment: str,
) -> Iterator[Cluster]:
    """Starts the named workers and a router; waits until all are in the fleet."""
    made = Cluster(
        directory=directory,
        model=model,
        options=options,
        environment=environment,
        addresses={name: f"127.0.0.1:{free_port()}" for name in names},
        everywhere=everywhere,
        program=program,
        own=own or {},
    )
    try:
        made.start_router()
        for name in names:
            made.start(name)
        made.wait_for_workers(len(names))
        yield made
    finally:
        made.stop()
