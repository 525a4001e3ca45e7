"""`tandem serve`: a router and its workers as child processes on this machine.

    check the addresses -> model -> start the children -> wait for /ready -> supervise -> drain

commands/children.py decides what runs; `Launch` does it. Everything that happens (a child ended,
the router answers, a signal came) is a fact in one queue, read by one loop. Children cannot outlive
the launcher: the kernel kills them when it dies. A child that ends is reported, and serving goes on
as long as one worker is left that generates. With `--restart on-failure` a child that failed is
started again, at its old addresses, within the bounds of commands/restarts.py.
"""

import asyncio
import ctypes
import json
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from commands.children import ChildPlan, check_free, plan_children, worker_ports
from commands.config import ServeConfig
from commands.demo_model import prepare_calibrated
from commands.restarts import MAX_RESTARTS, WITHIN_S, Restarts
from common.addresses import split_address
from common.environment import available_cores, child_environment, home

PR_SET_PDEATHSIG = 1
READY_INTERVAL_S = 0.1
STILL_WAITING_S = 10.0
MAX_REASON = 100
STOP_GRACE_S = 5.0
"""Added to `drain_s`: what a process may need beyond draining before it is killed."""

TANDEM = (sys.executable, "-m", "tandem")
COLOURS = {"router": "cyan", "prefill": "magenta", "decode": "green", "colocated": "yellow"}


@dataclass(frozen=True, slots=True)
class Exited:
    name: str


@dataclass(frozen=True, slots=True)
class RestartDue:
    name: str


@dataclass(frozen=True, slots=True)
class Ready:
    pass


@dataclass(frozen=True, slots=True)
class NeverReady:
    reason: str


@dataclass(frozen=True, slots=True)
class StopAsked:
    pass


Fact = Exited | RestartDue | Ready | NeverReady | StopAsked


def run(config: ServeConfig, config_file: Path | None, program: Sequence[str] = TANDEM) -> int:
    """Runs until a signal or the end of the router; returns the exit code."""
    output = Output()
    for name in ("http", "grpc", "metrics"):
        check_free(name, getattr(config, name))
    model = config.model or str(prepare_calibrated(home(), output.say))
    num_workers = config.prefill + config.decode + config.colocated
    ports = worker_ports(config, 2 * num_workers)
    plans = plan_children(config, config_file, model, ports, available_cores())
    return asyncio.run(Launch(config, plans, program, output).run())


