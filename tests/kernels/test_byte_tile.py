"""On CPU a decode widens packed elements of one byte in registers; a chunk writes them down first.
Which of both it was must not show in a bit.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.codecs import codec_named
from common.pages import PageLayout
from engine.kernels import reference
from engine.kernels.cpu.attention import attention
from engine.pools import PageArena
from tests.kernels.test_kernels import offsets_of

CODECS = ["fp8_e3m4", "fp8_e4m3", "fp8_e5m2", "int8"]
KV_HEADS = 2


@pytest.mark.parametrize("codec", CODECS)
@given(
    seed=st.integers(0, 2**32 - 1),
    group=st.integers(1, 9),
    head_dim=st.sampled_from([16, 48, 64]),
    block_size=st.sampled_from([16, 32]),
    num_blocks=st.integers(2, 5),
    bad=st.sampled_from([None, torch.nan, torch.inf]),
)
@settings(max_examples=60, deadline=None)
def test_a_decode_and_a_chunk_read_packed_pages_alike(
    codec: str,
    seed: int,
    group: int,
    head_dim: int,
    block_size: int,
    num_blocks: int,
    bad: float | None,
) -> None:
    layout = PageLayout(1, KV_HEADS, block_size, head_dim, codec_named(codec))
    generator = torch.Generator().manual_seed(seed)
    pool, tables = filled(layout, num_blocks, generator, bad)
    exact = reference.exact_slices(pool.exact, layout)
    exact.copy_(torch.randn(exact.shape, generator=generator))
    position = num_blocks * block_size + int(torch.randint(1, block_size, (), generator=generator))
    q = torch.randn((2, KV_HEADS * group, head_dim), generator=generator)
    rows, offsets = torch.zeros((2, KV_HEADS, head_dim)), offsets_of(layout)
    pages = (pool.packed, pool.exact, layout, offsets, 0)

    def attend(run: list[int]) -> torch.Tensor:
        out = torch.zeros_like(q)
        attention(q, rows, rows, torch.tensor([run]), tables, *pages, 2, out)
        return out[1]

    own = 1
    decode = attend([1, 1, position, 0, own, 0])
    chunk = attend([0, 2, position - 1, 0, own, 0])
    assert torch.equal(decode.view(torch.int32), chunk.view(torch.int32))
    assert decode.isnan().any() == (bad is not None)
    wanted = reference.attention(
        q, rows, rows, torch.tensor([[1, 1, position, 0, own, 0]]), tables, *pages
    )[1]
    torch.testing.assert_close(decode, wanted, atol=2e-5, rtol=1e-4, equal_nan=True)


def filled(
    layout: PageLayout, num_blocks: int, generator: torch.Generator, bad: float | None
) -> tuple[PageArena, torch.Tensor]:
    """Block 0 and the open block in exact pages 0 and 1, the others packed, in reverse order. One
    element of one of these may be bad.
    """
    pool = PageArena(layout, num_blocks, 2)
    slices = reference.packed_slices(pool.packed, layout)
    scales = reference.packed_scales(pool.packed, layout)
    shape = (num_blocks, 2, KV_HEADS, layout.block_size, layout.head_dim)
    blocks = torch.randn(shape, generator=generator)
    if bad is not None:
        page = int(torch.randint(1, num_blocks, (), generator=generator))
        place = int(torch.randint(0, blocks[page].numel(), (), generator=generator))
        blocks[page].view(-1)[place] = bad
    for page in range(1, num_blocks):
        for which in range(2):
            for head in range(KV_HEADS):
                data, scale = reference.quantise(
                    blocks[page, which, head], layout.codec.packed, which == 0
                )
                slices[page, 0, which, head] = data
                scales[which][page, 0, head] = scale
    tables = torch.tensor([[0, *range(num_blocks - 1, 0, -1), 0]], dtype=torch.int32)
    return pool, tables
