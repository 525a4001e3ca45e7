"""Graphs without CUDA: what is captured is a function that runs the step on its static buffers.

Padding must change nothing: neither the logits of the real rows nor a byte of any page.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from common.scheduling.plan import OutputStart, StepPlan
from common.types import SamplingParams
from engine import linear
from engine.batch import make_batch
from engine.cuda_graphs import (
    GraphPool,
    StaticBuffers,
    is_decode_step,
    nothing_of,
    padded,
    row_buckets,
)
from engine.device_inputs import DeviceStep, InputBuffer, columns_of
from engine.graphed_model import GraphedModel
from engine.offsets import open_offsets
from engine.runner import ModelRunner
from engine.triton_model import TritonModel
from engine.weights import Checkpoint
from tests.engine.conftest import make_runner
from tests.engine.driver import Driver
from tests.engine.tiny_models import give_offsets, make_tiny_model

MAX_ROWS = 12


def test_buckets_are_few_and_the_last_one_holds_all() -> None:
    assert row_buckets(1) == [1]
    assert row_buckets(2) == [1, 2]
    assert row_buckets(4) == [1, 2, 4]
    assert row_buckets(3) == [1, 2, 8]
    assert row_buckets(8) == [1, 2, 4, 8]
    assert row_buckets(20) == [1, 2, 4, 8, 16, 24]
    assert len(row_buckets(256)) == 35
    for size in range(1, 300):
        assert row_buckets(size)[-1] >= size


class RowwiseLinear:
    """A product whose rows are computed one by one: torch's own on a CPU take other paths, and
    round otherwise, for other numbers of rows.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        out = x.new_empty((len(x), len(self.weight)))
        for index, row in enumerate(x):
            out[index] = torch.mv(self.weight, row)
        return out if self.bias is None else out + self.bias


def make_model(path: Path, **changes: Any) -> Path:
    sizes: dict[str, Any] = {
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "hidden_size": 32,
    } | changes
    make_tiny_model(path, "qwen2", **sizes)
    give_offsets(path)
    return path


def triton_runner(path: Path, *, has_graphs: bool) -> ModelRunner:
    """Graphs are captured and replayed by running the step on its static buffers."""
    runner = make_runner(path, num_blocks=64, num_exact=32)
    offsets, _ = open_offsets(path, runner.config, runner.layout)
    checkpoint = Checkpoint.open(path)
    model = TritonModel(runner.config, checkpoint, runner.pool, offsets, torch.float32)
    runner.backend = model
    if has_graphs:
        graphed = GraphedModel(model, lambda step: step, max_rows=MAX_ROWS, max_blocks=16)
        graphed.capture()
        runner.backend = graphed
    return runner


def contexts(count: int) -> list[int]:
    """Lengths such that decodes stay in block 0, open a block, seal one, and lie in the middle."""
    return [3, 16, 31, 40, 15, 47, 33, 20, 5][:count]


