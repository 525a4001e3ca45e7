"""Keys of config.json that change arithmetic are honoured as transformers honours them, or refused
by name: nothing between.

A tiny model of each family is loaded with keys changed, added and taken away, by us and by
transformers. Either our logits are transformers' within 1e-4 (fp32), or we name a key that was
changed, or a tensor that no longer fits.
"""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from common.errors import UnsupportedModel
from common.model_config import ModelConfig
from tests.engine.test_architectures import LLAMA3, engine_logits, prompt_of
from tests.engine.tiny_models import CONFIGS, TinyModel, make_tiny_model

MISSING = object()
PROMPT = prompt_of(77)
FULL, SLIDING = "full_attention", "sliding_attention"
LINEAR = {"rope_type": "linear", "factor": 2.5}
OLD_LLAMA3 = {k: v for k, v in LLAMA3.items() if k != "rope_theta"}

VALUES: dict[str, list[Any]] = {
    "attention_bias": [True, False, None, MISSING, 1],
    "attention_dropout": [0.5],
    "attention_multiplier": [3.0],
    "embedding_multiplier": [2.0],
    "final_logit_softcapping": [5.0],
    "head_dim": [MISSING, None, 32, 17, "16"],
    "hidden_act": ["swish", "gelu", None, MISSING],
    "hidden_size": [80, None],
    "intermediate_size": [80],
    "layer_types": [MISSING, None, [FULL] * 3, [FULL, FULL, SLIDING], ["linear_attention"] * 3],
    "logits_scaling": [4.0],
    "max_position_embeddings": [128, 8192],
    "max_window_layers": [0, 2, 3, 28, MISSING],
    "mlp_bias": [True, None],
    "model_type": ["llama", "mistral", "qwen2", "qwen3", "granite", None],
    "num_attention_heads": [2, 8],
    "num_hidden_layers": [2, 4],
    "num_key_value_heads": [MISSING, None, 1, 4, 3],
    "original_max_position_embeddings": [32],
    "partial_rotary_factor": [1.0, 0.5],
    "pretraining_tp": [2],
    "quantization_config": [None, {"quant_method": "fp8"}, "fp8"],
    "residual_multiplier": [0.5],
    "rms_norm_eps": [1e-2, MISSING, None, "1e-5"],
    "rope_parameters": [
        *(MISSING, None, {}, {"rope_theta": 300.0}, LINEAR, LLAMA3, LINEAR | {"rope_theta": 300.0}),
        {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4},
        {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        {FULL: {"rope_type": "default", "rope_theta": 1e4}},
    ],
    "rope_scaling": [
        *(None, {}, LINEAR, {"type": "linear", "factor": 2.0}, OLD_LLAMA3, {"rope_theta": 300.0}),
        {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64},
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "linear", "factor": 0},
    ],
    "rope_theta": [300.0, 300, None, "300"],
    "sliding_window": [MISSING, None, 32, 4096],
    "tie_word_embeddings": [True, MISSING, None],
    "use_sliding_window": [True, False, None],
    "vocab_size": [300],
}
NAMED = (
    *("has shape", "no tensor", "does not have", "lm_head.weight"),
    *("rotary", "window", "heads", "activation", "biases", "quantised"),
)
"""Of messages that name a tensor, or what a key is about."""

STUMBLES = (("qwen2", "head_dim"), ("mistral", "layer_types"))

Change = dict[str, Any]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[TinyModel, Change]]:
    found = {}
    for family in CONFIGS:
        more: Change = {"sliding_window": None} if family == "mistral" else {}
        model = make_tiny_model(tmp_path_factory.mktemp(family), family, **more)
        found[family] = model, json.loads((model.path / "config.json").read_text())
    return found


def changed(config: Change, change: Change) -> Change:
    return {k: v for k, v in (config | change).items() if v is not MISSING}


