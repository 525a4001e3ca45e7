"""How large the pieces are that kernels work on, and with how many warps: `tiles.json`, by kind of
device and head size.

Written down rather than searched for while serving: a search costs a first request its time to
first token, and two workers that found different tiles would round differently. A kind of device
that is not in the table takes the entry of the one before it.
"""

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import torch

HEAD_SIZES = (64, 128)
"""Of the entries; larger heads take the last one."""
WIDE_OUTPUTS = 8192
NVIDIA_KINDS = {8: "sm_80", 9: "sm_90", 10: "sm_100"}
AMD_KIND = "gfx942"
INTERPRETER = "interpreter"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkTile:
    """Of `engine.kernels.gpu.attention`."""

    rows: int
    """Most (token, head of the group) pairs of one program."""
    step_tokens: int
    """Tokens of context that a program reads at once."""
    num_warps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTile:
    """Of `engine.kernels.gpu.decode`. `parts` and `stretch_tokens` say which tokens are summed
    together, so they are part of the result's last bits.
    """

    parts: int
    """Programs that share one (request, KV head)."""
    stretch_tokens: int
    """Consecutive tokens that one part reads before the next part takes over."""
    step_tokens: int
    num_warps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class InvariantTile:
    """Of `engine.kernels.gpu.decode` where chunks take it too; splits are as for decodes."""

    rows: int
    """Most (token, head of the group) pairs of one program."""
    step_tokens: int
    num_warps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreTile:
    """Of `engine.kernels.gpu.store`."""

    num_warps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    store: StoreTile
    chunk: ChunkTile
    decode: DecodeTile
    invariant: InvariantTile


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleTile:
    """Of `engine.kernels.gpu.sampling`."""

    tokens: int
    """Of the vocabulary, looked at together."""
    num_warps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulTile:
    """Of `engine.kernels.gpu.matmul`."""

    rows: int
    columns: int
    """Outputs of one program."""
    depth_bytes: int
    """Inputs multiplied at once, as bytes of a row; FP8 counts as the fp16 that it becomes."""
    num_warps: int
    num_stages: int
    """Of loads that are on their way at the same time."""


@cache
def matmul_tile_of(kind: str, num_outputs: int) -> MatmulTile:
    """By the weight's size alone: one tile for every number of rows, so that they are rounded
    alike. Narrow ones keep more processors busy where there are few outputs.
    """
    width = "wide" if num_outputs >= WIDE_OUTPUTS else "narrow"
    return MatmulTile(**_table()[kind]["matmul"][width])


@cache
def sample_tile_of(kind: str) -> SampleTile:
    return SampleTile(**_table()[kind]["sample"])


@cache
def tiles_of(kind: str, head_dim: int) -> Tiles:
    size = next((size for size in HEAD_SIZES if head_dim <= size), HEAD_SIZES[-1])
    entry = _table()[kind][str(size)]
    return Tiles(
        store=StoreTile(**entry["store"]),
        chunk=ChunkTile(**entry["chunk"]),
        decode=DecodeTile(**entry["decode"]),
        invariant=InvariantTile(**entry["invariant"]),
    )


@cache
def _table() -> dict[str, Any]:
    text = files(__package__).joinpath("tiles.json").read_text(encoding="utf-8")
    return json.loads(text)  # type: ignore[no-any-return]


@cache
def device_kind(device: torch.device) -> str:
    if device.type != "cuda":
        return INTERPRETER
    if torch.version.hip is not None:
        return AMD_KIND
    major = torch.cuda.get_device_capability(device)[0]
    return NVIDIA_KINDS[min(max(major, min(NVIDIA_KINDS)), max(NVIDIA_KINDS))]
