"""The model on CPU: packed weights, workspaces, and a team of threads that runs `forward` once per
step.

Weights keep the dtype of the checkpoint and are widened to fp32 in registers; all arithmetic is
fp32.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.engine.batch import StepBatch
from common.engine.pools import PageArena
from common.engine.rope import rope_tables
from common.engine.weights import Checkpoint
from common.errors import UnsupportedModel
from common.kernels.cpu import forward as k
from common.kernels.cpu.attention import scratch_floats
from common.kernels.cpu.pages import checksum_of
from common.kernels.cpu.sync import FIRST_COUNTER
from common.model_config import ModelConfig

KINDS: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
PAGE_KINDS: Final = {"fp32": 0, "bf16": 1, "fp8_e4m3": 2}
PANEL: Final = 16


class CpuModel:
    """`forward(batch)` computes a step's KV into `pool` and returns the wanted logits."""

    def __init__(
        self,
        config: ModelConfig,
        weights: "CpuWeights",
        pool: PageArena,
        *,
        max_num_tokens: int,
        num_threads: int,
    ) -> None:
        self._config = config
        self._weights = weights
        self._pool = pool
        self._num_threads = num_threads
        self._max_num_tokens = 0
        self._max_num_logits = 0
        self._eps = np.float32(config.rms_norm_eps)
        self._scale = np.float32(config.head_dim**-0.5)
        self._dims = _dims(config, weights, pool)
        self._sync = np.zeros(FIRST_COUNTER + 2 + config.num_layers * k.PHASES, dtype=np.int64)
        self._memory = np.zeros(k.NUM_MEMORY, dtype=np.int64)
        self._workspaces: list[NDArray[np.float32]] = []
        self._logits = np.zeros((0, 0), dtype=np.float32)
        self._helpers = ThreadPoolExecutor(num_threads - 1, "compute") if num_threads > 1 else None
        self._cos, self._sin = rope_tables(config)
        self._reserve(max_num_tokens, 1)

    def forward(self, batch: StepBatch, num_layers: int | None = None) -> Tensor:
        num_wanted = len(batch.wanted)
        if len(batch.token_ids) > self._max_num_tokens or num_wanted > self._max_num_logits:
            self._reserve(len(batch.token_ids), num_wanted)
        self._sync[:] = 0
        self._dims[k.LAYERS] = self._config.num_layers if num_layers is None else num_layers
        arguments = (
            self._num_threads, self._sync.ctypes.data, self._dims, self._eps, self._scale,
            self._weights.layers, self._memory,
            batch.token_ids, batch.items, batch.runs, batch.tables, batch.wanted,
        )  # fmt: skip
        helpers = self._helpers
        others = (
            [helpers.submit(k.forward, me, *arguments) for me in range(1, self._num_threads)]
            if helpers
            else []
        )
        k.forward(0, *arguments)
        for other in others:
            other.result()
        return torch.from_numpy(self._logits[:num_wanted, : self._config.vocab_size])

    def checksum(self, page: Tensor) -> int:
        return int(checksum_of(page.data_ptr(), page.numel()))

    def _reserve(self, num_tokens: int, num_logits: int) -> None:
        """Workspaces for this many rows and logits (or more, when there were more already)."""
        config = self._config
        tokens = self._max_num_tokens = max(num_tokens, self._max_num_tokens)
        logits = self._max_num_logits = max(num_logits, self._max_num_logits)
        q_width = config.num_heads * config.head_dim
        qkv_width = q_width + 2 * config.num_kv_heads * config.head_dim
        hidden = config.hidden_size
        group = config.num_heads // config.num_kv_heads
        scratch = max(
            scratch_floats(group, config.head_dim, self._pool.layout.block_size),
            k.ROW_BLOCK * k.PANEL_GROUP * PANEL,
        )
        sizes = {
            k.X: tokens * hidden,
            k.H: max(tokens, logits) * hidden,
            k.QKV_ROWS: tokens * max(qkv_width, hidden),
            k.ATTN: tokens * q_width,
            k.ACT: tokens * config.intermediate_size,
            k.SCRATCH: self._num_threads * scratch,
        }
        self._workspaces = []
        for column, size in sizes.items():
            self._memory[column] = self._keep(np.zeros(size, dtype=np.float32))
        self._logits = np.zeros((logits, int(self._dims[k.VOCAB_PADDED])), dtype=np.float32)
        memory = self._memory
        memory[k.SCRATCH_STEP] = scratch * 4
        memory[k.COS], memory[k.SIN] = self._cos.ctypes.data, self._sin.ctypes.data
        memory[k.PACKED], memory[k.EXACT] = (
            self._pool.packed.data_ptr(),
            self._pool.exact.data_ptr(),
        )
        memory[k.FINAL_NORM], memory[k.HEAD] = self._weights.final_norm, self._weights.head
        memory[k.EMBED], memory[k.LOGITS] = self._weights.embedding, self._logits.ctypes.data

    def _keep(self, workspace: NDArray[np.float32]) -> int:
        self._workspaces.append(workspace)
        return workspace.ctypes.data


