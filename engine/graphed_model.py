"""A GPU's model whose decode steps are captured as graphs; all other steps run eagerly.

The runner sees the same `Backend` as without graphs.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.batch import StepBatch
from engine.cuda_graphs import Capture, GraphPool, StaticBuffers, row_buckets
from engine.device_inputs import DeviceStep, columns_of
from engine.transfers import sent
from engine.triton_model import TritonModel


class GraphedModel:
    """`capture` first: a graph's addresses are those of the model's pool at that time."""

    def __init__(
        self, model: TritonModel, capture_with: Capture, *, max_rows: int, max_blocks: int
    ) -> None:
        """Steps of up to `max_rows` decodes, whose tables have up to `max_blocks` blocks."""
        self._model = model
        self.is_batch_invariant = model.is_batch_invariant
        self._block_size = model.block_size
        buckets = row_buckets(max_rows)
        buffers = StaticBuffers(
            model.device,
            max_rows=buckets[-1],
            max_blocks=max_blocks,
            vocab_size=model.vocab_size,
        )
        self.graphs = GraphPool(buffers, self._run, capture_with, buckets)
        self._logits: Tensor | None = None

    @torch.inference_mode()
    def capture(self) -> None:
        self.graphs.capture()

    @torch.inference_mode()
    def forward(
        self, batch: StepBatch, num_layers: int | None = None, latest: Tensor | None = None
    ) -> None:
        self._logits = None
        if num_layers is None and len(batch.runs) == len(batch.items) == len(batch.token_ids):
            self._logits = self.graphs.replay(columns_of(batch, self._block_size), latest)
        if self._logits is None:
            self._model.forward(batch, num_layers, latest)

    @torch.inference_mode()
    def logits(self, wanted: NDArray[np.int64]) -> Tensor:
        if self._logits is None:
            return self._model.logits(wanted)
        if np.array_equal(wanted, np.arange(len(self._logits))):
            return self._logits
        return self._logits[sent(wanted, self._logits.device)]

    def checksums(self, pages: Tensor, which: Tensor) -> Tensor:
        return self._model.checksums(pages, which)

    @property
    def converter(self) -> None:
        return None

    def land(
        self,
        source: Tensor,
        target: Tensor,
        slots: NDArray[np.int64],
        block_ids: NDArray[np.int64],
        tags: NDArray[np.uint8],
    ) -> tuple[NDArray[np.bool_], NDArray[np.uint64]]:
        return self._model.land(source, target, slots, block_ids, tags)

    def _run(self, step: DeviceStep, logits: Tensor) -> None:
        logits.copy_(self._model.step_logits(step))
