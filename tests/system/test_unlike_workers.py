"""Workers that differ, as real processes over NIXL: in ranks, and in what their pages hold."""

from pathlib import Path

import httpx
import pytest

from bench.cluster import cluster

PROMPT = list(range(100, 180))


@pytest.mark.slow
def test_exact_pages_of_two_ranks_become_packed_ones_of_one(shrunk: Path, tmp_path: Path) -> None:
    own = {
        "p0": ("--kv-codec", "fp32", "--tensor-parallel", "2"),
        "d0": ("--kv-codec", "int8"),
    }
    sizes = ("--kv-blocks", "256")
    with cluster(tmp_path, shrunk, "p0", "d0", options=sizes, own=own) as c:
        body = {"model": shrunk.name, "prompt": PROMPT, "max_tokens": 5}
        for _ in range(2):
            answer = httpx.post(f"{c.url}/v1/completions", json=body, timeout=60).json()
            assert answer["usage"]["completion_tokens"] == 5
        with c.served() as served:
            served.wait_until_at_rest()
            names = ("pull_pages", "pages_refused", "links_refused", "prompt_tokens_computed")
            found = {name: served.metric("decode", f"tandem_{name}_total") for name in names}
        assert found == {
            "pull_pages": 10,  # both times: converted pages are nobody's prefix
            "pages_refused": 0,
            "links_refused": 0,
            "prompt_tokens_computed": 0,
        }
        workers = httpx.get(f"{c.url}/v1/fleet").json()["workers"]
        shown = {worker["role"]: worker for worker in workers}
        assert (shown["prefill"]["ranks"], shown["decode"]["ranks"]) == (2, 1)
        assert shown["decode"]["other_bits"] == {
            c.addresses["p0"]: "ranks: 2 at the prefill worker, 1 here; KV codec: fp32 at the "
            "prefill worker, converted to int8 here"
        }
