"""Small things on their way between host and device, without waiting for the device."""

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def sent(array: NDArray[Any], device: torch.device) -> Tensor:
    """The array on the device, by way of pinned memory."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def fetched(tensor: Tensor) -> Tensor:
    """In host memory (pinned, when it comes from a GPU) once the device gets there."""
    return tensor.to("cpu", non_blocking=True)


def arrival(device: torch.device) -> Any:
    """An event that has come when all that was launched on this stream is done; None where nothing
    needs to be waited for. Whoever waits for it sleeps: a worker has few cores to spare.
    """
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