def check(
    family: str, models: dict[str, tuple[TinyModel, Change]], change: Change, note: str = ""
) -> str:
    """`equal`, `refused`, or `unknown` where transformers stumbles over a null that others take
    for a missing key.
    """
    if any(family == one and change.get(key, MISSING) is None for one, key in STUMBLES):
        return "unknown"
    model, config = models[family]
    shown = (
        f"{family} { {k: v if v is not MISSING else 'MISSING' for k, v in change.items()} } {note}"
    )
    (model.path / "config.json").write_text(json.dumps(changed(config, change)))
    try:
        found, tokens = engine_logits(model.path, PROMPT, 3, num_blocks=16, num_exact=2)
    except UnsupportedModel as error:
        reason = str(error)
    else:
        reason = ""
    if reason:
        assert any(name in reason for name in (*change, *NAMED)), f"{shown}: {reason}"
        return "refused"
    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(model.path, dtype=torch.float32)
    theirs.eval()
    with torch.no_grad():
        logits = theirs(torch.tensor([PROMPT + tokens])).logits[0]
    wanted = logits[len(PROMPT) - 1 : -1].numpy()
    np.testing.assert_allclose(found, wanted, atol=1e-4, rtol=0, err_msg=shown)
    return "equal"


def drawn(chance: random.Random, num_keys: int) -> Change:
    keys = chance.sample(sorted(VALUES), num_keys)
    return {key: chance.choice(VALUES[key]) for key in keys}


@pytest.mark.parametrize("family", CONFIGS)
def test_changed_keys_are_honoured_or_refused(
    family: str, models: dict[str, tuple[TinyModel, Change]]
) -> None:
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    for num_keys in (1, 1, 1, 1, 2, 2, 3, 3):
        check(family, models, drawn(chance, num_keys), f"seed {seed}")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", CONFIGS)
def test_every_key_and_many_combinations_are_honoured_or_refused(
    family: str, models: dict[str, tuple[TinyModel, Change]]
) -> None:
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    outcomes = [check(family, models, {k: v}) for k, values in VALUES.items() for v in values]
    assert outcomes.count("equal") > 30
    assert outcomes.count("refused") > 30
    for _ in range(150):
        check(family, models, drawn(chance, chance.choice((2, 3, 4))), f"seed {seed}")


YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    ("family", "change", "outcome"),
    [
        ("qwen2", {"rope_scaling": YARN}, "refused"),
        ("qwen2", {"rope_scaling": LINEAR}, "equal"),
        ("qwen2", {"rope_scaling": LINEAR, "rope_theta": 300.0}, "equal"),
        ("mistral", {"sliding_window": MISSING, "max_position_embeddings": 8192}, "refused"),
        ("mistral", {"sliding_window": MISSING}, "equal"),
        ("llama", {"model_type": "granite"}, "refused"),
        ("llama", {"model_type": "qwen3"}, "refused"),
        ("qwen3", {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, "refused"),
        ("qwen3", {"head_dim": MISSING}, "refused"),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 3}, "equal"),
        ("qwen2", {"use_sliding_window": True, "layer_types": [FULL] * 3}, "equal"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": None}, "equal"),
        (
            "qwen2",
            {"use_sliding_window": True, "max_window_layers": 2, "layer_types": MISSING,
             "sliding_window": 32},
            "refused",
        ),
        ("llama", {"hidden_act": "swish"}, "equal"),
    ],
)  # fmt: skip
def test_t40_t42_t43_t44_keys_that_went_wrong(
    family: str, change: Change, outcome: str, models: dict[str, tuple[TinyModel, Change]]
) -> None:
    assert check(family, models, change) == outcome


def test_t44_mistral_v0_1_is_served_up_to_its_window() -> None:
    config = ModelConfig.parse(MISTRAL, {})
    assert (config.sliding_window, config.longest) == (4096, 4096)
    config.check_window(4096)
    with pytest.raises(UnsupportedModel, match="window 4096"):
        config.check_window(4097)


MISTRAL: Change = {
    "architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 32768,
    "sliding_window": 4096, "rope_theta": 10000.0, "rms_norm_eps": 1e-05,
}  # fmt: skip


def test_t40_what_wins_is_what_transformers_takes(tmp_path: Path) -> None:
    """`rope_scaling` beside `rope_parameters`, which transformers 5 writes."""
    both = MISTRAL | {"rope_parameters": LLAMA3, "rope_scaling": LINEAR | {"rope_theta": 5.0}}
    rope = ModelConfig.parse(both, {}).rope
    assert (rope.kind, rope.factor, rope.theta) == ("linear", 2.5, 5.0)
    rope = ModelConfig.parse(both | {"rope_scaling": LINEAR}, {}).rope
    assert (rope.kind, rope.theta) == ("linear", 10000.0)
    assert ModelConfig.parse(both | {"rope_scaling": {}}, {}).rope.kind == "llama3"
