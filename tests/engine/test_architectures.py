"""Tiny random models of every architecture give the logits that transformers gives."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from common.errors import UnsupportedModel
from common.model_config import ModelConfig
from engine.weights import Checkpoint, model_fingerprint
from tests.engine.conftest import make_runner
from tests.engine.driver import Driver
from tests.engine.tiny_models import TinyModel, give_offsets, make_tiny_model

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama with biases": ("llama", {"attention_bias": True}),
    "llama, one KV head": ("llama", {"num_key_value_heads": 1}),
    "llama, no groups": ("llama", {"num_key_value_heads": 4}),
    "llama, wide heads": ("llama", {"head_dim": 48}),
    "llama, linear rope": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 1e4}},
    ),
    "llama, llama3 rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama, odd sizes": ("llama", {"hidden_size": 104, "intermediate_size": 90, "head_dim": None}),
    "llama, heads of 100, biases": (
        "llama",
        {"hidden_size": 200, "num_attention_heads": 2, "head_dim": 100, "attention_bias": True},
    ),
    "qwen2, odd sizes": ("qwen2", {"hidden_size": 88, "intermediate_size": 50, "head_dim": 22}),
    "qwen3, odd sizes, tied": (
        "qwen3",
        {"hidden_size": 72, "intermediate_size": 99, "head_dim": 20, "tie_word_embeddings": True},
    ),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3 tied": ("qwen3", {"tie_word_embeddings": True}),
}


def engine_logits(path: Path, prompt: list[int], num_new: int, **options: Any) -> tuple[Any, Any]:
    driver = Driver(make_runner(path, **({"kv_codec": "fp32"} | options)))
    driver.add("a", prompt, max_tokens=num_new)
    driver.run(chunk_tokens=32)
    return np.stack(driver.logits["a"]), driver.tokens["a"]


def prompt_of(num_tokens: int, vocab_size: int = 331) -> list[int]:
    return [int(t) for t in np.random.default_rng(num_tokens).integers(0, vocab_size, num_tokens)]


def assert_same_logits(model: TinyModel, **options: Any) -> None:
    prompt = prompt_of(77)
    found, tokens = engine_logits(model.path, prompt, 6, **options)
    wanted = model.logits(prompt + tokens)[len(prompt) - 1 : -1].numpy()
    np.testing.assert_allclose(found, wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    family, changes = MODELS[name]
    assert_same_logits(make_tiny_model(tmp_path, family, **changes))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_checkpoints_are_widened_exactly(tmp_path: Path, dtype: torch.dtype) -> None:
    assert_same_logits(make_tiny_model(tmp_path, "llama", dtype=dtype))


def test_sharded_checkpoint(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path, "llama", max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert_same_logits(model)


def test_older_rope_spelling_means_the_same(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, "llama", rope_parameters=LLAMA3)
    config = json.loads((tmp_path / "config.json").read_text())
    newer = ModelConfig.parse(config, {})
    parameters = config.pop("rope_parameters")
    theta = parameters.pop("rope_theta")
    older = ModelConfig.parse(config | {"rope_scaling": parameters, "rope_theta": theta}, {})
    kind = parameters.pop("rope_type")
    oldest = config | {"rope_scaling": parameters | {"type": kind}, "rope_theta": theta}
    assert newer.rope == older.rope == ModelConfig.parse(oldest, {}).rope


def test_t44_heads_of_an_odd_size_keep_the_same_bits_in_packed_pages(tmp_path: Path) -> None:
    """Cut into chunks or not; and as near to fp32 as without random offsets to subtract."""
    model = make_tiny_model(tmp_path, "llama", hidden_size=104, head_dim=None)
    prompt = prompt_of(77)
    plain, tokens = engine_logits(tmp_path, prompt, 6, kv_codec="fp8_e3m4")
    wanted = model.logits(prompt + tokens)[len(prompt) - 1 : -1].numpy()
    assert np.abs(plain - wanted).max() < 0.05
    give_offsets(tmp_path)
    whole, tokens = engine_logits(tmp_path, prompt, 6, kv_codec="fp8_e3m4")
    driver = Driver(make_runner(tmp_path, kv_codec="fp8_e3m4", num_threads=2))
    driver.add("a", prompt, max_tokens=6)
    driver.run(chunk_tokens=16)
    assert np.array_equal(np.stack(driver.logits["a"]), whole)
    wanted = model.logits(prompt + tokens)[len(prompt) - 1 : -1].numpy()
    assert np.abs(whole - wanted).max() < 0.1


def test_block_size_32(tmp_path: Path) -> None:
    assert_same_logits(make_tiny_model(tmp_path, "llama"), block_size=32)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ({"architectures": []}, "none named"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor"),
        ({"rope_parameters": None, "rope_scaling": {"type": "su", "factor": 2.0}}, "su"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"num_key_value_heads": 3}, "3 KV heads"),
        ({"hidden_size": None}, "hidden_size"),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}, "window 8"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
    ],
)
def test_unsupported_models_are_named(tiny: TinyModel, change: dict[str, Any], named: str) -> None:
    config = json.loads((tiny.path / "config.json").read_text()) | change
    with pytest.raises(UnsupportedModel, match=named):
        ModelConfig.parse(config, {}).check_window(2048)


def test_mistral_window_counts_only_when_it_would_be_active(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, "mistral", sliding_window=4096)
    assert ModelConfig.load(tmp_path).architecture == "MistralForCausalLM"
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"sliding_window": 512}
    with pytest.raises(UnsupportedModel, match=r"window 512.*--max-model-len 512"):
        ModelConfig.parse(config, {}).check_window(2048)
    ModelConfig.parse(config, {}).check_window(512)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match="window 512"):
        make_runner(tmp_path, num_blocks=4, num_exact=4)


def test_end_of_text_ids_are_the_union(tiny: TinyModel) -> None:
    config = json.loads((tiny.path / "config.json").read_text()) | {"eos_token_id": 5}
    assert ModelConfig.parse(config, {"eos_token_id": [7, 5]}).eos_token_ids == (5, 7)
    assert ModelConfig.parse(config | {"eos_token_id": None}, {}).eos_token_ids == ()
    wrong_ids: list[Any] = ["2", [2, "3"], True, {}]
    for wrong in wrong_ids:
        with pytest.raises(UnsupportedModel, match="no token id"):
            ModelConfig.parse(config, {"eos_token_id": wrong})


def test_damaged_checkpoints_are_explained(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, "llama")
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    with pytest.raises(UnsupportedModel, match="interrupted"):
        Checkpoint.open(tmp_path)
    file.write_bytes(b"\xff" * 64)
    with pytest.raises(UnsupportedModel, match="not a safetensors file"):
        Checkpoint.open(tmp_path)
    file.unlink()
    with pytest.raises(UnsupportedModel, match="neither"):
        make_runner(tmp_path, num_blocks=4, num_exact=4)


def test_missing_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, "llama")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    save_file(tensors | {name: torch.zeros(8, 8)}, file)
    with pytest.raises(UnsupportedModel, match=r"up_proj.weight has shape \[8, 8\]"):
        make_runner(tmp_path, num_blocks=4, num_exact=4)
    del tensors[name]
    save_file(tensors, file)
    with pytest.raises(UnsupportedModel, match=r"no tensor model\.layers\.1\.mlp\.up_proj"):
        make_runner(tmp_path, num_blocks=4, num_exact=4)


def test_fingerprint_tells_fine_tunes_apart(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, "llama")
    file = tmp_path / "model.safetensors"
    before = model_fingerprint(tmp_path)
    assert before == model_fingerprint(tmp_path)
    assert len(before) == 16
    tensors = load_file(file)
    for name, tensor in tensors.items():
        save_file(tensors | {name: tensor * 1.001}, file)
        assert model_fingerprint(tmp_path) != before, name
    save_file(tensors, file)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    assert model_fingerprint(tmp_path) != before
