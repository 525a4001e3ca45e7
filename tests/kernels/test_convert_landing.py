"""Pages of exact elements that land in another form: the bytes are those that sealing makes."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from common.codecs import codec_named
from common.pages import TAG_BYTES, PageKind, PageLayout, PageTag, checksum
from engine.kernels.cpu.convert import land_converted
from engine.kernels.cpu.pages import pages_of
from engine.kernels.cpu.store import store
from engine.kernels.offsets import Offsets
from engine.pools import PageArena

LAYERS, HEADS, WIDTH, BLOCK = 3, 2, 32, 16
QUANTISED = ["fp8_e3m4", "fp8_e4m3", "fp8_e5m2", "int8", "int4"]


def arena(codec: str) -> PageArena:
    return PageArena(PageLayout(LAYERS, HEADS, BLOCK, WIDTH, codec_named(codec)), 8, 8)


def _offsets() -> Offsets:
    generator = torch.Generator().manual_seed(3)
    means = torch.randn((LAYERS, 2, HEADS, WIDTH), generator=generator).bfloat16()
    angles = torch.outer(torch.arange(256.0), 10 ** -torch.linspace(0, 4, WIDTH // 2))
    return Offsets.of(means, angles.cos(), angles.sin(), BLOCK)


OFFSETS = _offsets()


def values(codec: str) -> torch.Tensor:
    """[layers, 2, 64, heads, width]: K and V of four blocks, as the engine would round them."""
    rows = (
        torch.randn((LAYERS, 2, 64, HEADS, WIDTH), generator=torch.Generator().manual_seed(9)) * 3
    )
    return rows if codec == "fp32" else rows.bfloat16().float()


def write(target: PageArena, rows: torch.Tensor, *, num_exact: int) -> None:
    """Blocks 0 to 3 into pages 4 to 7 of the same kind; the first `num_exact` into exact ones."""
    items = torch.tensor([
        [at, BLOCK, at, 4 + n if n < num_exact else -1, -1 if n < num_exact else 4 + n, 0]
        for n, at in enumerate(range(0, 64, BLOCK))
    ])  # fmt: skip
    for layer in range(LAYERS):
        k, v = (part.contiguous() for part in rows[layer])
        store(k, v, items, target.packed, target.exact, target.layout, OFFSETS, layer)


def tag(page: int, head: int) -> PageTag:
    return PageTag(
        content_hash=bytes([page]) * 16, fingerprint=b"the source's----", num_tokens=BLOCK,
        head=head, incarnation=3, generation=9,
    )  # fmt: skip


def sign(source: PageArena, kind: PageKind) -> None:
    records = source.records(kind).numpy()
    for page in range(4, 8):
        for head in range(HEADS):
            record = records[page, head]
            record[-TAG_BYTES:] = np.frombuffer(tag(page, head).pack(), dtype=np.uint8)
            sealed = tag(page, head).with_checksum(checksum(record)).pack()
            record[-TAG_BYTES:] = np.frombuffer(sealed, dtype=np.uint8)


def land(
    source: PageArena, target: PageArena, kind: PageKind, *, first_block: int = 0
) -> tuple[NDArray[np.bool_], NDArray[np.uint64]]:
    """Pages 4 to 7 become pages 0 to 3, which are blocks `first_block` and those that follow."""
    which = [(page, head) for page in range(4, 8) for head in range(HEADS)]
    moves = np.array(
        [[page * HEADS + head, page - 4, head, first_block + page - 4] for page, head in which]
    )
    tags = np.frombuffer(b"".join(tag(*one).pack() for one in which), dtype=np.uint8)
    layout = source.layout
    return land_converted(
        source.records(kind).flatten(0, 1),
        layout.element_kind(kind),
        kind,
        moves,
        tags.reshape(len(which), TAG_BYTES),
        np.array(pages_of(target.packed, target.exact, target.layout, OFFSETS)),
    )


@pytest.mark.parametrize("source_codec", ["bf16", "fp32"])
@pytest.mark.parametrize("codec", QUANTISED)
def test_packed_pages_are_what_seal_makes_of_the_exact_ones(codec: str, source_codec: str) -> None:
    source, target, wanted = arena(source_codec), arena(codec), arena(codec)
    write(source, values(source_codec), num_exact=0)
    write(wanted, values(source_codec), num_exact=0)
    sign(source, PageKind.PACKED)
    target.packed[:] = 7
    accepted, _ = land(source, target, PageKind.PACKED)
    assert accepted.all()
    layout = target.layout
    end = layout.scales_offset + layout.scales_bytes
    found = target.records(PageKind.PACKED)
    assert torch.equal(found[:4, :, :end], wanted.records(PageKind.PACKED)[4:, :, :end])
    assert not found[:4, :, -TAG_BYTES:].any(), "nobody here has vouched for them"
    assert (found[:4, :, end:-TAG_BYTES] == 7).all()
    assert (found[4:] == 7).all(), "nothing else is touched"


@pytest.mark.parametrize("source_codec", ["bf16", "fp32"])
def test_exact_pages_are_rounded_to_the_exact_form(source_codec: str) -> None:
    source, target, wanted = arena(source_codec), arena("fp8_e3m4"), arena("fp8_e3m4")
    rows = values(source_codec)
    write(source, rows, num_exact=4)
    write(wanted, rows.bfloat16().float(), num_exact=4)
    sign(source, PageKind.EXACT)
    accepted, _ = land(source, target, PageKind.EXACT)
    assert accepted.all()
    assert torch.equal(target.exact[:4], wanted.exact[4:])


def test_a_record_that_is_not_what_was_asked_for_changes_nothing() -> None:
    source, target = arena("bf16"), arena("int8")
    write(source, values("bf16"), num_exact=0)
    sign(source, PageKind.PACKED)
    records = source.records(PageKind.PACKED)
    records[5, 1, 1000] ^= 1  # torn
    records[6, 0, -TAG_BYTES] ^= 1  # of another block
    target.packed[:] = 7
    accepted, sums = land(source, target, PageKind.PACKED)
    assert accepted.reshape(4, HEADS).tolist() == [
        [True, True], [True, False], [False, True], [True, True],
    ]  # fmt: skip
    assert sums[3] == checksum(records[5, 1].numpy())
    found = target.records(PageKind.PACKED)
    assert (found[1, 1] == 7).all()
    assert (found[2, 0] == 7).all()


def test_offsets_are_those_of_the_block_s_place() -> None:
    """A block is sealed for where it stands in its request, whatever page it lies in."""
    source, at_0, at_5 = arena("bf16"), arena("int8"), arena("int8")
    write(source, values("bf16"), num_exact=0)
    sign(source, PageKind.PACKED)
    land(source, at_0, PageKind.PACKED)
    land(source, at_5, PageKind.PACKED, first_block=5)
    assert not torch.equal(at_0.packed[0], at_5.packed[0])
