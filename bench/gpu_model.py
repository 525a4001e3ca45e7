"""Whole steps for `bench.gpu`: a model of random weights, with and without graphs."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.gpu_steps import (
    BLOCK_SIZE,
    Shape,
    blocks_of,
    decode_batch,
    filled_pool,
    layout_of,
    mixed_batch,
    offsets_of,
)
from common.model_config import ModelConfig
from engine.batch import StepBatch
from engine.cuda_graphs import Capture, CudaCapture
from engine.graphed_model import GraphedModel
from engine.pools import PageArena
from engine.triton_model import TritonModel
from engine.weights import Checkpoint

SMOKE_LAYERS, LAYERS = 1, 32
STEPS = 12
"""Timed, after three that are not; the median counts."""


class RandomCheckpoint(Checkpoint):
    """What `TritonModel` asks of a checkpoint, made on the device on the spot."""

    def __init__(self, dtype: torch.dtype, device: str) -> None:
        super().__init__({})
        self._dtype, self._device = dtype, device

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        rows: range | None = None,
        columns: range | None = None,
    ) -> Tensor:
        if rows is not None:
            shape = (len(rows), *shape[1:])
        if columns is not None:
            shape = (shape[0], len(columns))
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=self._dtype, device=self._device)
        return torch.empty(shape, dtype=self._dtype, device=self._device).normal_(std=0.02)

    def output_head(self, config: ModelConfig, rows: range | None = None) -> Tensor:
        return self.read("lm_head.weight", (config.vocab_size, config.hidden_size), rows=rows)


def config_of(shape: Shape, num_layers: int, max_tokens: int) -> ModelConfig:
    return ModelConfig.parse(
        {
            "architectures": ["LlamaForCausalLM"],
            "num_hidden_layers": num_layers,
            "hidden_size": shape.hidden_size,
            "intermediate_size": shape.intermediate_size,
            "num_attention_heads": shape.num_heads,
            "num_key_value_heads": shape.num_kv_heads,
            "head_dim": shape.head_dim,
            "vocab_size": shape.vocab_size,
            "max_position_embeddings": max_tokens,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
        },
        {},
    )


def num_weights(config: ModelConfig) -> int:
    """That a step multiplies with; the embedding is looked up."""
    hidden, heads = config.hidden_size, config.num_heads + 2 * config.num_kv_heads
    attention = (heads + config.num_heads) * config.head_dim * hidden
    layer = attention + 3 * hidden * config.intermediate_size
    return config.num_layers * layer + config.vocab_size * hidden


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model, and the room that its pool has."""

    model: TritonModel
    config: ModelConfig
    max_rows: int
    max_blocks: int
    pool: PageArena

    @property
    def page_bytes(self) -> int:
        return self.pool.layout.packed_page_bytes

    def graphed(self) -> GraphedModel:
        is_cuda = self.model.device.type == "cuda"
        capture: Capture = CudaCapture() if is_cuda else lambda step: step
        graphed = GraphedModel(
            self.model, capture, max_rows=self.max_rows, max_blocks=self.max_blocks
        )
        graphed.capture()
        return graphed

    def decode(self, num_requests: int, context: int) -> StepBatch:
        return decode_batch(num_requests, context, blocks_of(context + 1))


def load(
    shape: Shape,
    device: str,
    codec: str,
    *,
    num_pages: int,
    max_rows: int,
    max_tokens: int,
    weight_dtype: str = "auto",
    is_batch_invariant: bool = False,
) -> Loaded:
    num_layers = LAYERS if device == "cuda" else SMOKE_LAYERS
    config = config_of(shape, num_layers, max_tokens)
    layout = layout_of(shape, codec, num_layers)
    pool = filled_pool(layout, num_pages, 2 * max_rows + 2, device)
    offsets = offsets_of(layout, blocks_of(max_tokens), device)
    checkpoint = RandomCheckpoint(shape.dtype, device)
    model = TritonModel(
        config, checkpoint, pool, offsets, shape.dtype, weight_dtype,
        is_batch_invariant=is_batch_invariant,
    )  # fmt: skip
    return Loaded(model, config, max_rows, blocks_of(max_tokens), pool)


def step_s(backend: TritonModel | GraphedModel, batch: StepBatch, num_steps: int = STEPS) -> float:
    """Seconds of a step from its batch to its tokens on the host, greedy; the median."""

    def step() -> None:
        backend.forward(batch)
        backend.logits(batch.wanted).argmax(dim=1).cpu()

    return median_s(step, num_steps)


def median_s(action: Callable[[], object], num_times: int) -> float:
    """Seconds on this side's clock, so `action` has to wait for what it starts."""
    for _ in range(3 if num_times > 1 else 0):
        action()
    times = []
    for _ in range(num_times):
        began = time.perf_counter()
        action()
        times.append(time.perf_counter() - began)
    return sorted(times)[len(times) // 2]


def chunk_flops(config: ModelConfig, chunk: int, num_decodes: int, context: int) -> float:
    """Of a chunk from position 0 on and decodes; logits of the last token and of the decodes."""
    head = config.vocab_size * config.hidden_size
    matrices = (num_weights(config) - head) * (chunk + num_decodes) + head * (1 + num_decodes)
    pairs = chunk * (chunk + 1) / 2 + num_decodes * context
    attention = 2 * config.num_heads * config.head_dim * pairs * config.num_layers
    return 2.0 * (matrices + attention)


def mixed(chunk: int, num_decodes: int, context: int) -> StepBatch:
    num_blocks = max(blocks_of(chunk), blocks_of(context + 1))
    return mixed_batch(chunk, num_decodes, context, num_blocks)


def pages_for(num_requests: int, num_tokens: int) -> int:
    return num_requests * -(-num_tokens // BLOCK_SIZE)