def start(runner: ModelRunner, count: int) -> StepPlan:
    """Outputs with pages of random bytes that mean finite numbers, and the plan of their decode."""
    generator = torch.Generator().manual_seed(count)
    for arena, most in ((runner.pool.packed, 0x70), (runner.pool.exact, 0x40)):
        arena.copy_(torch.randint(0, most, arena.shape, generator=generator, dtype=torch.uint8))
    keys = tuple(f"r{i}/0" for i in range(count))
    packed = iter(range(64))
    starts = []
    for i, (key, context) in enumerate(zip(keys, contexts(count), strict=True)):
        tokens = np.arange(context + 1, dtype=np.int32) * 7 % runner.config.vocab_size
        blocks = (2 * i, *(next(packed) for _ in range(context // 16)))
        starts.append(
            OutputStart(
                key=key,
                token_ids=tokens,
                num_prompt_tokens=context,
                sampling=SamplingParams(max_tokens=8, temperature=0.0),
                block_ids=blocks,
                tail=2 * i + 1,
            )
        )
    runner.begin(StepPlan(step=0, starts=tuple(starts)))
    return StepPlan(step=1, decodes=keys)


@pytest.fixture(scope="module", autouse=True)
def _rowwise() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "PlainLinear", RowwiseLinear)
        patch.setattr("torch.nn.functional.linear", lambda x, w, b=None: RowwiseLinear(w, b)(x))
        yield


Pair = tuple[ModelRunner, ModelRunner]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Eager, and with graphs."""
    path = make_model(tmp_path_factory.mktemp("graphs"), num_hidden_layers=1)
    return triton_runner(path, has_graphs=False), triton_runner(path, has_graphs=True)


def outcome(runner: ModelRunner, count: int) -> list[Tensor]:
    """Logits and all pages after a step of `count` decodes."""
    plan = start(runner, count)
    batch = make_batch(plan, runner.outputs, 16)
    runner.backend.forward(batch)
    logits = runner.backend.logits(batch.wanted).clone()
    runner.begin(StepPlan(step=2, drops=plan.decodes))
    return [logits, runner.pool.packed.clone(), runner.pool.exact.clone()]


# rows of padding hold what was in memory before
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize(
    "count", [1, 2, 3, 9, *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 5, 6, 7, 8))]
)
def test_a_padded_replay_is_the_eager_step_to_the_bit(small: Pair, count: int) -> None:
    eager, graphed = small
    assert isinstance(graphed.backend, GraphedModel)
    before = graphed.backend.graphs.num_replayed
    wanted, found = outcome(eager, count), outcome(graphed, count)
    assert graphed.backend.graphs.num_replayed == before + 1
    assert torch.isfinite(wanted[0]).all()
    for one, other in zip(wanted, found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
def test_padding_writes_no_page_and_changes_no_logits_whatever_memory_holds(small: Pair) -> None:
    _, graphed = small
    backend = graphed.backend
    assert isinstance(backend, GraphedModel)
    found = []
    for filling in (0.0, torch.nan):
        backend.graphs.buffers.logits.fill_(filling)
        backend.graphs.buffers.tables.fill_(63 if filling else 0)
        found.append(outcome(graphed, 5))
        assert torch.isfinite(found[-1][0]).all()
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
def test_requests_give_the_same_tokens_with_graphs(tmp_path: Path) -> None:
    """Chunks and mixed steps run eagerly in between; decodes go on in graphs, and back."""
    path = make_model(tmp_path, num_hidden_layers=1)
    tokens = []
    for has_graphs in (False, True):
        runner = triton_runner(path, has_graphs=has_graphs)
        backend = runner.backend
        driver = Driver(runner)
        driver.add("a", [int(t) for t in np.arange(20) * 31 % 331], max_tokens=3)
        driver.run(chunk_tokens=16)
        driver.add("b", list(range(13)), max_tokens=2)
        driver.run(chunk_tokens=16)
        tokens.append((driver.tokens, [np.stack(rows) for rows in driver.logits.values()]))
        if isinstance(backend, GraphedModel):
            assert backend.graphs.num_replayed == 2 + 1
    assert tokens[0][0] == tokens[1][0]
    for one, other in zip(tokens[0][1], tokens[1][1], strict=True):
        np.testing.assert_array_equal(one, other)


def test_steps_with_chunks_or_too_many_rows_are_not_for_graphs(small: Pair) -> None:
    runner, _ = small
    plan = start(runner, 3)
    batch = make_batch(plan, runner.outputs, 16)
    columns = columns_of(batch, 16)
    assert is_decode_step(columns)
    assert not is_decode_step(replace(columns, chunk_runs=columns.decode_runs))
    done: list[int] = []
    buffers = StaticBuffers(torch.device("cpu"), max_rows=2, max_blocks=4, vocab_size=7)

    def run(step: DeviceStep, logits: Tensor) -> None:
        done.append(len(step.token_ids))

    graphs = GraphPool(buffers, run, lambda step: step, [1, 2])
    graphs.capture()
    assert graphs.replay(columns) is None
    assert graphs.replay(nothing_of(1)) is not None
    assert done == [1]
    runner.begin(StepPlan(step=2, drops=plan.decodes))


def test_padding_names_no_page_and_sees_no_token() -> None:
    columns = padded(nothing_of(3), 8)
    assert (columns.items[:, 3:5] == -1).all()
    assert (columns.decode_runs[:, 1] == 0).all()
    assert columns.items[:, 0].tolist() == columns.decode_runs[:, 0].tolist() == list(range(8))
    assert columns.decode_runs[:, 3].tolist() == list(range(8))


def test_inputs_of_equal_shapes_lie_in_the_same_place() -> None:
    """Whatever the width of their tables, which come last; and they arrive as they were sent."""
    buffer = InputBuffer(torch.device("cpu"), 4096)
    seen = []
    for width in (1, 5, 9):
        columns = replace(nothing_of(4), tables=np.arange(4 * width, dtype=np.int32).reshape(4, -1))
        step = buffer.send(columns)
        seen.append([step.items.data_ptr(), step.decode_runs.data_ptr(), step.tables.data_ptr()])
        for name in DeviceStep.__dataclass_fields__:
            sent, arrived = getattr(columns, name), getattr(step, name)
            assert sent.shape == tuple(arrived.shape)
            assert np.array_equal(sent, arrived.numpy())
    assert seen[0] == seen[1] == seen[2]
    grown = buffer.send_arrays([np.arange(3000, dtype=np.int64), np.zeros((0, 6), np.int64)])
    assert grown[0].tolist() == list(range(3000))
    assert grown[1].shape == (0, 6)


def test_a_step_carries_the_tables_of_its_own_requests_only(small: Pair) -> None:
    runner, _ = small
    plan = start(runner, 4)
    batch = make_batch(plan, runner.outputs, 16)
    columns = columns_of(batch, 16)
    assert columns.tables.shape == (4, 1 + max(contexts(4)) // 16)
    for run, row in zip(batch.runs, columns.decode_runs, strict=True):
        blocks = run[2] // 16 + 1
        assert (batch.tables[run[3], :blocks] == columns.tables[row[3], :blocks]).all()
    runner.begin(StepPlan(step=2, drops=plan.decodes))
