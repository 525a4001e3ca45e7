"""The model on CPU: packed weights, workspaces, and a team of threads that runs the kernels.

Weights keep the dtype of the checkpoint, or are made int8; they are widened to fp32 where they are
used, and all arithmetic is fp32.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.model_config import ModelConfig
from engine.batch import MAX_RUN_TOKENS, StepBatch
from engine.int8_weights import int8_panels
from engine.kernels.cpu import forward as k
from engine.kernels.cpu.attention import scratch_floats
from engine.kernels.cpu.int8_weights import WIDE_FLOATS
from engine.kernels.cpu.landing import land
from engine.kernels.cpu.matmul import I8_WEIGHTS
from engine.kernels.cpu.pages import checksum_of, pages_of
from engine.kernels.cpu.sync import FIRST_COUNTER
from engine.kernels.offsets import Offsets
from engine.padding import PANEL, PaddedSizes, norm_weight, pad_end, pad_heads
from engine.pools import PageArena
from engine.rope import rope_tables
from engine.weights import Checkpoint

KINDS: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
FINAL, LOGITS = k.Model._fields.index("final"), k.Model._fields.index("logits")


class CpuModel:
    """`forward(batch)` computes a step's KV into `pool`; `logits(wanted)` those of its rows."""

    is_batch_invariant: Final = True

    def __init__(
        self,
        config: ModelConfig,
        weights: "CpuWeights",
        pool: PageArena,
        offsets: Offsets,
        *,
        max_num_tokens: int,
        num_threads: int,
    ) -> None:
        self._config = config
        self.weights = weights
        self._pool = pool
        self._num_threads = num_threads
        self._max_num_tokens = 0
        self._max_num_logits = 0
        self._sizes = sizes = PaddedSizes.of(config)
        assert pool.layout.head_dim == sizes.head_dim
        self._eps = np.float32(config.rms_norm_eps * config.hidden_size / sizes.hidden)
        self._head_eps = np.float32(config.rms_norm_eps * config.head_dim / sizes.head_dim)
        self._scale = np.float32(config.head_dim**-0.5)
        self._cos, self._sin = rope_tables(config, sizes.head_dim)
        self._sync = np.zeros(FIRST_COUNTER + 2 + config.num_layers * k.PHASES, dtype=np.int64)
        self._pages = np.array(pages_of(pool.packed, pool.exact, pool.layout, offsets))
        self._offsets = offsets
        self._workspaces: list[NDArray[np.float32]] = []
        self._helpers = ThreadPoolExecutor(num_threads - 1, "compute") if num_threads > 1 else None
        self._reserve(max_num_tokens)

    def forward(
        self, batch: StepBatch, num_layers: int | None = None, latest: Tensor | None = None
    ) -> None:
        assert not len(batch.unread_rows), "on a CPU every token is read when its step ends"
        if len(batch.token_ids) > self._max_num_tokens:
            self._reserve(len(batch.token_ids))
        self._model[0] = self._config.num_layers if num_layers is None else num_layers
        self._on_team(
            k.layers, self._model, self.weights.layers, self._pages, self._eps, self._head_eps,
            self._scale, batch.token_ids, batch.items, batch.runs, batch.tables,
        )  # fmt: skip

    def logits(self, wanted: NDArray[np.int64]) -> Tensor:
        if len(wanted) > self._max_num_logits:
            self._reserve_logits(len(wanted))
        self._on_team(k.head, self._model, self._eps, wanted)
        return torch.from_numpy(self._logits[: len(wanted), : self._config.vocab_size])

    def _on_team(self, kernel: Any, *arguments: Any) -> None:
        self._sync[:] = 0
        size, sync = self._num_threads, self._sync.ctypes.data
        others = range(1, size)
        helpers = self._helpers
        helping = [helpers.submit(kernel, me, size, sync, *arguments) for me in others if helpers]
        kernel(0, size, sync, *arguments)
        for helper in helping:
            helper.result()

    def checksums(self, pages: Tensor, which: Tensor) -> Tensor:
        sums = [self._checksum(pages[int(page)]) for page in which]
        return torch.from_numpy(np.array(sums, dtype=np.uint64).view(np.int64))

    def _checksum(self, page: Tensor) -> int:
        return int(checksum_of(page.data_ptr(), page.numel()))

    def land(
        self,
        source: Tensor,
        target: Tensor,
        slots: NDArray[np.int64],
        block_ids: NDArray[np.int64],
        tags: NDArray[np.uint8],
    ) -> tuple[NDArray[np.bool_], NDArray[np.uint64]]:
        return land(source, target, slots, block_ids, tags)

    def _reserve(self, tokens: int) -> None:
        """Workspaces for this many rows."""
        config, weights, sizes = self._config, self.weights, self._sizes
        self._max_num_tokens = tokens
        q_width = config.num_heads * sizes.head_dim
        kv_width = config.num_kv_heads * sizes.head_dim
        vocab_padded = -(-config.vocab_size // PANEL) * PANEL
        scratch = self._scratch_floats()
        self._workspaces = []
        model = k.Model(
            num_layers=config.num_layers,
            hidden=sizes.hidden,
            inter=sizes.inter,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=sizes.head_dim,
            vocab_padded=vocab_padded,
            kind=weights.kind,
            x=self._workspace(tokens, sizes.hidden),
            normed=self._workspace(tokens, sizes.hidden),
            qkv=self._workspace(tokens, q_width + 2 * kv_width),
            attended=self._workspace(tokens, q_width),
            delta=self._workspace(tokens, sizes.hidden),
            act=self._workspace(tokens, sizes.inter),
            scratch=self._workspace(self._num_threads, scratch),
            scratch_step=scratch * 4,
            cos=self._cos.ctypes.data,
            sin=self._sin.ctypes.data,
            embedding=weights.embedding,
            final_norm=weights.final_norm,
            head=weights.head,
            final=0,
            logits=0,
        )
        self._model = np.array(model, dtype=np.int64)
        self._reserve_logits(max(1, self._max_num_logits))

    def _reserve_logits(self, count: int) -> None:
        self._max_num_logits = count
        vocab_padded = -(-self._config.vocab_size // PANEL) * PANEL
        self._logits = np.zeros((count, vocab_padded), dtype=np.float32)
        self._final = np.zeros((count, self._sizes.hidden), dtype=np.float32)
        self._model[FINAL], self._model[LOGITS] = self._final.ctypes.data, self._logits.ctypes.data

    def _scratch_floats(self) -> int:
        """Per thread: for an attention run, or for the pairs of one gate and up task."""
        group = self._config.num_heads // self._config.num_kv_heads
        layout = self._pool.layout
        attention = scratch_floats(MAX_RUN_TOKENS, group, layout.head_dim, layout.block_size)
        return max(attention, WIDE_FLOATS + k.INT8_ROW_BLOCK * k.PANEL_GROUP * PANEL)

    def _workspace(self, rows: int, columns: int) -> int:
        self._workspaces.append(np.zeros((rows, columns), dtype=np.float32))
        return self._workspaces[-1].ctypes.data


class CpuWeights:
    """Weights as the kernels read them: matrices in panels, norms and biases as fp32. Attributes
    are addresses.
    """

    def __init__(
        self, checkpoint: Checkpoint, config: ModelConfig, weight_dtype: str = "auto"
    ) -> None:
        self._sizes = PaddedSizes.of(config)
        self._is_int8 = weight_dtype == "int8"
        self._checkpoint = checkpoint
        self._config = config
        self.tensors: list[Tensor] = []
        self._has_output_bias = checkpoint.has_output_bias(config)
        self._dtype = _common_dtype(checkpoint)
        self.kind = I8_WEIGHTS if self._is_int8 else KINDS[self._dtype]
        self.layers = np.array(
            [self._layer(f"model.layers.{i}.") for i in range(config.num_layers)], dtype=np.int64
        )
        shape = (config.vocab_size, config.hidden_size)
        embedding = self._wide(checkpoint.read("model.embed_tokens.weight", shape))
        head = checkpoint.output_head(config)
        self.embedding = self._keep(int8_panels(embedding) if self._is_int8 else embedding)
        if head is None and self._is_int8:
            self.head = self.embedding
        else:
            self.head = self._panels(embedding if head is None else self._wide(head))
        self.final_norm = self._norm("model.norm.weight", config.hidden_size)
        checkpoint.refuse_unread()

    def _layer(self, prefix: str) -> k.Layer:
        config, attn, mlp = self._config, prefix + "self_attn.", prefix + "mlp."
        hidden, inter, sizes = config.hidden_size, config.intermediate_size, self._sizes
        gate, up = (
            pad_end(self._wide(self._matrix(f"{mlp}{name}.weight", inter, hidden)), 0, sizes.inter)
            for name in ("gate_proj", "up_proj")
        )
        out = self._matrix(attn + "o_proj.weight", hidden, config.num_heads * config.head_dim)
        down = self._matrix(mlp + "down_proj.weight", hidden, inter)
        return k.Layer(
            norm_1=self._norm(prefix + "input_layernorm.weight", hidden),
            qkv=self._qkv(attn),
            qkv_bias=self._qkv_bias(attn) if config.attention_bias else 0,
            q_norm=self._head_norm(attn + "q_norm.weight") if config.qk_norm else 0,
            k_norm=self._head_norm(attn + "k_norm.weight") if config.qk_norm else 0,
            out=self._panels(pad_end(self._by_head(out, 1), 0, sizes.hidden)),
            out_bias=self._out_bias(attn) if self._has_output_bias else 0,
            norm_2=self._norm(prefix + "post_attention_layernorm.weight", hidden),
            gate_up=self._panels(_alternating(gate, up)),
            down=self._panels(pad_end(pad_end(down, 1, sizes.inter), 0, sizes.hidden)),
        )

    def _qkv(self, attn: str) -> int:
        hidden = self._config.hidden_size
        parts = [
            self._wide(self._by_head(self._matrix(f"{attn}{name}.weight", width, hidden), 0))
            for name, width in self._qkv_widths()
        ]
        return self._panels(torch.cat(parts))

    def _qkv_bias(self, attn: str) -> int:
        parts = [
            self._by_head(self._checkpoint.read(f"{attn}{name}.bias", (width,)), 0)
            for name, width in self._qkv_widths()
        ]
        return self._keep(torch.cat(parts).float())

    def _out_bias(self, attn: str) -> int:
        bias = self._checkpoint.read(attn + "o_proj.bias", (self._config.hidden_size,))
        return self._keep(pad_end(bias.float(), 0, self._sizes.hidden))

    def _qkv_widths(self) -> list[tuple[str, int]]:
        config = self._config
        kv_width = config.num_kv_heads * config.head_dim
        q_width = config.num_heads * config.head_dim
        return [("q_proj", q_width), ("k_proj", kv_width), ("v_proj", kv_width)]

    def _matrix(self, name: str, rows: int, columns: int) -> Tensor:
        return self._checkpoint.read(name, (rows, columns)).to(self._dtype)

    def _wide(self, matrix: Tensor) -> Tensor:
        """[.., hidden], padded."""
        return pad_end(matrix.to(self._dtype), 1, self._sizes.hidden)

    def _by_head(self, tensor: Tensor, dim: int) -> Tensor:
        """Dimension `dim` is that of all heads, each of which is padded."""
        return pad_heads(tensor, dim, self._config.head_dim, self._sizes.head_dim)

    def _panels(self, matrix: Tensor) -> int:
        return self._keep(int8_panels(matrix) if self._is_int8 else _panels(matrix))

    def _norm(self, name: str, size: int) -> int:
        weight = self._checkpoint.read(name, (size,))
        return self._keep(norm_weight(weight, self._sizes.hidden))

    def _head_norm(self, name: str) -> int:
        head_dim, size = self._config.head_dim, self._sizes.head_dim
        weight = self._checkpoint.read(name, (head_dim,)).float() * (head_dim / size) ** 0.5
        return self._keep(self._by_head(weight, 0))

    def _keep(self, tensor: Tensor) -> int:
        tensor = tensor.contiguous()
        self.tensors.append(tensor)
        return tensor.data_ptr()


def _common_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """The dtype all matrices are stored in; fp32, which holds any of them, when they differ."""
    stored = {entry.dtype for entry in checkpoint.entries if len(entry.shape) == 2}
    names = {"BF16": torch.bfloat16, "F16": torch.float16}
    return names.get(stored.pop(), torch.float32) if len(stored) == 1 else torch.float32


def _alternating(gate: Tensor, up: Tensor) -> Tensor:
    """Rows of both so that a panel of one follows a panel of the other."""
    width = gate.shape[1]
    pairs = torch.stack([gate.view(-1, PANEL, width), up.view(-1, PANEL, width)], dim=1)
    return pairs.view(-1, width)


def _panels(matrix: Tensor) -> Tensor:
    """[n, k] as [ceil(n / 16), k, 16]; columns beyond n are zero."""
    n, width = matrix.shape
    padded = -(-n // PANEL) * PANEL
    if padded != n:
        matrix = torch.cat([matrix, matrix.new_zeros(padded - n, width)])
    return matrix.view(padded // PANEL, PANEL, width).transpose(1, 2).contiguous()
