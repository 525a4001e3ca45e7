"""The error of attention over a long context, against the same pages in float64.

Products are summed in fp32, so the error is that of rounding elements and weights to the type of
the queries, a step of that type at most, however many are summed.
"""

from collections.abc import Callable

import pytest
import torch

from common.codecs import codec_named
from common.pages import PageLayout
from engine.kernels import reference
from engine.kernels.gpu.attention import attention
from engine.kernels.gpu.decode import Partials, decode_attention
from engine.kernels.gpu.tiles import ChunkTile, DecodeTile, InvariantTile, StoreTile, Tiles
from engine.kernels.offsets import Offsets
from engine.pools import PageArena

WIDTH, BLOCK = 16, 32
BOUND = {torch.float32: 2e-6, torch.float16: 2**-9}
"""Of the largest value. The narrow type here is fp16 with a step of 2^-10, which the interpreter
multiplies as a GPU does; it has no products of bf16, whose step is 2^-7.
"""
TILES = Tiles(
    store=StoreTile(num_warps=4),
    chunk=ChunkTile(rows=16, step_tokens=512, num_warps=4),
    decode=DecodeTile(parts=2, stretch_tokens=512, step_tokens=512, num_warps=4),
    invariant=InvariantTile(rows=16, step_tokens=512, num_warps=4),
)
"""Few large steps, for the interpreter."""


def error_at(num_tokens: int, dtype: torch.dtype, is_decode: bool) -> float:
    """Largest error of the last token's attention, as a part of the largest value."""
    generator = torch.Generator().manual_seed(num_tokens)
    num_blocks = num_tokens // BLOCK
    layout = PageLayout(1, 1, BLOCK, WIDTH, codec_named("fp8_e4m3"))
    pool = PageArena(layout, num_blocks, 2)
    codes = torch.randn((num_blocks, 1, 2, 1, BLOCK, WIDTH), generator=generator) * 100
    packed = reference.packed_slices(pool.packed, layout)
    packed.copy_(codes.to(torch.float8_e4m3fn).view(torch.uint8))
    for scales in reference.packed_scales(pool.packed, layout):
        scales.fill_(127 - 6)
    exact = reference.exact_slices(pool.exact, layout)
    exact.copy_(torch.randn(exact.shape, generator=generator))
    angles = torch.outer(torch.arange(float(num_tokens)), 10 ** -torch.linspace(0, 4, WIDTH // 2))
    means = torch.randn((1, 2, 1, WIDTH), generator=generator)
    offsets = Offsets.of(means, angles.cos(), angles.sin(), BLOCK)

    q = (torch.randn((1, 2, WIDTH), generator=generator) * WIDTH**-0.5).to(dtype)
    out = torch.empty_like(q)
    rows = torch.randn((2, 1, 1, WIDTH), generator=generator).bfloat16().float()
    table = torch.arange(num_blocks, dtype=torch.int32)[None]
    position = num_tokens - BLOCK  # its own block holds this token alone
    pages = pool.packed, pool.exact, layout, offsets, 0
    exact[1, 0, :, :, 0] = rows[:, 0]
    run = torch.tensor([[0, 1, position, 0, 1 if is_decode else -1, 0]])
    kernel: Callable[..., None] = decode_attention if is_decode else attention
    last = Partials.allocate(1, 2, WIDTH, q.device) if is_decode else 1
    kernel(q, *rows, run, table, *pages, last, out)

    blocks = [
        reference.read_block(pool.packed, pool.exact, layout, offsets, n, n, n == 0)[0, :, 0]
        for n in range(num_blocks - 1)
    ]
    keys, values = torch.cat([*blocks, rows[:, 0]], dim=1).double()
    weights = torch.softmax(q[0].double() @ keys.T, dim=1)
    wanted = weights @ values
    return float((out[0].double() - wanted).abs().max() / values.abs().max())


@pytest.mark.parametrize(
    ("dtype", "is_decode"), [(torch.float32, True), (torch.float16, True), (torch.float16, False)]
)
def test_the_error_does_not_grow_with_the_context(
    dtype: torch.dtype, is_decode: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("attention", "decode"):
        monkeypatch.setattr(f"engine.kernels.gpu.{module}.tiles_of", lambda *_: TILES)
    short, long = (error_at(tokens, dtype, is_decode) for tokens in (1024, 8192))
    assert short < BOUND[dtype]
    assert long < BOUND[dtype]
