"""Landing: good pages are copied without their tags, all others leave their places alone."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from common.codecs import codec_named
from common.pages import TAG_BYTES, PageKind, PageLayout, PageTag, checksum
from engine.kernels.cpu.landing import land as cpu_land
from engine.kernels.gpu.landing import land as gpu_land

LANDS: dict[str, Callable[..., Any]] = {"numba": cpu_land, "triton": gpu_land}


@pytest.mark.parametrize("num_layers", [1, 24])
@pytest.mark.parametrize("which", LANDS)
def test_only_pages_with_the_right_tag_and_checksum_land(which: str, num_layers: int) -> None:
    layout = PageLayout(num_layers, 2, 16, 32, codec_named("fp8_e3m4"))
    size = layout.page_bytes(PageKind.PACKED)
    rng = np.random.default_rng(5)
    source = rng.integers(0, 256, (6, size), dtype=np.uint8)
    tags = []
    for page in source:
        tag = PageTag(
            content_hash=rng.bytes(16), fingerprint=bytes(16), num_tokens=16, head=0, incarnation=3,
            generation=int(rng.integers(1, 99)),
        )  # fmt: skip
        page[-TAG_BYTES:] = np.frombuffer(tag.pack(), dtype=np.uint8)
        sealed = tag.with_checksum(checksum(page)).pack()
        page[-TAG_BYTES:] = np.frombuffer(sealed, dtype=np.uint8)
        tags.append(np.frombuffer(tag.pack(), dtype=np.uint8))
    source[1, 77] ^= 4  # a byte changed on the way
    source[4, -3] ^= 1  # the checksum's own
    slots, blocks = np.array([5, 1, 0, 4, 2]), np.array([2, 3, 7, 1, 0])
    wanted_tags = np.stack([tags[slot] for slot in slots])
    wanted_tags[2, 20] ^= 1  # another model's page
    target = torch.full((8, size), 9, dtype=torch.uint8)
    accepted, sums = LANDS[which](torch.from_numpy(source), target, slots, blocks, wanted_tags)
    assert accepted.tolist() == [True, False, False, False, True]
    assert sums.tolist() == [checksum(source[slot]) for slot in slots]
    expected = np.full((8, size), 9, dtype=np.uint8)
    for slot, block in ((5, 2), (2, 0)):
        expected[block] = source[slot]
        expected[block, -TAG_BYTES:] = 0
    assert np.array_equal(target.numpy(), expected)


@pytest.mark.parametrize("which", LANDS)
def test_nothing_lands_of_nothing(which: str) -> None:
    pages, none = torch.zeros((2, 128), dtype=torch.uint8), np.zeros(0, dtype=np.int64)
    accepted, sums = LANDS[which](pages, pages, none, none, np.zeros((0, 64), dtype=np.uint8))
    assert len(accepted) == len(sums) == 0
