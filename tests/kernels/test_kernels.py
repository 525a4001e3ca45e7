"""Every kernel against its plain reference: Triton under its interpreter, numba, and torch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit
from torch import Tensor

from common.codecs import CODECS as CODEC_TABLE
from common.codecs import ElementKind, codec_named
from common.pages import PageKind, PageLayout
from engine.kernels import reference
from engine.kernels.cpu import pages as cpu_pages
from engine.kernels.cpu import simd
from engine.kernels.cpu.attention import attention as cpu_attention
from engine.kernels.cpu.store import store as cpu_store
from engine.kernels.gpu.attention import attention as chunk_attention
from engine.kernels.gpu.checksum import checksums as gpu_checksums
from engine.kernels.gpu.codec import decode_fp8
from engine.kernels.gpu.decode import Partials, decode_attention
from engine.kernels.gpu.store import rotate_and_store
from engine.kernels.offsets import Offsets
from engine.pools import PageArena

LAYERS, HEADS, GROUP, WIDTH = 2, 2, 3, 16
CODECS = list(CODEC_TABLE)
QUANTISED = [name for name, codec in CODEC_TABLE.items() if codec.is_quantised]


def layout_of(codec: str, block_size: int = 16, head_dim: int = WIDTH) -> PageLayout:
    return PageLayout(LAYERS, HEADS, block_size, head_dim, codec_named(codec))


@dataclass
class Step:
    """Rows of a step over pools that hold something already."""

    layout: PageLayout
    pool: PageArena
    q: Tensor
    k: Tensor
    v: Tensor
    items: Tensor
    runs: Tensor
    tables: Tensor
    offsets: Offsets


def offsets_of(layout: PageLayout, scale: float = 2.0) -> Offsets:
    """Random means over 16 blocks."""
    generator = torch.Generator().manual_seed(11)
    shape = (layout.num_layers, 2, layout.num_kv_heads, layout.head_dim)
    angles = torch.outer(
        torch.arange(16.0 * layout.block_size), 10 ** -torch.linspace(0, 4, layout.head_dim // 2)
    )
    means = (torch.randn(shape, generator=generator) * scale).bfloat16()
    return Offsets.of(means, angles.cos(), angles.sin(), layout.block_size)


def make_step(codec: str, block_size: int) -> Step:
    """Chunks from the start and further on; decodes in block 0, in a tail, at a block's end."""
    b = block_size
    layout = layout_of(codec, b)
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        values = torch.randn(shape, generator=generator) * 4
        return values.bfloat16().float() if layout.codec.exact is ElementKind.BF16 else values

    pool = PageArena(layout, 24, 12)
    fill(pool, normal, generator)
    counts = [2 * b + 5, b + 3, 1, 1, 1]
    starts = [0, 2 * b, 3, 2 * b + 4, 4 * b - 1]
    rows = np.cumsum([0, *counts])
    table = [[0, 1, 2, 0, 0], [1, 3, 4, 5, 0], [2, 0, 0, 0, 0], [3, 6, 7, 0, 0], [4, 8, 9, 10, 0]]
    tails = [5, 6, -1, 7, 8]
    items, runs = [], []
    for i, (count, start, row) in enumerate(zip(counts, starts, rows, strict=False)):
        is_chunk = count > 1
        at = start
        while at < start + count:
            block, end = at // b, min(start + count, (at // b + 1) * b)
            seals = end % b == 0 and block > 0
            exact = table[i][0] if block == 0 else tails[i]
            if is_chunk and seals:
                exact = -1
            packed = table[i][block] if seals else -1
            items.append([row + at - start, end - at, at, exact, packed, int(not is_chunk)])
            at = end
        own = -1 if is_chunk else (table[i][0] if start < b else tails[i])
        runs.append([row, count, start, i, own, 0])
    total = int(rows[-1])
    return Step(
        layout=layout,
        pool=pool,
        q=torch.randn((total, HEADS * GROUP, WIDTH), generator=generator) * WIDTH**-0.5,
        k=normal(total, HEADS, WIDTH),
        v=normal(total, HEADS, WIDTH),
        items=torch.tensor(items),
        runs=torch.tensor(runs),
        tables=torch.tensor(table, dtype=torch.int32),
        offsets=offsets_of(layout),
    )


