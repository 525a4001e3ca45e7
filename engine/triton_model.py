"""The model on a GPU: torch for the matrices, Triton for everything that touches pages.

With `--batch-invariant` the matrices are Triton's too, and one attention kernel serves chunks and
decodes; all other kernels compute row by row anyway.

Of several ranks each has its heads, a part of the feed-forward layer and of the vocabulary, and all
of the residual; the two products that end in the residual are summed over ranks.

Also runs on CPU tensors when Triton interprets its kernels (TRITON_INTERPRET=1), for tests.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.model_config import ModelConfig
from common.ranks import shares
from engine.batch import MAX_RUN_TOKENS, StepBatch
from engine.device_inputs import DeviceStep, InputBuffer, columns_of
from engine.kernels.gpu.attention import attention
from engine.kernels.gpu.checksum import checksums
from engine.kernels.gpu.decode import Partials, decode_attention
from engine.kernels.gpu.landing import land
from engine.kernels.gpu.norm import rms_norm
from engine.kernels.gpu.store import rotate_and_store
from engine.kernels.gpu.swiglu import swiglu
from engine.kernels.offsets import Offsets
from engine.linear import Linear, make_linear
from engine.model_share import ModelShare, gpu_share, within
from engine.padding import pad_end
from engine.pools import PageArena
from engine.ranks.collective import Alone, Collective
from engine.rope import rope_tables
from engine.weights import Checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer's tensors on the device; None where the model has none."""

    norm_1: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Linear
    norm_2: Tensor
    gate_up: Linear
    down: Linear