def _dims(config: ModelConfig, weights: "CpuWeights", pool: PageArena) -> NDArray[np.int64]:
    layout, dims = pool.layout, np.zeros(k.NUM_DIMS, dtype=np.int64)
    dims[k.LAYERS], dims[k.HIDDEN], dims[k.INTER] = (
        config.num_layers,
        config.hidden_size,
        config.intermediate_size,
    )
    dims[k.HEADS], dims[k.KV_HEADS], dims[k.HEAD_DIM] = (
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
    )
    dims[k.BLOCK], dims[k.KIND] = layout.block_size, weights.kind
    dims[k.VOCAB_PADDED] = -(-config.vocab_size // PANEL) * PANEL
    dims[k.PACKED_BYTES], dims[k.EXACT_BYTES] = layout.packed_page_bytes, layout.exact_page_bytes
    dims[k.SCALES], dims[k.PACKED_KIND] = layout.scales_offset, PAGE_KINDS[layout.codec.name]
    dims[k.EXACT_KIND] = 0 if layout.codec.exact_element_bytes == 4 else 1
    return dims


class CpuWeights:
    """Weights as the kernels read them: matrices in panels, norms and biases as fp32. Attributes
    are addresses.
    """

    def __init__(self, checkpoint: Checkpoint, config: ModelConfig) -> None:
        refuse_odd_sizes(config)
        self._checkpoint = checkpoint
        self._config = config
        self._tensors: list[Tensor] = []
        self._dtype = _common_dtype(checkpoint)
        self.kind = KINDS[self._dtype]
        self.layers = np.zeros((config.num_layers, k.NUM_TENSORS), dtype=np.int64)
        for layer in range(config.num_layers):
            self.layers[layer] = self._layer(f"model.layers.{layer}.")
        embedding = checkpoint.read(
            "model.embed_tokens.weight", (config.vocab_size, config.hidden_size)
        )
        head = checkpoint.output_head(config)
        self.embedding = self._keep(embedding.to(self._dtype).contiguous())
        self.head = self._keep(_panels((embedding if head is None else head).to(self._dtype)))
        self.final_norm = self._vector("model.norm.weight", config.hidden_size)

    def _layer(self, prefix: str) -> NDArray[np.int64]:
        config, row = self._config, np.zeros(k.NUM_TENSORS, dtype=np.int64)
        hidden, inter = config.hidden_size, config.intermediate_size
        q_width, kv_width = (
            config.num_heads * config.head_dim,
            config.num_kv_heads * config.head_dim,
        )
        attn = prefix + "self_attn."
        row[k.NORM_1] = self._vector(prefix + "input_layernorm.weight", hidden)
        row[k.NORM_2] = self._vector(prefix + "post_attention_layernorm.weight", hidden)
        widths = {"q_proj": q_width, "k_proj": kv_width, "v_proj": kv_width}
        qkv = [
            self._matrix(f"{attn}{name}.weight", width, hidden) for name, width in widths.items()
        ]
        row[k.QKV] = self._keep(_panels(torch.cat(qkv)))
        if config.attention_bias:
            biases = [
                self._checkpoint.read(f"{attn}{name}.bias", (width,))
                for name, width in widths.items()
            ]
            row[k.QKV_BIAS] = self._keep(torch.cat(biases).float())
        if config.output_bias:
            row[k.OUT_BIAS] = self._vector(attn + "o_proj.bias", hidden)
        if config.qk_norm:
            row[k.Q_NORM] = self._vector(attn + "q_norm.weight", config.head_dim)
            row[k.K_NORM] = self._vector(attn + "k_norm.weight", config.head_dim)
        row[k.OUT] = self._keep(_panels(self._matrix(attn + "o_proj.weight", hidden, q_width)))
        gate = _panels(self._matrix(prefix + "mlp.gate_proj.weight", inter, hidden))
        up = _panels(self._matrix(prefix + "mlp.up_proj.weight", inter, hidden))
        row[k.GATE_UP] = self._keep(torch.stack([gate, up], dim=1))
        row[k.DOWN] = self._keep(
            _panels(self._matrix(prefix + "mlp.down_proj.weight", hidden, inter))
        )
        return row

    def _matrix(self, name: str, rows: int, columns: int) -> Tensor:
        return self._checkpoint.read(name, (rows, columns)).to(self._dtype)

    def _vector(self, name: str, size: int) -> int:
        return self._keep(self._checkpoint.read(name, (size,)).float())

    def _keep(self, tensor: Tensor) -> int:
        tensor = tensor.contiguous()
        self._tensors.append(tensor)
        return tensor.data_ptr()


def refuse_odd_sizes(config: ModelConfig) -> None:
    """The CPU kernels work on 16 floats at a time."""
    for name in ("hidden_size", "intermediate_size", "head_dim"):
        if getattr(config, name) % PANEL:
            raise UnsupportedModel(f"{name} {getattr(config, name)} is not a multiple of {PANEL}")


def _common_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """The dtype all matrices are stored in; fp32, which holds any of them, when they differ."""
    stored = {entry.dtype for entry in checkpoint.entries if len(entry.shape) == 2}
    names = {"BF16": torch.bfloat16, "F16": torch.float16}
    return names.get(stored.pop(), torch.float32) if len(stored) == 1 else torch.float32


def _panels(matrix: Tensor) -> Tensor:
    """[n, k] as [ceil(n / 16), k, 16]; columns beyond n are zero."""
    n, width = matrix.shape
    padded = -(-n // PANEL) * PANEL
    if padded != n:
        matrix = torch.cat([matrix, matrix.new_zeros(padded - n, width)])
    return matrix.view(padded // PANEL, PANEL, width).transpose(1, 2).contiguous()
