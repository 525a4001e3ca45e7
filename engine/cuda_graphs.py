"""Decode steps as CUDA graphs: one for each bucket of batch sizes, captured at start.

    pool = GraphPool(buffers, run, CudaCapture(), row_buckets(256))
    pool.capture()                      # once; `run` works on the static buffers only
    logits = pool.replay(columns)       # fills the buffers, pads, replays; None: run it eagerly

Launching some ten kernels a layer from Python takes longer than a small batch takes to compute. A
graph is launched once, but its addresses and grids are frozen: steps are copied into buffers that
stay where they are (`StaticBuffers`) and padded to the bucket's size with rows that write nowhere
and see nothing. How long each row is, kernels read on the device. All graphs share one memory pool,
since only one of them runs at a time.

Nothing here but `CudaCapture` knows CUDA: with a capture function that gives back what it was
given, the same steps run eagerly on the same buffers, on any device.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.batch import ITEM_FIELDS, RUN_FIELDS
from engine.device_inputs import ALIGN, DeviceStep, InputBuffer, StepColumns

Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Given a function that does a step on static buffers, what does it again."""


def row_buckets(max_rows: int) -> list[int]:
    """1, 2, 4, 8, then multiples of 8, the last one no smaller than `max_rows`."""
    small = [rows for rows in (1, 2, 4) if rows < max_rows]
    return small + ([max_rows] if max_rows in (1, 2, 4) else list(range(8, max_rows + 8, 8)))


def is_decode_step(columns: StepColumns) -> bool:
    """One row, one item, one run for each request: what graphs are captured for."""
    rows = columns.num_rows
    return len(columns.chunk_runs) == 0 and len(columns.decode_runs) == len(columns.items) == rows


def padded(columns: StepColumns, num_rows: int) -> StepColumns:
    """A decode step of `num_rows` rows. The added ones store nothing (both pages -1) and attend to
    nothing (runs of no tokens).
    """
    more = num_rows - columns.num_rows
    assert more >= 0
    rows = np.arange(columns.num_rows, num_rows, dtype=np.int64)
    items = np.zeros((more, ITEM_FIELDS), dtype=np.int64)
    items[:, 0], items[:, 1], items[:, 3:5] = rows, 1, -1
    runs = np.zeros((more, RUN_FIELDS), dtype=np.int64)
    runs[:, 0], runs[:, 3], runs[:, 4] = rows, rows, -1
    nothing = np.zeros(more, dtype=np.int32)
    width = columns.tables.shape[1]
    return replace(
        columns,
        token_ids=np.concatenate([columns.token_ids, nothing]),
        positions=np.concatenate([columns.positions, nothing]),
        items=np.concatenate([columns.items, items]),
        decode_runs=np.concatenate([columns.decode_runs, runs]),
        wanted=np.arange(num_rows, dtype=np.int64),
        tables=np.concatenate([columns.tables, np.zeros((more, width), dtype=np.int32)]),
    )


def nothing_of(num_rows: int) -> StepColumns:
    """A decode step of padding alone."""
    none = np.zeros(0, dtype=np.int32)
    empty = StepColumns(
        token_ids=none,
        positions=none,
        items=np.zeros((0, ITEM_FIELDS), dtype=np.int64),
        chunk_runs=np.zeros((0, RUN_FIELDS), dtype=np.int64),
        decode_runs=np.zeros((0, RUN_FIELDS), dtype=np.int64),
        wanted=none.astype(np.int64),
        tables=np.zeros((0, 1), dtype=np.int32),
        unread_rows=none.astype(np.int64),
        unread_places=none.astype(np.int64),
    )
    return padded(empty, num_rows)


class StaticBuffers:
    """Where decode steps lie for as long as their graphs live."""

    def __init__(
        self, device: torch.device, *, max_rows: int, max_blocks: int, vocab_size: int
    ) -> None:
        bytes_of_row = 2 * 4 + 8 * (ITEM_FIELDS + RUN_FIELDS + 3) + 4 * max_blocks
        num_columns = len(DeviceStep.__dataclass_fields__)
        self._inputs = InputBuffer(device, max_rows * bytes_of_row + num_columns * ALIGN)
        self.tables = torch.zeros((max_rows, max_blocks), dtype=torch.int32, device=device)
        self.logits = torch.zeros((max_rows, vocab_size), dtype=torch.float32, device=device)

    def fill(self, columns: StepColumns) -> DeviceStep:
        """The step where the graph of as many rows finds it. Columns of tables beyond the step's
        own keep what they held: nobody reads them.
        """
        step = self._inputs.send(columns)
        rows, width = columns.tables.shape
        self.tables[:rows, :width].copy_(step.tables)
        return replace(step, tables=self.tables[:rows])


@dataclass(frozen=True, slots=True)
class _Graph:
    step: DeviceStep
    replay: Callable[[], None]


@dataclass(slots=True)
class GraphPool:
    buffers: StaticBuffers
    run: Callable[[DeviceStep, Tensor], None]
    """A decode step's logits [num_rows, vocab_size] into the tensor given."""
    capture_with: Capture
    buckets: list[int]
    """Rows of the graphs, fewest first, as from `row_buckets`."""
    num_replayed: int = 0
    _graphs: dict[int, _Graph] = field(default_factory=dict)

    def capture(self) -> None:
        """Largest first: the shared memory pool then holds all the others need."""
        for num_rows in reversed(self.buckets):
            step = self.buffers.fill(nothing_of(num_rows))
            self._graphs[num_rows] = _Graph(step, self._captured(step, num_rows))

    def replay(self, columns: StepColumns, latest: Tensor | None = None) -> Tensor | None:
        """Logits [num_rows, vocab_size] of a decode step, valid until the next call; None for a
        step that no graph was captured for. `latest` are the tokens of the step before, which this
        one may be fed with.
        """
        if not is_decode_step(columns):
            return None
        num_rows = next((rows for rows in self.buckets if rows >= columns.num_rows), None)
        if num_rows is None:
            return None
        graph = self._graphs[num_rows]
        step = self.buffers.fill(padded(columns, num_rows))
        assert _addresses(step) == _addresses(graph.step), "a graph's inputs have moved"
        step.feed(latest)
        graph.replay()
        self.num_replayed += 1
        return self.buffers.logits[: columns.num_rows]

    def _captured(self, step: DeviceStep, num_rows: int) -> Callable[[], None]:
        logits = self.buffers.logits[:num_rows]
        return self.capture_with(lambda: self.run(step, logits))


def _addresses(step: DeviceStep) -> list[int]:
    """Of what a decode step reads. (`wanted` is every row.)"""
    read = (step.token_ids, step.positions, step.items, step.decode_runs, step.tables)
    return [tensor.data_ptr() for tensor in read]


class CudaCapture:
    """Records on a stream of its own, into one memory pool for all graphs.

    A step is run before it is recorded, so that kernels are compiled and libraries have their
    workspaces. Other threads may use CUDA meanwhile.
    """

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._memory: Any = torch.cuda.graph_pool_handle()

    def __call__(self, step: Callable[[], None]) -> Callable[[], None]:
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            step()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            graph, pool=self._memory, stream=self._stream, capture_error_mode="thread_local"
        ):
            step()
        replay: Callable[[], None] = graph.replay
        return replay
