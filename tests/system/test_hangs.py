"""T09 on real processes: one thread of a worker stops, all others run on. The worker is out within
ten seconds, its requests go on elsewhere with the right tokens, and it is back when it moves again.
"""

import contextlib
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.cluster import Cluster, cluster
from bench.serving import wait_for
from tests.system.streams import Stream, undisturbed
from tests.system.test_faults import LONG, OPTIONS, at_rest, busy_worker

WITHIN_S = 10.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("orders")


@pytest.fixture(scope="module")
def fleet(
    shrunk: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("fleet")
    program = ("tests.system.hanging_worker", str(folder))
    names = ("p0", "p1", "d0", "d1")
    with cluster(directory, shrunk, *names, options=OPTIONS, program=program) as running:
        yield running


@contextlib.contextmanager
def hanging(c: Cluster, folder: Path, name: str, thread: str) -> Iterator[None]:
    order = folder / f"{c.processes[name].pid}.{thread}"
    order.touch()
    try:
        yield
    finally:
        order.unlink(missing_ok=True)


def shown(c: Cluster, name: str) -> dict[str, Any] | None:
    """The worker as the router sees it; None when it is not in the fleet."""
    workers = httpx.get(f"{c.url}/v1/fleet", timeout=10).json()["workers"]
    return next((w for w in workers if w["address"] == c.addresses[name]), None)


def is_used(c: Cluster, name: str) -> bool:
    worker = shown(c, name)
    return worker is not None and "excluded" not in worker


def is_unwell(url: str) -> bool:
    return httpx.get(url, timeout=10).status_code == 503


def disturbed(c: Cluster, folder: Path, role: str, thread: str, salt: int) -> None:
    is_prefill = role == "prefill"
    prompt, max_tokens = (LONG, 30) if is_prefill else (LONG[:300], 400)
    stream = Stream(c, prompt, max_tokens, salt=salt)
    if not is_prefill:
        assert stream.first.wait(30)
    name = busy_worker(c, role)
    metrics = str((shown(c, name) or {})["metrics"]).removesuffix("/metrics")
    assert httpx.get(f"{metrics}/ready").status_code == 200
    began = time.monotonic()
    with hanging(c, folder, name, thread):
        assert wait_for(lambda: not is_used(c, name), WITHIN_S), c.logs()
        assert time.monotonic() - began < WITHIN_S
        assert httpx.get(f"{c.url}/ready").status_code == 200, "there is another one"
        assert any(c.addresses[name] in r for r in httpx.get(f"{c.url}/ready").json()["reasons"])
        assert wait_for(partial(is_unwell, f"{metrics}/health"), 5)
        assert is_unwell(f"{metrics}/ready")
        text = stream.join()
        assert c.processes[name].poll() is None
    assert wait_for(lambda: is_used(c, name), 10), c.logs()
    assert httpx.get(f"{metrics}/health").status_code == 200
    assert stream.longest_pause_s < WITHIN_S + 2.0 + 15.0
    assert text == undisturbed(c, prompt, max_tokens, salt=salt)
    at_rest(c)


def test_a_decode_worker_whose_device_hangs(fleet: Cluster, folder: Path) -> None:
    disturbed(fleet, folder, "decode", "device", salt=1)


def test_a_prefill_worker_whose_loop_hangs(fleet: Cluster, folder: Path) -> None:
    disturbed(fleet, folder, "prefill", "loop", salt=2)


@pytest.mark.slow
def test_a_decode_worker_whose_loop_hangs(fleet: Cluster, folder: Path) -> None:
    disturbed(fleet, folder, "decode", "loop", salt=3)


@pytest.mark.slow
def test_a_prefill_worker_whose_device_hangs(fleet: Cluster, folder: Path) -> None:
    disturbed(fleet, folder, "prefill", "device", salt=4)


@pytest.mark.slow
@pytest.mark.parametrize("thread", ["device", "loop"])
def test_one_that_does_not_recover_ends_with_exit_code_3(
    fleet: Cluster, folder: Path, thread: str
) -> None:
    stream = Stream(fleet, LONG[:300], 400, salt=5)
    assert stream.first.wait(30)
    name = busy_worker(fleet, "decode")
    with hanging(fleet, folder, name, thread):
        assert fleet.processes[name].wait(timeout=60) == 3
    assert "it does not recover" in fleet.log(name)
    assert stream.join() == undisturbed(fleet, LONG[:300], 400, salt=5)
    fleet.start(name)
    fleet.wait_for_workers(4)