def fill(pool: PageArena, normal: Callable[..., Tensor], generator: torch.Generator) -> None:
    layout = pool.layout
    exact, packed = (
        reference.exact_slices(pool.exact, layout),
        reference.packed_slices(pool.packed, layout),
    )
    exact.copy_(normal(*exact.shape))
    if not layout.codec.is_quantised:
        packed.copy_(normal(*packed.shape))
        return
    scales = reference.packed_scales(pool.packed, layout)
    for page, layer, which, head in np.ndindex(packed.shape[:4]):
        block = normal(layout.block_size, layout.head_dim)
        data, scale = reference.quantise(block, layout.codec.packed, which == 0)
        packed[page, layer, which, head] = data
        scales[which][page, layer, head] = scale


Store = Callable[..., None]


def unturned(store: Callable[..., object]) -> Store:
    """A store that rotates, of k and v, with angles of zero and a query head for each KV head."""

    def plain(k: Tensor, v: Tensor, items: Tensor, *pages: Any) -> None:
        ones = torch.ones(int((items[:, 2] + items[:, 1]).max()), k.shape[2] // 2)
        heads = torch.cat([torch.zeros_like(k), k, v], dim=1)
        store(heads, None, 1e-5, ones, torch.zeros_like(ones), items, *pages)

    return plain


def gpu_attention(q: Tensor, k: Tensor, v: Tensor, runs: Tensor, *rest: Any) -> None:
    *pages, longest, out = rest
    is_decode = runs[:, 1] == 1
    partials = Partials.allocate(len(runs), q.shape[1], q.shape[2], q.device)
    both: tuple[Callable[..., None], ...] = chunk_attention, decode_attention
    for kernel, which, last in zip(both, (~is_decode, is_decode), (longest, partials), strict=True):
        kernel(q, k, v, runs[which], *pages, last, out)


STORES: dict[str, Store] = {"triton": unturned(rotate_and_store), "numba": cpu_store}
REFERENCES: dict[str, Store] = {
    "triton": unturned(reference.rotate_and_store),
    "numba": reference.store,
}
ATTENTIONS: dict[str, Callable[..., None]] = {"triton": gpu_attention, "numba": cpu_attention}


@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("which", STORES)
def test_store_writes_the_bytes_of_the_reference(which: str, codec: str, block_size: int) -> None:
    step, wanted = make_step(codec, block_size), make_step(codec, block_size)
    for layer in range(LAYERS):
        STORES[which](
            step.k,
            step.v,
            step.items,
            step.pool.packed,
            step.pool.exact,
            step.layout,
            step.offsets,
            layer,
        )
        reference.store(
            wanted.k,
            wanted.v,
            wanted.items,
            wanted.pool.packed,
            wanted.pool.exact,
            wanted.layout,
            wanted.offsets,
            layer,
        )
    assert torch.equal(step.pool.exact, wanted.pool.exact)
    assert torch.equal(step.pool.packed, wanted.pool.packed)


@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("which", ATTENTIONS)
def test_attention_equals_the_reference(which: str, codec: str, block_size: int) -> None:
    step, layer = make_step(codec, block_size), 1
    pool, layout = step.pool, step.layout
    reference.store(
        step.k, step.v, step.items, pool.packed, pool.exact, layout, step.offsets, layer
    )
    found = torch.empty_like(step.q)
    longest = int(step.runs[:, 1].max())
    ATTENTIONS[which](
        step.q,
        step.k,
        step.v,
        step.runs,
        step.tables,
        pool.packed,
        pool.exact,
        layout,
        step.offsets,
        layer,
        longest,
        found,
    )
    wanted = reference.attention(
        step.q,
        step.k,
        step.v,
        step.runs,
        step.tables,
        pool.packed,
        pool.exact,
        layout,
        step.offsets,
        layer,
    )
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-4)


def blocks() -> dict[str, Tensor]:
    """Blocks [16, 16] with something odd about each."""
    generator = torch.Generator().manual_seed(5)
    plain = torch.randn((16, 16), generator=generator)
    with_nan, with_inf = plain.clone(), plain.clone()
    with_nan[3, 4], with_inf[5, 6], with_inf[5, 7] = torch.nan, torch.inf, -torch.inf
    return {
        "plain": plain,
        "zero": torch.zeros(16, 16),
        "tiny": plain * 1e-37,
        "subnormal": plain * 1e-41,
        "huge": plain * 1e37,
        "one large": torch.where(torch.arange(256).view(16, 16) == 77, 3e4, plain),
        "exactly 448": plain.clamp(-1, 1) * 448,
        "exactly 30": plain.clamp(-1, 1) * 30,
        "between steps": torch.arange(-128, 128).view(16, 16) / 128.0,
        "powers of two": 2.0 ** torch.arange(-128, 128).view(16, 16).float() * 0.5,
        "nan": with_nan,
        "inf": with_inf,
        "all nan": torch.full((16, 16), torch.nan),
    }


