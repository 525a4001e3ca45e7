"""Layouts, tags and the e4m3 codec, with made-up shapes and values. Failures print their seed."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.codecs import CODECS, ElementKind, codec_named
from common.errors import ConfigError
from common.pages import TAG_BYTES, PageKind, PageLayout, PageTag, checksum, tag_mismatch
from engine.kernels import reference
from engine.pools import PageArena

U64 = st.integers(0, 2**64 - 1)
LAYOUTS = st.builds(
    PageLayout,
    num_layers=st.integers(1, 80),
    num_kv_heads=st.integers(1, 16),
    block_size=st.sampled_from([16, 32]),
    head_dim=st.sampled_from([16, 48, 64, 80, 96, 128]),
    codec=st.sampled_from(sorted(CODECS.values(), key=lambda codec: codec.name)),
)
TAGS = st.builds(
    PageTag,
    content_hash=st.binary(min_size=16, max_size=16),
    fingerprint=st.binary(min_size=16, max_size=16),
    num_tokens=st.integers(0, 32),
    head=st.integers(0, 255),
    incarnation=U64,
    generation=U64,
    checksum=U64,
)
SETTINGS = settings(print_blob=True, deadline=None, max_examples=100)


@SETTINGS
@given(LAYOUTS, st.sampled_from(PageKind))
def test_parts_of_a_record_follow_each_other(layout: PageLayout, kind: PageKind) -> None:
    scales = layout.scales_bytes if kind is PageKind.PACKED else 0
    end = layout.payload_bytes(kind) // layout.num_kv_heads + scales
    assert end <= layout.tag_offset(kind) < end + 64
    assert layout.record_bytes(kind) == layout.tag_offset(kind) + TAG_BYTES
    assert layout.record_bytes(kind) % 64 == 0
    assert layout.page_bytes(kind) == layout.num_kv_heads * layout.record_bytes(kind)


@pytest.mark.parametrize("codec", ["fp8_e3m4", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("block_size", [16, 32])
def test_a_sealed_fp8_page_is_half_a_bf16_page(block_size: int, codec: str) -> None:
    """Scales and tag included; the demo model's shape and a small one's."""
    for layers, heads, width in ((30, 3, 64), (24, 2, 64), (32, 8, 128)):
        fp8, bf16 = (
            PageLayout(layers, heads, block_size, width, codec_named(name)).packed_page_bytes
            for name in (codec, "bf16")
        )
        assert fp8 <= 0.505 * bf16


def test_fingerprint_covers_everything_that_must_agree() -> None:
    base = PageLayout(4, 2, 16, 64, codec_named("fp8_e3m4"))
    others = [
        PageLayout(5, 2, 16, 64, base.codec),
        PageLayout(4, 4, 16, 64, base.codec),
        PageLayout(4, 2, 32, 64, base.codec),
        PageLayout(4, 2, 16, 128, base.codec),
        PageLayout(4, 2, 16, 64, codec_named("bf16")),
    ]
    found = {layout.fingerprint(bytes(16)) for layout in (base, *others)}
    found.add(base.fingerprint(b"another model..."))
    found.add(base.fingerprint(bytes(16), weight_dtype="fp8"))
    found.add(base.fingerprint(bytes(16), arithmetic="sm_90 in bfloat16"))
    found.add(base.fingerprint(bytes(16), arithmetic="sm_80 in bfloat16"))
    assert len(found) == 10
    assert {len(fingerprint) for fingerprint in found} == {16}


def test_unknown_codecs_and_block_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match="fp8_e3m4"):
        codec_named("fp8")
    with pytest.raises(ConfigError, match="not 16 or 32"):
        PageLayout(1, 1, 8, 64, codec_named("bf16"))


@SETTINGS
@given(TAGS)
def test_tags_survive_their_bytes(tag: PageTag) -> None:
    assert len(tag.pack()) == TAG_BYTES
    assert PageTag.unpack(tag.pack()) == tag
    assert tag_mismatch(tag, tag) is None


@SETTINGS
@given(TAGS, TAGS)
def test_a_mismatch_names_the_first_field_that_differs(found: PageTag, wanted: PageTag) -> None:
    reason = tag_mismatch(found, wanted)
    assert (reason is None) == (found == wanted)
    if reason is not None:
        field = reason.partition(":")[0]
        assert getattr(found, field) != getattr(wanted, field)


def test_a_cleared_tag_is_called_so() -> None:
    cleared = PageTag.unpack(bytes(TAG_BYTES))
    wanted = PageTag(
        content_hash=bytes(16),
        fingerprint=bytes(16),
        num_tokens=0,
        head=0,
        incarnation=0,
        generation=0,
    )
    assert "no tag" in str(tag_mismatch(cleared, wanted))


@SETTINGS
@given(st.binary(min_size=64, max_size=64 * 20), st.integers(0, 10**6), st.integers(0, 7))
def test_checksum_changes_with_every_bit_before_it(data: bytes, place: int, bit: int) -> None:
    page = np.frombuffer(data[: len(data) // 64 * 64], dtype=np.uint8).copy()
    before = checksum(page)
    page[-8:] ^= 0xFF
    assert checksum(page) == before
    page[place % (len(page) - 8)] ^= 1 << bit
    assert checksum(page) != before


@pytest.mark.parametrize(
    ("kind", "mantissa_bits", "smallest", "largest"),
    [(ElementKind.E3M4, 4, 1 / 64, 30), (ElementKind.E4M3, 3, 1 / 512, 448)],
)
@SETTINGS
@given(st.integers(0, 2**32 - 1), st.integers(-60, 60), st.sampled_from([0.0, 1.0, 8.0]))
def test_quantised_values_are_as_near_as_fp8_gets(
    kind: ElementKind, mantissa_bits: int, smallest: float, largest: int, seed: int, power: int,
    skew: float,
) -> None:  # fmt: skip
    """Within half a step of the format at the block's scale, and never beyond its largest value."""
    generator = torch.Generator().manual_seed(seed)
    block = torch.randn((16, 16), generator=generator) * 2.0**power
    block *= torch.exp(skew * torch.randn((16, 1), generator=generator))
    block = block.bfloat16().float()
    data, code = reference.quantise(block, kind, True)
    found = reference.dequantise(data, code, kind, True)
    scale = 2.0 ** (int(code) - 127)
    step = torch.maximum(
        2.0 ** (torch.floor(torch.log2(block.abs())) - mantissa_bits),
        torch.tensor(scale * smallest),
    )
    assert ((found - block).abs() <= step / 2 + 1e-45).all()
    assert largest / 2 < float(block.abs().amax()) / scale <= largest


def test_arenas_are_zeroed_and_aligned() -> None:
    layout = PageLayout(2, 2, 16, 16, codec_named("fp8_e3m4"))
    arena = PageArena(layout, 3, 2)
    assert arena.packed.shape == (3, layout.packed_page_bytes)
    assert arena.exact.shape == (2, layout.exact_page_bytes)
    assert arena.packed.data_ptr() % 4096 == arena.exact.data_ptr() % 4096 == 0
    assert not arena.packed.any()
    assert PageArena(layout, 0, 0).num_bytes == 0
