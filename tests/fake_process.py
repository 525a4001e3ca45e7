"""Stands in for `tandem router|prefill|decode` under the launcher; run as a script.

What it does is written in `behaviour.json` in the model directory: `{"decode": {"exit": 3}}` ends
a decode worker at once, `{"router": {"ignores_sigterm": true}}` has to be killed, `{"ready": 503}`
is what the router answers once its workers have started. What happened is appended to `events`.
"""

import http.server
import json
import os
import signal
import sys
import threading
from pathlib import Path


def argument(name: str) -> str:
    return sys.argv[sys.argv.index(name) + 1]


def main() -> int:
    role, model = sys.argv[1], Path(argument("--model"))
    behaviour = json.loads((model / "behaviour.json").read_text())
    own = behaviour.get(role, {})
    stopped = threading.Event()
    if own.get("ignores_sigterm"):
        signal.signal(signal.SIGTERM, lambda *_: record(model, f"{role} ignored SIGTERM"))
    else:
        signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    sys.stdout.write(f"hello from {role}\n")
    sys.stdout.flush()
    if "exit" in own:
        record(model, f"{role} ended")
        return int(own["exit"])
    record(model, f"{role} started pid={os.getpid()} threads={os.environ['OMP_NUM_THREADS']}")
    sys.stdout.write(f"{role} is up\n")
    sys.stdout.flush()
    if role == "router":
        start_router(model, behaviour.get("ready", 200))
    stopped.wait()
    record(model, f"{role} stopped")
    return 0


def start_router(model: Path, status: int) -> None:
    host, _, port = argument("--http").rpartition(":")

    num_processes = 1 + len((argument("--prefill") + "," + argument("--decode")).split(","))

    def answer() -> int:
        events = (model / "events").read_text()
        told = events.count("started") + events.count("ended")
        return status if told >= num_processes and "decode started" in events else 503

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(answer() if self.path == "/ready" else 404)
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer((host, int(port)), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()


def record(model: Path, event: str) -> None:
    with (model / "events").open("a") as file:
        file.write(event + "\n")


if __name__ == "__main__":
    sys.exit(main())
