"""Weights from a Hugging Face directory: `model.safetensors`, or shards named by
`model.safetensors.index.json`.

`Checkpoint` lists and reads tensors, in the dtype they are stored in; what the model does with them
is its own affair. `model_fingerprint` tells two checkpoints apart without reading them whole.
"""

import hashlib
import json
import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.errors import UnsupportedModel
from common.model_config import ModelConfig

log = logging.getLogger(__name__)

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SAMPLE_BYTES = 64
SAMPLES_PER_TENSOR = 8
MAX_HEADER_BYTES = 100_000_000

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies: bytes [start, end) of a file."""

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class Checkpoint:
    """The tensors of a model directory. Opening reads headers only; `read` copies one tensor."""

    def __init__(self, entries: dict[str, TensorEntry]) -> None:
        self._entries = entries

    @classmethod
    def open(cls, directory: str | Path) -> "Checkpoint":
        entries: dict[str, TensorEntry] = {}
        for path in _files(Path(directory)):
            entries |= _header(path)
        return cls(entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    @property
    def entries(self) -> list[TensorEntry]:
        return sorted(self._entries.values(), key=lambda entry: entry.name)

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor, which must have this shape and be finite, in its stored dtype."""
        entry = self._entries.get(name)
        if entry is None:
            raise UnsupportedModel(f"the checkpoint has no tensor {name}")
        if entry.shape != shape:
            raise UnsupportedModel(
                f"{name} has shape {list(entry.shape)}, the configuration asks for {list(shape)}"
            )
        if entry.dtype not in _DTYPES:
            raise UnsupportedModel(
                f"{name} is stored as {entry.dtype}; there are {', '.join(_DTYPES)}"
            )
        data = bytearray(entry.end - entry.start)
        with entry.path.open("rb") as file:
            file.seek(entry.start)
            if file.readinto(data) != len(data):
                raise UnsupportedModel(f"{entry.path} is shorter than its header says (at {name})")
        tensor = torch.frombuffer(data, dtype=_DTYPES[entry.dtype]).view(shape)
        _check_finite(entry, tensor)
        return tensor

    def output_head(self, config: ModelConfig) -> Tensor | None:
        """The output matrix, or None when it is the embedding."""
        shape = (config.vocab_size, config.hidden_size)
        if not config.tie_word_embeddings:
            return self.read("lm_head.weight", shape)
        if "lm_head.weight" in self and not torch.equal(
            self.read("lm_head.weight", shape), self.read("model.embed_tokens.weight", shape)
        ):
            log.warning(
                "the checkpoint is tied but holds another lm_head.weight; the embedding is used"
            )
        return None


def _check_finite(entry: TensorEntry, tensor: Tensor) -> None:
    """A sum is as fast as memory, and what is not finite in it never goes away again."""
    if math.isfinite(tensor.sum().item()):
        return
    bad = (~torch.isfinite(tensor)).nonzero()  # else the sum of large numbers has overflowed
    if len(bad):
        raise UnsupportedModel(
            f"{entry.path}: {entry.name} has {len(bad)} values that are not finite, the first one "
            f"at {bad[0].tolist()}; the file is damaged: fetch or convert it again"
        )


def _files(directory: Path) -> list[Path]:
    index = directory / INDEX
    if (directory / SINGLE).exists():
        return [directory / SINGLE]
    if not index.exists():
        raise UnsupportedModel(f"{directory} has neither {SINGLE} nor {INDEX}")
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise UnsupportedModel(f"{index} is not a safetensors index: {error}") from error
    for name in names:
        if Path(name).name != name or not (directory / name).exists():
            raise UnsupportedModel(f"{index} names {name}, which is not there")
    return [directory / name for name in names]


def _header(path: Path) -> dict[str, TensorEntry]:
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
                raise ValueError("its header length is impossible")
            header = json.loads(file.read(length))
        entries = {
            name: _entry(name, path, fields, 8 + length)
            for name, fields in header.items()
            if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnsupportedModel(f"{path} is not a safetensors file: {error}") from error
    if any(entry.end > size for entry in entries.values()):
        raise UnsupportedModel(
            f"{path} is shorter than its header says; was the download interrupted?"
        )
    return entries


def _entry(name: str, path: Path, fields: dict[str, Any], data_start: int) -> TensorEntry:
    begin, end = (data_start + int(offset) for offset in fields["data_offsets"])
    shape = tuple(int(n) for n in fields["shape"])
    return TensorEntry(name, path, str(fields["dtype"]), shape, begin, end)


def model_fingerprint(directory: str | Path) -> bytes:
    """16 bytes that differ when the configuration, any tensor's name, shape or dtype, or sampled
    bytes differ.

    Eight places of each tensor are sampled, so any fine-tune that moves a tensor is noticed,
    without reading it all.
    """
    directory = Path(directory)
    digest = hashlib.blake2b(digest_size=16)
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    digest.update(json.dumps(config, sort_keys=True).encode())
    files = {path: path.open("rb") for path in _files(directory)}
    try:
        for entry in Checkpoint.open(directory).entries:
            digest.update(f"{entry.name} {entry.dtype} {entry.shape};".encode())
            step = max((entry.end - entry.start) // SAMPLES_PER_TENSOR, 1)
            for place in range(entry.start, entry.end, step):
                files[entry.path].seek(place)
                digest.update(files[entry.path].read(min(SAMPLE_BYTES, entry.end - place)))
    finally:
        for file in files.values():
            file.close()
    return digest.digest()
