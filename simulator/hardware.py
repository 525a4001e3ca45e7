"""Named GPUs and named models: public numbers, each with where it is from.

Peaks are dense (without structured sparsity), bandwidths are per GPU and, for links, per direction.
Memory is what the data sheet calls it, in decimal gigabytes.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.model_config import ModelConfig

TERA, GIGA = 1e12, 1e9
NIC_200G, NIC_400G = 25 * GIGA, 50 * GIGA
GPUS_PER_MACHINE = 8
"""Of every platform below: DGX A100, H100, H200 and B200, AMD's MI300X platform."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """FLOP/s, bytes, bytes/s."""

    name: str
    bf16_flops: float
    fp8_flops: float
    memory_bytes: float
    memory_bandwidth: float
    rank_bandwidth: float
    """To the other GPUs of the same machine (NVLink, or AMD's Infinity Fabric)."""
    network_bandwidth: float
    """Of its NIC, to other workers."""

    def flops(self, dtype: str) -> float:
        """Peak for products of that element type."""
        return self.fp8_flops if dtype == "float8" else self.bf16_flops


GPUS = {
    gpu.name: gpu
    for gpu in (
        # bf16, fp8, memory, its bandwidth, NVLink, NIC:
        # NVIDIA A100 80GB SXM data sheet (2021); it has no fp8. DGX A100 data sheet: HDR 200 Gb/s.
        Gpu("a100", 312 * TERA, 312 * TERA, 80 * GIGA, 2039 * GIGA, 300 * GIGA, NIC_200G),
        # NVIDIA H100 SXM data sheet (2023), its peaks halved (they count sparsity). DGX H100:
        # ConnectX-7, 400 Gb/s for each GPU.
        Gpu("h100", 989.5 * TERA, 1979 * TERA, 80 * GIGA, 3350 * GIGA, 450 * GIGA, NIC_400G),
        # NVIDIA H200 SXM data sheet (2024): the H100 with 141 GB of HBM3e. DGX H200: as DGX H100.
        Gpu("h200", 989.5 * TERA, 1979 * TERA, 141 * GIGA, 4800 * GIGA, 450 * GIGA, NIC_400G),
        # NVIDIA DGX B200 data sheet (2024), an eighth of it: 1,440 GB, 64 TB/s, 72 PFLOP/s fp8 with
        # sparsity; NVLink 5 at 1.8 TB/s both ways; ConnectX-7, 400 Gb/s for each GPU.
        Gpu("b200", 2250 * TERA, 4500 * TERA, 180 * GIGA, 8000 * GIGA, 900 * GIGA, NIC_400G),
        # AMD Instinct MI300X data sheet (2023): 1,307.4 and 2,614.9 TFLOP/s, 192 GB, 5.3 TB/s, 896
        # GB/s both ways over seven links. Its platform: one 400 Gb/s NIC for each GPU.
        Gpu("mi300x", 1307.4 * TERA, 2614.9 * TERA, 192 * GIGA, 5300 * GIGA, 448 * GIGA, NIC_400G),
    )
}


def gpu_named(name: str) -> Gpu:
    """Raises ConfigError with the known names."""
    gpu = GPUS.get(name.lower())
    if gpu is None:
        raise ConfigError(f"--gpu {name} is not known; there are {', '.join(GPUS)}")
    return gpu


def _llama(**numbers: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "torch_dtype": "bfloat16",
        **numbers,
    }


_LLAMA_8B = _llama(
    num_hidden_layers=32, hidden_size=4096, intermediate_size=14336, num_attention_heads=32
)
_LLAMA_70B = _llama(
    num_hidden_layers=80, hidden_size=8192, intermediate_size=28672, num_attention_heads=64
)

# The numbers of each model's config.json (meta-llama and Qwen on huggingface.co).
MODELS: dict[str, dict[str, Any]] = {
    "llama-3-8b": {**_LLAMA_8B, "max_position_embeddings": 8192},
    "llama-3-70b": {**_LLAMA_70B, "max_position_embeddings": 8192},
    "llama-3.1-8b": {**_LLAMA_8B, "max_position_embeddings": 131072},
    "llama-3.1-70b": {**_LLAMA_70B, "max_position_embeddings": 131072},
    "qwen3-32b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_hidden_layers": 64,
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "torch_dtype": "bfloat16",
    },
}


def model_named(name: str) -> ModelConfig:
    """A known name, or a directory with a config.json. Raises ConfigError with the known names."""
    if name.lower() in MODELS:
        return ModelConfig.parse(MODELS[name.lower()], {})
    if (Path(name) / "config.json").is_file():
        return ModelConfig.load(name)
    raise ConfigError(
        f"--model {name} is neither a known model nor a directory with a config.json;"
        f" known are {', '.join(MODELS)}"
    )
