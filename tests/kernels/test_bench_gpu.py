"""`bench.gpu` to its end: on a CPU, kernels interpreted, tiny shapes; times mean nothing here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench import gpu

ROOT = Path(__file__).parents[2]
SECTIONS = ["ceilings", "kernels", "itl_context", "model", "fp8_weights", "overlap", "chunks"]
SECTIONS += ["batch_invariant", "handoff"]


def test_every_section_runs_and_every_kernel_is_right(tmp_path: Path) -> None:
    report = tmp_path / "gpu.json"
    done = subprocess.run(
        [sys.executable, "-m", "bench.gpu", "--smoke", "--json", str(report)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    found = json.loads(report.read_text())["sections"]
    assert list(found) == SECTIONS
    for name, section in found.items():
        assert section["error"] is None, name
        assert section["rows"], name
    assert all(row["note"].startswith("error") for row in found["kernels"]["rows"])


def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.gpu"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main() == 2
    assert "--smoke" in capsys.readouterr().err
