"""How a GPU's memory is shared out, with a made-up GPU whose kernels are interpreted."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.codecs import codec_named
from common.errors import ConfigError, InternalError
from common.model_config import ModelConfig
from common.pages import PageLayout
from engine.config import StepLimits
from engine.cuda_graphs import Capture
from engine.gpu_memory import MARGIN_BYTES, MemoryUse, largest_step, open_gpu, pool_size
from engine.graphed_model import GraphedModel
from engine.offsets import open_offsets
from engine.pool_size import PoolShare, PoolSize
from engine.pools import PageArena
from engine.self_test import compare
from engine.triton_model import TritonModel
from engine.weights import Checkpoint
from tests.engine.tiny_models import make_tiny_model

MIB = 1 << 20
LAYOUT = PageLayout(32, 8, 16, 128, codec_named("fp8_e3m4"))
NOTHING = PoolSize(num_packed=0, num_exact=0)


def use(**changes: int) -> MemoryUse:
    sizes = {"total": 80_000, "free_at_start": 79_000, "held": 17_000, "peak": 1500, "landing": 300}
    return MemoryUse(**{name: size * MIB for name, size in (sizes | changes).items()})


def test_kv_gets_what_weights_graphs_the_largest_step_and_landing_leave() -> None:
    left = use().left_for_pool(0.9)
    assert left == int(0.9 * 80_000 * MIB) - (17_000 + 1500 + 300) * MIB - MARGIN_BYTES
    size = pool_size(use(), PoolShare(share=0.9, max_num_seqs=256), LAYOUT)
    assert left - 4 * LAYOUT.exact_page_bytes < size.num_bytes(LAYOUT) <= left


def test_what_other_processes_hold_is_not_given_away() -> None:
    alone = use().left_for_pool(0.5)
    beside = use(free_at_start=40_000).left_for_pool(0.5)
    assert beside == alone
    crowded = use(free_at_start=30_000).left_for_pool(0.5)
    assert crowded == alone - 10_000 * MIB


def test_too_little_memory_is_said_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"leaves 0 MiB .* 70000 MiB.*--weight-dtype fp8"):
        pool_size(use(held=70_000), PoolShare(share=0.8, max_num_seqs=256), LAYOUT)


@pytest.mark.parametrize(("chunk", "decodes"), [(20, 3), (64, 1), (130, 0)])
def test_the_largest_step_has_every_row_and_stores_nothing(chunk: int, decodes: int) -> None:
    limits = StepLimits(chunk_tokens=chunk, num_decodes=decodes, max_tokens=200)
    step = largest_step(limits, 16)
    assert len(step.token_ids) == len(step.positions) == len(step.wanted) == chunk + decodes
    assert (step.items[:, 3:5] == -1).all()
    for fields in (step.items, step.runs):
        covered = np.concatenate([np.arange(row, row + count) for row, count, *_ in fields])
        assert covered.tolist() == list(range(chunk + decodes))
        assert (step.positions[fields[:, 0]] == fields[:, 2]).all()
    assert step.positions.max() == chunk - 1
    assert step.runs[:, 3].max() == decodes < len(step.tables)


class MadeUpGpu:
    """Tells the free memory of a script, and notes what was done."""

    device = "cpu"

    def __init__(self, *free_mib: int) -> None:
        self._free = list(free_mib)
        self.num_captured = 0
        self.num_dry_runs = 0

    def free_and_total(self) -> tuple[int, int]:
        return self._free.pop(0) * MIB, 1000 * MIB

    def peak_of(self, action: Callable[[], object]) -> int:
        action()
        self.num_dry_runs += 1
        return 100 * MIB

    def capture(self) -> Capture:
        def captured(step: Callable[[], None]) -> Callable[[], None]:
            self.num_captured += 1
            return step

        return captured


@pytest.fixture(scope="module")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("memory")
    sizes: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 32}
    return make_tiny_model(path, "llama", num_hidden_layers=1, **sizes).path


@pytest.mark.parametrize("num_decodes", [0, 3])
def test_a_gpu_is_opened_with_the_pool_that_fits(tiny_path: Path, num_decodes: int) -> None:
    config = ModelConfig.load(tiny_path)
    layout = PageLayout(1, 1, 16, config.head_dim, codec_named("fp8_e3m4"))
    offsets, _ = open_offsets(tiny_path, config, layout)
    models = []

    def make_model(pool: PageArena) -> TritonModel:
        models.append(TritonModel(config, Checkpoint.open(tiny_path), pool, offsets, torch.float32))
        return models[-1]

    gpu = MadeUpGpu(900, 500, 500)
    limits = StepLimits(chunk_tokens=20, num_decodes=num_decodes, max_tokens=64)
    share = PoolShare(share=0.8, max_num_seqs=4)
    backend, pool = open_gpu(gpu, make_model, layout, limits, room=share, landing=NOTHING)
    left = (800 - 400 - 100) * MIB - MARGIN_BYTES
    assert left - 4 * layout.exact_page_bytes < pool.num_bytes <= left
    assert isinstance(backend, GraphedModel if num_decodes else TritonModel)
    assert (gpu.num_dry_runs, gpu.num_captured) == (1, 2 * 3 if num_decodes else 0)
    assert models[0].pool is pool
    assert not pool.packed.any()
    assert not pool.exact.any()

    size = PoolSize(num_packed=7, num_exact=5)
    gpu = MadeUpGpu(900)
    _, pool = open_gpu(gpu, make_model, layout, limits, room=size, landing=NOTHING)
    assert (len(pool.packed), len(pool.exact)) == (7, 5)
    assert gpu.num_dry_runs == 0


def test_the_self_test_on_a_gpu_allows_rounding_and_nothing_more() -> None:
    wanted = np.array([1.0, -20.0, 3.0], dtype=np.float32)
    compare(wanted + np.float32(0.5), wanted, "decode", 0.1)
    for found in (wanted + np.float32(2.5), wanted * np.float32(np.nan)):
        with pytest.raises(InternalError, match="other logits"):
            compare(found, wanted, "decode", 0.1)
    with pytest.raises(InternalError, match="other bits"):
        compare(np.nextafter(wanted, np.float32(0)), wanted, "decode", 0.0)
