"""What Tandem reads from a Hugging Face model directory before it touches a weight. No torch here.

`ModelConfig.load(directory)` gives the facts the engine, the page layout and the router need, or
raises `UnsupportedModel` naming what the engine does not have. What a key means, and what a missing
one does, is as transformers has it for the model's family, or the key is refused by name.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from common.errors import UnsupportedModel


class RopeKind(StrEnum):
    NONE = "none"
    LINEAR = "linear"
    LLAMA3 = "llama3"


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding: base and, for long contexts, how its frequencies are stretched."""

    theta: float
    kind: RopeKind = RopeKind.NONE
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position_embeddings: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A dense decoder-only transformer of the Llama family."""

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    sliding_window: int | None
    """Tokens that a query sees at most, in some layer; None where that is all of them. Served only
    up to that length, where it changes nothing."""
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    attention_bias: bool
    """Of q, k and v."""
    output_bias: bool
    """Of the output projection, where the checkpoint has one."""
    qk_norm: bool
    eos_token_ids: tuple[int, ...]
    dtype: str

    @classmethod
    def load(cls, directory: str | Path) -> "ModelConfig":
        directory = Path(directory)
        generation = directory / "generation_config.json"
        return cls.parse(
            read_json(directory / "config.json"),
            read_json(generation) if generation.exists() else {},
        )

    @classmethod
    def parse(cls, config: Mapping[str, Any], generation: Mapping[str, Any]) -> "ModelConfig":
        family = _family(config)
        fields = Fields(config)
        _refuse_unsupported(fields, family)
        num_heads = fields.integer("num_attention_heads")
        hidden_size = fields.integer("hidden_size")
        num_kv_heads = _kv_heads(fields, family, num_heads)
        if num_heads % num_kv_heads:
            raise UnsupportedModel(
                f"{num_heads} attention heads cannot share {num_kv_heads} KV heads evenly"
            )
        has_bias = fields.boolean("attention_bias", False)
        return cls(
            architecture=family.architecture,
            num_layers=fields.integer("num_hidden_layers"),
            hidden_size=hidden_size,
            intermediate_size=fields.integer("intermediate_size"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=_head_dim(fields, family, hidden_size, num_heads),
            vocab_size=fields.integer("vocab_size"),
            max_position_embeddings=fields.integer("max_position_embeddings"),
            sliding_window=_sliding_window(fields, family),
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            rope=_rope(fields),
            tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
            attention_bias=family.has_qkv_bias or has_bias,
            output_bias=has_bias,
            qk_norm=family.has_qk_norm,
            eos_token_ids=_eos_token_ids(fields.integer("vocab_size"), config, generation),
            dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
        )

    @property
    def longest(self) -> int:
        """Tokens up to which nothing is outside of a window."""
        return min(
            self.max_position_embeddings, self.sliding_window or self.max_position_embeddings
        )

    def check_window(self, num_tokens: int) -> None:
        """Raises UnsupportedModel where a window would be active in sequences so long."""
        if num_tokens > self.longest:
            raise UnsupportedModel(
                f"sliding window attention (window {self.sliding_window}) is not supported; up to "
                f"that length it changes nothing: --max-model-len {self.sliding_window}"
            )

    def with_positions(self, count: int) -> "ModelConfig":
        """The same model with no more positions than that."""
        return replace(self, max_position_embeddings=min(count, self.max_position_embeddings))


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What transformers takes for granted about an architecture."""

    architecture: str
    model_type: str
    default_kv_heads: int | None
    """None: as many as heads."""
    default_head_dim: int | None = None
    """None: the hidden size, divided."""
    default_window: int | None = None
    """Of a family in which all layers slide; None where `use_sliding_window` says so."""
    has_qkv_bias: bool = False
    takes_bias: bool = False
    """`attention_bias` may be true."""
    has_qk_norm: bool = False


