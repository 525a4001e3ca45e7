"""Ranks whose backend is Triton's: interpreted, over gloo, in as many processes, with graphs that
run eagerly. Their logits are those of one rank on the CPU.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.engine.conftest import make_runner
from tests.engine.driver import Driver
from tests.engine.tiny_models import give_offsets, make_tiny_model
from tests.kernels.rank_process import NUM_NEW, PROMPTS

CASES = [
    pytest.param("qwen2", "fp8_e3m4", 2, "any", id="2 ranks"),
    pytest.param(
        "llama", "fp32", 4, "ordered", id="4 ranks, sums in order", marks=pytest.mark.slow
    ),
    pytest.param("qwen3", "bf16", 2, "any", id="2 ranks of qwen3", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("family", "codec", "num_ranks", "order"), CASES)
def test_ranks_answer_as_one(
    tmp_path: Path, family: str, codec: str, num_ranks: int, order: str
) -> None:
    path = tmp_path / "model"
    make_tiny_model(path, family, num_hidden_layers=2, intermediate_size=80)
    give_offsets(path)
    processes = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.kernels.rank_process", str(path), str(rank)),
                *(str(num_ranks), str(tmp_path / "store"), codec, order),
                str(tmp_path / f"{rank}.npz"),
            ],
            env={**os.environ, "TRITON_INTERPRET": "1"},
        )
        for rank in range(num_ranks)
    ]
    driver = Driver(make_runner(path, kv_codec=codec, num_blocks=32, num_exact=8))
    for key, prompt in PROMPTS.items():
        driver.add(key, prompt, max_tokens=NUM_NEW)
    driver.run(chunk_tokens=32)
    assert [process.wait(timeout=120) for process in processes] == [0] * num_ranks
    found = [np.load(tmp_path / f"{rank}.npz") for rank in range(num_ranks)]
    for key in PROMPTS:
        wanted = np.stack(driver.logits[key])
        atol = 2e-3 if codec == "fp8_e3m4" else 1e-4
        np.testing.assert_allclose(found[0][key], wanted, atol=atol, rtol=0)
        for other in found[1:]:
            assert np.array_equal(other[key], found[0][key]), "ranks have other logits"
