"""mTLS between real processes: with certificates a fleet works, hand-offs included; without one
nobody is heard.
"""

import subprocess
import sys
from pathlib import Path

import grpc
import httpx
import pytest

from bench.cluster import cluster


def test_a_fleet_with_certificates_answers_and_hears_nobody_else(
    shrunk: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "certs"
    command = [sys.executable, "-m", "tandem", "certs", "--out", str(folder)]
    subprocess.run(command, check=True, capture_output=True)
    everywhere = ("--internal-tls", str(folder))
    sizes = ("--kv-blocks", "256")
    with cluster(tmp_path, shrunk, "p0", "d0", options=sizes, everywhere=everywhere) as c:
        body = {"model": shrunk.name, "prompt": list(range(100, 180)), "max_tokens": 5}
        answer = httpx.post(f"{c.url}/v1/completions", json=body, timeout=60).json()
        assert answer["usage"]["completion_tokens"] == 5
        with c.served() as served:
            assert served.metric("decode", "tandem_pull_pages_total") == 5
            served.wait_until_at_rest()
        for name in ("p0", "d0"):
            with grpc.insecure_channel(c.addresses[name]) as channel:
                watch = channel.stream_stream("/tandem.Worker/Watch")
                with pytest.raises(grpc.RpcError) as found:
                    next(watch(iter([b""]), timeout=10))
                assert found.value.code() is grpc.StatusCode.UNAVAILABLE