FAMILIES = {
    family.architecture: family
    for family in (
        Family(
            architecture="LlamaForCausalLM",
            model_type="llama",
            default_kv_heads=None,
            takes_bias=True,
        ),
        Family(
            architecture="MistralForCausalLM",
            model_type="mistral",
            default_kv_heads=8,
            default_window=4096,
        ),
        Family(
            architecture="Qwen2ForCausalLM",
            model_type="qwen2",
            default_kv_heads=32,
            has_qkv_bias=True,
        ),
        Family(
            architecture="Qwen3ForCausalLM",
            model_type="qwen3",
            default_kv_heads=32,
            default_head_dim=128,
            takes_bias=True,
            has_qk_norm=True,
        ),
    )
}


class Fields:
    """Keys of config.json, each with its type. Missing ones have the given default; null is not
    missing.
    """

    def __init__(self, given: Mapping[str, Any], prefix: str = "") -> None:
        self.given = given
        self._prefix = prefix

    def integer(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        value = self.given.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.wrong(key, "a positive integer" if least else "an integer from 0 on")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.given.get(key, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or value <= 0:
            raise self.wrong(key, "a positive number")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        value = self.given.get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def has(self, key: str) -> bool:
        """Null counts as nothing."""
        return self.given.get(key) is not None

    def wrong(self, key: str, what: str) -> UnsupportedModel:
        return UnsupportedModel(
            f"config.json: {self._prefix}{key} must be {what}, not {self.given.get(key)!r}"
        )


def read_json(path: Path) -> dict[str, Any]:
    """Raises UnsupportedModel, which names the file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UnsupportedModel(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise UnsupportedModel(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise UnsupportedModel(f"{path} does not hold a JSON object")
    return content


def _family(config: Mapping[str, Any]) -> Family:
    named = config.get("architectures") or []
    if not isinstance(named, list) or len(named) != 1 or named[0] not in FAMILIES:
        shown = ", ".join(map(str, named)) if isinstance(named, list) else str(named)
        raise UnsupportedModel(
            f"architecture {shown or '(none named)'} is not supported; "
            f"there are {', '.join(FAMILIES)}"
        )
    family = FAMILIES[named[0]]
    kind = config.get("model_type", family.model_type)
    if kind != family.model_type:
        raise UnsupportedModel(
            f"config.json: model_type is {kind!r}, and architectures says {family.architecture}, "
            f"whose model_type is {family.model_type!r}: other arithmetic, one of them is wrong"
        )
    return family


def _kv_heads(fields: Fields, family: Family, num_heads: int) -> int:
    if "num_key_value_heads" in fields.given and not fields.has("num_key_value_heads"):
        return num_heads
    return fields.integer("num_key_value_heads", family.default_kv_heads or num_heads)


def _head_dim(fields: Fields, family: Family, hidden_size: int, num_heads: int) -> int:
    default = family.default_head_dim
    if default is None and not fields.has("head_dim"):
        if hidden_size % num_heads:
            raise UnsupportedModel(
                f"config.json has no head_dim, and hidden_size {hidden_size} is no multiple of "
                f"{num_heads} heads"
            )
        head_dim = hidden_size // num_heads
    else:
        head_dim = fields.integer("head_dim", default)
    if head_dim % 2:
        raise UnsupportedModel(
            f"head_dim is {head_dim}: rotary embedding takes channels by pairs, so it must be even"
        )
    return head_dim


def _refuse_unsupported(fields: Fields, family: Family) -> None:
    config = fields.given
    quantised = config.get("quantization_config")
    if quantised:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        raise UnsupportedModel(
            f"quantised checkpoints (quantization_config: {method}) are not supported"
        )
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModel(f"activation {activation!r} is not supported, only silu")
    if fields.boolean("mlp_bias", False):
        raise UnsupportedModel("biases in the feed-forward layers (mlp_bias) are not supported")
    if fields.boolean("attention_bias", False) and not family.takes_bias:
        raise UnsupportedModel(f"attention_bias is not supported for {family.architecture}")


def _sliding_window(fields: Fields, family: Family) -> int | None:
    """Of layers that have one; as transformers works out which have."""
    kinds = fields.given.get("layer_types")
    if kinds is not None and not (isinstance(kinds, list) and set(map(str, kinds)) <= KINDS):
        raise UnsupportedModel(
            f"config.json: layer_types is {kinds!r}; there are {' and '.join(sorted(KINDS))}"
        )
    if family.default_window is not None:
        if kinds:
            raise UnsupportedModel(
                f"config.json: layer_types ({', '.join(sorted(set(kinds)))}) is nothing that a "
                f"{family.architecture} has"
            )
        return _window(fields, family.default_window)
    if not fields.boolean("use_sliding_window", False):
        if kinds and SLIDING in kinds:
            raise UnsupportedModel(
                f"config.json: layer_types names {SLIDING}, but use_sliding_window is not true"
            )
        return None
    first = fields.integer("max_window_layers", 28, least=0)
    slides = SLIDING in kinds if kinds else first < fields.integer("num_hidden_layers")
    window = _window(fields, 4096)
    if kinds and slides and window is None:
        raise fields.wrong("sliding_window", f"a number of tokens: layer_types names {SLIDING}")
    return window if slides else None


SLIDING = "sliding_attention"
KINDS = {"full_attention", SLIDING}


def _window(fields: Fields, default: int) -> int | None:
    if "sliding_window" in fields.given and not fields.has("sliding_window"):
        return None
    return fields.integer("sliding_window", default)


def _rope(fields: Fields) -> RopeConfig:
    """Both spellings: `rope_theta` beside `rope_scaling`, and the newer `rope_parameters` that
    holds both. Where a file has both, `rope_scaling` is what counts.
    """
    config = fields.given
    name = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    given = config.get(name) or {}
    if not isinstance(given, dict) or any(isinstance(value, dict) for value in given.values()):
        raise fields.wrong(name, "one set of parameters for all layers")
    scaling = Fields(given, f"{name}.")
    theta = (scaling if "rope_theta" in given else fields).number("rope_theta", 10000.0)
    part = scaling if scaling.has("partial_rotary_factor") else fields
    if part.has("partial_rotary_factor") and part.number("partial_rotary_factor") != 1.0:
        raise UnsupportedModel("partial_rotary_factor is not supported")
    kind = str(given.get("rope_type") or given.get("type") or "default")
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, kind=RopeKind.LINEAR, factor=scaling.number("factor"))
    if kind != "llama3":
        raise UnsupportedModel(
            f"rotary scaling {kind!r} ({name}) is not supported; there are linear and llama3"
        )
    original = "original_max_position_embeddings"
    rope = RopeConfig(
        theta=theta,
        kind=RopeKind.LLAMA3,
        factor=scaling.number("factor"),
        low_freq_factor=scaling.number("low_freq_factor"),
        high_freq_factor=scaling.number("high_freq_factor"),
        original_max_position_embeddings=(fields if fields.has(original) else scaling).integer(
            original
        ),
    )
    if rope.high_freq_factor <= rope.low_freq_factor:
        raise scaling.wrong("high_freq_factor", "larger than low_freq_factor")
    return rope


def _eos_token_ids(vocab_size: int, *sources: Mapping[str, Any]) -> tuple[int, ...]:
    ids: set[int] = set()
    for source in sources:
        value = source.get("eos_token_id")
        if value is None:
            continue
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, bool) or not isinstance(item, int):
                raise UnsupportedModel(f"eos_token_id holds {item!r}, which is no token id")
            if not 0 <= item < vocab_size:
                raise UnsupportedModel(
                    f"eos_token_id (config.json, generation_config.json) holds {item}, but the "
                    f"vocabulary has {vocab_size} tokens: take it out"
                )
            ids.add(item)
    return tuple(sorted(ids))