class Launch:
    def __init__(
        self,
        config: ServeConfig,
        plans: Sequence[ChildPlan],
        program: Sequence[str],
        output: "Output",
    ) -> None:
        self.config = config
        self.plans = {plan.name: plan for plan in plans}
        self.program = tuple(program)
        self.output = output
        self.children: dict[str, asyncio.subprocess.Process] = {}
        self.facts: asyncio.Queue[Fact] = asyncio.Queue()
        self.restarts: dict[str, Restarts] = {plan.name: Restarts() for plan in plans}
        self.is_coming_back: set[str] = set()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.facts.put_nowait, StopAsked())
        self.output.say(f"starting {', '.join(self.plans)}")
        async with asyncio.TaskGroup() as group:
            try:
                for plan in self.plans.values():
                    await self.start(plan, group)
                waiting = group.create_task(self.wait_ready())
                code = await self.supervise(group)
                waiting.cancel()
                return await self.stop(code)
            finally:
                self.kill(self.alive())

    async def start(self, plan: ChildPlan, group: asyncio.TaskGroup) -> None:
        child = await asyncio.create_subprocess_exec(
            *self.program,
            *plan.arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=child_environment(plan.threads),
            process_group=0,  # a terminal's Ctrl-C reaches the launcher only, which knows the order
            preexec_fn=DieWithParent(os.getpid()),
        )
        self.children[plan.name] = child
        group.create_task(self.follow(plan, child))

    async def follow(self, plan: ChildPlan, child: asyncio.subprocess.Process) -> None:
        assert child.stdout is not None
        rest = b""
        while data := await child.stdout.read(65536):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self.output.child_line(plan, line)
        if rest:
            self.output.child_line(plan, rest)
        await child.wait()
        self.facts.put_nowait(Exited(plan.name))

    async def wait_ready(self) -> None:
        """Asks the router until it answers 200: it is another process, so nothing could wake us."""
        address, answer = self.config.http, "no answer yet"
        loop = asyncio.get_running_loop()
        started = told = loop.time()
        while (now := loop.time()) - started < self.config.start_timeout_s:
            status, answer = await get_ready(address)
            if status == 200:
                self.facts.put_nowait(Ready())
                return
            if now - told >= STILL_WAITING_S:
                told = now
                self.output.say(f"waiting for {now - started:.0f} s: {answer}")
            await asyncio.sleep(READY_INTERVAL_S)
        self.facts.put_nowait(NeverReady(answer))

    async def supervise(self, group: asyncio.TaskGroup) -> int:
        """Reads facts until it is time to stop; returns the exit code."""
        while True:
            match await self.facts.get():
                case Ready():
                    host, port = reachable(self.config.http)
                    self.output.ready(f"ready http://{bracketed(host)}:{port}/v1")
                case NeverReady(reason=reason):
                    bound = self.config.start_timeout_s
                    self.output.say(f"not ready within {bound:.0f} s ({reason}); stopping")
                    return 1
                case StopAsked():
                    self.output.say("stopping; once more to stop at once")
                    return 0
                case RestartDue(name=name):
                    self.is_coming_back.discard(name)
                    await self.start(self.plans[name], group)
                case Exited(name=name):
                    self.output.say(f"{name} {self.how_it_ended(name)}")
                    self.plan_restart(name)
                    if (code := self.code_after(name)) is not None:
                        return code

    def plan_restart(self, name: str) -> None:
        """Not of what ended as it was told to, nor of what has refused its configuration."""
        if self.config.restart == "no" or self.children[name].returncode in (0, 2):
            return
        loop, restarts = asyncio.get_running_loop(), self.restarts[name]
        delay_s = restarts.after_failure(loop.time())
        if delay_s is None:
            self.output.say(
                f"{name} has failed {MAX_RESTARTS + 1} times within {WITHIN_S / 60:g} minutes; "
                "it is not started again"
            )
            return
        self.output.say(
            f"{name} starts again in {delay_s:g} s ({restarts.num_recent} of {MAX_RESTARTS})"
        )
        self.is_coming_back.add(name)
        loop.call_later(delay_s, self.facts.put_nowait, RestartDue(name))

    def how_it_ended(self, name: str) -> str:
        code = self.children[name].returncode
        assert code is not None
        return (
            f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        )

    def code_after(self, name: str) -> int | None:
        """None while what is left (or comes back) can serve; 2 when a child refused its
        configuration, as it would do again: then that is for whoever started this to change.
        """
        if self.children[name].returncode == 2 and not self.restarts[name].num_recent:
            return 2
        left = {*self.alive(), *self.is_coming_back}
        if "router" in left and any(self.plans[other].generates for other in left):
            return None
        if name != "router" and "router" in self.alive():
            self.output.say("no worker is left that generates; stopping")
        return 1

    async def stop(self, code: int) -> int:
        """Router first, so that it drains while workers still answer; then the workers."""
        workers = [name for name in self.plans if name != "router"]
        for names in (["router"], workers):
            for name in set(names) & set(self.alive()):
                self.children[name].send_signal(signal.SIGTERM)
            if not await self.wait_for_end(names):
                self.kill(self.alive())
                return code or 130
        return code

    async def wait_for_end(self, names: Sequence[str]) -> bool:
        """Waits within the bound and kills what is left; False when asked to stop at once."""
        loop = asyncio.get_running_loop()
        bound = self.config.drain_s + STOP_GRACE_S
        deadline = loop.time() + bound
        while left := [name for name in self.alive() if name in names]:
            try:
                async with asyncio.timeout_at(deadline):
                    fact = await self.facts.get()
            except TimeoutError:
                self.output.say(f"{', '.join(left)} did not stop within {bound:.0f} s; killed")
                self.kill(left)
                return True
            if isinstance(fact, StopAsked):
                self.output.say("killed")
                return False
        return True

    def alive(self) -> list[str]:
        return [name for name, child in self.children.items() if child.returncode is None]

    def kill(self, names: Sequence[str]) -> None:
        for name in names:
            with suppress(ProcessLookupError):
                os.killpg(self.children[name].pid, signal.SIGKILL)


class DieWithParent:
    """Runs in the child before exec: the kernel sends it SIGKILL when the launcher ends."""

    def __init__(self, parent: int) -> None:
        self.parent = parent
        self.prctl = ctypes.CDLL(None, use_errno=True).prctl

    def __call__(self) -> None:
        self.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != self.parent:  # it ended before the line above
            os._exit(1)


class Output:
    """Our words and the children's lines on stderr, coloured on a terminal; `ready` on stdout."""

    def __init__(self) -> None:
        self.console = Console(stderr=True, highlight=False)

    def say(self, text: str) -> None:
        self.line("tandem", "bold", text)

    def child_line(self, plan: ChildPlan, line: bytes) -> None:
        self.line(plan.name, COLOURS[plan.role], line.decode(errors="replace").rstrip("\r"))

    def line(self, name: str, style: str, text: str) -> None:
        if self.console.is_terminal:
            shown = Text.assemble((f"{name:<12}", style), Text.from_ansi(text))
            self.console.print(shown, soft_wrap=True)
        else:
            sys.stderr.write(f"{name:<12}{text}\n")
            sys.stderr.flush()

    def ready(self, text: str) -> None:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()


async def get_ready(address: str) -> tuple[int, str]:
    """Status of GET /ready and the reason in words; status 0 when nobody answers."""
    host, port = reachable(address)
    request = f"GET /ready HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n"
    try:
        async with asyncio.timeout(2):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(request.encode())
            answer = (await reader.read(4096)).decode(errors="replace")
            writer.close()
        status = int(answer.split(" ", 2)[1])
    except (OSError, TimeoutError, ValueError, IndexError):
        return 0, "the router does not answer yet"
    return status, in_words(status, answer.partition("\r\n\r\n")[2])


def in_words(status: int, body: str) -> str:
    """The first of the router's reasons, short enough for one line."""
    try:
        reason = str(json.loads(body)["reasons"][0])
    except (ValueError, LookupError, TypeError):
        return f"the router says {status}"
    return reason if len(reason) <= MAX_REASON else reason[:MAX_REASON] + "..."


def reachable(address: str) -> tuple[str, int]:
    """An address to connect to: a wildcard is reached through loopback."""
    host, port = split_address(address)
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), port


def bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