class TritonModel:
    """`forward(batch)` computes a step's KV into `pool` and returns the wanted logits."""

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        pool: PageArena,
        offsets: Offsets,
        dtype: torch.dtype,
        weight_dtype: str = "auto",
        *,
        is_batch_invariant: bool = False,
        ranks: Collective | None = None,
    ) -> None:
        """`pool` and `offsets` are those of this rank's KV heads."""
        self._ranks = ranks = ranks or Alone()
        heads = shares(ranks.num_ranks, config.num_heads, config.num_kv_heads)[ranks.rank]
        self._share = share = gpu_share(config, heads)
        assert pool.layout.num_kv_heads == len(share.kv_heads)
        self.is_batch_invariant = is_batch_invariant
        self._config = config
        self.pool = pool
        self._offsets = offsets.to(pool.packed.device)
        self._dtype = dtype
        self._device = pool.packed.device
        self.device, self.block_size = self._device, pool.layout.block_size
        self.vocab_size = config.vocab_size
        self._read = _Reader(
            checkpoint, config, share, dtype, self._device, weight_dtype, is_batch_invariant
        )
        self._embedding = self._read.vocabulary("model.embed_tokens.weight")
        head = self._read.output_head()
        self._head = make_linear(
            self._embedding if head is None else head, None, "auto",
            is_invariant=is_batch_invariant,
        )  # fmt: skip
        self._final_norm = self._read.tensor("model.norm.weight", config.hidden_size)
        self._layers = [self._read.layer(i) for i in range(config.num_layers)]
        checkpoint.refuse_unread()
        cos, sin = rope_tables(config)
        self._cos = torch.from_numpy(cos).to(self._device)
        self._sin = torch.from_numpy(sin).to(self._device)
        self._inputs = InputBuffer(self._device)

    @torch.inference_mode()
    def forward(
        self, batch: StepBatch, num_layers: int | None = None, latest: Tensor | None = None
    ) -> None:
        self._wanted = batch.wanted
        self._step = self._inputs.send(columns_of(batch, self.pool.layout.block_size))
        self._step.feed(latest)
        self._rows = self._hidden(self._step, num_layers)

    def use_pool(self, pool: PageArena) -> None:
        """Pages of the same layout, from now on."""
        assert pool.layout == self.pool.layout
        self.pool = pool

    def step_logits(self, step: DeviceStep) -> Tensor:
        """[num_rows, vocab_size] float32 of all rows of a step that lies on the device already."""
        return self._logits_of(self._hidden(step))

    def _hidden(self, step: DeviceStep, num_layers: int | None = None) -> Tensor:
        """[num_rows, hidden_size] behind the layers. Waits for nothing and allocates by the shapes
        alone, so that it can be captured.
        """
        config = self._config
        partials = Partials.allocate(
            len(step.token_ids if self.is_batch_invariant else step.decode_runs),
            len(self._share.heads), config.head_dim, self._device,
        )  # fmt: skip
        stream = None
        x = self._embedded(step.token_ids)
        for index, layer in enumerate(self._layers[:num_layers]):
            x, stream = self._norm(x, layer.norm_1, stream)
            attended = self._attend(layer, layer.qkv(x), step, partials, index)
            x = self._ranks.sum(layer.out(attended))
            x, stream = self._norm(x, layer.norm_2, stream)
            x = self._ranks.sum(layer.down(swiglu(layer.gate_up(x))))
        return x if stream is None else x + stream

    def _embedded(self, token_ids: Tensor) -> Tensor:
        if self._share.is_alone:
            return self._embedding[token_ids]
        own = token_ids - self._share.vocab.start
        is_own = (own >= 0) & (own < len(self._embedding))
        rows = self._embedding[own.clamp(0, len(self._embedding) - 1)]
        return self._ranks.sum(rows * is_own[:, None])

    @torch.inference_mode()
    def logits(self, wanted: NDArray[np.int64]) -> Tensor:
        sent = self._step.wanted if wanted is self._wanted else self._to_device(wanted)
        return self._logits_of(self._rows[sent])

    def _logits_of(self, rows: Tensor) -> Tensor:
        """[num_rows, vocab_size] float32 of hidden rows."""
        normed, _ = self._norm(rows, self._final_norm)
        logits = self._ranks.gather(self._head(normed)).float()
        return logits if self._share.is_alone else logits[:, : self.vocab_size]

    def checksums(self, pages: Tensor, which: Tensor) -> Tensor:
        return checksums(pages, which)

    @property
    def converter(self) -> None:
        return None

    def land(
        self,
        source: Tensor,
        target: Tensor,
        slots: NDArray[np.int64],
        block_ids: NDArray[np.int64],
        tags: NDArray[np.uint8],
    ) -> tuple[NDArray[np.bool_], NDArray[np.uint64]]:
        return land(source, target, slots, block_ids, tags)

    def _attend(
        self, layer: Layer, qkv: Tensor, step: DeviceStep, partials: Partials, index: int
    ) -> Tensor:
        """[num_rows, heads * head_dim] of qkv [num_rows, (heads + 2 * kv_heads) * head_dim], whose
        K and V are stored on the way.
        """
        norms = None
        if layer.q_norm is not None and layer.k_norm is not None:
            norms = layer.q_norm, layer.k_norm
        pool = self.pool
        pages = pool.packed, pool.exact, pool.layout, self._offsets, index
        q, k, v = rotate_and_store(
            qkv.view(len(qkv), -1, self._config.head_dim), norms, self._config.rms_norm_eps,
            self._cos, self._sin, step.items, *pages,
        )  # fmt: skip
        out = torch.empty_like(q)
        if self.is_batch_invariant:
            decode_attention(
                q, k, v, step.chunk_runs, step.tables, *pages, partials, out,
                max_run_tokens=MAX_RUN_TOKENS, is_invariant=True,
            )  # fmt: skip
        else:
            attention(q, k, v, step.chunk_runs, step.tables, *pages, MAX_RUN_TOKENS, out)
        decode_attention(
            q, k, v, step.decode_runs, step.tables, *pages, partials, out,
            is_invariant=self.is_batch_invariant,
        )  # fmt: skip
        return out.flatten(1)

    def _norm(
        self, x: Tensor, weight: Tensor, stream: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return rms_norm(x, weight, self._config.rms_norm_eps, stream)

    def _to_device(self, column: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(column)).to(self._device)


class _Reader:
    """Tensors of a checkpoint, on the device and in the dtype of the computation."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: ModelConfig,
        share: ModelShare,
        dtype: torch.dtype,
        device: torch.device,
        weight_dtype: str,
        is_invariant: bool,
    ) -> None:
        self._checkpoint = checkpoint
        self._config = config
        self._share = share
        self._dtype = dtype
        self._device = device
        self._weight_dtype = weight_dtype
        self._is_invariant = is_invariant
        self._has_output_bias = checkpoint.has_output_bias(config)

    def tensor(
        self,
        name: str,
        *shape: int,
        rows: range | None = None,
        columns: range | None = None,
    ) -> Tensor:
        read = self._checkpoint.read(name, shape, rows=rows, columns=columns)
        return read.to(self._device, self._dtype)

    def vocabulary(self, name: str) -> Tensor:
        """This rank's rows, with zeros beyond the end of the vocabulary."""
        shape = (self._config.vocab_size, self._config.hidden_size)
        return self._padded(self._checkpoint.read(name, shape, rows=self._tokens))

    def output_head(self) -> Tensor | None:
        head = self._checkpoint.output_head(self._config, self._tokens)
        return None if head is None else self._padded(head)

    @property
    def _tokens(self) -> range:
        return within(self._share.vocab, self._config.vocab_size)

    def _padded(self, rows: Tensor) -> Tensor:
        return pad_end(rows, 0, len(self._share.vocab)).to(self._device, self._dtype)

    def layer(self, index: int) -> Layer:
        config, share, prefix = self._config, self._share, f"model.layers.{index}."
        attn, mlp = prefix + "self_attn.", prefix + "mlp."
        hidden, inter, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
        queries, keys = (
            range(heads.start * head_dim, heads.stop * head_dim)
            for heads in (share.heads, share.kv_heads)
        )
        q_width, kv_width = config.num_heads * head_dim, config.num_kv_heads * head_dim
        parts = {
            "q_proj": (q_width, queries), "k_proj": (kv_width, keys), "v_proj": (kv_width, keys)
        }  # fmt: skip
        qkv = [
            self.tensor(f"{attn}{n}.weight", width, hidden, rows=rows)
            for n, (width, rows) in parts.items()
        ]
        bias = None
        if config.attention_bias:
            biases = [
                self.tensor(f"{attn}{n}.bias", width, rows=rows)
                for n, (width, rows) in parts.items()
            ]
            bias = torch.cat(biases)
        gate_up = [
            self.tensor(f"{mlp}{n}.weight", inter, hidden, rows=share.inter)
            for n in ("gate_proj", "up_proj")
        ]
        return Layer(
            norm_1=self.tensor(prefix + "input_layernorm.weight", hidden),
            qkv=self._linear(torch.cat(qkv), bias),
            q_norm=self.tensor(attn + "q_norm.weight", head_dim) if config.qk_norm else None,
            k_norm=self.tensor(attn + "k_norm.weight", head_dim) if config.qk_norm else None,
            out=self._linear(
                self.tensor(attn + "o_proj.weight", hidden, q_width, columns=queries),
                self._output_bias(attn + "o_proj.bias"),
            ),
            norm_2=self.tensor(prefix + "post_attention_layernorm.weight", hidden),
            gate_up=self._linear(torch.cat(gate_up)),
            down=self._linear(
                self.tensor(mlp + "down_proj.weight", hidden, inter, columns=share.inter)
            ),
        )

    def _output_bias(self, name: str) -> Tensor | None:
        """Rank 0 adds it, once for all."""
        if not self._has_output_bias:
            return None
        bias = self.tensor(name, self._config.hidden_size)
        return bias if self._share.rank == 0 else None

    def _linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        return make_linear(weight, bias, self._weight_dtype, is_invariant=self._is_invariant)
