"""Steps and pages for `bench.gpu`: shapes, batches made by hand, pools full of valid numbers."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from common.codecs import codec_named
from common.pages import PageKind, PageLayout
from engine.batch import ITEM_FIELDS, MAX_RUN_TOKENS, RUN_FIELDS, StepBatch
from engine.kernels.offsets import Offsets
from engine.pools import PageArena

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Of a model, and of the jobs that its kernels are given."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    rows: int
    """Of kernels that go row by row."""
    batch: int
    context: int
    chunk: int
    num_pages: int
    dtype: torch.dtype


LLAMA_8B = Shape(
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    hidden_size=4096,
    intermediate_size=14_336,
    vocab_size=128_256,
    rows=8192,
    batch=64,
    context=4096,
    chunk=1024,
    num_pages=4096,
    dtype=torch.bfloat16,
)
CHECKED = replace(LLAMA_8B, rows=7, batch=3, context=300, chunk=150, num_pages=5)
"""The same model, jobs small enough for the plain references."""
SMOKE = Shape(
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    hidden_size=32,
    intermediate_size=48,
    vocab_size=96,
    rows=2,
    batch=2,
    context=40,
    chunk=20,
    num_pages=3,
    dtype=torch.float32,
)


def layout_of(shape: Shape, codec: str, num_layers: int = 1) -> PageLayout:
    return PageLayout(
        num_layers, shape.num_kv_heads, BLOCK_SIZE, shape.head_dim, codec_named(codec)
    )


def blocks_of(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_SIZE)


def filled_pool(layout: PageLayout, num_packed: int, num_exact: int, device: str) -> PageArena:
    """Bytes that mean small finite numbers, in the codecs that are compared here."""
    arena = PageArena(layout, num_packed, num_exact, device)
    arena.exact.view(torch.bfloat16).normal_()
    if layout.codec.is_quantised:
        arena.packed.random_(0, 0x58)
        arena.records(PageKind.PACKED)[:, :, layout.scales_offset :] = 121  # 2 ** -6
    else:
        arena.packed.view(torch.bfloat16).normal_()
    return arena


def offsets_of(layout: PageLayout, num_blocks: int, device: str) -> Offsets:
    """Random means, turned by random angles."""
    means = torch.randn((layout.num_layers, 2, layout.num_kv_heads, layout.head_dim))
    angles = torch.rand((num_blocks, layout.head_dim // 2)) * 6
    return Offsets(means, angles.cos(), angles.sin()).to(torch.device(device))


def tables_of(num_requests: int, num_blocks: int) -> NDArray[np.int32]:
    """Request r: exact page r, then packed pages of its own. Its tail is exact page
    `num_requests` + r.
    """
    tables = np.arange(num_requests * num_blocks, dtype=np.int32).reshape(num_requests, -1)
    tables[:, 0] = np.arange(num_requests)
    return tables


def decode_batch(num_requests: int, context: int, num_blocks: int) -> StepBatch:
    """One token each behind `context` others."""
    return mixed_batch(0, num_requests, context, num_blocks)


def mixed_batch(
    chunk: int, num_decodes: int, context: int, num_blocks: int, start: int = 0
) -> StepBatch:
    """A chunk of request 0 from `start` on, if any, then decodes of the requests behind it."""
    first = 1 if chunk else 0
    rows = np.arange(num_decodes, dtype=np.int64)
    requests = rows + first
    num_requests = num_decodes + first
    tables = tables_of(num_requests, num_blocks)
    own = requests + num_requests if context >= BLOCK_SIZE else requests
    decode_items = np.stack(
        [chunk + rows, np.ones_like(rows), np.full_like(rows, context), own, rows * 0 - 1, rows**0],
        axis=1,
    )
    decode_runs = np.stack(
        [chunk + rows, np.ones_like(rows), np.full_like(rows, context), requests, own, rows * 0],
        axis=1,
    )
    items, runs = _chunk(chunk, start, tables[0], num_requests) if chunk else _no_chunk()
    positions = [start + np.arange(chunk), np.full(num_decodes, context)]
    total = chunk + num_decodes
    return StepBatch(
        token_ids=np.arange(total, dtype=np.int32) % 90,
        positions=np.concatenate(positions).astype(np.int32),
        items=np.concatenate([items, decode_items]),
        runs=np.concatenate([runs, decode_runs]),
        tables=tables,
        wanted=np.arange(chunk - 1 if chunk else 0, total, dtype=np.int64),
        num_sampled=num_decodes + first,
    )


def _no_chunk() -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    return np.zeros((0, ITEM_FIELDS), np.int64), np.zeros((0, RUN_FIELDS), np.int64)


def _chunk(
    chunk: int, start: int, table: NDArray[np.int32], tail: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    firsts = np.arange(0, chunk, BLOCK_SIZE, dtype=np.int64)
    counts = np.minimum(BLOCK_SIZE, chunk - firsts)
    blocks = (start + firsts) // BLOCK_SIZE
    pages = table[blocks].astype(np.int64)
    is_full = counts == BLOCK_SIZE
    exact = np.where(blocks == 0, pages, np.where(is_full, -1, tail))
    packed = np.where((blocks > 0) & is_full, pages, -1)
    items = np.stack([firsts, counts, start + firsts, exact, packed, firsts * 0], axis=1)
    firsts = np.arange(0, chunk, MAX_RUN_TOKENS, dtype=np.int64)
    counts = np.minimum(MAX_RUN_TOKENS, chunk - firsts)
    nobody = firsts * 0
    after = chunk - firsts - counts
    runs = np.stack([firsts, counts, start + firsts, nobody, nobody - 1, after], axis=1)
    return items, runs
