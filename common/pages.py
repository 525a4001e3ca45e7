"""Pages: where every byte of a block's KV lies, and how a page says what it holds.

A page is one contiguous row of *records*, one for each KV head. A record is `payload | scales |
padding | tag`, a multiple of 64 bytes long, the tag in its last 64: what can be read, checked and
believed by itself, so that workers which hold different heads can exchange pages. There are two
kinds of page (`PageKind`): *packed* pages hold sealed blocks in the codec's element type, *exact*
pages hold block 0 and open tails in the codec's exact type. A record's payload is [num_layers,
2 (K, V), block_size, head_dim]; its scales are, layer by layer, K's, then V's, each as `ScaleKind`
says. A quantised block holds what is left of it after its offset (engine/kernels/offsets.py) was
subtracted.

The tag is written last, after everything else, and erased first. It names the head, and its final
word is the checksum of the whole record.

Used by the engine (pools, kernels), kvtransfer (landing zone, pull plans) and both schedulers. No
torch here.
"""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from common.codecs import Codec, ElementKind, ScaleKind
from common.errors import ConfigError
from common.model_config import ModelConfig

TAG_BYTES: Final = 64
TAG_MAGIC: Final = 0x544B5633  # "TKV3": a record of this format, version 3
NO_FINGERPRINT: Final = bytes(16)
OFFSETS_FILE: Final = "kv_offsets.tandem"
"""Beside a model's weights: the means of K and V that engine/kernels/offsets.py speaks of, as
safetensors. Not named so, since other servers take every *.safetensors there for weights.
"""

_TAG = struct.Struct("<16s16sHHIQQQ")
_GOLDEN: Final = 0x9E3779B97F4A7C15


class PageKind(IntEnum):
    PACKED = 0
    EXACT = 1


@dataclass(frozen=True, slots=True)
class PageLayout:
    """Sizes and offsets, in bytes, of both page kinds for one model, codec and block size."""

    num_layers: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    codec: Codec

    def __post_init__(self) -> None:
        if self.block_size not in (16, 32):
            raise ConfigError(f"block size {self.block_size} is not 16 or 32", param="block_size")

    @classmethod
    def of(
        cls, model: ModelConfig, block_size: int, codec: Codec, *, head_dim: int | None = None
    ) -> "PageLayout":
        """`head_dim` is given where heads are stored wider than the model has them."""
        return cls(
            num_layers=model.num_layers,
            num_kv_heads=model.num_kv_heads,
            block_size=block_size,
            head_dim=head_dim or model.head_dim,
            codec=codec,
        )

    @property
    def num_elements(self) -> int:
        return self.num_layers * 2 * self.num_kv_heads * self.block_size * self.head_dim

    @property
    def scale_bytes(self) -> tuple[int, int]:
        """Bytes of the scales of one head's K and V in a packed page."""
        match self.codec.scale:
            case ScaleKind.NONE:
                return 0, 0
            case ScaleKind.POWER:
                return 1, 1
            case ScaleKind.FLOAT:
                return 4, 4
            case ScaleKind.RANGE:
                return 4 * self.head_dim, 4 * self.block_size

    @property
    def scales_bytes(self) -> int:
        """Of all scales of a packed page's record."""
        return self.num_layers * sum(self.scale_bytes)

    def element_kind(self, kind: PageKind) -> ElementKind:
        return self.codec.exact if kind is PageKind.EXACT else self.codec.packed

    def payload_bytes(self, kind: PageKind) -> int:
        """Of the elements of all records."""
        return self.num_elements * self.element_kind(kind).num_bits // 8

    @property
    def scales_offset(self) -> int:
        """Of the scales in a packed page's record; exact pages have none."""
        return self.payload_bytes(PageKind.PACKED) // self.num_kv_heads

    def record_bytes(self, kind: PageKind) -> int:
        scales = self.scales_bytes if kind is PageKind.PACKED else 0
        payload = self.payload_bytes(kind) // self.num_kv_heads
        return _round_up(payload + scales, 64) + TAG_BYTES

    def page_bytes(self, kind: PageKind) -> int:
        return self.num_kv_heads * self.record_bytes(kind)

    @property
    def packed_page_bytes(self) -> int:
        return self.page_bytes(PageKind.PACKED)

    @property
    def exact_page_bytes(self) -> int:
        return self.page_bytes(PageKind.EXACT)

    def tag_offset(self, kind: PageKind) -> int:
        """In a record."""
        return self.record_bytes(kind) - TAG_BYTES

    def fingerprint(
        self,
        model_fingerprint: bytes,
        offsets_hash: bytes = NO_FINGERPRINT,
        weight_dtype: str = "auto",
        arithmetic: str = "",
    ) -> bytes:
        """16 bytes over all that two workers must agree on before one reads the other's pages.
        `weight_dtype` is how they keep the weights: quantised ones compute other keys and values.
        `arithmetic` is what decides the last bits, where a worker promises those.
        """
        fields = (
            f"tandem page {TAG_MAGIC:x} codec={self.codec.name} block={self.block_size} "
            f"layers={self.num_layers} kv_heads={self.num_kv_heads} head_dim={self.head_dim} "
            f"packed={self.packed_page_bytes} exact={self.exact_page_bytes} weights={weight_dtype}"
            f"{arithmetic and f' arithmetic={arithmetic}'}"
        )
        digest = hashlib.blake2b(model_fingerprint + offsets_hash + fields.encode(), digest_size=16)
        return digest.digest()


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True, slots=True, kw_only=True)
class PageTag:
    """What a record says about itself: `head` is the KV head that it holds. `checksum` covers the
    whole record, itself counted as zero.
    """

    content_hash: bytes
    fingerprint: bytes
    num_tokens: int
    head: int
    incarnation: int
    generation: int
    checksum: int = 0
    magic: int = TAG_MAGIC

    def pack(self) -> bytes:
        assert len(self.content_hash) == 16
        assert len(self.fingerprint) == 16
        return _TAG.pack(
            self.content_hash,
            self.fingerprint,
            self.num_tokens,
            self.head,
            self.magic,
            self.incarnation,
            self.generation,
            self.checksum,
        )

    def with_checksum(self, checksum: int) -> "PageTag":
        return replace(self, checksum=checksum)

    @classmethod
    def unpack(cls, record: bytes | memoryview) -> "PageTag":
        content_hash, fingerprint, num_tokens, head, magic, incarnation, generation, checksum = (
            _TAG.unpack(record)
        )
        return cls(
            content_hash=content_hash,
            fingerprint=fingerprint,
            num_tokens=num_tokens,
            head=head,
            magic=magic,
            incarnation=incarnation,
            generation=generation,
            checksum=checksum,
        )