def seal_with(which: str, codec: str, block: Tensor, block_size: int = 16) -> tuple[Tensor, Tensor]:
    """A packed page with the block as K and its negative as V, by an implementation and by the
    reference.
    """
    width = block.shape[-1]
    layout = PageLayout(1, 1, block_size, width, codec_named(codec))
    rows = block.bfloat16().float().view(block_size, 1, width)
    items = torch.tensor([[0, block_size, block_size, -1, 1, 0]])
    found, wanted = PageArena(layout, 2, 1), PageArena(layout, 2, 1)
    none = offsets_of(layout, scale=0.0)
    STORES[which](rows, -rows, items, found.packed, found.exact, layout, none, 0)
    REFERENCES[which](rows, -rows, items, wanted.packed, wanted.exact, layout, none, 0)
    return found.packed, wanted.packed


@pytest.mark.filterwarnings("ignore:invalid value encountered in multiply")  # infinity turned
@pytest.mark.parametrize("name", blocks())
@pytest.mark.parametrize("codec", QUANTISED)
@pytest.mark.parametrize("which", STORES)
def test_odd_blocks_are_sealed_as_the_reference_does(which: str, codec: str, name: str) -> None:
    found, wanted = seal_with(which, codec, blocks()[name])
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("codec", QUANTISED)
@given(st.integers(0, 2**32 - 1), st.integers(-120, 120), st.sampled_from([16, 32]), st.booleans())
@settings(max_examples=40, deadline=None)
def test_any_block_is_sealed_as_the_reference_does(
    codec: str, seed: int, power: int, size: int, has_outliers: bool
) -> None:
    """On the CPU path, which is the quick one: every magnitude, both block sizes."""
    generator = torch.Generator().manual_seed(seed)
    block = torch.randn((size, 32), generator=generator).double() * 2.0**power
    if has_outliers:
        block[:, seed % 32] *= 1000
    found, wanted = seal_with("numba", codec, block.float(), size)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize(("codec", "bound"), [
    ("fp8_e3m4", 1 / 32), ("fp8_e4m3", 1 / 16), ("fp8_e5m2", 1 / 8),
    ("int8", 1 / 250), ("int4", 1 / 28),
])  # fmt: skip
@given(st.integers(0, 2**32 - 1), st.integers(-60, 60))
@settings(max_examples=40, deadline=None)
def test_what_is_read_is_near_what_was_sealed(
    codec: str, bound: float, seed: int, power: int
) -> None:
    """fp8 within a share of each value (or of its smallest step), int within one of the range."""
    kind = codec_named(codec).packed
    generator = torch.Generator().manual_seed(seed)
    block = (torch.randn((16, 32), generator=generator).double() * 2.0**power).float()
    for is_k in (True, False):
        again = reference.dequantise(*reference.quantise(block, kind, is_k), kind, is_k)
        amax = float(block.abs().max())
        span = block.abs() if kind in reference.FP8 else torch.tensor(2 * amax)
        smallest = 2.0**-10 if kind is ElementKind.E3M4 else 2.0**-14
        assert ((again - block).abs() <= span * bound * 1.02 + amax * smallest).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("codec", QUANTISED)
def test_what_is_not_finite_is_read_as_nan(codec: str, bad: float) -> None:
    """It is never taken for a number, and values outside its group of one scale stay good."""
    kind = codec_named(codec).packed
    block = torch.randn((16, 32), generator=torch.Generator().manual_seed(1))
    block[3, 5] = bad
    for is_k in (True, False):
        again = reference.dequantise(*reference.quantise(block, kind, is_k), kind, is_k)
        assert again[3, 5].isnan()
        touched = torch.zeros(16, 32, dtype=torch.bool)
        touched[3, 5] = True
        if kind is ElementKind.INT4:
            touched[:, 5] |= is_k
            touched[3] |= not is_k
        assert torch.equal(again.isnan(), touched)


def test_the_values_of_e3m4() -> None:
    """Four bits of mantissa, three of exponent with bias 3; what other formats of that name have
    as infinities and NaN are numbers here, but for the last code of each sign.
    """
    values = reference.e3m4_values()
    assert values[[0x00, 0x01, 0x0F, 0x10, 0x30, 0x38, 0x70, 0x7E]].tolist() == [
        *(0.0, 1 / 64, 15 / 64, 0.25, 1.0, 1.5, 16.0, 30.0)
    ]
    assert values.isnan().nonzero().flatten().tolist() == [0x7F, 0xFF]
    assert torch.equal(values[128:255], -values[:127])
    assert values[128].signbit()
    steps = values[:127].diff()
    assert torch.equal(steps[:16], torch.full((16,), 1 / 64))
    assert torch.equal(steps[16:], 2.0 ** torch.arange(-6, 1).repeat_interleave(16)[:110])


