"""A rank's weights as the CPU kernels read them: matrices in panels, norms and biases as fp32.

Weights keep the dtype of the checkpoint, or are made int8; they are widened to fp32 where they are
used. Columns (outputs) of q, k, v, gate and up are dealt to ranks, and rows (inputs) of the two
products behind them; so is the vocabulary.
"""

from typing import Final

import numpy as np
import torch
from torch import Tensor

from common.model_config import ModelConfig
from engine.int8_weights import int8_panels
from engine.kernels.cpu import forward as k
from engine.kernels.cpu.matmul import I8_WEIGHTS
from engine.model_share import ModelShare, alone, cpu_share, within
from engine.padding import PANEL, PaddedSizes, norm_weight, pad_end, pad_heads
from engine.weights import Checkpoint

KINDS: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class CpuWeights:
    """Attributes are addresses."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: ModelConfig,
        weight_dtype: str = "auto",
        share: ModelShare | None = None,
    ) -> None:
        """`share`: of one rank; None for a model that one has alone."""
        self.share = share = share or cpu_share(config, alone(config))
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
        vocab = within(share.vocab, config.vocab_size)
        embedding = self._wide(checkpoint.read("model.embed_tokens.weight", shape, rows=vocab))
        head = checkpoint.output_head(config, vocab)
        self.embedding = self._keep(int8_panels(embedding) if self._is_int8 else embedding)
        if head is None and self._is_int8:
            self.head = self.embedding
        else:
            self.head = self._panels(embedding if head is None else self._wide(head))
        self.final_norm = self._norm("model.norm.weight", config.hidden_size)
        checkpoint.refuse_unread()

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)

    def _layer(self, prefix: str) -> k.Layer:
        config, attn, mlp = self._config, prefix + "self_attn.", prefix + "mlp."
        hidden, inter, sizes = config.hidden_size, config.intermediate_size, self._sizes
        part, width = within(self.share.inter, inter), len(self.share.inter)
        gate, up = (
            pad_end(self._wide(self._rows(f"{mlp}{name}.weight", (inter, hidden), part)), 0, width)
            for name in ("gate_proj", "up_proj")
        )
        q_width = config.num_heads * config.head_dim
        heads = self._channels(self.share.heads)
        out = self._columns(attn + "o_proj.weight", (hidden, q_width), heads)
        down = self._columns(mlp + "down_proj.weight", (hidden, inter), part)
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
            down=self._panels(pad_end(pad_end(down, 1, width), 0, sizes.hidden)),
        )

    def _qkv(self, attn: str) -> int:
        hidden = self._config.hidden_size
        parts = [
            self._wide(
                self._by_head(self._rows(f"{attn}{name}.weight", (width, hidden), channels), 0)
            )
            for name, width, channels in self._qkv_parts()
        ]
        return self._panels(torch.cat(parts))

    def _qkv_bias(self, attn: str) -> int:
        parts = [
            self._by_head(self._checkpoint.read(f"{attn}{name}.bias", (width,), rows=channels), 0)
            for name, width, channels in self._qkv_parts()
        ]
        return self._keep(torch.cat(parts).float())

    def _out_bias(self, attn: str) -> int:
        bias = self._checkpoint.read(attn + "o_proj.bias", (self._config.hidden_size,))
        return self._keep(pad_end(bias.float(), 0, self._sizes.hidden))

    def _qkv_parts(self) -> list[tuple[str, int, range]]:
        """Of each matrix: its name, how many outputs it has, and which are this rank's."""
        config, share = self._config, self.share
        kv_width = config.num_kv_heads * config.head_dim
        kv_channels = self._channels(share.kv_heads)
        return [
            ("q_proj", config.num_heads * config.head_dim, self._channels(share.heads)),
            ("k_proj", kv_width, kv_channels),
            ("v_proj", kv_width, kv_channels),
        ]

    def _channels(self, heads: range) -> range:
        return range(heads.start * self._config.head_dim, heads.stop * self._config.head_dim)

    def _rows(self, name: str, shape: tuple[int, int], rows: range) -> Tensor:
        return self._checkpoint.read(name, shape, rows=rows).to(self._dtype)

    def _columns(self, name: str, shape: tuple[int, int], columns: range) -> Tensor:
        return self._checkpoint.read(name, shape, columns=columns).to(self._dtype)

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
