"""Checkpoints that are not what they say are refused, naming file and tensor; nothing is taken for
granted silently.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.errors import UnsupportedModel
from engine.weights import INDEX, SINGLE, Checkpoint
from tests.engine.conftest import make_runner
from tests.engine.test_architectures import assert_same_logits
from tests.engine.tiny_models import TinyModel, make_tiny_model

Q_PROJ = "model.layers.1.self_attn.q_proj"


def load(path: Path) -> None:
    make_runner(path, num_blocks=4, num_exact=4)


# --- which file a tensor is in (T16) --------------------------------------------------------------


@pytest.fixture
def sharded(tmp_path: Path) -> TinyModel:
    model = make_tiny_model(tmp_path, "llama", max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    return model


def change_index(path: Path, change: Callable[[dict[str, str]], None]) -> None:
    index = json.loads((path / INDEX).read_text())
    change(index["weight_map"])
    (path / INDEX).write_text(json.dumps(index))


def test_t16_a_stale_copy_in_another_shard_is_refused(sharded: TinyModel) -> None:
    name = f"{Q_PROJ}.weight"
    home = json.loads((sharded.path / INDEX).read_text())["weight_map"][name]
    others = sorted({p.name for p in sharded.path.glob("*.safetensors")} - {home})
    for other in (others[0], others[-1]):
        file = sharded.path / other
        before = file.read_bytes()
        save_file(load_file(file) | {name: torch.zeros(64, 64)}, file)
        with pytest.raises(UnsupportedModel, match=rf"{other} holds {name}, .* has in {home}"):
            load(sharded.path)
        file.write_bytes(before)
    assert_same_logits(sharded)


def test_t16_an_index_names_what_is_there_and_nothing_else(sharded: TinyModel) -> None:
    whole = (sharded.path / INDEX).read_text()
    first = sorted(p.name for p in sharded.path.glob("*.safetensors"))[0]
    change_index(sharded.path, lambda names: names.update({"model.ghost.weight": first}))
    with pytest.raises(UnsupportedModel, match=rf"model.ghost.weight in {first}, which does not"):
        load(sharded.path)
    (sharded.path / INDEX).write_text(whole)
    change_index(sharded.path, lambda names: names.__delitem__(f"{Q_PROJ}.weight"))
    with pytest.raises(UnsupportedModel, match=rf"holds {Q_PROJ}.weight, which .* does not name"):
        load(sharded.path)
    (sharded.path / INDEX).write_text(whole)
    change_index(
        sharded.path, lambda names: names.update({"model.norm.weight": "gone.safetensors"})
    )
    with pytest.raises(
        UnsupportedModel, match=r"model.norm.weight in 'gone.safetensors', .*not th"
    ):
        load(sharded.path)
    for broken in ("[]", '{"weight_map": 5}', '{"weight_map": {"a": 5}}', "{", "[" * 100_000):
        (sharded.path / INDEX).write_text(broken)
        with pytest.raises(UnsupportedModel, match=INDEX):
            load(sharded.path)


def test_t16_a_single_file_beside_shards_of_another_is_refused(sharded: TinyModel) -> None:
    tensors = {k: v for p in sharded.path.glob("*.safetensors") for k, v in load_file(p).items()}
    save_file(tensors, sharded.path / SINGLE)
    with pytest.raises(UnsupportedModel, match="names other files: remove one"):
        load(sharded.path)
    (sharded.path / INDEX).unlink()
    assert_same_logits(sharded)


# --- every tensor is read (T17, T41, T44) ---------------------------------------------------------


def with_tensors(path: Path, **more: torch.Tensor) -> None:
    file = path / SINGLE
    save_file(load_file(file) | more, file)


@pytest.mark.parametrize(
    "name", [f"{Q_PROJ}.bias", f"{Q_PROJ}.weight_scale", "model.layers.7.mlp.up_proj.weight"]
)
def test_t17_a_tensor_that_nobody_reads_is_named(tmp_path: Path, name: str) -> None:
    make_tiny_model(tmp_path, "llama")
    with_tensors(tmp_path, **{name: torch.zeros(64)})
    with pytest.raises(UnsupportedModel, match=rf"does not have: {name}$"):
        load(tmp_path)


def test_t17_the_first_few_are_named(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, "llama")
    with_tensors(tmp_path, **{f"x{i}": torch.zeros(1) for i in range(8)})
    with pytest.raises(UnsupportedModel, match="x0, x1, x2, x3, x4 and 3 more"):
        load(tmp_path)


def test_t17_stored_rotary_tables_are_harmless(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path, "llama")
    with_tensors(tmp_path, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)})
    assert_same_logits(model)


def test_t41_a_tied_model_with_another_head_is_refused(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path, "llama", tie_word_embeddings=True)
    same = load_file(tmp_path / SINGLE)["model.embed_tokens.weight"].clone()
    with_tensors(tmp_path, **{"lm_head.weight": same})
    assert_same_logits(model)
    same[3, 5] += 1e-3
    with_tensors(tmp_path, **{"lm_head.weight": same})
    with pytest.raises(UnsupportedModel, match=r"lm_head.weight is another .* set it to false"):
        load(tmp_path)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_t44_biases_on_q_k_and_v_alone(tmp_path: Path, family: str) -> None:
    """transformers takes zeros for the output projection's."""
    model = make_tiny_model(tmp_path, family, attention_bias=True)
    tensors = load_file(tmp_path / SINGLE)
    kept = {k: v for k, v in tensors.items() if not k.endswith("o_proj.bias")}
    assert len(kept) == len(tensors) - 3
    save_file(kept, tmp_path / SINGLE, metadata={"format": "pt"})
    reference = type(model.reference).from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert_same_logits(TinyModel(tmp_path, reference))
    one = "model.layers.2.self_attn.o_proj.bias"
    save_file(kept | {one: tensors[one]}, tmp_path / SINGLE)
    with pytest.raises(UnsupportedModel, match=r"no tensor model.layers.0.self_attn.o_proj.bias"):
        load(tmp_path)


