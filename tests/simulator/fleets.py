"""Small simulated workers for tests: a small model, few pages, quick steps."""

from typing import Any

from common.codecs import codec_named
from common.model_config import ModelConfig
from common.pages import PageLayout
from common.scheduling.step_time import StepTimes
from common.types import Role
from engine.pool_size import landing_of, pool_of
from simulator.costs import FittedCosts
from simulator.host import WorkerSetup

TIMES = StepTimes(
    fixed_s=5e-3, prefill_token_s=40e-6, pair_s=4e-9, decode_s=60e-6, context_token_s=20e-9
)
COSTS = FittedCosts(times=TIMES, read_byte_s=1e-10, land_byte_s=2e-11)
SMALL_MODEL = ModelConfig.parse(
    {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 4,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1000,
        "max_position_embeddings": 8192,
    },
    {},
)


def layout(codec: str = "fp8_e3m4") -> PageLayout:
    return PageLayout(
        num_layers=SMALL_MODEL.num_layers,
        num_kv_heads=SMALL_MODEL.num_kv_heads,
        block_size=16,
        head_dim=SMALL_MODEL.head_dim,
        codec=codec_named(codec),
    )


def worker(role: Role, num_packed: int = 1000, **settings: Any) -> WorkerSetup:
    max_num_seqs = settings.pop("max_num_seqs", 64)
    chunk_tokens = settings.pop("chunk_tokens", 256)
    pool, landing = pool_of(num_packed, max_num_seqs), landing_of(chunk_tokens, 16)
    values: dict[str, Any] = {
        "role": role,
        "costs": COSTS,
        "step_times": TIMES,
        "layout": layout(),
        "ownership": ((0, 1),),
        "num_packed": pool.num_packed,
        "num_exact": pool.num_exact,
        "chunk_tokens": chunk_tokens,
        "max_num_seqs": max_num_seqs,
        "max_model_len": SMALL_MODEL.max_position_embeddings,
        "num_landing_packed": landing.num_packed,
        "num_landing_exact": landing.num_exact,
    }
    return WorkerSetup(**{**values, **settings})
