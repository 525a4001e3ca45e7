"""What one rank has of a model: heads, a part of the feed-forward layer, a part of the vocabulary.

Raise ConfigError where a model is too narrow for so many ranks.
"""

from dataclasses import dataclass

from common.errors import ConfigError
from common.model_config import ModelConfig
from common.ranks import RankShare, deal, shares
from engine.int8_weights import GROUP
from engine.padding import PANEL, PaddedSizes

GPU_UNIT = 128
"""Inputs of a product that a GPU takes at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShare:
    rank: int
    num_ranks: int
    heads: range
    kv_heads: range
    inter: range
    vocab: range

    @property
    def is_alone(self) -> bool:
        return self.num_ranks == 1


def cpu_share(config: ModelConfig, heads: RankShare) -> ModelShare:
    """In padded sizes. Whole groups of int8 weights where there are enough, so that they are those
    of one rank.
    """
    panels = -(-config.vocab_size // PANEL)
    if panels < heads.num_ranks:
        raise _too_narrow(heads.num_ranks)
    part = deal(panels, heads.num_ranks)[heads.rank]
    vocab = range(part.start * PANEL, part.stop * PANEL)
    return _share(heads, _inter(PaddedSizes.of(config).inter, heads, (GROUP, PANEL)), vocab)


def gpu_share(config: ModelConfig, heads: RankShare) -> ModelShare:
    """All parts of the vocabulary are as long, the last ones beyond its end."""
    size = -(-config.vocab_size // (heads.num_ranks * PANEL)) * PANEL
    if heads.num_ranks == 1:
        size = config.vocab_size
    vocab = range(heads.rank * size, (heads.rank + 1) * size)
    units = (GPU_UNIT, PANEL, 1)
    return _share(heads, _inter(config.intermediate_size, heads, units), vocab)


def alone(config: ModelConfig) -> RankShare:
    return shares(1, config.num_heads, config.num_kv_heads)[0]


def within(part: range, size: int) -> range:
    """What is real of a part that may go beyond the end."""
    return range(min(part.start, size), min(part.stop, size))


def _inter(size: int, heads: RankShare, units: tuple[int, ...]) -> range:
    """A part in the largest of these units of which there are enough."""
    for unit in units:
        count = -(-size // unit)
        if size // unit >= heads.num_ranks:
            part = deal(count, heads.num_ranks)[heads.rank]
            return range(part.start * unit, min(part.stop * unit, size))
    raise _too_narrow(heads.num_ranks)


def _share(heads: RankShare, inter: range, vocab: range) -> ModelShare:
    return ModelShare(
        rank=heads.rank,
        num_ranks=heads.num_ranks,
        heads=heads.heads,
        kv_heads=heads.kv_heads,
        inter=inter,
        vocab=vocab,
    )


def _too_narrow(num_ranks: int) -> ConfigError:
    return ConfigError(
        f"--tensor-parallel {num_ranks}: the model is too narrow for so many ranks",
        param="tensor_parallel",
    )
