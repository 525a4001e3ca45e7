"""A model's means of K before rotary and of V, measured on windows of a text (`tandem calibrate`).

Windows of the text go through the engine with fp32 pages; K is turned back from there by the angle
of its position. Block 0 is left out: it is never sealed, and its first token is unlike all others.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from common.errors import ConfigError
from common.scheduling.plan import OutputStart, PrefillChunk, StepPlan
from common.types import SamplingParams
from engine.kernels.reference import packed_slices
from engine.padding import unpad_heads
from engine.rope import rope_tables
from engine.runner import ModelRunner

CHUNK_TOKENS = 512
KEY = "calibrate/0"


def read_tokens(model: str, text: str) -> NDArray[np.int32]:
    try:
        content = Path(text).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"--text {text}: {error.strerror}", param="text") from error
    path = Path(model) / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain exceptions of its own
        raise ConfigError(f"cannot read the tokenizer {path}: {error}", param="model") from None
    return np.array(tokenizer.encode(content, add_special_tokens=False).ids, dtype=np.int32)


def spread(tokens: NDArray[np.int32], window: int, count: int) -> NDArray[np.int32]:
    """Up to `count` windows [.., window] that do not overlap, evenly over the text."""
    whole = tokens[: len(tokens) // window * window].reshape(-1, window)
    if not len(whole):
        raise ConfigError(
            f"the text has {len(tokens)} tokens, fewer than one window of {window}", param="text"
        )
    return whole[np.unique(np.linspace(0, len(whole) - 1, count).astype(np.int64))]


def measure(runner: ModelRunner, windows: NDArray[np.int32]) -> Tensor:
    """[num_layers, 2, num_kv_heads, head_dim] bfloat16."""
    config, block_size = runner.config, runner.layout.block_size
    cos, sin = (torch.from_numpy(table).double() for table in rope_tables(config))
    shape = (config.num_layers, 2, config.num_kv_heads, config.head_dim)
    total = torch.zeros(shape, dtype=torch.float64)
    num_blocks = windows.shape[1] // block_size
    for window in windows:
        for plan in plans_of(window, block_size):
            runner.execute(plan)
        # [blocks, layers, 2, heads, block_size, head_dim] of blocks 1, 2, ...
        sealed = packed_slices(runner.pool.packed[: num_blocks - 1], runner.layout)
        sealed = unpad_heads(sealed, config.head_dim).double()
        positions = torch.arange(block_size, windows.shape[1]).view(-1, 1, 1, block_size)
        a, b = sealed[:, :, 0].chunk(2, dim=-1)
        c, s = cos[positions], sin[positions]
        k = torch.cat([a * c + b * s, b * c - a * s], dim=-1)
        total[:, 0] += k.sum((0, 3))
        total[:, 1] += sealed[:, :, 1].sum((0, 3))
    num_tokens = len(windows) * (num_blocks - 1) * block_size
    means: Tensor = (total / num_tokens).bfloat16()
    return means


def plans_of(
    window: NDArray[np.int32], block_size: int, chunk_tokens: int = CHUNK_TOKENS
) -> Iterator[StepPlan]:
    """Steps that compute a window of whole blocks in exact page 0 and packed pages 0, 1, ..., and
    forget it.
    """
    start = OutputStart(
        key=KEY,
        token_ids=window,
        num_prompt_tokens=len(window),
        sampling=SamplingParams(max_tokens=1, temperature=0.0),
    )
    for first in range(0, len(window), chunk_tokens):
        count = min(chunk_tokens, len(window) - first)
        chunk = PrefillChunk(
            key=KEY,
            start=first,
            num_tokens=count,
            block_ids=(0, *range((first + count) // block_size - 1)),
        )
        yield StepPlan(step=0, starts=() if first else (start,), chunks=(chunk,))
    yield StepPlan(step=0, drops=(KEY,))
