"""KV codecs: how the elements of a page are stored. A new one is an entry in `CODECS`, and its seal
and load kernels.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from common.errors import ConfigError

DEFAULT_KV_CODEC: Final = "fp8_e3m4"


class ElementKind(IntEnum):
    """How one element is stored. The numbers are what kernels are told."""

    FP32 = 0
    BF16 = 1
    E3M4 = 2
    """Sign, three bits of exponent (bias 3), four of mantissa; up to 30. No infinities: 0x7F and
    0xFF are NaN, as in e4m3. Its 256 values: `engine.kernels.reference.e3m4_values`."""
    E4M3 = 3
    E5M2 = 4
    INT8 = 5
    """-127 to 127; -128 is what was not finite."""
    INT4 = 6
    """0 to 15; a byte holds channels 2i (its low half) and 2i + 1."""

    @property
    def num_bits(self) -> int:
        kinds = {ElementKind.FP32: 32, ElementKind.BF16: 16, ElementKind.INT4: 4}
        return kinds.get(self, 8)


class ScaleKind(IntEnum):
    """What stands beside the elements of one (layer, K or V, head) slice of a block."""

    NONE = 0
    POWER = 1
    """An E8M0 byte: a power of two, biased by 127."""
    FLOAT = 2
    """An fp32 factor."""
    RANGE = 3
    """bf16 factors, then bf16 minima: K's for each channel, V's for each token. A factor that is
    not a number marks values that were not finite."""


@dataclass(frozen=True, slots=True)
class Codec:
    """How a sealed block is stored."""

    name: str
    packed: ElementKind
    exact: ElementKind
    scale: ScaleKind

    @property
    def is_quantised(self) -> bool:
        """Sealing loses something, and offsets are subtracted before."""
        return self.scale is not ScaleKind.NONE


CODECS: Final[dict[str, Codec]] = {
    codec.name: codec
    for codec in (
        Codec("fp8_e3m4", ElementKind.E3M4, ElementKind.BF16, ScaleKind.POWER),
        Codec("fp8_e4m3", ElementKind.E4M3, ElementKind.BF16, ScaleKind.POWER),
        Codec("fp8_e5m2", ElementKind.E5M2, ElementKind.BF16, ScaleKind.POWER),
        Codec("int8", ElementKind.INT8, ElementKind.BF16, ScaleKind.FLOAT),
        Codec("int4", ElementKind.INT4, ElementKind.BF16, ScaleKind.RANGE),
        Codec("bf16", ElementKind.BF16, ElementKind.BF16, ScaleKind.NONE),
        Codec("fp32", ElementKind.FP32, ElementKind.FP32, ScaleKind.NONE),
    )
}


def codec_named(name: str) -> Codec:
    if name not in CODECS:
        raise ConfigError(
            f"unknown KV codec {name!r}; there are {', '.join(CODECS)}", param="kv_codec"
        )
    return CODECS[name]