@pytest.mark.parametrize("kind", [ElementKind.E4M3, ElementKind.E5M2])
@given(st.integers(0, 2**32 - 1), st.integers(-20, 8))
@settings(max_examples=40, deadline=None)
def test_the_reference_rounds_as_torch_does(kind: ElementKind, seed: int, power: int) -> None:
    """So its tables and its way to the nearest value, which e3m4 has alone, are right."""
    dtype = torch.float8_e4m3fn if kind is ElementKind.E4M3 else torch.float8_e5m2
    block = torch.randn((16, 32), generator=torch.Generator().manual_seed(seed)) * 2.0**power
    block[0] = (block[0] * 64).round() / 64  # ties
    data, code = reference.quantise(block, kind, True)
    scaled = block * 2.0 ** (127 - int(code))
    assert torch.equal(data, scaled.to(dtype).view(torch.uint8))


@pytest.mark.parametrize("kind", reference.FP8)
def test_every_fp8_byte_is_read_as_its_value(kind: ElementKind) -> None:
    data = torch.arange(256).to(torch.uint8)
    out, zeros = torch.empty(256), torch.zeros(16)
    WIDEN[kind](data.data_ptr(), zeros.data_ptr(), out.data_ptr())
    wanted = reference.FP8[kind] * 0.25
    assert torch.equal(out.isnan(), wanted.isnan())
    assert torch.equal(out.nan_to_num(), wanted.nan_to_num())


def widening(intrinsic: Any, factor: float) -> Any:
    scale = np.float32(0.25 * factor)

    @njit
    def widen(source, zeros, target):  # type: ignore[no-untyped-def]
        for i in range(0, 256, 16):
            intrinsic(source + i, scale, zeros, target + i * 4)

    return widen


WIDEN = {
    ElementKind.E3M4: widening(simd.widen_e3m4, 4096),
    ElementKind.E4M3: widening(simd.widen_e4m3, 256),
    ElementKind.E5M2: widening(simd.widen_e5m2, 1),
}


@pytest.mark.parametrize("kind", [ElementKind.E3M4, ElementKind.E4M3])
def test_every_fp8_byte_is_decoded_as_its_value_on_a_gpu(kind: ElementKind) -> None:
    out = torch.empty(256)
    decode_kernel[(1,)](torch.arange(256).to(torch.uint8), out, KIND=int(kind))
    wanted = reference.FP8[kind]
    assert torch.equal(out.isnan(), wanted.isnan())
    assert torch.equal(out.nan_to_num(), wanted.nan_to_num())


@triton.jit  # type: ignore[untyped-decorator]
def decode_kernel(data_ptr, out_ptr, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, 256)
    tl.store(out_ptr + at, decode_fp8(tl.load(data_ptr + at), KIND))


@pytest.mark.parametrize("codec", CODECS)
def test_checksums_agree(codec: str) -> None:
    layout = layout_of(codec)
    for kind in PageKind:
        pages = torch.randint(0, 256, (3, layout.page_bytes(kind)), dtype=torch.uint8)
        wanted = reference.checksums(pages)
        assert [int(c) % 2**64 for c in gpu_checksums(pages)] == wanted
        some = gpu_checksums(pages, torch.tensor([2, 0]))
        assert [int(c) % 2**64 for c in some] == [wanted[2], wanted[0]]
        assert [cpu_pages.checksum_of(page.data_ptr(), page.numel()) for page in pages] == wanted


def test_checksum_sees_every_word_but_its_own() -> None:
    layout = layout_of("fp8_e4m3")
    page = torch.randint(0, 256, (layout.packed_page_bytes,), dtype=torch.uint8)
    before = cpu_pages.checksum_of(page.data_ptr(), page.numel())
    for index in range(len(page)):
        page[index] ^= 1 << index % 8
        changed = cpu_pages.checksum_of(page.data_ptr(), page.numel()) != before
        assert changed == (index < len(page) - 8)
        page[index] ^= 1 << index % 8


def test_checksum_sees_words_that_change_places() -> None:
    page = torch.randint(0, 256, (1024,), dtype=torch.uint8)
    before = cpu_pages.checksum_of(page.data_ptr(), page.numel())
    swapped = page.view(-1, 8)[[1, 0, *range(2, 128)]].flatten().contiguous()
    assert cpu_pages.checksum_of(swapped.data_ptr(), swapped.numel()) != before