# --- broken files (T18) ---------------------------------------------------------------------------


def a_file(header: Any, num_bytes: int) -> bytes:
    data = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(data).to_bytes(8, "little") + data + bytes(num_bytes)


def entry(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


GOOD = entry([2], 0, 8)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", "header"),
        (b"x" * 511, "header"),
        (a_file(b"[" * 100_000, 0), "nested too deeply"),
        (a_file(b"[]", 0), "not a JSON object"),
        (a_file({"a": GOOD, "b": entry([2], 16, 8)}, 16), "b: it ends at byte 8, before it begins"),
        (a_file({"a": GOOD, "b": entry([3], 8, 16)}, 16), r"b: F32 of shape \[3\] takes 12 bytes"),
        (a_file({"a": GOOD, "b": entry([2], -8, 0)}, 8), r"b: its data_offsets are \[-8, 0\]"),
        (a_file({"a": GOOD, "b": entry([-2], 8, 16)}, 16), r"b: its shape is \[-2\]"),
        (a_file({"a": GOOD, "b": entry([2], 4, 12)}, 12), r"b \(bytes 4 to 12\) overlaps"),
        (a_file({"a": GOOD, "b": entry([2], 12, 20)}, 20), r"b \(bytes 12 to 20\) leaves a hole"),
        (a_file({"a": GOOD, "b": entry([2], 8, 16)}, 11), "from b on; was the download interrupt"),
        (a_file({"a": GOOD}, 12), "4 bytes follow its last tensor, a"),
        (a_file({"a": GOOD, "b": 5}, 8), "b: its entry is not an object"),
        (a_file({"a": GOOD, "b": entry([2**62, 8], 8, 16)}, 16), "b: F32 of shape"),
        (a_file({"a": entry([2], 0, 8, "X8")}, 8), "X8"),
        (a_file({"a": {"dtype": 5, "shape": [2], "data_offsets": [0, 8]}}, 8), "a: its dtype is 5"),
        (a_file({"a": {"shape": [2]}}, 8), "a: its data_offsets are None"),
    ],
)
def test_t18_a_broken_file_is_named_with_its_tensor(
    tmp_path: Path, content: bytes, named: str
) -> None:
    (tmp_path / SINGLE).write_bytes(content)
    with pytest.raises(UnsupportedModel, match=rf"{SINGLE} is not a safetensors file: .*{named}"):
        Checkpoint.open(tmp_path)


def test_t18_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / SINGLE).mkdir()
    with pytest.raises(UnsupportedModel, match=f"cannot read .*{SINGLE}"):
        Checkpoint.open(tmp_path)
