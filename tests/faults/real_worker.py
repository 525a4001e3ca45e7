"""A worker process that strikes at a moment of its own life: `tandem prefill` or `tandem decode`
with faults built in.

    python -m tests.faults.real_worker FOLDER prefill|decode OPTIONS

The folder is shared with the test. `armed` (a phase and a fault, JSON) is claimed by the process in
which the request reaches the phase: it renames the file to `struck` and acts at that very event.
Who works on the request is in `prefill.pid` and `decode.pid`. Faults inside a process arrive as
`command.PID`.
"""

import asyncio
import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import anyio

import tandem
from commands.table import parse
from common.events import EventLog
from common.pages import PageKind
from common.rpc import GrpcPeer, GrpcStream, Handler, Stream
from common.scheduling.kv_cache import KvCache
from decode_worker.core import DecodeCore
from decode_worker.handoffs import Wire
from decode_worker.service import DecodeService
from kvtransfer.nixl_transport import NixlTransport
from kvtransfer.transport import ReadEnd
from tests.fakes.fleet import flip_a_byte, make_stale
from tests.fakes.pages import hold_all_pages
from tests.faults.cells import Fault, Phase, is_reached
from worker.context import WorkerContext

CHUNK_TOKENS = 256
DELAY_S, EXHAUST_S = 1.5, 1.0
SIGNALS = {
    Fault.KILL_P: ("prefill", signal.SIGKILL),
    Fault.RESTART: ("prefill", signal.SIGKILL),
    Fault.KILL_D: ("decode", signal.SIGKILL),
    Fault.RESTART_D: ("decode", signal.SIGKILL),
    Fault.STOP_P_3: ("prefill", signal.SIGSTOP),
    Fault.STOP_P_15: ("prefill", signal.SIGSTOP),
    Fault.STOP_D_3: ("decode", signal.SIGSTOP),
    Fault.STOP_D_15: ("decode", signal.SIGSTOP),
    Fault.ROUTER: ("router", signal.SIGKILL),
}
INSIDE_D = (Fault.DROP, Fault.DELAY, Fault.CORRUPT, Fault.STALE, Fault.EXHAUST)
"""Done by the decode worker to itself."""


def strike(folder: Path, fault: Fault) -> None:
    """From whatever process. What the client does itself (leaving) is nothing here."""
    if fault in SIGNALS:
        name, number = SIGNALS[fault]
        pid = pid_of(folder, name)
        if pid is not None:
            os.kill(pid, number)
    elif fault in INSIDE_D:
        pid = pid_of(folder, "decode")
        if pid is not None:
            write(folder / f"command.{pid}", fault)


def pid_of(folder: Path, name: str) -> int | None:
    try:
        return int((folder / f"{name}.pid").read_text())
    except FileNotFoundError:
        return None


def write(path: Path, text: str) -> None:
    """At once: whoever looks sees all of it or nothing."""
    draft = path.with_name(f"{path.name}.{os.getpid()}.draft")
    draft.write_text(text)
    draft.replace(path)


