"""Weights from a Hugging Face directory: `model.safetensors`, or shards named by
`model.safetensors.index.json`.

`Checkpoint` lists and reads tensors, in the dtype they are stored in; what the model does with them
is its own affair. `model_fingerprint` tells two checkpoints apart without reading them whole.
"""

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.errors import UnsupportedModel
from common.model_config import ModelConfig, read_json
from engine.tensor_file import TensorEntry, tensors_of

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SAMPLE_BYTES = 64
SAMPLES_PER_TENSOR = 8
SHOWN_NAMES = 5

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class Checkpoint:
    """The tensors of a model directory. Opening reads headers only; `read` copies one tensor."""

    def __init__(self, entries: dict[str, TensorEntry]) -> None:
        self._entries = entries
        self._unread = {name for name in entries if not is_harmless(name)}

    @classmethod
    def open(cls, directory: str | Path) -> "Checkpoint":
        """Raises UnsupportedModel, naming file and tensor."""
        return cls(_entries(Path(directory)))

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    @property
    def entries(self) -> list[TensorEntry]:
        return sorted(self._entries.values(), key=lambda entry: entry.name)

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        rows: range | None = None,
        columns: range | None = None,
    ) -> Tensor:
        """The tensor, which must have this shape and be finite, in its stored dtype; with `rows` or
        `columns` only these, which are consecutive.
        """
        entry = self._entries.get(name)
        if entry is None:
            raise UnsupportedModel(f"the checkpoint has no tensor {name}")
        if entry.shape != shape:
            raise UnsupportedModel(
                f"{entry.path}: {name} has shape {list(entry.shape)}, the configuration asks for "
                f"{list(shape)}"
            )
        if entry.dtype not in _DTYPES:
            raise UnsupportedModel(
                f"{entry.path}: {name} is stored as {entry.dtype}; there are {', '.join(_DTYPES)}"
            )
        self._unread.discard(name)
        row_bytes = (entry.end - entry.start) // max(shape[0], 1)
        rows = rows if rows is not None else range(shape[0])
        data = bytearray(len(rows) * row_bytes)
        try:
            with entry.path.open("rb") as file:
                file.seek(entry.start + rows.start * row_bytes)
                num_read = file.readinto(data)
        except OSError as error:
            raise UnsupportedModel(
                f"cannot read {name} of {entry.path}: {error.strerror or error}"
            ) from error
        if num_read != len(data):
            raise UnsupportedModel(f"{entry.path} is shorter than its header says (at {name})")
        tensor = torch.frombuffer(data, dtype=_DTYPES[entry.dtype]).view(len(rows), *shape[1:])
        _check_finite(entry, tensor)
        if columns is not None and len(columns) != shape[1]:
            return tensor[:, columns.start : columns.stop].clone()
        return tensor

    def output_head(self, config: ModelConfig, rows: range | None = None) -> Tensor | None:
        """The output matrix, or None when it is the embedding; with `rows` only these."""
        shape = (config.vocab_size, config.hidden_size)
        if not config.tie_word_embeddings:
            return self.read("lm_head.weight", shape, rows=rows)
        if "lm_head.weight" in self and not torch.equal(
            self.read("lm_head.weight", shape, rows=rows),
            self.read("model.embed_tokens.weight", shape, rows=rows),
        ):
            raise UnsupportedModel(
                "config.json says tie_word_embeddings, but lm_head.weight is another matrix than "
                "model.embed_tokens.weight: set it to false to use the head, or remove the tensor"
            )
        return None

    def has_output_bias(self, config: ModelConfig) -> bool:
        """Some models have biases on q, k and v alone; transformers takes zeros for the others."""
        return config.output_bias and any(
            name.endswith("self_attn.o_proj.bias") for name in self._entries
        )

    def refuse_unread(self) -> None:
        """When a model has read all that it wants: what is left would change it."""
        if self._unread:
            names = sorted(self._unread)
            shown = ", ".join(names[:SHOWN_NAMES])
            more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
            raise UnsupportedModel(
                f"the checkpoint holds tensors that a model with this config.json does not have: "
                f"{shown}{more}"
            )


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


def _entries(directory: Path) -> dict[str, TensorEntry]:
    """Of the only file, or of the shards as the index has them: it decides which file a tensor is
    read from, and a file that says something else is an error.
    """
    single, index = directory / SINGLE, directory / INDEX
    weight_map = _weight_map(index) if index.exists() else {}
    if single.exists():
        if set(weight_map.values()) - {SINGLE}:
            raise UnsupportedModel(
                f"{directory} has {SINGLE} and an {INDEX} that names other files: remove one"
            )
        files = [SINGLE]
    elif weight_map:
        files = sorted(set(weight_map.values()))
    else:
        raise UnsupportedModel(f"{directory} has neither {SINGLE} nor {INDEX}")
    entries: dict[str, TensorEntry] = {}
    for file in files:
        for name, entry in tensors_of(directory / file).items():
            if weight_map and weight_map.get(name) != file and not is_harmless(name):
                raise UnsupportedModel(
                    f"{directory / file} holds {name}, which {INDEX} "
                    + (f"has in {weight_map[name]}" if name in weight_map else "does not name")
                )
            if not weight_map or name in weight_map:
                entries[name] = entry
    for name, file in weight_map.items():
        if name not in entries:
            raise UnsupportedModel(f"{INDEX} has {name} in {file}, which does not hold it")
    return entries


def _weight_map(index: Path) -> dict[str, str]:
    """File by tensor; all files are there."""
    found: Any = read_json(index).get("weight_map")
    is_map = isinstance(found, dict) and all(isinstance(file, str) for file in found.values())
    if not is_map or not found:
        raise UnsupportedModel(f"{index} is not a safetensors index: it has no weight_map")
    for name, file in found.items():
        if Path(file).name != file or not (index.parent / file).is_file():
            raise UnsupportedModel(f"{index} has {name} in {file!r}, which is not there")
    return dict(found)


def is_harmless(name: str) -> bool:
    """Whether a tensor that nobody reads changes nothing: tables that older versions of
    transformers stored, and that follow from config.json.
    """
    return name.endswith(("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached"))


def model_fingerprint(directory: str | Path) -> bytes:
    """16 bytes that differ when the configuration, any tensor's name, shape or dtype, or sampled
    bytes differ.

    Eight places of each tensor are sampled, so any fine-tune that moves a tensor is noticed,
    without reading it all.
    """
    directory = Path(directory)
    digest = hashlib.blake2b(digest_size=16)
    config = read_json(directory / "config.json")
    digest.update(json.dumps(config, sort_keys=True).encode())
    entries = Checkpoint.open(directory).entries
    files = {path: path.open("rb") for path in {entry.path for entry in entries}}
    try:
        for entry in entries:
            digest.update(f"{entry.name} {entry.dtype} {entry.shape};".encode())
            step = max((entry.end - entry.start) // SAMPLES_PER_TENSOR, 1)
            for place in range(entry.start, entry.end, step):
                files[entry.path].seek(place)
                digest.update(files[entry.path].read(min(SAMPLE_BYTES, entry.end - place)))
    finally:
        for file in files.values():
            file.close()
    return digest.digest()
