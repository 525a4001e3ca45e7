"""The demo model: conversion of a small GGUF file made here, interruptions, and the real one."""

import json
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import pytest
from gguf import GGMLQuantizationType, GGUFWriter
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from commands import demo_model as demo
from commands.demo_model import DemoModelFailed, convert, is_complete, prepare, write_manifest

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, VOCABULARY = 2, 1, 4, 8, 6
TOKENS = ["<pad>", "<s>", "</s>", "a", "b", "ab"]


def matrix(rows: int, columns: int, first: int) -> numpy.ndarray[Any, Any]:
    return numpy.arange(first, first + rows * columns, dtype=numpy.float32).reshape(rows, columns)


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    """A Llama of one layer. Its q and k rows are paired for rotary, as llama.cpp writes them."""
    path = tmp_path / "small.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(16)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(100000.0)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3, 1, 1, 1])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    shapes = {
        "token_embd": (VOCABULARY, HIDDEN),
        "blk.0.attn_q": (HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_output": (HIDDEN, HEADS * HEAD_DIM),
        "blk.0.ffn_gate": (16, HIDDEN),
        "blk.0.ffn_up": (16, HIDDEN),
        "blk.0.ffn_down": (HIDDEN, 16),
    }
    for i, (name, (rows, columns)) in enumerate(shapes.items()):
        writer.add_tensor(f"{name}.weight", matrix(rows, columns, 1000 * i))
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", numpy.ones(HIDDEN, dtype=numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def converted(gguf: Path, tmp_path: Path) -> Path:
    directory = tmp_path / "converted"
    directory.mkdir()
    convert(gguf, directory)
    return directory


def test_weights_get_their_hugging_face_names_and_values(converted: Path) -> None:
    weights = load_file(converted / "model.safetensors")
    assert len(weights) == 11
    embedding = weights["model.embed_tokens.weight"]
    assert embedding.dtype == numpy.float32
    numpy.testing.assert_array_equal(embedding, matrix(VOCABULARY, HIDDEN, 0))
    down = weights["model.layers.0.mlp.down_proj.weight"]
    numpy.testing.assert_array_equal(down, matrix(HIDDEN, 16, 7000))


def test_query_and_key_rows_return_to_two_halves_per_head(converted: Path) -> None:
    weights = load_file(converted / "model.safetensors")
    query = weights["model.layers.0.self_attn.q_proj.weight"]
    key = weights["model.layers.0.self_attn.k_proj.weight"]
    value = weights["model.layers.0.self_attn.v_proj.weight"]
    paired = matrix(HEADS * HEAD_DIM, HIDDEN, 1000)
    numpy.testing.assert_array_equal(query, paired[[0, 2, 1, 3, 4, 6, 5, 7]])
    numpy.testing.assert_array_equal(key, matrix(HEAD_DIM, HIDDEN, 2000)[[0, 2, 1, 3]])
    numpy.testing.assert_array_equal(value, matrix(HEAD_DIM, HIDDEN, 3000))


def test_configuration_and_tokenizer(converted: Path) -> None:
    config = json.loads((converted / "config.json").read_text())
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (2, 1)
    assert (config["head_dim"], config["rms_norm_eps"], config["rope_theta"]) == (4, 1e-5, 100000.0)
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (1, 2, 2)
    tokenizer = Tokenizer.from_file(str(converted / "tokenizer.json"))
    assert tokenizer.encode("<s>abba</s>").ids == [1, 5, 4, 3, 2]
    named = json.loads((converted / "tokenizer_config.json").read_text())
    assert (named["bos_token"], named["eos_token"], named["pad_token"]) == ("<s>", "</s>", "</s>")
    assert named["chat_template"] == (converted / "chat_template.jinja").read_text()


def test_a_quantised_tensor_is_dequantised_exactly(tmp_path: Path) -> None:
    from gguf.quants import dequantize, quantize

    values = matrix(2, 32, 0) / 31
    packed = quantize(values, GGMLQuantizationType.Q8_0)
    scale = packed[0, :2].view(numpy.float16).astype(numpy.float32)
    expected = packed[0, 2:].view(numpy.int8).astype(numpy.float32) * scale
    numpy.testing.assert_array_equal(dequantize(packed, GGMLQuantizationType.Q8_0)[0], expected)


def test_an_unknown_tensor_is_refused() -> None:
    with pytest.raises(DemoModelFailed, match=r"blk\.0\.attn_q_norm\.weight"):
        demo.hugging_face_name("blk.0.attn_q_norm.weight")


def test_a_file_that_is_not_the_known_one_is_refused(gguf: Path) -> None:
    with pytest.raises(
        DemoModelFailed, match=r"small\.gguf has sha256 [0-9a-f]{64}, expected b179c9"
    ):
        demo.check_source(gguf)


