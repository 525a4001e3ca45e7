"""A step's arrays on their way to the device: packed into one pinned buffer, one copy a step.

    columns = columns_of(batch, block_size)    # what kernels read, the step's own block tables only
    step = InputBuffer(device).send(columns)   # the same, as views of one piece of device memory

Where a column lies depends on the shapes alone, so that steps of equal shapes have equal addresses:
captured graphs rely on it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.batch import RUN_FIELDS, StepBatch

ALIGN = 16
FIRST_BYTES = 1 << 16
NUM_HOST_BUFFERS = 2
"""So that a step can be packed while the copy of the one before is still on its way; more where
several things are sent for a step."""

_DTYPES = {np.dtype(np.int32): torch.int32, np.dtype(np.int64): torch.int64}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepColumns:
    """As in `StepBatch`, but runs are split by what they are, and their table rows count within
    `tables` [requests of the step, blocks of the longest], int32.
    """

    token_ids: NDArray[np.int32]
    positions: NDArray[np.int32]
    items: NDArray[np.int64]
    chunk_runs: NDArray[np.int64]
    """[.., RUN_FIELDS], of more than one token"""
    decode_runs: NDArray[np.int64]
    """[.., RUN_FIELDS], of one token"""
    wanted: NDArray[np.int64]
    tables: NDArray[np.int32]
    unread_rows: NDArray[np.int64]
    unread_places: NDArray[np.int64]

    @property
    def num_rows(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceStep:
    """`StepColumns` on the device; valid until the buffer's next `send`."""

    token_ids: Tensor
    positions: Tensor
    items: Tensor
    chunk_runs: Tensor
    decode_runs: Tensor
    wanted: Tensor
    tables: Tensor
    unread_rows: Tensor
    unread_places: Tensor

    def feed(self, latest: Tensor | None) -> None:
        """Puts in the tokens that nobody has read, from those of the latest step."""
        if len(self.unread_rows):
            assert latest is not None, "no step has been sampled"
            tokens = latest[self.unread_places].to(torch.int32)
            self.token_ids.index_copy_(0, self.unread_rows, tokens)


def columns_of(batch: StepBatch, block_size: int) -> StepColumns:
    runs, tables = batch.own_tables(block_size)
    assert runs.shape[1] == RUN_FIELDS
    is_decode = runs[:, 1] == 1
    return StepColumns(
        token_ids=batch.token_ids,
        positions=batch.positions,
        items=batch.items,
        chunk_runs=runs[~is_decode],
        decode_runs=runs[is_decode],
        wanted=batch.wanted,
        tables=tables,
        unread_rows=batch.unread_rows,
        unread_places=batch.unread_places,
    )


class InputBuffer:
    """Memory on the device for one step's columns, and pinned memory that they are packed in."""

    def __init__(
        self,
        device: torch.device,
        num_bytes: int = FIRST_BYTES,
        num_host_buffers: int = NUM_HOST_BUFFERS,
    ) -> None:
        self._device = device
        self._num_host_buffers = num_host_buffers
        self._is_cuda = device.type == "cuda"
        self._turn = 0
        self._allocate(num_bytes)

    def send(self, columns: StepColumns) -> DeviceStep:
        arrays = {name: getattr(columns, name) for name in DeviceStep.__dataclass_fields__}
        return DeviceStep(**dict(zip(arrays, self.send_arrays(list(arrays.values())), strict=True)))

    def send_arrays(self, arrays: Sequence[NDArray[np.generic]]) -> list[Tensor]:
        """int32 and int64 arrays, as tensors of the same shapes; does not wait for the device."""
        places, end = _places(arrays)
        if end > len(self._memory):
            self._allocate(max(end, 2 * len(self._memory)))
        self._turn = (self._turn + 1) % self._num_host_buffers
        host, copied = self._host[self._turn], self._copied[self._turn]
        if copied is not None:
            copied.synchronize()  # an old copy, long done
        packed = host.numpy()
        for array, place in zip(arrays, places, strict=True):
            view = packed[place : place + array.nbytes].view(array.dtype)
            view.reshape(array.shape)[...] = array
        self._memory[:end].copy_(host[:end], non_blocking=True)
        if copied is not None:
            copied.record()
        return [
            self._memory[place : place + array.nbytes].view(_DTYPES[array.dtype]).view(array.shape)
            for array, place in zip(arrays, places, strict=True)
        ]

    def _allocate(self, num_bytes: int) -> None:
        """The old memory goes back to torch's allocator, which keeps it for what runs already."""
        self._memory = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)
        self._host = [
            torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=self._is_cuda)
            for _ in range(self._num_host_buffers)
        ]
        self._copied = [_event(self._is_cuda) for _ in range(self._num_host_buffers)]


def _places(arrays: Sequence[NDArray[np.generic]]) -> tuple[list[int], int]:
    """Offsets in bytes, and the end."""
    places, end = [], 0
    for array in arrays:
        places.append(end)
        end += -(-array.nbytes // ALIGN) * ALIGN
    return places, end


def _event(is_cuda: bool) -> Any:
    return torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]
