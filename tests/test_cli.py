"""The command line as a person meets it, and `tandem serve` with fake processes under it."""

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import pytest

from commands.children import ChildPlan, check_free, free_ports, plan_children, worker_ports
from commands.config import ServeConfig
from commands.restarts import Restarts
from commands.serve import in_words
from commands.table import COMMANDS
from common.environment import available_cores
from common.errors import ConfigError
from common.options import command_line_parser

ROOT = Path(__file__).resolve().parent.parent
FAKE = ROOT / "tests" / "fake_process.py"
SERVE_FAKES = """
import sys
from commands.table import parse
from commands import serve as launcher
command = parse(sys.argv[2:])
sys.exit(launcher.run(command.config, command.config_file, (sys.executable, sys.argv[1])))
"""
DEADLINE_S = 30.0


class Served:
    """A launcher in a process of its own, with fake children."""

    def __init__(self, model: Path, *flags: str, **behaviour: object) -> None:
        (model / "behaviour.json").write_text(json.dumps(behaviour))
        self.events_file = model / "events"
        self.http, grpc, metrics = (f"127.0.0.1:{port}" for port in free_ports(3))
        addresses = ("--http", self.http, "--grpc", grpc, "--metrics", metrics)
        command = (sys.executable, "-c", SERVE_FAKES, str(FAKE), "serve", "--model", str(model))
        self.process = subprocess.Popen(
            [*command, *addresses, *flags],
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def wait_ready(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == f"ready http://{self.http}/v1\n"

    def wait_line(self, text: str) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if text in line:
                return
        raise AssertionError(f"the launcher never said {text!r}")

    def finish(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, out, err

    def events(self) -> list[str]:
        return self.events_file.read_text().splitlines()

    def pids(self) -> list[int]:
        return [int(pid) for pid in re.findall(r"pid=(\d+)", self.events_file.read_text())]


Launch = Callable[..., Served]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


@pytest.fixture
def launch(model: Path) -> Iterator[Launch]:
    served: list[Served] = []

    def start(*flags: str, **behaviour: object) -> Served:
        served.append(Served(model, *flags, **behaviour))
        return served[-1]

    yield start
    for one in served:
        one.process.kill()
        one.finish()


@pytest.fixture
def taken() -> Iterator[str]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def tandem(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tandem", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S)


def gone(pid: int) -> bool:
    """Waits for the process's end on its pidfd."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        readable, _, _ = select.select([descriptor], [], [], DEADLINE_S)
        return bool(readable)
    finally:
        os.close(descriptor)


def test_a_wrong_flag_is_one_line_and_exit_code_2() -> None:
    done = tandem("serve", "--kv-codecs", "fp32")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("tandem: unknown option --kv-codecs; did you mean --kv-codec")
    assert done.stderr.count("\n") == 1


def test_help_names_every_command_and_loads_no_torch() -> None:
    code = "import sys, tandem; sys.modules['torch'] = None; tandem.main()"
    command = [sys.executable, "-c", code, "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0
    for name in ("serve", "router", "prefill", "decode", "demo-model", "calibrate", "quality"):
        assert name in done.stdout


def test_a_taken_port_is_named_before_anything_starts(model: Path, taken: str) -> None:
    done = tandem("serve", "--model", str(model), "--http", taken)
    assert done.returncode == 2
    assert done.stderr == f"tandem: --http {taken} cannot be used: Address already in use\n"
    assert not (model / "events").exists()


def test_check_free_accepts_a_port_that_was_just_released(taken: str) -> None:
    with pytest.raises(ConfigError, match="--metrics"):
        check_free("metrics", taken)
    check_free("metrics", f"127.0.0.1:{free_ports(1)[0]}")


def test_two_workers_share_the_cores_and_get_ports_of_their_own() -> None:
    config = ServeConfig(
        chunk_tokens=64,
        prefill_where="remote",
        itl_target=0.1,
        weight_dtype="fp8",
        batch_invariant=True,
    )
    router, prefill, decode = plan_children(config, None, "/m", [1, 2, 3, 4], cores=8)
    assert (router.name, prefill.name, decode.name) == ("router", "prefill-0", "decode-0")
    assert (prefill.threads, decode.threads) == (4, 4)
    assert flags(router)["--prefill"] == "127.0.0.1:1"
    assert flags(router)["--decode"] == "127.0.0.1:3"
    assert flags(router)["--prefill-where"] == "remote"
    assert flags(prefill)["--metrics"] == "127.0.0.1:2"
    assert flags(decode)["--listen"] == "127.0.0.1:3"
    assert flags(decode)["--chunk-tokens"] == "64"
    assert flags(prefill)["--weight-dtype"] == flags(decode)["--weight-dtype"] == "fp8"
    assert (flags(router)["--itl-target"], "--itl-target" in flags(decode)) == ("0.1", False)
    assert "--kv-codec" not in decode.arguments
    assert "--batch-invariant" in prefill.arguments
    assert "--batch-invariant" in decode.arguments
    assert "--batch-invariant" not in router.arguments


def test_the_reason_for_waiting_is_short() -> None:
    assert in_words(503, '{"reasons": ["decode:7000: cannot be reached", "b"]}') == (
        "decode:7000: cannot be reached"
    )
    assert in_words(503, json.dumps({"reasons": ["x" * 300]})) == "x" * 100 + "..."
    assert in_words(502, "<html>") == "the router says 502"


def test_colocated_workers_are_decode_workers_to_the_router() -> None:
    config = ServeConfig(prefill=0, decode=0, colocated=2)
    router, first, second = plan_children(config, Path("a.toml"), "/m", [1, 2, 3, 4], cores=1)
    assert flags(router)["--prefill"] == ""
    assert flags(router)["--decode"] == "127.0.0.1:1,127.0.0.1:3"
    assert first.arguments[:4] == ("decode", "--colocated", "--config", "a.toml")
    assert (first.threads, second.threads) == (1, 1)


def flags(plan: ChildPlan) -> dict[str, str]:
    words = plan.arguments
    return {words[i]: words[i + 1] for i in range(len(words) - 1) if words[i].startswith("--")}


def test_ctrl_c_stops_the_router_before_the_workers_and_leaves_no_process(launch: Launch) -> None:
    served = launch()
    served.wait_ready()
    served.process.send_signal(signal.SIGINT)
    code, out, err = served.finish()
    assert (code, out) == (0, "")
    assert served.events()[3] == "router stopped"
    assert sorted(served.events()[4:]) == ["decode stopped", "prefill stopped"]
    assert re.search(r"^decode-0 +hello from decode$", err, re.MULTILINE)
    assert all(gone(pid) for pid in served.pids())
    share = max(1, available_cores() // 2)
    assert sum(f"threads={share}" in event for event in served.events()) >= 2


def test_sigterm_stops_like_ctrl_c(launch: Launch) -> None:
    served = launch()
    served.wait_ready()
    served.process.terminate()
    assert served.finish()[0] == 0
    assert all(gone(pid) for pid in served.pids())


def test_a_second_ctrl_c_kills_at_once(launch: Launch) -> None:
    served = launch(router={"ignores_sigterm": True})
    served.wait_ready()
    served.process.send_signal(signal.SIGINT)
    served.wait_line("stopping; once more")
    served.process.send_signal(signal.SIGINT)
    code, _, err = served.finish()
    assert code == 130
    assert "killed" in err
    assert all(gone(pid) for pid in served.pids())


def test_a_process_that_does_not_drain_is_killed_within_the_bound(launch: Launch) -> None:
    served = launch("--drain-s", "0.1", decode={"ignores_sigterm": True})
    served.wait_ready()
    served.process.send_signal(signal.SIGINT)
    code, _, err = served.finish()
    assert code == 0
    assert "decode-0 did not stop within 5 s; killed" in err
    assert all(gone(pid) for pid in served.pids())


def test_children_die_with_a_launcher_that_is_killed(launch: Launch) -> None:
    served = launch(router={"ignores_sigterm": True})
    served.wait_ready()
    served.process.kill()
    assert len(served.pids()) == 3
    assert all(gone(pid) for pid in served.pids())
    served.finish()


def test_a_dead_prefill_worker_is_reported_and_serving_goes_on(launch: Launch) -> None:
    served = launch(prefill={"exit": 3})
    served.wait_line("prefill-0 exited with code 3")
    served.wait_ready()
    served.process.send_signal(signal.SIGINT)
    assert served.finish()[0] == 0


def test_a_worker_ended_by_a_signal_is_reported_by_its_name(launch: Launch) -> None:
    served = launch("--decode", "2")
    served.wait_ready()
    pid = next(
        int(event.split("pid=")[1].split()[0]) for event in served.events() if "decode" in event
    )
    os.kill(pid, signal.SIGKILL)
    served.wait_line("was ended by SIGKILL")
    served.process.send_signal(signal.SIGINT)
    assert served.finish()[0] == 0


def test_without_any_worker_that_generates_the_launcher_gives_up(launch: Launch) -> None:
    code, out, err = launch(decode={"exit": 3}).finish()
    assert (code, out) == (1, "")
    assert "decode-0 exited with code 3" in err
    assert "no worker is left that generates" in err


@pytest.mark.parametrize("role", ["router", "prefill", "decode"])
def test_a_refused_configuration_ends_everything_with_exit_code_2(
    launch: Launch, role: str
) -> None:
    assert launch(**{role: {"exit": 2}}).finish()[0] == 2


def test_a_dead_router_ends_everything(launch: Launch) -> None:
    served = launch()
    served.wait_ready()
    os.kill(next(int(e.split("pid=")[1].split()[0]) for e in served.events() if "router" in e), 9)
    code, _, err = served.finish()
    assert code == 1
    assert "router was ended by SIGKILL" in err
    assert sorted(served.events()[3:]) == ["decode stopped", "prefill stopped"]
    assert all(gone(pid) for pid in served.pids())


def test_a_router_that_never_gets_ready_ends_in_an_error(launch: Launch) -> None:
    code, out, err = launch("--start-timeout-s", "1", ready=503).finish()
    assert (code, out) == (1, "")
    assert "not ready within 1 s (the router says 503); stopping" in err


def pid_of(served: Served, role: str) -> int:
    """Of the one started last."""
    return [int(e.split("pid=")[1].split()[0]) for e in served.events() if f"{role} st" in e][-1]


def test_what_fails_is_started_again_at_its_old_port(launch: Launch) -> None:
    """T15: worker and router, each killed; the launcher goes on, nothing is left at the end."""
    served = launch("--restart", "on-failure")
    served.wait_ready()
    for role, name in (("decode", "decode-0"), ("router", "router")):
        before = pid_of(served, role)
        arguments = Path(f"/proc/{before}/cmdline").read_bytes()
        os.kill(before, signal.SIGKILL)
        served.wait_line(f"{name} was ended by SIGKILL")
        served.wait_line(f"{name} starts again in 1 s (1 of 5)")
        served.wait_line(f"{role} is up")
        after = pid_of(served, role)
        assert after != before
        assert Path(f"/proc/{after}/cmdline").read_bytes() == arguments
    served.process.send_signal(signal.SIGINT)
    assert served.finish()[0] == 0
    assert all(gone(pid) for pid in served.pids())


def test_a_worker_that_was_told_to_stop_is_not_started_again(launch: Launch) -> None:
    served = launch("--restart", "on-failure", "--decode", "2")
    served.wait_ready()
    os.kill(pid_of(served, "decode"), signal.SIGTERM)
    served.wait_line("exited with code 0")
    served.process.send_signal(signal.SIGINT)
    code, _, err = served.finish()
    assert code == 0
    assert "starts again" not in err


def test_restarts_are_bounded_and_slower_each_time() -> None:
    restarts = Restarts()
    assert [restarts.after_failure(10.0 * n) for n in range(7)] == [1, 2, 4, 8, 16, None, None]
    assert restarts.after_failure(600.0) == 16, "the first of five is ten minutes ago"
    assert restarts.after_failure(5000.0) == 1


def test_workers_listen_where_they_are_told_to(taken: str) -> None:
    config = ServeConfig(worker_ports=7100, prefill=1, decode=2)
    ports = list(range(7100, 7106))
    _, prefill, first, second = plan_children(config, None, "/m", ports, cores=1)
    assert flags(prefill)["--listen"] == "127.0.0.1:7100"
    assert flags(first)["--metrics"] == "127.0.0.1:7103"
    assert flags(second)["--listen"] == "127.0.0.1:7104"
    with pytest.raises(ConfigError, match="--worker-ports"):
        worker_ports(ServeConfig(worker_ports=int(taken.rpartition(":")[2])), 1)
    with pytest.raises(ConfigError, match="--worker-ports is 65533"):
        ServeConfig(worker_ports=65533)


def test_version_is_that_of_the_distribution(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as found:
        command_line_parser(COMMANDS).parse_args(["--version"])
    assert found.value.code == 0
    assert capsys.readouterr().out == f"tandem {metadata.version('tandem-serve')}\n"
