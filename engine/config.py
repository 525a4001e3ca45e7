"""What an engine is made of, in one value: which model, how it is kept and computed, and how much
memory its pages get.
"""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from common.codecs import DEFAULT_KV_CODEC, codec_named
from common.errors import ConfigError
from common.model_config import ModelConfig
from common.pages import PageLayout
from common.ranks import RankShare, shares
from engine.padding import padded
from engine.pool_size import NO_PAGES, PoolShare, PoolSize

MIN_POSITIONS = 1024
"""Of the rotary tables, which are as long as a request can get: what the self-test takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """The largest step that a worker plans."""

    chunk_tokens: int
    num_decodes: int
    """Graphs are captured for as many; 0 for a worker that does not decode."""
    max_tokens: int
    """Of one request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    model: str | Path
    """Its directory."""
    kv_codec: str = DEFAULT_KV_CODEC
    block_size: int = 16
    pool: PoolSize | PoolShare = NO_PAGES
    """A share is for GPUs, where it says how large the pool gets."""
    landing: PoolSize = NO_PAGES
    device: str = "cpu"
    dtype: str = "auto"
    weight_dtype: str = "auto"
    batch_invariant: bool = False
    """For GPUs; on a CPU rows never depend on their batch."""
    num_threads: int = 1
    """Of each rank."""
    num_ranks: int = 1
    incarnation: int = 0
    max_num_tokens: int = 512
    """Rows of a step."""
    max_num_decodes: int = 0
    """Those of them that decode: a GPU captures graphs for so many."""
    max_model_len: int | None = None
    is_calibrated: bool = True
    """False leaves the model's offsets aside."""

    def __post_init__(self) -> None:
        if self.device not in ("cpu", "cuda"):
            raise ConfigError(f"device {self.device!r} is neither cpu nor cuda", param="device")
        if self.num_threads < 1:
            raise ConfigError(
                f"a worker needs at least one thread, not {self.num_threads}", param="threads"
            )

    def load_model(self) -> ModelConfig:
        """The model's own numbers, with as many positions as a request can have here."""
        model = ModelConfig.load(self.model)
        longest = self.longest(model)
        model.check_window(longest)
        room = longest
        if self.device == "cpu":  # the pool of a GPU is sized later
            assert isinstance(self.pool, PoolSize), "only a GPU's pool is sized by what is left"
            room = (self.pool.num_packed + self.pool.num_exact) * self.block_size
        return model.with_positions(max(min(longest, room), MIN_POSITIONS))

    def longest(self, model: ModelConfig) -> int:
        """Tokens of one request."""
        return self.max_model_len or model.max_position_embeddings

    def layout(self, model: ModelConfig) -> PageLayout:
        width = padded(model.head_dim) if self.device == "cpu" else model.head_dim
        return PageLayout.of(model, self.block_size, codec_named(self.kv_codec), head_dim=width)

    def shares(self, model: ModelConfig) -> tuple[RankShare, ...]:
        """Raises ConfigError."""
        return shares(self.num_ranks, model.num_heads, model.num_kv_heads)

    def rank_layout(self, model: ModelConfig, rank: int) -> PageLayout:
        """Of the pages of one rank."""
        heads = self.shares(model)[rank].kv_heads
        return replace(self.layout(model), num_kv_heads=len(heads))

    def fields(self) -> dict[str, Any]:
        """Plain values, for `of_fields` in another process. Of a CPU's: its pool has a size."""
        return {**asdict(self), "model": str(self.model)}

    @classmethod
    def of_fields(cls, fields: dict[str, Any]) -> "EngineConfig":
        sizes = {name: PoolSize(**fields[name]) for name in ("pool", "landing")}
        return cls(**{**fields, **sizes})

    def limits(self, model: ModelConfig) -> StepLimits:
        longest = self.longest(model)
        return StepLimits(
            chunk_tokens=min(self.max_num_tokens - self.max_num_decodes, longest),
            num_decodes=self.max_num_decodes,
            max_tokens=longest,
        )