def test_damage_is_found(converted: Path) -> None:
    assert not is_complete(converted, verify=False)
    write_manifest(converted)
    assert is_complete(converted, verify=True)
    weights = converted / "model.safetensors"
    damaged = bytearray(weights.read_bytes())
    damaged[-1] ^= 1
    weights.write_bytes(damaged)
    assert is_complete(converted, verify=False)
    assert not is_complete(converted, verify=True)
    weights.write_bytes(damaged[:-1])
    assert not is_complete(converted, verify=False)


@pytest.fixture
def small_make(converted: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Puts the small model in the place of the download; returns what was made so far."""
    made: list[str] = []

    def make(scratch: Path, report: demo.Report) -> None:
        shutil.copytree(converted, scratch / "converted")
        write_manifest(scratch / "converted")
        made.append("made")

    monkeypatch.setattr(demo, "make", make)
    return made


def test_it_is_made_once(small_make: list[str], tmp_path: Path) -> None:
    said: list[str] = []
    directory = prepare(tmp_path, said.append)
    assert prepare(tmp_path, said.append) == directory
    assert prepare(tmp_path, said.append, verify=True) == directory
    assert small_make == ["made"]
    assert directory == tmp_path / "models" / "SmolLM2-135M-Instruct"
    assert sorted(path.name for path in directory.parent.iterdir()) == [
        ".SmolLM2-135M-Instruct.lock", "SmolLM2-135M-Instruct",
    ]  # fmt: skip


def test_a_damaged_directory_is_replaced(small_make: list[str], tmp_path: Path) -> None:
    directory = prepare(tmp_path, report=print_nothing)
    (directory / "tokenizer.json").write_text("{}")
    prepare(tmp_path, report=print_nothing)
    assert small_make == ["made", "made"]
    assert is_complete(directory, verify=True)


def test_an_interruption_leaves_nothing_that_looks_finished(
    small_make: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    working = demo.make

    def interrupted(scratch: Path, report: demo.Report) -> None:
        (scratch / "converted").mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "make", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare(tmp_path, report=print_nothing)
    assert not (tmp_path / "models" / demo.NAME).exists()
    monkeypatch.setattr(demo, "make", working)
    leftover = tmp_path / "models" / f".{demo.NAME}.partial" / "converted"  # as after SIGKILL
    leftover.mkdir(parents=True)
    assert is_complete(prepare(tmp_path, report=print_nothing), verify=True)
    assert not leftover.exists()


def test_a_home_that_cannot_be_written_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file where the folder should be")
    with pytest.raises(DemoModelFailed, match="/models: File exists; TANDEM_HOME names another"):
        prepare(tmp_path, report=print_nothing)


def test_t20_a_full_disk_is_one_clear_line(gguf: Path, tmp_path: Path) -> None:
    """Each of the files that a conversion writes, cut off by a limit on a file's size, in a process
    of its own: the limit holds for good.
    """
    code = """
import resource, sys
from pathlib import Path
from commands import demo_model as demo
def make(scratch, report):
    (scratch / "converted").mkdir()
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), resource.RLIM_INFINITY))
    demo.convert(Path(sys.argv[1]), scratch / "converted")
demo.make = make
try:
    demo.prepare(Path(sys.argv[2]), print)
except demo.DemoModelFailed as error:
    sys.exit(f"tandem: {error}")
"""
    for limit in (100, 500, 1500):
        home = tmp_path / str(limit)
        done = subprocess.run(
            [sys.executable, "-c", code, str(gguf), str(home), str(limit)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.stderr.startswith(f"tandem: {home}/models: "), done.stderr
        assert done.stderr.endswith("; TANDEM_HOME names another place\n")
        assert "too large" in done.stderr
        assert not list((home / "models").glob("*/*"))


def test_two_at_once_take_turns(small_make: list[str], tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    waiting = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        with demo.file_lock(tmp_path / "models" / f".{demo.NAME}.lock", report=print_nothing):
            second = pool.submit(prepare, tmp_path, lambda text: waiting.set())
            assert waiting.wait(timeout=30)
            assert small_make == []
        assert second.result(timeout=30) == tmp_path / "models" / demo.NAME
    assert small_make == ["made"]


def print_nothing(text: str) -> None:
    pass


def test_the_demo_model_is_what_the_design_says(demo_model: Path) -> None:
    config = json.loads((demo_model / "config.json").read_text())
    expected = {
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
        "vocab_size": 49152, "rope_theta": 100000.0, "max_position_embeddings": 8192,
        "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2,
        "torch_dtype": "float32",
    }  # fmt: skip
    assert {name: config[name] for name in expected} == expected
    tokenizer = Tokenizer.from_file(str(demo_model / "tokenizer.json"))
    assert tokenizer.encode("<|im_start|><|im_end|> 120").ids == [1, 2, 216, 33, 34, 32]
    text = "naïve café 日本語 🙂\n\tx = 3.14"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_the_demo_model_answers_paris_under_transformers(demo_model: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    model = AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert str(prompt).startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    inputs = tokenizer(prompt, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    answer = tokenizer.decode(output[0, inputs.input_ids.shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"
