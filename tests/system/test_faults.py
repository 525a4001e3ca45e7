"""Faults on real processes with NIXL: SIGKILL, SIGSTOP, restarts. The whole matrix runs on
virtual time (tests/faults); here the parts that only an operating system has are tried.
"""

import json
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.cluster import Cluster, cluster
from bench.load import random_prompt
from bench.serving import wait_for
from commands.demo_model import prepare
from common.environment import home
from tests.system.streams import Stream, undisturbed

LONG = random_prompt(7000, seed=1)
OPTIONS = ("--kv-blocks", "2048", "--chunk-tokens", "256")


@pytest.fixture(scope="module")
def fleet(shrunk: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two prefill and two decode workers; a test that kills one brings it back."""
    directory = tmp_path_factory.mktemp("fleet")
    with cluster(directory, shrunk, "p0", "p1", "d0", "d1", options=OPTIONS) as running:
        yield running


def busy_worker(c: Cluster, role: str) -> str:
    """The name of the worker of a role that has the request."""
    found: list[str] = []

    def look() -> bool:
        workers = httpx.get(f"{c.url}/v1/fleet").json()["workers"]
        names = {address: name for name, address in c.addresses.items()}
        found[:] = [
            names[w["address"]]
            for w in workers
            if w["role"] == role and w["running"] + w["waiting"]
        ]
        return bool(found)

    assert wait_for(look, 10), c.logs()
    return found[0]


def at_rest(c: Cluster) -> None:
    with c.served() as served:
        served.wait_until_at_rest(within_s=10)


def test_kill_the_prefill_worker_in_the_middle_of_a_prompt(fleet: Cluster) -> None:
    stream = Stream(fleet, LONG, 30, salt=1)
    name = busy_worker(fleet, "prefill")
    fleet.kill(name)
    text = stream.join()
    assert stream.longest_pause_s < 1.0 + 2.0 + 15.0
    fleet.start(name)
    fleet.wait_for_workers(4)
    assert text == undisturbed(fleet, LONG, 30, salt=1)
    at_rest(fleet)


def test_kill_the_decode_worker_while_it_decodes(fleet: Cluster) -> None:
    stream = Stream(fleet, LONG[:300], 400, salt=2)
    assert stream.first.wait(30)
    name = busy_worker(fleet, "decode")
    fleet.kill(name)
    text = stream.join()
    fleet.start(name)
    fleet.wait_for_workers(4)
    assert text == undisturbed(fleet, LONG[:300], 400, salt=2)
    at_rest(fleet)


SCHEMA = {
    "type": "object",
    "properties": {
        f"field_{number}": {"type": "string", "minLength": 40, "maxLength": 60}
        for number in range(6)
    },
    "required": [f"field_{number}" for number in range(6)],
    "additionalProperties": False,
}
JSON_FIELDS: dict[str, Any] = {
    "response_format": {"type": "json_schema", "json_schema": {"name": "six", "schema": SCHEMA}},
    "ignore_eos": False,
}


def check_json(text: str) -> None:
    fields = json.loads(text)
    assert list(fields) == SCHEMA["required"]
    assert all(40 <= len(value) <= 60 for value in fields.values())


def test_an_answer_of_a_schema_is_whole_when_its_decode_worker_dies(fleet: Cluster) -> None:
    stream = Stream(fleet, LONG[:300], 1500, 6, **JSON_FIELDS)
    assert stream.first.wait(30)
    name = busy_worker(fleet, "decode")
    fleet.kill(name)
    text = stream.join()
    check_json(text)
    fleet.start(name)
    fleet.wait_for_workers(4)
    assert text == undisturbed(fleet, LONG[:300], 1500, 6, **JSON_FIELDS)
    at_rest(fleet)


def test_answers_of_a_schema_are_whole_when_requests_are_evicted(
    shrunk: Path, tmp_path: Path
) -> None:
    """Four requests of up to 30 blocks on a pool of 40: most of them are evicted and resumed."""
    options = ("--kv-blocks", "40", "--max-num-seqs", "8")
    with cluster(tmp_path, shrunk, "c0", options=options) as c:
        streams = [Stream(c, LONG[:20], 440, 20 + n, **JSON_FIELDS) for n in range(4)]
        texts = [stream.join() for stream in streams]
        for text in texts:
            check_json(text)
        with c.served() as served:
            assert served.metric("colocated", "tandem_preemptions_total") > 0
        for n, text in enumerate(texts):
            assert text == undisturbed(c, LONG[:20], 440, 20 + n, **JSON_FIELDS)
        at_rest(c)


@pytest.mark.slow
def test_a_stop_of_three_seconds_is_survived_without_failover(fleet: Cluster) -> None:
    for role, salt in (("prefill", 3), ("decode", 4)):
        stream = Stream(fleet, LONG[:3000], 200, salt=salt)
        name = busy_worker(fleet, role)
        fleet.signal(name, signal.SIGSTOP)
        threading.Event().wait(3.0)
        fleet.signal(name, signal.SIGCONT)
        assert stream.join() == undisturbed(fleet, LONG[:3000], 200, salt=salt)
        assert "keepalive" not in fleet.log("router")
    at_rest(fleet)


def test_a_frozen_decode_worker_is_given_up_within_seven_seconds(fleet: Cluster) -> None:
    stream = Stream(fleet, LONG[:300], 600, salt=5)
    assert stream.first.wait(30)
    name = busy_worker(fleet, "decode")
    fleet.signal(name, signal.SIGSTOP)
    try:
        text = stream.join()
        assert 5.0 < stream.longest_pause_s < 7.0 + 2.0 + 3.0
    finally:
        fleet.signal(name, signal.SIGCONT)
    fleet.wait_for_workers(4)
    assert text == undisturbed(fleet, LONG[:300], 600, salt=5)
    at_rest(fleet)


@pytest.mark.slow
def test_a_drained_worker_finishes_what_it_has_and_exits_with_0(fleet: Cluster) -> None:
    """B102: SIGTERM in the middle of streams; new requests go elsewhere, nothing is lost."""
    streams = [Stream(fleet, LONG[:200], 300, salt=10 + n) for n in range(4)]
    assert all(stream.first.wait(30) for stream in streams)
    name = busy_worker(fleet, "decode")
    fleet.signal(name, signal.SIGTERM)
    later = [Stream(fleet, LONG[:200], 30, salt=20 + n) for n in range(4)]
    texts = [stream.join() for stream in streams + later]
    assert fleet.processes[name].wait(timeout=30) == 0
    fleet.start(name)
    fleet.wait_for_workers(4)
    for number, text in enumerate(texts[:4]):
        assert text == undisturbed(fleet, LONG[:200], 300, salt=10 + number)
    at_rest(fleet)


@pytest.mark.slow
def test_a_rolling_restart_of_every_worker_under_load_loses_nothing(fleet: Cluster) -> None:
    stop = threading.Event()
    expected = {salt: undisturbed(fleet, LONG[:100], 40, salt=30 + salt) for salt in range(4)}

    def client(salt: int) -> int:
        count = 0
        while not stop.is_set():
            assert Stream(fleet, LONG[:100], 40, salt=30 + salt).join() == expected[salt]
            count += 1
        return count

    with ThreadPoolExecutor(4) as pool:
        clients = [pool.submit(client, salt) for salt in range(4)]
        for name in ("p0", "d0", "p1", "d1"):
            fleet.signal(name, signal.SIGTERM)
            assert fleet.processes[name].wait(timeout=40) == 0
            fleet.start(name)
            fleet.wait_for_workers(4)
        stop.set()
        assert sum(client.result() for client in clients) > 8
    at_rest(fleet)


def test_late_bytes_of_a_read_that_was_given_up_hit_only_quarantined_slots(tmp_path: Path) -> None:
    """The cell that is known to bite, over TCP: freeze P during a pull, cancel the request, let
    others use D's pool, resume P. The bytes that then arrive must change nobody's text.
    """
    model = prepare(home(), lambda _: None)
    target = tmp_path / "freeze"
    program = ("tests.system.freezing_reader", str(target))
    options = ("--kv-blocks", "512")
    with (
        cluster(
            tmp_path, model, "p0", "d0", options=options, program=program, UCX_TLS="tcp,self"
        ) as c,
        c.served() as served,
    ):
        expected = [undisturbed(c, LONG[:60], 12, salt=200 + n) for n in range(4)]
        draft = tmp_path / "draft"
        draft.write_text(str(c.processes["p0"].pid))
        draft.rename(target)
        stream = Stream(c, LONG[:900], 12, salt=100)
        assert wait_for(lambda: not target.exists(), 60), c.logs()
        stream.leave()
        quarantined = {"state": "quarantined"}
        assert wait_for(
            lambda: served.metric("decode", "tandem_landing_slots", **quarantined) > 0, 10
        )
        assert wait_for(lambda: served.metric("decode", "tandem_requests_running") == 0, 10)
        others = [Stream(c, LONG[:60], 12, salt=200 + n) for n in range(4)]
        assert wait_for(lambda: served.worker("decode")["blocks"]["held"] > 0, 10)
        c.signal("p0", signal.SIGCONT)
        assert [other.join() for other in others] == expected
        served.wait_until_at_rest(within_s=20)
