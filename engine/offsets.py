"""A model's measured means of K and V: read from and written to the file beside its weights.

`load_means` gives zeros where there is no file. The hash of the means is part of the layout
fingerprint, since pages sealed with other offsets mean other numbers.
"""

import hashlib
import os
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from common.errors import ConfigError, UnsupportedModel
from common.model_config import ModelConfig
from common.pages import NO_FINGERPRINT, OFFSETS_FILE, PageLayout
from engine.kernels.offsets import Offsets
from engine.padding import pad_heads
from engine.rope import rope_tables

TENSOR = "means"


def open_offsets(
    model_dir: str | Path, config: ModelConfig, layout: PageLayout, *, is_calibrated: bool = True
) -> tuple[Offsets, bytes]:
    """What the kernels subtract and add, and its hash; nothing for a codec that loses nothing."""
    means = torch.zeros(means_shape(config), dtype=torch.bfloat16)
    if is_calibrated and layout.codec.is_quantised:
        means = load_means(model_dir, config)
    cos, sin = (torch.from_numpy(table) for table in rope_tables(config, layout.head_dim))
    stored = pad_heads(means, -1, config.head_dim, layout.head_dim)
    return Offsets.of(stored, cos, sin, layout.block_size), means_hash(means)


def means_shape(config: ModelConfig) -> tuple[int, int, int, int]:
    return (config.num_layers, 2, config.num_kv_heads, config.head_dim)


def load_means(model_dir: str | Path, config: ModelConfig) -> Tensor:
    """[num_layers, 2, num_kv_heads, head_dim] bfloat16."""
    path, shape = Path(model_dir) / OFFSETS_FILE, means_shape(config)
    if not path.exists():
        return torch.zeros(shape, dtype=torch.bfloat16)
    try:
        with safe_open(path, framework="pt") as file:
            means: Tensor = file.get_tensor(TENSOR)
    except (SafetensorError, OSError) as error:
        raise UnsupportedModel(f"{path} cannot be read: {error}; {REPAIR}") from error
    if means.shape != shape or means.dtype != torch.bfloat16 or not means.isfinite().all():
        raise UnsupportedModel(f"{path} does not belong to this model; {REPAIR}")
    return means


REPAIR = "make it again with tandem calibrate, or remove it"


def means_hash(means: Tensor) -> bytes:
    """16 bytes; zeros for means that are all zero, as without a file."""
    if not means.any():
        return NO_FINGERPRINT
    data = means.contiguous().view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(data, digest_size=16).digest()


def save_means(model_dir: str | Path, means: Tensor, about: dict[str, str]) -> Path:
    """Written beside and renamed, so that a worker that starts now reads the old or the new."""
    path = Path(model_dir) / OFFSETS_FILE
    scratch = path.with_suffix(f".{os.getpid()}.partial")
    try:
        save_file({TENSOR: means.contiguous()}, scratch, metadata=about)
        scratch.chmod(0o644)  # containers read it under another user id; safetensors writes 0600
        scratch.replace(path)
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"cannot write {path}: {error}") from error
    finally:
        scratch.unlink(missing_ok=True)
    return path
