"""Kinds 6 and 7 as far as they are the router's: readiness, metrics, draining, addresses, load,
bounds.
"""

import concurrent.futures
import shutil
import signal
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from common.addresses import listen
from common.clock import MonotonicClock
from common.errors import ConfigError, InternalError
from common.types import Role
from router.config import RouterConfig
from router.fleet.discovery import Discovery
from router.fleet.dispatch import Dispatcher
from router.fleet.fleet import Fleet
from router.fleet.reach import Reach
from router.fleet.routing import LeastLoaded
from router.wiring import open_router
from tests.router.fake_worker import FakeWorker
from tests.router.sse import events, finish_of
from tests.router.stack import DEADLINE_S, Stack


def scrape(stack: Stack) -> dict[str, float]:
    """All samples, by name and labels. A series that appears twice fails."""
    port = stack.router.metrics_server.port
    text = httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False).text
    found: dict[str, float] = {}
    names: list[str] = []
    for family in text_string_to_metric_families(text):
        names.append(family.name)
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()))
            key = f"{sample.name}{{{labels}}}"
            assert key not in found
            found[key] = sample.value
    assert len(names) == len(set(names))
    return found


# --- readiness ------------------------------------------------------------------------------------


def test_b103_ready_only_when_a_request_would_succeed(model_dir: Path) -> None:
    decode, prefill = FakeWorker(Role.DECODE), FakeWorker(Role.PREFILL)
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        socket.create_server(("127.0.0.1", 0)) as too,
    ):
        ports = [s.getsockname()[1] for s in (taken, too)]
    addresses = [f"127.0.0.1:{port}" for port in ports]
    decodes, prefills = (addresses[0],), (addresses[1],)
    with Stack(model_dir, decode=decodes, prefill=prefills) as stack:
        assert stack.http.get("/health").status_code == 200
        response = stack.http.get("/ready")
        assert response.status_code == 503
        assert any(addresses[0] in reason for reason in response.json()["reasons"])
        refused = stack.complete("x")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")
        assert "retry-after" in refused.headers
        stack.workers.append(decode)
        stack.call(decode.start, addresses[0])
        stack.until(lambda: len(stack.router.service.fleet.linked()) == 1)
        assert stack.http.get("/ready").status_code == 503
        stack.workers.append(prefill)
        stack.call(prefill.start, addresses[1])
        stack.until(lambda: stack.router.service.fleet.is_ready())
        assert stack.http.get("/ready").json() == {"status": "ready", "reasons": []}
        assert stack.complete("x", max_tokens=1).status_code == 200


def test_b62_b120_a_misfit_is_shown_and_not_used(model_dir: Path) -> None:
    odd = FakeWorker(Role.PREFILL, block_size=32)
    with Stack(model_dir, FakeWorker(Role.DECODE), odd) as stack:
        reasons = stack.http.get("/ready").json()["reasons"]
        assert "blocks of 32" in reasons[0]
        workers = stack.http.get("/v1/fleet").json()["workers"]
        assert "blocks of 32" in next(w for w in workers if w["role"] == "prefill")["excluded"]
        assert stack.complete("x").status_code == 503


def test_fleet_view_has_the_operators_shape(model_dir: Path) -> None:
    with Stack(model_dir, FakeWorker(Role.DECODE), FakeWorker(Role.PREFILL)) as stack:
        workers = stack.http.get("/v1/fleet").json()["workers"]
        assert {w["role"] for w in workers} == {"decode", "prefill"}
        for worker in workers:
            assert set(worker) == {
                *("role", "address", "metrics", "pid", "incarnation", "draining", "blocks"),
                *("running", "waiting", "queued_tokens", "decodes", "context_tokens"),
                *("chunk_tokens", "step_times", "handoff_s", "prefix_blocks", "ranks"),
            }
            assert worker["blocks"] == {"total": 100, "free": 100, "cached": 0, "held": 0}


# --- metrics --------------------------------------------------------------------------------------


