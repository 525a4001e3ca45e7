"""The fault matrix: every fault at every phase of a request, on virtual time.

    python -m tests.faults.cells          prints the table of docs/reliability.md

A cell is one request through a real router core (discovery, fleet, dispatch, journey), two
prefill and two decode workers with real services, and a model whose tokens depend on every byte
of KV. When the request reaches the phase, the fault strikes. Then: the right tokens or a typed
error, within the bound; pools at rest; a canary answered as before; nothing left running.
"""

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import anyio

from common.errors import InternalError, TandemError
from common.events import EventLog
from common.messages import GenerateRequest, pack_tokens
from common.rpc import Stream
from common.types import FinishReason, Role, SamplingParams
from router.fleet.discovery import Discovery
from router.fleet.dispatch import Dispatcher
from router.fleet.fleet import Fleet as RouterFleet
from router.fleet.journey import Inbox, Journey
from router.fleet.reach import Reach
from router.fleet.routing import LeastLoaded, RoutingPolicy
from tests.fakes.fleet import STEP_S, Fleet, Worker, fleet, flip_a_byte, make_stale
from tests.fakes.hash_model import expected_tokens
from tests.fakes.pages import hold_all_pages
from tests.fakes.virtual_time import LoopClock, VirtualTimeLoop

CHUNK_TOKENS = 64
PROMPT = list(range(100, 100 + 4 * CHUNK_TOKENS + 9))
SAMPLING = SamplingParams(max_tokens=40, temperature=1.0, seed=3)
CANARY = list(range(7, 60))
CANARY_SAMPLING = SamplingParams(max_tokens=8, temperature=0.0)

CLOSED_S, SILENT_S, NEXT_TOKEN_S, REST_S = 1.0, 7.0, 2.0, 2.0
HANG_S = 15.0
PREDICTED_TTFT_S = (len(PROMPT) / CHUNK_TOKENS + 2) * STEP_S + 1.0
"""Computing the prompt anew, and the router's pause before it looks for workers again."""


class Phase(StrEnum):
    QUEUED = "queued at P"
    FIRST_CHUNK = "first chunk"
    MIDDLE_CHUNK = "middle chunk"
    LAST_CHUNK = "last chunk"
    FIRST_TOKEN = "first token sent, pages not landed"
    LANDED = "pages landed, not verified"
    DECODING = "decoding"
    LAST_TOKEN = "last token"


class Fault(StrEnum):
    DISCONNECT = "client disconnects"
    KILL_P = "kill P"
    KILL_D = "kill D"
    STOP_P_3 = "stop P 3 s"
    STOP_D_3 = "stop D 3 s"
    DROP = "drop the stream"
    DELAY = "delay the pull"
    CORRUPT = "corrupt a page byte"
    STALE = "stale page"
    RESTART = "restart P on its port"
    RESTART_D = "restart D on its port"
    EXHAUST = "pool exhausted at D"
    ROUTER = "kill the router"
    STOP_P_15 = "stop P 15 s"
    STOP_D_15 = "stop D 15 s"
    HANG_DEVICE_P = "device of P hangs 15 s"
    HANG_DEVICE_D = "device of D hangs 15 s"
    HANG_LOOP_P = "loop of P hangs 15 s"
    HANG_LOOP_D = "loop of D hangs 15 s"
    SICK_P = "P's numbers are not finite"
    SICK_D = "D's numbers are not finite"
    HANDOFFS = "hand-offs of P fail"
    SLOW_P = "P is 20 times as slow"
    SLOW_D = "D is 20 times as slow"


@dataclass(slots=True)
class Cell:
    """What came of one cell."""

    outcome: str
    has_struck: bool
    """False when the worker that the fault hits has no part in the request any more."""
    longest_gap_s: float
    num_retries: int
    tokens: list[int] = field(default_factory=list)


