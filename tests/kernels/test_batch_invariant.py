"""`--batch-invariant` on Triton's kernels, interpreted: a token's logits and pages have the same
bits however it was computed.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.errors import InternalError
from common.model_config import ModelConfig
from engine.backend import Backend, gpu_arithmetic
from engine.batch import StepBatch
from engine.graphed_model import GraphedModel
from engine.kernels import reference
from engine.kernels.gpu.decode import Partials, decode_attention
from engine.kernels.gpu.store import rotate_and_store
from engine.offsets import open_offsets
from engine.pools import PageArena
from engine.triton_model import TritonModel
from engine.weights import Checkpoint
from tests.engine.conftest import make_runner
from tests.engine.driver import Driver
from tests.engine.tiny_models import give_offsets, make_tiny_model
from tests.kernels.test_kernels import (
    GROUP,
    HEADS,
    WIDTH,
    Step,
    layout_of,
    make_step,
    offsets_of,
)

pytestmark = pytest.mark.usefixtures("ordered_dots")

VOCAB = 96
Bits = dict[int, NDArray[np.int32]]
"""Logits of one request by position."""


class EveryRow:
    """A backend that keeps the logits of all rows it has computed, by table row and position."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.found: dict[int, Bits] = {}

    def forward(self, batch: StepBatch, latest: Tensor | None = None) -> None:
        self._backend.forward(batch, latest=latest)
        rows = np.arange(len(batch.token_ids), dtype=np.int64)
        logits = self._backend.logits(rows).numpy().copy().view(np.int32)
        for row, count, position, table, *_ in batch.runs.tolist():
            bits = self.found.setdefault(table, {})
            for i in range(count):
                assert np.array_equal(
                    bits.setdefault(position + i, logits[row + i]), logits[row + i]
                )

    @property
    def num_replayed(self) -> int:
        assert isinstance(self._backend, GraphedModel)
        return self._backend.graphs.num_replayed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two heads to a KV head: a tile of 16 rows holds eight tokens, a block takes two tiles."""
    sizes: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 32}
    sizes |= {"intermediate_size": 48, "vocab_size": VOCAB}
    path = make_tiny_model(
        tmp_path_factory.mktemp("invariant"), "qwen3", num_hidden_layers=2, **sizes
    ).path
    give_offsets(path)
    return path


def make_driver(path: Path, *, graph_rows: int = 0) -> tuple[Driver, EveryRow]:
    runner = make_runner(path, num_blocks=64, num_exact=16)
    offsets, _ = open_offsets(path, runner.config, runner.layout)
    model = TritonModel(
        runner.config, Checkpoint.open(path), runner.pool, offsets, torch.float32,
        is_batch_invariant=True,
    )  # fmt: skip
    backend: Backend = model
    if graph_rows:
        backend = GraphedModel(model, lambda step: step, max_rows=graph_rows, max_blocks=16)
        backend.capture()
    assert backend.is_batch_invariant
    every = EveryRow(backend)
    runner.backend = every  # type: ignore[assignment]
    return Driver(runner), every


def prompt_of(seed: int, num_tokens: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, VOCAB, num_tokens)]


def assert_same(found: Bits, wanted: Bits, what: str) -> None:
    assert found.keys() <= wanted.keys()
    for position, bits in found.items():
        assert np.array_equal(bits, wanted[position]), f"{what}, position {position}"


# rows of padding hold what was in memory before
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize(
    ("num_first", "chunks"), [(30, [512]), pytest.param(3, [16, 512], marks=pytest.mark.slow)]
)
def test_a_token_has_the_same_bits_however_it_is_computed(
    path: Path, num_first: int, chunks: list[int]
) -> None:
    """34 tokens: the first in chunks of 16, the others decoded, which seals a block and opens one;
    all as chunks; beside others in chunks and in padded graphs.
    """
    driver, every = make_driver(path)
    driver.add("a", prompt_of(0, num_first), max_tokens=35 - num_first)
    driver.run(chunk_tokens=16)
    wanted, pages = every.found[0], driver.pages("a")
    tokens = prompt_of(0, num_first) + driver.tokens["a"]
    assert sorted(wanted) == list(range(34))

    for chunk in chunks:
        driver, every = make_driver(path)
        driver.add("a", tokens[:-1], max_tokens=1)
        driver.run(chunk_tokens=chunk)
        assert_same(every.found[0], wanted, f"chunks of {chunk}")
        assert len(every.found[0]) == 34
        assert driver.tokens["a"] == tokens[-1:]
        assert driver.pages("a") == pages, f"chunks of {chunk}"

    driver, every = make_driver(path, graph_rows=4)
    driver.add("others", prompt_of(1, 7), max_tokens=4)
    driver.step()
    driver.add("a", tokens[:31], max_tokens=3)
    driver.add("late", prompt_of(2, 1), max_tokens=2)
    driver.run(chunk_tokens=512)
    assert_same(every.found[1], wanted, "beside others")
    assert len(every.found[1]) == 33
    assert driver.tokens["a"] == tokens[31:34]
    assert every.num_replayed > 0


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [16, 128, 512])
def test_long_contexts_wrap_around_their_parts(path: Path, chunk: int) -> None:
    """140 tokens are more stretches than there are parts; the last tokens once more as decodes."""
    prompt = prompt_of(3, 140)
    driver, every = make_driver(path)
    driver.add("a", prompt, max_tokens=3)
    driver.run()
    tokens = prompt + driver.tokens["a"]
    again, chunks = make_driver(path)
    again.add("a", tokens[:-1], max_tokens=1)
    again.run(chunk_tokens=chunk)
    assert_same(every.found[0], chunks.found[0], "decodes behind a long prompt")
    assert again.tokens["a"] == tokens[-1:]


def attended(step: Step, runs: Tensor) -> Tensor:
    """By the kernel for all rows; runs of one token in a launch of their own, as in a step."""
    pages = step.pool.packed, step.pool.exact, step.layout, step.offsets, 1
    partials = Partials.allocate(len(step.q), HEADS * GROUP, WIDTH, step.q.device)
    partials.sums.fill_(torch.nan)
    partials.stats.fill_(torch.nan)
    out = torch.full_like(step.q, torch.nan)
    is_one = runs[:, 1] == 1
    for which, longest in ((~is_one, int(runs[:, 1].max())), (is_one, 1)):
        decode_attention(
            step.q, step.k, step.v, runs[which], step.tables, *pages, partials, out,
            max_run_tokens=longest, is_invariant=True,
        )  # fmt: skip
    return out


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["fp8_e3m4", "int4", "fp32"])
@pytest.mark.parametrize("block_size", [16, 32])
def test_one_kernel_attends_for_all_runs(codec: str, block_size: int) -> None:
    step = make_step(codec, block_size)
    pages = step.pool.packed, step.pool.exact, step.layout, step.offsets, 1
    reference.store(step.k, step.v, step.items, *pages)
    wanted = reference.attention(step.q, step.k, step.v, step.runs, step.tables, *pages)
    torch.testing.assert_close(attended(step, step.runs), wanted, atol=2e-5, rtol=1e-4)


def test_a_row_far_behind_attends_alike_in_a_chunk_and_alone() -> None:
    """From position 144, behind more stretches than there are parts; the chunk ends in a block."""
    step = make_step("fp8_e3m4", 16)
    count, start = 20, 144
    step.tables = torch.arange(22, dtype=torch.int32).view(2, 11)
    rows = slice(0, count)
    step.q, step.k, step.v = step.q[rows], step.k[rows], step.v[rows]
    chunk = torch.tensor([[0, count, start, 0, -1, 0]])
    some = [0, 4, 5, 15, 16, 19]
    alone = torch.tensor([[i, 1, start + i, 0, -1, count - 1 - i] for i in some])
    found = attended(step, chunk)
    assert torch.equal(found[some], attended(step, alone)[some])
    pages = step.pool.packed, step.pool.exact, step.layout, step.offsets, 1
    wanted = reference.attention(step.q, step.k, step.v, chunk, step.tables, *pages)
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-4)


def test_a_decode_that_opens_a_page_leaves_nothing_of_what_it_held() -> None:
    layout = layout_of("fp32")
    pool = PageArena(layout, 1, 2)
    pool.exact.fill_(0x41)
    heads, ones = torch.ones(1, 5 * HEADS, WIDTH), torch.ones(17, WIDTH // 2)
    items = torch.tensor([[0, 1, 16, 1, -1, 1]])
    rotate_and_store(
        heads, None, 1e-5, ones, torch.zeros_like(ones), items, pool.packed, pool.exact, layout,
        offsets_of(layout), 0,
    )  # fmt: skip
    stored = reference.exact_slices(pool.exact, layout)[1, 0]
    assert stored[:, :, 0].eq(1).all()
    assert stored[:, :, 1:].eq(0).all()


class Unsteady:
    """A backend whose logits differ a little from step to step."""

    def __init__(self, backend: Backend, *, is_batch_invariant: bool) -> None:
        self._backend, self.is_batch_invariant, self._times = backend, is_batch_invariant, 0

    def logits(self, wanted: NDArray[np.int64]) -> Tensor:
        self._times += 1
        return self._backend.logits(wanted) + 1e-4 * (self._times % 7)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


def test_the_self_test_demands_bits_of_who_promises_them(path: Path) -> None:
    runner = make_runner(path)
    backend = runner.backend
    assert backend.is_batch_invariant
    runner.backend = Unsteady(backend, is_batch_invariant=False)
    runner.self_test()
    runner.backend = Unsteady(backend, is_batch_invariant=True)
    with pytest.raises(InternalError, match="other bits"):
        runner.self_test()


def test_a_cpu_keeps_the_promise_anyway(path: Path) -> None:
    plain, invariant = make_runner(path), make_runner(path, batch_invariant=True)
    assert plain.layout_fingerprint == invariant.layout_fingerprint
    assert invariant.pages.origin.arithmetic == ""


def test_gpus_of_other_kinds_or_types_do_not_promise_the_same_bits(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ModelConfig.load(path)
    found = []
    for capability in ((8, 6), (9, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda it=capability: it)
        found += [gpu_arithmetic(dtype, config) for dtype in ("auto", "bfloat16", "float16")]
    assert found[3:] == ["sm_90 in bfloat16", "sm_90 in bfloat16", "sm_90 in float16"]
    assert len(set(found)) == 4