def test_b97_b99_each_request_is_counted_once_by_how_it_ended(model_dir: Path) -> None:
    worker = FakeWorker()
    with Stack(model_dir, worker) as stack:
        before = scrape(stack)
        for _ in range(3):
            assert stack.complete("x", max_tokens=4, n=2).status_code == 200
        for _ in range(2):
            assert stack.complete("x", max_tokens=-1).status_code == 400
        for number in range(5):
            stack.do(lambda: worker.allow(2))
            sent = worker.num_tokens_sent
            body = {"prompt": "x", "max_tokens": 50, "stream": True}
            with stack.http.stream("POST", "/v1/completions", json=body):
                stack.until(lambda sent=sent: worker.num_tokens_sent == sent + 2)  # type: ignore[misc]
            stack.do(lambda: worker.allow(1))  # only a write can tell
            stack.until(lambda number=number: len(worker.cancelled) == number + 1)  # type: ignore[misc]
            worker.steps_allowed = None
        worker.fails_after = (0, InternalError("a defect"))
        assert stack.complete("x").status_code == 500
        stack.until(lambda: stack.router.service.admission.is_idle)
        after = scrape(stack)

        def grown(key: str) -> float:
            return after.get(key, 0) - before.get(key, 0)

        outcomes = {
            outcome: grown(
                f"tandem_router_requests_total{{endpoint=/v1/completions,outcome={outcome}}}"
            )
            for outcome in ("success", "abort", "rejected", "error")
        }
        assert outcomes == {"success": 3, "abort": 5, "rejected": 2, "error": 1}
        assert grown("tandem_router_time_to_first_token_seconds_count{}") == 8
        assert grown("tandem_router_request_seconds_count{}") == 3
        assert grown("tandem_router_queue_seconds_count{}") == 9
        assert grown("tandem_router_prompt_tokens_total{}") == 9
        assert grown("tandem_router_output_tokens_total{}") >= 3 * 8 + 5 * 2
        assert after["tandem_router_requests_running{}"] == 0
        assert after["tandem_router_requests_waiting{}"] == 0
        assert after["tandem_router_workers{role=colocated,state=ready}"] == 1


def test_b100_two_routers_in_one_process_do_not_clash(model_dir: Path) -> None:
    with Stack(model_dir, FakeWorker()) as one, Stack(model_dir, FakeWorker()) as two:
        one.complete("x", max_tokens=1)
        name = "tandem_router_requests_total{endpoint=/v1/completions,outcome=success}"
        assert (scrape(one).get(name), scrape(two).get(name)) == (1, None)


def test_b143_label_sets_do_not_grow(model_dir: Path) -> None:
    with Stack(model_dir, FakeWorker()) as stack:
        stack.complete("x", max_tokens=1)
        stack.complete("x", model="m")
        size = len(scrape(stack))
        for number in range(30):
            stack.complete(f"{number}", max_tokens=1)
            stack.complete("x", model=f"m{number}")
            stack.http.get(f"/v1/{number}")
        assert len(scrape(stack)) == size


# --- load and bounds ------------------------------------------------------------------------------


def test_b110_paced_requests_spread_evenly(model_dir: Path) -> None:
    with Stack(model_dir, FakeWorker(), FakeWorker()) as stack:
        for number in range(40):
            stack.complete(f"{number}", max_tokens=1)
        counts = [len(worker.submitted) for worker in stack.workers]
        assert counts == [20, 20]


def test_b111_the_idle_worker_gets_the_prompts(model_dir: Path) -> None:
    busy, idle = FakeWorker(), FakeWorker()
    with Stack(model_dir, busy, idle) as stack:
        stack.do(lambda: busy.set_state(running=8))
        stack.until(lambda: any(w.state.running == 8 for w in stack.router.service.fleet.linked()))
        for number in range(20):
            stack.complete(f"{number}", max_tokens=1)
        assert len(idle.submitted) == 20


def test_prefill_work_is_spread_too(model_dir: Path) -> None:
    decode = FakeWorker(Role.DECODE)
    with Stack(model_dir, decode, FakeWorker(Role.PREFILL), FakeWorker(Role.PREFILL)) as stack:
        for number in range(10):
            stack.complete(f"{number}", max_tokens=1)
        assert sorted(Counter(route.prefill for route in decode.routes).values()) == [5, 5]
        assert all(route.incarnation for route in decode.routes)


