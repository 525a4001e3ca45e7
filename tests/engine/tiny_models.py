"""Tiny random checkpoints, written the way transformers writes real ones."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from common.model_config import ModelConfig
from engine.offsets import means_shape, save_means

CONFIGS: dict[str, tuple[Any, Any]] = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
}

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 331,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class TinyModel:
    path: Path
    reference: Any

    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """[num_tokens, vocab] by transformers."""
        with torch.no_grad():
            return self.reference(torch.tensor([token_ids])).logits[0]  # type: ignore[no-any-return]


def make_tiny_model(
    path: Path,
    family: str,
    *,
    max_shard_size: str = "5GB",
    dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> TinyModel:
    config_class, model_class = CONFIGS[family]
    torch.manual_seed(7)
    model = model_class(config_class(**(SIZES | changes)))
    for name, parameter in model.named_parameters():
        scale = 0.3 if name.endswith("bias") or "norm" in name else 0.08
        torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=scale)
    model.to(dtype).save_pretrained(path, max_shard_size=max_shard_size)
    return TinyModel(path, model_class.from_pretrained(path, dtype=torch.float32).eval())


def give_offsets(path: Path, seed: int = 1) -> Path:
    """Means of K and V as `tandem calibrate` would leave them, but random."""
    generator = torch.Generator().manual_seed(seed)
    means = torch.randn(means_shape(ModelConfig.load(path)), generator=generator)
    return save_means(path, means.bfloat16(), {})
