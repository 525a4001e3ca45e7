"""The fault matrix on real processes with NIXL: two prefill and two decode workers that strike
themselves (real_worker.py), one streamed request a cell.

    python -m tests.faults.real_matrix [--phase P ...] [--fault F ...] [--tcp]

Prints the table; exit code 1 when a cell does not end as it must. Takes some 15 minutes.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

from bench.cluster import Cluster, cluster
from bench.load import random_prompt
from bench.serving import wait_for
from bench.shrunk_model import shrunk_model
from tests.faults.cells import CLOSED_S, NEXT_TOKEN_S, SILENT_S, Fault, Phase
from tests.faults.real_worker import CHUNK_TOKENS, DELAY_S, INSIDE_D, SIGNALS, strike, write
from tests.system.streams import Stream, undisturbed

NUM_PROMPT = 4 * CHUNK_TOKENS + 9
NUM_OUTPUT = 120
NUM_PAGES = -(-NUM_PROMPT // 16)
OPTIONS = ("--kv-blocks", "1024", "--chunk-tokens", str(CHUNK_TOKENS), "--log-level", "warning")
PREDICTED_TTFT_S = 4.0
"""Of the prompt, computed anew on a machine that does other things as well."""
REST_S = 5.0
FAULTS = [fault for fault in Fault if fault in (*SIGNALS, *INSIDE_D, Fault.DISCONNECT)]
"""Hanging threads are tried in tests/system/test_hangs.py, wrong numbers in test_sick_worker.py."""
STOPS = {Fault.STOP_P_3: 3.0, Fault.STOP_D_3: 3.0, Fault.STOP_P_15: 15.0, Fault.STOP_D_15: 15.0}


@dataclass(slots=True)
class Outcome:
    text: str
    is_good: bool


class Matrix:
    def __init__(self, c: Cluster, folder: Path) -> None:
        self.c = c
        self.folder = folder
        self.salt = 0
        self.waking = threading.Thread()
        self.canary = self.sing()

    def sing(self) -> str:
        return undisturbed(self.c, random_prompt(40, seed=3), 8, salt=-900)

    def cell(self, phase: Phase, fault: Fault) -> Outcome:
        self.begin(phase, fault)
        prompt = random_prompt(NUM_PROMPT - 1, seed=5)
        stream = Stream(self.c, prompt, NUM_OUTPUT, self.salt, return_token_ids=True)
        if fault is Fault.ROUTER:
            stream.may_break()
        self.act_when_reached(stream, phase, fault)
        stream.wait(90)
        try:
            found = self.judge(stream, prompt, fault)
        except AssertionError as error:
            found = Outcome(f"NOT RIGHT: {error}"[:200], is_good=False)
        return found

    def begin(self, phase: Phase, fault: Fault) -> None:
        self.salt += 1
        for path in self.folder.iterdir():
            path.unlink(missing_ok=True)
        write(self.folder / "router.pid", str(self.c.processes["router"].pid))
        armed = {"phase": phase, "fault": fault, "num_pages": NUM_PAGES}
        write(self.folder / "armed", json.dumps(armed))

    def act_when_reached(self, stream: Stream, phase: Phase, fault: Fault) -> None:
        wanted = {Phase.DECODING: 10, Phase.LAST_TOKEN: NUM_OUTPUT - 1}.get(phase)
        struck = self.folder / "struck"
        if wanted is not None:
            assert wait_for(lambda: stream.num_tokens >= wanted or stream.has_ended, 60)
            (self.folder / "armed").rename(struck)
            strike(self.folder, fault)
        assert wait_for(struck.exists, 60), f"{phase} was never reached\n{self.c.logs()}"
        if fault is Fault.DISCONNECT:
            stream.leave()
        if fault in STOPS:
            self.waking = threading.Timer(STOPS[fault], self.resume)
            self.waking.start()
        if fault in (Fault.RESTART, Fault.RESTART_D):
            self.bring_back()

    def resume(self) -> None:
        for process in self.c.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)

    def bring_back(self) -> None:
        """Whoever is dead starts anew."""
        for name, process in list(self.c.processes.items()):
            wait_for(lambda process=process: process.poll() is not None, 0.2)  # type: ignore[misc]
            if process.poll() is not None:
                self.c.start_router() if name == "router" else self.c.start(name)

    def judge(self, stream: Stream, prompt: list[int], fault: Fault) -> Outcome:
        if fault in STOPS:
            self.waking.join()
        self.bring_back()
        self.c.wait_for_workers(4)
        with self.c.served() as served:
            served.wait_until_at_rest(within_s=REST_S)
        whole = undisturbed(self.c, prompt, NUM_OUTPUT, self.salt)
        assert self.sing() == self.canary, "the canary sings otherwise"
        assert whole.startswith(stream.text), "a wrong, lost or doubled token"
        pause = f"{stream.longest_pause_s:.2f} s"
        if fault in (Fault.DISCONNECT, Fault.ROUTER):
            return Outcome("client gone" if fault is Fault.DISCONNECT else "closed", is_good=True)
        if stream.error is not None:
            return Outcome(f"error {stream.error['code']}, {pause}", is_good=False)
        assert stream.is_done, "the stream has no end"
        assert stream.text == whole, "the text is cut short"
        bound = bound_s(fault)
        return Outcome(f"right text, {pause}", is_good=stream.longest_pause_s <= bound)


def bound_s(fault: Fault) -> float:
    noticed = {Fault.DELAY: DELAY_S, Fault.STOP_P_15: SILENT_S, Fault.STOP_D_15: SILENT_S}
    noticed |= {Fault.STOP_P_3: 3.0, Fault.STOP_D_3: 3.0}
    return noticed.get(fault, CLOSED_S) + NEXT_TOKEN_S + PREDICTED_TTFT_S


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.real_matrix", allow_abbrev=False)
    parser.add_argument("--phase", nargs="+", default=[phase.name for phase in Phase])
    parser.add_argument("--fault", nargs="+", default=[fault.name for fault in FAULTS])
    parser.add_argument("--tcp", action="store_true", help="pages travel by TCP")
    options = parser.parse_args()
    phases = [Phase[name] for name in options.phase]
    faults = [Fault[name] for name in options.fault]
    if options.tcp:
        os.environ["UCX_TLS"] = "tcp,self"
    is_good = True
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory, "faults")
        folder.mkdir()
        model = shrunk_model(Path(directory, "two-layers"))
        program = ("tests.faults.real_worker", str(folder))
        names = ("p0", "p1", "d0", "d1")
        with cluster(Path(directory), model, *names, options=OPTIONS, program=program) as c:
            matrix = Matrix(c, folder)
            show("| |", *(f" {phase} |" for phase in phases))
            show("|---|", *("---|" for _ in phases))
            for fault in faults:
                row = []
                for phase in phases:
                    found = matrix.cell(phase, fault)
                    is_good &= found.is_good
                    row.append(f" {found.text}{'' if found.is_good else ' **NOT GOOD**'} |")
                show(f"| {fault} |", *row)
    show("every cell is good" if is_good else "NOT GOOD")
    return 0 if is_good else 1


def show(*parts: str) -> None:
    sys.stdout.write("".join(parts) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
