"""Pages of one layout turned into another's: what they read as afterwards."""

import pytest
import torch
from torch import Tensor

from common.codecs import codec_named
from common.errors import LayoutMismatch
from common.pages import PageLayout
from engine.kernels import reference
from engine.kernels.gpu.convert import PageSet, block_moves, convert_pages
from engine.kernels.offsets import Offsets
from engine.pools import PageArena

LAYERS, HEADS, WIDTH, TOKENS = 1, 2, 16, 64


def pages_of(
    codec: str, block_size: int, *, heads: int = HEADS, mean_of_k: float = 1.0, first_head: int = 0
) -> PageSet:
    """Empty pages; the means are those of the model's heads from `first_head` on."""
    layout = PageLayout(LAYERS, heads, block_size, WIDTH, codec_named(codec))
    generator = torch.Generator().manual_seed(3)
    means = torch.randn((LAYERS, 2, HEADS, WIDTH), generator=generator).bfloat16()
    means[:, 0] *= mean_of_k
    angles = torch.outer(torch.arange(128.0), 10 ** -torch.linspace(0, 4, WIDTH // 2))
    offsets = Offsets.of(
        means[:, :, first_head : first_head + heads], angles.cos(), angles.sin(), block_size
    )
    arena = PageArena(layout, 8, 8)
    return PageSet(arena.packed, arena.exact, layout, offsets)


def filled(pages: PageSet, seed: int = 7) -> PageSet:
    """A request of 64 tokens in blocks 0, 1, 2, ...: block 0 exact, the others sealed."""
    layout, size = pages.layout, pages.layout.block_size
    rows = torch.randn((2, LAYERS, TOKENS, HEADS, WIDTH),
                       generator=torch.Generator().manual_seed(seed))  # fmt: skip
    rows = (rows * 3).bfloat16().float()
    items = torch.tensor([
        [at, size, at, 0 if at == 0 else -1, at // size if at else -1, 0]
        for at in range(0, TOKENS, size)
    ])  # fmt: skip
    for layer in range(LAYERS):
        k, v = rows[:, layer]
        reference.store(
            k, v, items, pages.packed, pages.exact, layout, pages.offsets, layer
        )  # fmt: skip
    return pages


def reading(pages: PageSet) -> Tensor:
    """[layers, 2, heads, tokens, head_dim] of all blocks in order."""
    size = pages.layout.block_size
    blocks = [
        reference.read_block(
            pages.packed, pages.exact, pages.layout, pages.offsets, n, n, is_exact=n == 0
        )
        for n in range(TOKENS // size)
    ]
    return torch.cat(blocks, dim=3)


def converted(source: PageSet, target: PageSet) -> PageSet:
    sizes = source.layout.block_size, target.layout.block_size
    ours, theirs = (list(range(TOKENS // size)) for size in sizes)
    convert_pages(source, target, block_moves(ours, theirs, *sizes))
    return target


def sealed_again(values: Tensor, target: PageSet) -> Tensor:
    """What the target reads as when `values` are stored in it."""
    layout, size = target.layout, target.layout.block_size
    exact = reference.DTYPES[layout.codec.exact]
    out = values.clone()
    for block in range(TOKENS // size):
        place = slice(block * size, (block + 1) * size)
        for layer in range(LAYERS):
            offset = target.offsets.of_block(layer, block)
            for which in range(2):
                for head in range(HEADS):
                    given = values[layer, which, head, place]
                    kind = layout.codec.packed
                    if block == 0:
                        again = given.to(exact).float()
                    elif not layout.codec.is_quantised:
                        again = given.to(reference.DTYPES[kind]).float()
                    else:
                        left = given - offset[which, head]
                        data = reference.quantise(left, kind, which == 0)
                        again = reference.dequantise(*data, kind, which == 0)
                        again = again + offset[which, head]
                    out[layer, which, head, place] = again
    return out


@pytest.mark.parametrize(
    ("source", "sizes", "target"),
    [
        ("fp8_e3m4", (16, 32), "fp8_e3m4"),
        ("fp8_e4m3", (16, 16), "fp8_e3m4"),
        ("fp8_e3m4", (32, 16), "fp8_e4m3"),
        ("fp8_e5m2", (16, 16), "int8"),
        ("int8", (32, 16), "int4"),
        ("int4", (16, 32), "fp8_e3m4"),
        ("bf16", (16, 32), "fp8_e3m4"),
    ],
)
def test_pages_read_as_their_values_quantised_anew(
    source: str, sizes: tuple[int, int], target: str
) -> None:
    given = filled(pages_of(source, sizes[0]))
    found = reading(converted(given, pages_of(target, sizes[1])))
    wanted = sealed_again(reading(given), pages_of(target, sizes[1]))
    # the offsets are subtracted in one step there and in two here: a value on the edge between two
    # codes may take the other one
    step = (wanted - reading(given)).abs().amax() * 2.1 + 1e-5
    assert float((found - wanted).abs().max()) <= float(step)
    assert float(((found - wanted).abs() > 1e-5).float().mean()) < 0.01


@pytest.mark.parametrize(
    ("source", "sizes", "target"),
    [
        ("int4", (32, 32), "int4"),
        ("fp8_e3m4", (16, 32), "fp32"),
        ("fp8_e4m3", (32, 16), "fp32"),
        ("int8", (32, 16), "fp32"),
        ("bf16", (32, 16), "bf16"),
        ("bf16", (16, 32), "fp32"),
    ],
)
def test_these_lose_nothing(source: str, sizes: tuple[int, int], target: str) -> None:
    given = filled(pages_of(source, sizes[0]))
    found = reading(converted(given, pages_of(target, sizes[1])))
    assert torch.equal(found, reading(given))


@pytest.mark.parametrize("codec", ["fp8_e3m4", "fp8_e4m3"])
def test_halves_of_fp8_blocks_lose_nothing_where_offsets_stay(codec: str) -> None:
    for mean_of_k in (0.0, 1.0):
        given = filled(pages_of(codec, 32, mean_of_k=mean_of_k))
        found = reading(converted(given, pages_of(codec, 16, mean_of_k=mean_of_k)))
        is_same = (found == reading(given))[..., 32:, :]
        assert is_same[:, 1].all()
        assert bool(is_same[:, 0].all()) == (mean_of_k == 0.0)


@pytest.mark.parametrize("target", ["int8", "fp32"])
def test_heads_are_split_and_joined_again(target: str) -> None:
    given = filled(pages_of("int8", 16))
    moves = block_moves(range(4), range(4), 16, 16)
    halves = [pages_of(target, 16, heads=1, first_head=head) for head in range(HEADS)]
    for head, half in enumerate(halves):
        convert_pages(given, half, moves, source_head=head, num_heads=1)
        assert torch.equal(reading(half), reading(given)[:, :, head : head + 1])
    whole = pages_of(target, 16)
    for head, half in enumerate(halves):
        convert_pages(half, whole, moves, target_head=head)
    assert torch.equal(reading(whole), reading(given))
    if target == "int8":
        assert torch.equal(whole.packed, given.packed)
        assert torch.equal(whole.exact, given.exact)


def test_what_does_not_fit_is_refused() -> None:
    given, moves = pages_of("int8", 16), block_moves([0], [0], 16, 16)
    with pytest.raises(LayoutMismatch, match="heads 1 to 2 are not among the 2 KV heads"):
        convert_pages(given, pages_of("int8", 16), moves, source_head=1, num_heads=2)
    with pytest.raises(
        LayoutMismatch, match="heads 0 to 1 are not among the 1 KV heads of the tar"
    ):
        convert_pages(given, pages_of("int8", 16, heads=1), moves)
    other = PageLayout(LAYERS + 1, HEADS, 16, WIDTH, codec_named("int8"))
    with pytest.raises(LayoutMismatch, match="cannot become pages of 2 layers"):
        convert_pages(given, PageSet(given.packed, given.exact, other, given.offsets), moves)
