"""The demo model cut down to its first layers: real tokenizer, real code path, little work."""

import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

from commands.demo_model import prepare
from common.environment import home

COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "chat_template.jinja",
)


def shrunk_model(target: Path, num_layers: int = 2) -> Path:
    """Writes the model to `target` and returns it. Its text is nonsense, but always the same."""
    source = prepare(home(), lambda _: None)
    target.mkdir(parents=True, exist_ok=True)
    for name in COPIED:
        if (source / name).exists():
            shutil.copy(source / name, target / name)
    config = json.loads((source / "config.json").read_text())
    config["num_hidden_layers"] = num_layers
    (target / "config.json").write_text(json.dumps(config))
    weights = load_file(source / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if layer_of(name) < num_layers}
    save_file(kept, target / "model.safetensors")
    return target


def layer_of(name: str) -> int:
    """Tensors outside the layers count as part of the first."""
    parts = name.split(".")
    return int(parts[2]) if parts[1] == "layers" else 0