def test_b102_a_draining_worker_finishes_and_gets_nothing_new(model_dir: Path) -> None:
    one, two = FakeWorker(), FakeWorker()
    with Stack(model_dir, one, two) as stack:
        for worker in (one, two):
            worker.steps_allowed = 0
        with concurrent.futures.ThreadPoolExecutor() as pool:
            running = pool.submit(stack.complete, "a b", max_tokens=20, stream=True)
            stack.until(lambda: bool(one.submitted or two.submitted))
            used, other = (one, two) if one.submitted else (two, one)
            stack.do(lambda: used.set_state(draining=True))
            stack.until(lambda: len(stack.router.service.fleet.decode_workers()) == 1)
            stack.do(lambda: other.allow(None))
            for _ in range(5):
                assert stack.complete("x", max_tokens=1).status_code == 200
            stack.do(lambda: used.allow(None))
            assert finish_of(events(running.result())) == "length"
        assert len(used.submitted) == 1


def test_b116_the_waiting_line_has_an_end(model_dir: Path) -> None:
    worker = FakeWorker()
    with Stack(model_dir, worker, max_waiting=8) as stack:
        for _ in range(3):
            assert burst(stack, worker) == {200: 8, 429: 22}
        assert stack.complete("x", n=20, max_tokens=1).status_code == 200


def burst(stack: Stack, worker: FakeWorker) -> Counter[int]:
    """Thirty at once while nobody is admitted; then those that wait are."""
    worker.admits = False
    worker.submitted.clear()
    limits = httpx.Limits(max_connections=40)
    with (
        httpx.Client(trust_env=False, timeout=DEADLINE_S, limits=limits) as client,
        concurrent.futures.ThreadPoolExecutor(30) as pool,
    ):
        body = {"prompt": "x", "max_tokens": 1}
        url = f"{stack.url}/v1/completions"
        asked = [pool.submit(client.post, url, json=body) for _ in range(30)]
        stack.until(lambda: sum(f.done() for f in asked) == 22)
        refused = stack.complete("x", n=20, max_tokens=1)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "overloaded"
        stack.call(worker.admit_all)
        return Counter(f.result().status_code for f in asked)


# --- draining -------------------------------------------------------------------------------------


def test_b102_the_router_drains(model_dir: Path) -> None:
    worker = FakeWorker()
    with Stack(model_dir, worker) as stack:
        worker.steps_allowed = 0
        with concurrent.futures.ThreadPoolExecutor() as pool:
            running = pool.submit(stack.complete, "a b", max_tokens=20, stream=True)
            stack.until(lambda: worker.num_running == 1)
            stack.stop()
            stack.until(lambda: stack.router.service.admission.is_draining)
            refused = stack.complete("x")
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
            assert stack.http.get("/ready").status_code == 503
            stack.do(lambda: worker.allow(None))
            assert finish_of(events(running.result())) == "length"
        stack.wait_stopped()


def test_a_drain_has_a_bound(model_dir: Path) -> None:
    worker = FakeWorker()
    with Stack(model_dir, worker, drain_s=0.2) as stack:
        worker.steps_allowed = 0
        with concurrent.futures.ThreadPoolExecutor() as pool:
            running = pool.submit(stack.complete, "a b", max_tokens=20)
            stack.until(lambda: worker.num_running == 1)
            stack.stop()
            stack.wait_stopped()
            assert running.result().json()["error"]["code"] == "draining"