class Harness:
    """The hooks in this process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.loop: asyncio.AbstractEventLoop | None = None
        self.service: DecodeService | None = None
        self.core: DecodeCore | None = None
        self.cache: KvCache | None = None
        self.sessions: set[anyio.CancelScope] = set()
        self.handoffs: list[GrpcStream] = []
        self.may_read = asyncio.Event()
        self.may_read.set()
        self.change: Any = None
        self.num_pages_read = 0

    def see(self, event: str, fields: dict[str, Any]) -> None:
        if event in ("handoff_began", "submitted"):
            role = "prefill" if event == "handoff_began" else "decode"
            write(self.folder / f"{role}.pid", str(os.getpid()))
            self.num_pages_read = 0
        if event == "pages_read":
            self.num_pages_read += int(fields["num_pages"])
        try:
            armed = json.loads((self.folder / "armed").read_text())
        except (FileNotFoundError, ValueError):
            return
        num_left = armed["num_pages"] - self.num_pages_read
        if not is_reached(Phase(armed["phase"]), event, fields, CHUNK_TOKENS, num_left):
            return
        try:
            (self.folder / "armed").rename(self.folder / "struck")
        except FileNotFoundError:
            return
        fault = Fault(armed["fault"])
        if fault in INSIDE_D and self.service is not None:
            self.act(fault)
        else:
            strike(self.folder, fault)

    def watch(self) -> None:
        """Commands from other processes."""
        path, pause = self.folder / f"command.{os.getpid()}", threading.Event()
        while True:
            if path.exists() and self.loop is not None:
                fault = Fault(path.read_text())
                path.unlink()
                self.loop.call_soon_threadsafe(self.act, fault)
            pause.wait(0.001)

    def act(self, fault: Fault) -> None:
        assert self.core is not None
        assert self.loop is not None
        match fault:
            case Fault.DROP:
                streams, self.handoffs = self.handoffs, []
                for stream in streams:
                    stream.cancel()
                if not self.core.num_handoffs:
                    for session in self.sessions:
                        session.cancel()
            case Fault.DELAY:
                self.may_read.clear()
                self.loop.call_later(DELAY_S, self.may_read.set)
            case Fault.CORRUPT | Fault.STALE:
                self.change = flip_a_byte if fault is Fault.CORRUPT else make_stale
            case Fault.EXHAUST:
                self.exhaust()

    def exhaust(self) -> None:
        assert self.cache is not None
        release = hold_all_pages(self.cache)

        def give_back() -> None:
            assert self.service is not None
            release()
            self.service.wake()

        assert self.loop is not None
        self.loop.call_later(EXHAUST_S, give_back)


class HookedRead:
    """A read that the harness may hold up, or whose bytes it may change before they are checked."""

    def __init__(self, harness: Harness, read: Any, transport: Any, pages: Any) -> None:
        self._harness = harness
        self._read = read
        self._transport = transport
        self._pages = pages

    async def wait(self) -> ReadEnd:
        end: ReadEnd = await self._read.wait()
        await self._harness.may_read.wait()
        change, self._harness.change = self._harness.change, None
        if change is not None and end is ReadEnd.DONE:
            kind, slot = self._pages[-1].slot
            arena = self._transport._landing
            rows = arena.packed if kind is PageKind.PACKED else arena.exact
            change(rows[slot].numpy())
        return end


def install(harness: Harness) -> None:
    record, read = EventLog.record, NixlTransport.read
    open_stream, begin = GrpcPeer.open, DecodeService.__init__
    handlers = DecodeService.handlers

    def hooked_record(self: EventLog, event: str, **fields: object) -> None:
        record(self, event, **fields)
        if harness.loop is None:
            harness.loop = asyncio.get_running_loop()
        harness.see(event, fields)

    def hooked_read(self: NixlTransport, incarnation: str, pages: Any) -> Any:
        return HookedRead(harness, read(self, incarnation, pages), self, pages)

    def hooked_open(self: GrpcPeer, method: str) -> GrpcStream:
        stream = open_stream(self, method)
        if method == "Handoff":
            harness.handoffs.append(stream)
        return stream

    def hooked_begin(
        self: DecodeService,
        context: WorkerContext,
        core: DecodeCore,
        wire: Wire | None,
        **more: Any,
    ) -> None:
        begin(self, context, core, wire, **more)
        harness.service, harness.core, harness.cache = self, core, context.cache

    def hooked_handlers(self: DecodeService) -> dict[str, Handler]:
        found = handlers(self)

        async def serve_session(stream: Stream) -> None:
            with anyio.CancelScope() as scope:
                harness.sessions.add(scope)
                try:
                    await found["Session"](stream)
                finally:
                    harness.sessions.discard(scope)

        return {**found, "Session": serve_session}

    EventLog.record = hooked_record  # type: ignore[method-assign]
    NixlTransport.read = hooked_read  # type: ignore[method-assign]
    GrpcPeer.open = hooked_open  # type: ignore[method-assign]
    DecodeService.__init__ = hooked_begin  # type: ignore[method-assign]
    DecodeService.handlers = hooked_handlers  # type: ignore[method-assign]
    threading.Thread(target=harness.watch, daemon=True).start()


if __name__ == "__main__":
    install(Harness(Path(sys.argv[1])))
    sys.exit(tandem.run(parse(sys.argv[2:])))
