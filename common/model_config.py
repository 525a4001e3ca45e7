"""What Tandem reads from a Hugging Face model directory before it touches a weight. No torch here.

`ModelConfig.load(directory)` gives the facts the engine, the page layout and the router need, or
raises `UnsupportedModel` naming what the engine does not have. Nothing unknown is replaced by a
default silently.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
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
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    attention_bias: bool
    output_bias: bool
    qk_norm: bool
    eos_token_ids: tuple[int, ...]
    dtype: str

    @classmethod
    def load(cls, directory: str | Path) -> "ModelConfig":
        directory = Path(directory)
        generation = directory / "generation_config.json"
        return cls.parse(
            _read_json(directory / "config.json"),
            _read_json(generation) if generation.exists() else {},
        )

    @classmethod
    def parse(cls, config: Mapping[str, Any], generation: Mapping[str, Any]) -> "ModelConfig":
        architecture = _architecture(config)
        _refuse_unsupported(config, architecture)
        num_heads = _integer(config, "num_attention_heads")
        hidden_size = _integer(config, "hidden_size")
        num_kv_heads = _integer(config, "num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise UnsupportedModel(
                f"{num_heads} attention heads cannot share {num_kv_heads} KV heads evenly"
            )
        return cls(
            architecture=architecture,
            num_layers=_integer(config, "num_hidden_layers"),
            hidden_size=hidden_size,
            intermediate_size=_integer(config, "intermediate_size"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=_integer(config, "head_dim", hidden_size // num_heads),
            vocab_size=_integer(config, "vocab_size"),
            max_position_embeddings=_integer(config, "max_position_embeddings"),
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope=_rope(config),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            attention_bias=architecture == "Qwen2ForCausalLM"
            or bool(config.get("attention_bias", False)),
            output_bias=architecture != "Qwen2ForCausalLM"
            and bool(config.get("attention_bias", False)),
            qk_norm=architecture == "Qwen3ForCausalLM",
            eos_token_ids=_eos_token_ids(config, generation),
            dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
        )


ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UnsupportedModel(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise UnsupportedModel(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise UnsupportedModel(f"{path} does not hold a JSON object")
    return content


def _architecture(config: Mapping[str, Any]) -> str:
    named = config.get("architectures") or []
    if len(named) != 1 or named[0] not in ARCHITECTURES:
        raise UnsupportedModel(
            f"architecture {', '.join(map(str, named)) or '(none named)'} is not supported; "
            f"there are {', '.join(ARCHITECTURES)}"
        )
    return str(named[0])


def _integer(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise UnsupportedModel(f"config.json: {key} must be a positive integer, not {value!r}")
    return value


def _refuse_unsupported(config: Mapping[str, Any], architecture: str) -> None:
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise UnsupportedModel(
            f"quantised checkpoints (quantization_config: {method}) are not supported"
        )
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedModel(f"activation {activation!r} is not supported, only silu")
    if config.get("mlp_bias"):
        raise UnsupportedModel("biases in the feed-forward layers (mlp_bias) are not supported")
    if (
        architecture != "LlamaForCausalLM"
        and architecture != "Qwen3ForCausalLM"
        and config.get("attention_bias")
    ):
        raise UnsupportedModel(f"attention_bias is not supported for {architecture}")
    if float(config.get("partial_rotary_factor") or 1.0) != 1.0:
        raise UnsupportedModel("partial_rotary_factor is not supported")
    _refuse_sliding_window(config, architecture)


def _refuse_sliding_window(config: Mapping[str, Any], architecture: str) -> None:
    """A window that is never active is harmless; one that would be is refused."""
    window = config.get("sliding_window")
    layers = config.get("layer_types") or []
    if "sliding_attention" in layers or set(layers) - {"full_attention", "sliding_attention"}:
        raise UnsupportedModel(
            f"attention layers of kinds {sorted(set(layers))} are not supported, only full"
        )
    if architecture == "MistralForCausalLM":
        is_active = window is not None and window < _integer(config, "max_position_embeddings")
    else:
        is_active = bool(config.get("use_sliding_window", False))
    if is_active:
        raise UnsupportedModel(f"sliding window attention (window {window}) is not supported")


def _rope(config: Mapping[str, Any]) -> RopeConfig:
    """Both spellings: `rope_theta` beside `rope_scaling`, and the newer `rope_parameters` that
    holds both.
    """
    scaling: Mapping[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(scaling.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(
            theta=theta, kind=RopeKind.LINEAR, factor=float(_needed(scaling, "factor"))
        )
    if kind == "llama3":
        return RopeConfig(
            theta=theta,
            kind=RopeKind.LLAMA3,
            factor=float(_needed(scaling, "factor")),
            low_freq_factor=float(_needed(scaling, "low_freq_factor")),
            high_freq_factor=float(_needed(scaling, "high_freq_factor")),
            original_max_position_embeddings=int(
                _needed(scaling, "original_max_position_embeddings")
            ),
        )
    raise UnsupportedModel(f"rotary scaling {kind!r} is not supported; there are linear and llama3")


def _needed(scaling: Mapping[str, Any], key: str) -> Any:
    if key not in scaling:
        raise UnsupportedModel(f"config.json: rotary scaling has no {key}")
    return scaling[key]


def _eos_token_ids(*sources: Mapping[str, Any]) -> tuple[int, ...]:
    ids: set[int] = set()
    for source in sources:
        value = source.get("eos_token_id")
        if value is None:
            continue
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, bool) or not isinstance(item, int):
                raise UnsupportedModel(f"eos_token_id holds {item!r}, which is no token id")
            ids.add(item)
    return tuple(sorted(ids))