def start_process(model_dir: Path, *extra: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "tandem.py", "router", "--model", str(model_dir)]
    command += ["--http", "127.0.0.1:0", "--metrics", "127.0.0.1:0", "--decode", "127.0.0.1:1"]
    return subprocess.Popen([*command, *extra], stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("which", [signal.SIGTERM, signal.SIGINT])
def test_the_process_exits_with_0_on_a_signal(model_dir: Path, which: signal.Signals) -> None:
    process = start_process(model_dir)
    assert process.stderr is not None
    line = ""
    while "listening" not in line:
        line = process.stderr.readline()
        assert line, "ended before it listened"
    process.send_signal(which)
    process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0


def test_b104_a_taken_port_is_one_line_with_the_option(model_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        process = start_process(model_dir, "--http", address)
        _, error = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 2
        lines = error.strip().splitlines()
        assert len(lines) == 1
        assert f"--http {address}" in lines[0]


@pytest.mark.parametrize("option", ["http", "metrics", "grpc"])
def test_b104_each_port_is_named_when_taken(model_dir: Path, option: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"--{option} {address}"):
            Stack(model_dir, FakeWorker(), **{option: address}).open_and_close()


# --- addresses ------------------------------------------------------------------------------------


def test_b105_everything_over_ipv6(model_dir: Path) -> None:
    with Stack(model_dir, FakeWorker(), host="[::1]", grpc="[::1]:0") as stack:
        assert stack.complete("x", max_tokens=1).status_code == 200
        assert stack.http.get("/v1/fleet").json()["workers"][0]["address"].startswith("[::1]:")
        assert httpx.get(
            f"http://[::1]:{stack.router.metrics_server.port}/metrics", trust_env=False
        ).is_success


def test_b105_all_interfaces(model_dir: Path) -> None:
    with listen("[::]:0", "--http") as found:
        port = found.getsockname()[1]
        for host in ("127.0.0.1", "::1"):
            socket.create_connection((host, port), timeout=1).close()


@pytest.mark.parametrize("entry", ["::1:8000", "nothing", ":5", "host:", "host:99999", "host:x"])
def test_b105_malformed_addresses_are_refused(entry: str) -> None:
    with pytest.raises(ConfigError):
        Discovery(
            [entry],
            fleet=Fleet(),
            dispatcher=Dispatcher(Fleet(), LeastLoaded()),
            reach=Reach(
                router_id="r", connect=lambda address: (_ for _ in ()).throw(AssertionError)
            ),
            clock=MonotonicClock(),
        )


def test_a_name_with_many_addresses_is_followed(model_dir: Path) -> None:
    """A compose service that is scaled from one worker to two, then down."""
    one, two = FakeWorker(), FakeWorker()
    addresses: dict[str, list[str]] = {"name": []}

    async def resolve(host: str, port: int) -> list[str]:
        return list(addresses["name"])

    async def run() -> None:
        from common.rpc import connect

        fleet = Fleet()
        discovery = Discovery(
            ["service:7000"],
            fleet=fleet,
            dispatcher=Dispatcher(fleet, LeastLoaded()),
            reach=Reach(router_id="r", connect=connect, resolve=resolve, refresh_s=0.01),
            clock=MonotonicClock(),
        )

        async def until(ready: Any) -> None:
            with anyio.fail_after(DEADLINE_S):
                while not ready():  # noqa: ASYNC110 - the fleet is a table, not an event
                    await anyio.sleep(0.002)

        async with anyio.create_task_group() as group:
            group.start_soon(discovery.run)
            await until(lambda: "service:7000: the name does not resolve" in fleet.reasons())
            for worker in (one, two):
                await worker.start()
                addresses["name"].append(worker.address)
            await until(lambda: len(fleet.decode_workers()) == 2)
            assert fleet.reasons() == []
            addresses["name"].remove(two.address)
            await two.stop()
            await until(lambda: [w.address for w in fleet.linked()] == [one.address])
            await until(lambda: fleet.reasons() == [])
            group.cancel_scope.cancel()
        await one.stop()

    anyio.run(run)


def test_a_model_directory_without_a_tokenizer_is_refused(model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((model_dir / "config.json").read_text())
    config = RouterConfig(
        model=str(tmp_path), http="127.0.0.1:0", metrics="127.0.0.1:0", decode=("127.0.0.1:1",)
    )
    with pytest.raises(ConfigError, match="tokenizer"):
        open_router(config)


def test_what_routing_refuses_carries_a_request_id_too(stack: Stack) -> None:
    for method, path, status in (("GET", "/nothing", 404), ("GET", "/v1/completions", 405)):
        own = stack.http.request(method, path, headers={"x-request-id": "mine-1"})
        assert (own.status_code, own.headers["x-request-id"]) == (status, "mine-1")
        assert stack.http.request(method, path).headers["x-request-id"]


@pytest.mark.parametrize("shows_tools", [False, True])
def test_it_says_when_the_chat_template_hides_tools(
    model_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, shows_tools: bool
) -> None:
    """Once it listens: the demo model's own template never names a tool."""
    model = tmp_path / "model"
    shutil.copytree(model_dir, model)
    if shows_tools:
        (model / "chat_template.jinja").write_text(
            "{{ tools | tojson }}{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
        )
    with Stack(model, FakeWorker()):
        pass
    said = [r.message for r in caplog.records if r.name == "router.wiring"]
    warnings = [line for line in said if "does not show tools" in line]
    assert len(warnings) == (0 if shows_tools else 1)
