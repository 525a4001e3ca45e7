"""T12: what is not finite is found before a worker says that it is ready, in whichever tensor and
layer it is; and while it serves, in pages that are held for the test.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from common.errors import InternalError, UnsupportedModel
from engine.runner import ModelRunner
from tests.engine.conftest import make_runner
from tests.engine.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), "llama", num_hidden_layers=5).path


def copy_with(source: Path, target: Path, name: str, value: float, dtype: torch.dtype) -> Path:
    """One element of one tensor is `value`."""
    for path in source.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    weights = {key: w.to(dtype) for key, w in load_file(source / "model.safetensors").items()}
    weights[name].view(-1)[weights[name].numel() * 2 // 3] = value
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


def runner_of(path: Path) -> ModelRunner:
    return make_runner(path, num_blocks=40, num_exact=8, max_num_tokens=64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    "name",
    ["model.layers.4.mlp.down_proj.weight", "model.embed_tokens.weight", "model.norm.weight"],
)
def test_weights_that_are_not_finite_are_refused_by_name(
    source: Path, tmp_path: Path, name: str, value: float, dtype: torch.dtype
) -> None:
    path = copy_with(source, tmp_path, name, value, dtype)
    with pytest.raises(UnsupportedModel, match=f"{name} has 1 values that are not finite"):
        runner_of(path)


def test_large_weights_are_not_taken_for_infinite_ones(source: Path, tmp_path: Path) -> None:
    """Their sum overflows, they do not: what they make of the output, the self-test says."""
    path = copy_with(source, tmp_path, "model.layers.0.input_layernorm.weight", 1.0, torch.float32)
    weights = load_file(path / "model.safetensors")
    weights["model.layers.0.mlp.down_proj.weight"][:] = 3e38
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InternalError, match="not finite"):
        runner_of(path).self_test()


@pytest.mark.parametrize("layer", range(5))
def test_every_layer_is_in_the_self_test(source: Path, tmp_path: Path, layer: int) -> None:
    prefix = f"model.layers.{layer}."
    path = copy_with(source, tmp_path, prefix + "self_attn.o_proj.weight", 1.0, torch.float32)
    weights = load_file(path / "model.safetensors")
    weights[prefix + "input_layernorm.weight"][:] = 1e30
    weights[prefix + "self_attn.o_proj.weight"][:] = 3e38
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InternalError, match="self-test: the model's logits are not finite"):
        runner_of(path).self_test()


def test_while_serving_only_its_own_pages_are_touched(source: Path) -> None:
    runner = runner_of(source)
    runner.self_test()
    rng = np.random.default_rng(3)
    for arena in (runner.pool.packed, runner.pool.exact):
        noise = rng.integers(0, 255, tuple(arena.shape), dtype=np.uint8)
        arena[:] = torch.from_numpy(noise)
    packed, exact = runner.pool.packed.clone(), runner.pool.exact.clone()
    runner.self_test_on((3, 20, 31), 5)
    changed = [row for row in range(40) if not torch.equal(packed[row], runner.pool.packed[row])]
    assert changed == [20, 31]
    changed = [row for row in range(8) if not torch.equal(exact[row], runner.pool.exact[row])]
    assert changed == [3]
