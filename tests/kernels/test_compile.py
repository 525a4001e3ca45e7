"""Every Triton kernel compiles to machine code for the GPUs we mean to run on, without spills."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kernels_compile_for_every_gpu(tmp_path: Path) -> None:
    environment = os.environ | {
        "TRITON_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-m", "bench.aot", "--quick"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