class Trigger(EventLog):
    """An event log that strikes when the request reaches the phase."""

    def __init__(self, phase: Phase) -> None:
        super().__init__(LoopClock())
        self.phase = phase
        self.strike: Callable[[], None] | None = None
        self._num_pages_read = 0

    def record(self, event: str, **fields: object) -> None:
        if self.strike is not None and self._is_reached(event, fields):
            self.now()

    def now(self) -> None:
        strike, self.strike = self.strike, None
        if strike is not None:
            strike()

    def _is_reached(self, event: str, fields: dict[str, Any]) -> bool:
        if event == "pages_read":
            self._num_pages_read += int(str(fields["num_pages"]))
        num_left = -(-len(PROMPT) // 16) - self._num_pages_read
        return is_reached(self.phase, event, fields, CHUNK_TOKENS, num_left)


def is_reached(
    phase: Phase, event: str, fields: dict[str, Any], chunk_tokens: int, num_pages_left: int
) -> bool:
    """Whether a worker's event is the one at which a request of four chunks and a bit reaches the
    phase. (While it decodes, the client counts tokens.)
    """
    match phase:
        case Phase.QUEUED:
            return event == "handoff_began"
        case Phase.FIRST_CHUNK:
            return event == "chunk_started" and fields["start"] == 0
        case Phase.MIDDLE_CHUNK:
            return event == "chunk_started" and fields["start"] == 2 * chunk_tokens
        case Phase.LAST_CHUNK:
            return event == "chunk_started" and fields["start"] == 4 * chunk_tokens
        case Phase.FIRST_TOKEN:
            return event == "first_tokens_arrived"
        case Phase.LANDED:
            return event == "pages_read" and num_pages_left <= 0
        case _:
            return False


class Router:
    """The router without its HTTP front: journeys over whatever discovery finds."""

    def __init__(
        self,
        workers: Fleet,
        name: str,
        addresses: tuple[str, ...] = ("p0:1", "p1:1", "d0:1", "d1:1"),
        policy: RoutingPolicy | None = None,
        is_remote_only: bool = False,
    ) -> None:
        self.name = name
        self.fleet = RouterFleet(LoopClock(), is_remote_only=is_remote_only)
        self.dispatcher = Dispatcher(self.fleet, policy or LeastLoaded(), clock=LoopClock())
        self._discovery = Discovery(
            addresses,
            fleet=self.fleet,
            dispatcher=self.dispatcher,
            reach=Reach(
                router_id=name,
                connect=workers.network.connect_from(name),
                resolve=_as_named,
            ),
            clock=LoopClock(),
        )
        self.scope = anyio.CancelScope()

    async def run(self) -> None:
        with self.scope:
            await self._discovery.run()

    async def ready(self) -> None:
        """Discovery takes a moment of virtual time."""
        await asyncio.sleep(1.0)
        assert len(self.fleet.decode_workers(())) == 2

    def journey(self, inbox: Inbox, prompt: list[int], sampling: SamplingParams) -> Journey:
        _numbers["request"] += 1
        return Journey(
            GenerateRequest(
                request_id=f"r{_numbers['request']}",
                token_ids=pack_tokens(prompt),
                num_prompt_tokens=len(prompt),
                sampling=sampling,
                deadline_s=60.0,
            ),
            prompt_index=0,
            inbox=inbox,
            dispatcher=self.dispatcher,
            clock=LoopClock(),
            on_admitted=lambda: None,
        )

    async def generate(self, prompt: list[int], sampling: SamplingParams) -> list[int]:
        inbox = Inbox()
        journey = self.journey(inbox, prompt, sampling)
        journey.start()
        tokens: list[int] = []
        while True:
            for _, _, token, reason, _ in await inbox.take():
                tokens.append(token)
                if reason is not None:
                    return tokens


_numbers: Counter[str] = Counter()


async def _as_named(host: str, port: int) -> list[str]:
    return [f"{host}:{port}"]


HANGS = (Fault.HANG_DEVICE_P, Fault.HANG_DEVICE_D, Fault.HANG_LOOP_P, Fault.HANG_LOOP_D)


class World:
    """One cell's fleet and router, and how faults are done to them."""

    def __init__(self, workers: Fleet, trigger: Trigger) -> None:
        self.workers = workers
        self.trigger = trigger
        self.router = Router(workers, "router0")
        self.journey: Journey | None = None
        self.is_disconnected = False
        self.has_struck = False

    def busy(self, role: Role) -> Worker | None:
        """The worker of a role that has the request."""
        found = [
            worker
            for worker in self.workers.workers.values()
            if worker.identity.role is role
            and (
                worker.scheduler.num_running
                + worker.scheduler.num_waiting
                + worker.core.num_handoffs
            )
        ]
        return found[0] if found else None

    def strike(self, fault: Fault) -> None:
        p = self.busy(Role.PREFILL)
        d = self.busy(Role.DECODE)
        self.has_struck = True
        match fault:
            case Fault.DISCONNECT:
                assert self.journey is not None
                self.is_disconnected = True
                self.journey.stop()
            case Fault.KILL_P | Fault.RESTART if p is not None:
                self.workers.kill(p.address)
                if fault is Fault.RESTART:
                    self.workers.add(Role.PREFILL, p.address)
            case Fault.KILL_D | Fault.RESTART_D if d is not None:
                self.workers.kill(d.address)
                if fault is Fault.RESTART_D:
                    self.workers.add(Role.DECODE, d.address)
            case Fault.STOP_P_3 | Fault.STOP_P_15 if p is not None:
                self._stop(p.address, 3.0 if fault is Fault.STOP_P_3 else 15.0)
            case Fault.STOP_D_3 | Fault.STOP_D_15 if d is not None:
                self._stop(d.address, 3.0 if fault is Fault.STOP_D_3 else 15.0)
            case Fault.HANG_DEVICE_P if p is not None:
                self._hang_device(p)
            case Fault.HANG_DEVICE_D if d is not None:
                self._hang_device(d)
            case Fault.HANG_LOOP_P if p is not None:
                self._hang_loop(p)
            case Fault.HANG_LOOP_D if d is not None:
                self._hang_loop(d)
            case Fault.SICK_P if p is not None:
                p.device.is_sick = lambda plan: True
            case Fault.SICK_D if d is not None:
                d.device.is_sick = lambda plan: True
            case Fault.HANDOFFS if p is not None:
                self._fail_handoffs(p)
            case Fault.SLOW_P if p is not None:
                p.device.slow_down(20)
            case Fault.SLOW_D if d is not None:
                d.device.slow_down(20)
            case Fault.DROP:
                if p is None or not self.workers.network.drop(p.address, "Handoff"):
                    assert d is not None
                    self.workers.network.drop(d.address, "Session")
            case Fault.DELAY if p is not None:
                for worker in self.workers.workers.values():
                    if worker.identity.role is Role.PREFILL:
                        self.workers.fabric.hold(worker.identity.incarnation)
                        self._later(1.5, self.workers.fabric.resume, worker.identity.incarnation)
            case Fault.CORRUPT | Fault.STALE if d is not None:
                self._alter(d, flip_a_byte if fault is Fault.CORRUPT else make_stale)
            case Fault.EXHAUST if d is not None:
                self._exhaust(d)
            case Fault.ROUTER:
                self.router.scope.cancel()
                self.workers.network.kill(self.router.name)
            case _:
                self.has_struck = False

    def _stop(self, address: str, seconds: float) -> None:
        self.workers.freeze(address)
        self._later(seconds, self.workers.resume, address)

    def _hang_device(self, worker: Worker) -> None:
        worker.device.may_run.clear()
        self._later(HANG_S, worker.device.may_run.set)

    def _hang_loop(self, worker: Worker) -> None:
        """Nothing is said or read; but pings are answered, and memory can be read."""
        worker.device.may_run.clear()
        self.workers.network.freeze(worker.address, answers_pings=True)
        self._later(HANG_S, self.workers.network.resume, worker.address)
        self._later(HANG_S, worker.device.may_run.set)

    def _fail_handoffs(self, worker: Worker) -> None:
        async def fails(stream: Stream) -> None:
            await stream.receive()
            raise InternalError("on purpose")

        self.workers.network.serve(worker.address, {**worker.service.handlers(), "Handoff": fails})
        self.workers.network.drop(worker.address, "Handoff")

    def _alter(self, d: Worker, change: Callable[[Any], None]) -> None:
        """A page that has landed and is not checked yet, else the next one that is read."""
        assert d.zone is not None
        if self.trigger.phase is Phase.LANDED:
            landed = sorted(d.zone._in_use)
            kind, slot = landed[-1]
            change(d.runner.landing.rows(kind)[slot])
        elif self.busy(Role.PREFILL) is not None:
            self.workers.fabric.alter(1, change)
        else:
            self.has_struck = False

    def _exhaust(self, worker: Worker) -> None:
        """Somebody holds every free page for a while."""
        release = hold_all_pages(worker.cache)

        def give_back() -> None:
            release()
            worker.service.wake()

        self._later(1.0, give_back)

    def _later(self, seconds: float, function: Callable[..., Any], *arguments: Any) -> None:
        asyncio.get_running_loop().call_later(seconds, lambda: function(*arguments))


@asynccontextmanager
async def world(phase: Phase) -> AsyncIterator[World]:
    trigger = Trigger(phase)
    async with fleet(
        num_prefill=0,
        num_decode=0,
        chunk_tokens=CHUNK_TOKENS,
        events=trigger,
        is_watched=True,
        # the last pages land while the logits are computed, unless these take no time
        logits_share=0.0 if phase is Phase.FIRST_TOKEN else 0.1,
    ) as workers:
        for role, name in ((Role.PREFILL, "p"), (Role.DECODE, "d")):
            for number in range(2):
                # one decode worker plans ahead, the other one does not
                workers.add(role, f"{name}{number}:1", overlaps_steps=number == 0)
        made = World(workers, trigger)
        workers.group.start_soon(made.router.run)
        await made.router.ready()
        yield made


async def run_cell(phase: Phase, fault: Fault) -> Cell:
    """Raises AssertionError when the cell does not end as it must."""
    async with world(phase) as w:
        for _ in range(4):  # every pair of workers is linked
            assert await w.router.generate(CANARY, CANARY_SAMPLING) == CANARY_EXPECTED
        await asyncio.sleep(REST_S)
        num_tasks = len(asyncio.all_tasks())
        cell = await _strike(w, phase, fault)
        await _check_at_rest(w, fault, num_tasks)
        return cell


CANARY_EXPECTED = expected_tokens(CANARY, CANARY_SAMPLING)
EXPECTED = expected_tokens(PROMPT, SAMPLING)


async def _strike(w: World, phase: Phase, fault: Fault) -> Cell:
    loop = asyncio.get_running_loop()
    inbox = Inbox()
    w.journey = w.router.journey(inbox, PROMPT, SAMPLING)
    w.trigger.strike = lambda: w.strike(fault)
    w.journey.start()
    tokens: list[int] = []
    longest, before = 0.0, loop.time()
    outcome = ""
    while not outcome:
        try:
            with anyio.fail_after(30):
                events = await inbox.take()
        except TandemError as error:
            outcome = f"error {error.code}"
        except TimeoutError:
            outcome = "no more tokens"
        else:
            for _, _, token, reason, _ in events:
                tokens.append(token)
                _strike_while_decoding(w, phase, len(tokens))
                if reason is FinishReason.LENGTH:
                    outcome = "right text"
        if outcome != "no more tokens":
            longest = max(longest, loop.time() - before)
        before = loop.time()
    assert w.trigger.strike is None, "the phase was never reached"
    _check_outcome(w, fault, outcome, tokens, longest)
    return Cell(outcome, w.has_struck, longest, w.journey.num_retries, tokens)


def _strike_while_decoding(w: World, phase: Phase, num_tokens: int) -> None:
    is_reached = (phase is Phase.DECODING and num_tokens == 10) or (
        phase is Phase.LAST_TOKEN and num_tokens == SAMPLING.max_tokens - 1
    )
    if is_reached:
        w.trigger.now()


def _check_outcome(
    w: World, fault: Fault, outcome: str, tokens: list[int], longest_gap_s: float
) -> None:
    assert tokens == EXPECTED[: len(tokens)], "a wrong, lost or doubled token"
    assert w.journey is not None
    if w.is_disconnected or fault is Fault.ROUTER:
        assert outcome in ("no more tokens", "right text") or outcome.startswith("error ")
        return
    if fault is Fault.SICK_D and w.has_struck and tokens:
        # what was sent cannot be taken back, and may be wrong: the client is told
        assert outcome in ("error internal_error", "right text"), outcome
        return
    assert outcome == "right text", outcome
    assert tokens == EXPECTED
    assert longest_gap_s <= bound_s(fault), f"{longest_gap_s:.2f} s"
    refused = sum(worker.metric("pages_refused_total") for worker in w.workers.workers.values())
    assert refused == (w.has_struck and fault in (Fault.CORRUPT, Fault.STALE))
    if fault in (Fault.STOP_P_3, Fault.STOP_D_3, Fault.DELAY, Fault.CORRUPT, Fault.STALE):
        assert w.journey.num_retries == 0, "this is survived without another attempt"
    assert w.journey.num_retries <= 2


def bound_s(fault: Fault) -> float:
    """Longest pause that a client may see."""
    noticed = {
        Fault.STOP_P_3: 3.0,
        Fault.STOP_D_3: 3.0,
        Fault.DELAY: 1.5,
        Fault.STOP_P_15: SILENT_S,
        Fault.STOP_D_15: SILENT_S,
        Fault.HANG_DEVICE_P: SILENT_S,
        Fault.HANG_DEVICE_D: SILENT_S,
        Fault.HANG_LOOP_P: SILENT_S,
        Fault.HANG_LOOP_D: SILENT_S,
        Fault.SLOW_P: 2.0,
        Fault.SLOW_D: 2.0,
    }.get(fault, CLOSED_S)
    return noticed + NEXT_TOKEN_S + PREDICTED_TTFT_S


async def _sing(w: World, fault: Fault) -> None:
    """Canaries are answered as before. A sick worker may fail one more, then it is out."""
    num_right = num_failed = 0
    while num_right < 4:
        try:
            assert await w.router.generate(CANARY, CANARY_SAMPLING) == CANARY_EXPECTED
            num_right += 1
        except InternalError:
            num_failed += 1
            assert fault is Fault.SICK_D
            assert num_failed <= 2
    if fault in (Fault.SICK_P, Fault.SICK_D) and w.has_struck:
        assert len(w.workers.unfit) <= 1


async def _check_at_rest(w: World, fault: Fault, num_tasks: int) -> None:
    resumes_after_s = {Fault.STOP_P_3: 3.0, Fault.STOP_D_3: 3.0}
    resumes_after_s |= {Fault.STOP_P_15: 15.0, Fault.STOP_D_15: 15.0}
    resumes_after_s |= dict.fromkeys(HANGS, HANG_S)
    await asyncio.sleep(resumes_after_s.get(fault, 0.0))
    if fault is Fault.ROUTER:
        await asyncio.sleep(REST_S)
        w.workers.check_at_rest()  # before anybody comes back
        w.router = Router(w.workers, "router1")
        w.workers.group.start_soon(w.router.run)
        await w.router.ready()
    await asyncio.sleep(REST_S)
    w.workers.check_at_rest()
    await _sing(w, fault)
    await asyncio.sleep(REST_S + 8.0)
    w.workers.check_at_rest()
    w.router.fleet.check_invariants()
    for worker in w.workers.workers.values():
        assert worker.runner.num_outputs == 0
        assert worker.metric("requests_running") == 0
        assert worker.metric("requests_waiting") == 0
        assert worker.metric("kv_blocks", {"state": "held"}) == 0
        assert worker.metric("handoffs_active") == 0
    lost = fault in (Fault.KILL_P, Fault.KILL_D)
    assert len(asyncio.all_tasks()) <= num_tasks + (0 if lost else 2), "a task is left"


def run(phase: Phase, fault: Fault) -> Cell:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(run_cell(phase, fault))


def table() -> str:
    """The matrix in Markdown: what the client got, the longest pause it saw, further attempts."""
    lines = ["| fault | " + " | ".join(Phase) + " |", "|---" * (len(Phase) + 1) + "|"]
    for fault in Fault:
        cells = [shown(run(phase, fault), fault) for phase in Phase]
        lines.append(f"| {fault} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def shown(cell: Cell, fault: Fault) -> str:
    if not cell.has_struck:
        return "-"
    if fault is Fault.DISCONNECT:
        return "all freed"
    if fault is Fault.ROUTER:
        return "connection closed, all freed"
    attempts = {0: "", 1: ", 1 retry"}.get(cell.num_retries, f", {cell.num_retries} retries")
    return f"{cell.outcome}, {cell.longest_gap_s:.2f} s{attempts}"


if __name__ == "__main__":
    sys.stdout.write(table() + "\n")
