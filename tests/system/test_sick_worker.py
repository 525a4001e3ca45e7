"""T11 on real processes: one of two workers computes nonsense from some moment on."""

from collections import Counter
from pathlib import Path

import httpx
import pytest

from bench.cluster import cluster
from bench.load import random_prompt

NUM_BEFORE, NUM_AFTER = 10, 100


@pytest.mark.slow
def test_a_worker_with_a_damaged_weight_takes_itself_out(shrunk: Path, tmp_path: Path) -> None:
    folder = tmp_path / "orders"
    folder.mkdir()
    program = ("tests.system.hanging_worker", str(folder))
    options = ("--kv-blocks", "512")
    with cluster(tmp_path, shrunk, "c0", "c1", options=options, program=program) as c:

        def ask(number: int) -> int:
            body = {"prompt": random_prompt(30, seed=number), "max_tokens": 4, "temperature": 0}
            return httpx.post(f"{c.url}/v1/completions", json=body, timeout=30).status_code

        assert [ask(number) for number in range(NUM_BEFORE)] == [200] * NUM_BEFORE
        (folder / f"{c.processes['c1'].pid}.sick").touch()
        codes = [ask(100 + number) for number in range(NUM_AFTER)]
        assert c.processes["c1"].wait(timeout=30) == 3
        assert "not fit to serve: self-test" in c.log("c1")
        assert Counter(codes)[200] >= NUM_AFTER - 3, codes
        assert codes[10:].count(200) >= NUM_AFTER - 10 - 1, codes
        assert ask(1000) == 200
        c.start("c1")
        c.wait_for_workers(2)
        assert "found colocated" in c.log("router")