def tags_of(
    content_hashes: Sequence[bytes],
    fingerprint: bytes,
    num_tokens: Sequence[int],
    incarnations: int | Sequence[int],
    generations: Sequence[int],
) -> NDArray[np.uint8]:
    """[pages, TAG_BYTES]: as `PageTag.pack` does, of head 0 and without a checksum."""
    tags = np.zeros((len(content_hashes), TAG_BYTES), dtype=np.uint8)
    hashes = np.frombuffer(b"".join(content_hashes), dtype=np.uint8)
    tags[:, :16] = hashes.reshape(len(content_hashes), 16)
    tags[:, 16:32] = np.frombuffer(fingerprint, dtype=np.uint8)
    tags.view(np.uint16)[:, 16] = num_tokens
    tags.view(np.uint32)[:, 9] = TAG_MAGIC
    tags.view(np.uint64)[:, 5] = incarnations
    tags.view(np.uint64)[:, 6] = generations
    return tags


def with_heads(tags: NDArray[np.uint8], heads: Sequence[int]) -> NDArray[np.uint8]:
    """[pages * heads, TAG_BYTES]: each page's tag once for every head."""
    of_heads = np.repeat(tags, len(heads), axis=0)
    of_heads.view(np.uint16)[:, 17] = np.tile(np.array(heads, dtype=np.uint16), len(tags))
    return of_heads


def checksum_weights(num_words: int) -> NDArray[np.uint64]:
    """The odd factor of each 64-bit word of a record."""
    with np.errstate(over="ignore"):
        spread = np.arange(1, num_words + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    return spread ^ (spread >> np.uint64(32)) | np.uint64(1)


def checksum(page: NDArray[np.uint8]) -> int:
    """Sum modulo 2^64 of the record's words times their factors; the last word (the checksum's own)
    counts as zero.

    The plain definition; the engine's kernels compute the same.
    """
    words = page.view(np.uint64)[:-1]
    return int((words * checksum_weights(len(words))).sum(dtype=np.uint64))


def tag_mismatch(found: PageTag, wanted: PageTag) -> str | None:
    """Why a page is not the one that was asked for: the first field that differs, None when all
    agree.
    """
    if found.magic != wanted.magic:
        return (
            "magic: the page has no tag (cleared, or never written)"
            if found.magic == 0
            else "magic"
        )
    for field in (
        "content_hash",
        "fingerprint",
        "num_tokens",
        "head",
        "incarnation",
        "generation",
        "checksum",
    ):
        have, want = getattr(found, field), getattr(wanted, field)
        if have != want:
            return f"{field}: found {_show(have)}, wanted {_show(want)}"
    return None


def _show(value: int | bytes) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)
