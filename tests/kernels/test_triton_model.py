"""A whole forward pass with Triton's kernels, interpreted, against the CPU backend.

The prompts are such that decodes open a block, seal one, and stay in block 0.
"""

import numpy as np
import pytest
import torch

from engine.offsets import open_offsets
from engine.triton_model import TritonModel
from engine.weights import Checkpoint
from tests.engine.conftest import make_runner
from tests.engine.driver import Driver
from tests.engine.tiny_models import give_offsets, make_tiny_model


@pytest.mark.parametrize(
    ("family", "codec"), [("llama", "fp8_e3m4"), ("qwen2", "fp32"), ("qwen3", "bf16")]
)
def test_triton_backend_answers_as_the_cpu_backend(
    tmp_path_factory: pytest.TempPathFactory, family: str, codec: str
) -> None:
    path = make_tiny_model(tmp_path_factory.mktemp(family), family, num_hidden_layers=2).path
    give_offsets(path)
    drivers = []
    for is_triton in (False, True):
        runner = make_runner(path, kv_codec=codec, num_blocks=32, num_exact=8)
        if is_triton:
            checkpoint = Checkpoint.open(path)
            offsets, _ = open_offsets(path, runner.config, runner.layout)
            runner.backend = TritonModel(
                runner.config, checkpoint, runner.pool, offsets, torch.float32
            )
        driver = Driver(runner)
        driver.add("long", [int(t) for t in np.arange(46) * 31 % 331], max_tokens=4)
        driver.add("short", list(range(14)), max_tokens=4)
        driver.run(chunk_tokens=32)
        drivers.append(driver)
    for key in ("long", "short"):
        cpu, triton = (np.stack(driver.logits[key]) for driver in drivers)
        np.testing.assert_allclose(triton, cpu, atol=2e-3 if codec == "fp8_e3m4" else 1e-4, rtol=0)
        assert drivers[0].tokens[key] == drivers[1].tokens[key]
    pages, which = drivers[1].runner.pool.packed, torch.tensor([3, 0])
    cpu_sums, sums = (driver.runner.backend.checksums(pages, which) for driver in drivers)
    assert cpu_sums.tolist() == sums.tolist()
