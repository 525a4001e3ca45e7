"""The model on CPU, or one rank's part of it: workspaces, and a team of threads that runs the
kernels. All arithmetic is fp32.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.codecs import ElementKind
from common.model_config import ModelConfig
from common.pages import PageKind
from engine.backend import Converter
from engine.batch import MAX_RUN_TOKENS, StepBatch
from engine.cpu_weights import CpuWeights
from engine.kernels.cpu import forward as k
from engine.kernels.cpu.attention import scratch_floats
from engine.kernels.cpu.convert import land_converted
from engine.kernels.cpu.int8_weights import WIDE_FLOATS
from engine.kernels.cpu.landing import land
from engine.kernels.cpu.pages import checksum_of, pages_of
from engine.kernels.cpu.sync import FIRST_COUNTER
from engine.kernels.offsets import Offsets
from engine.padding import PANEL, PaddedSizes
from engine.pools import PageArena
from engine.ranks.board import Board
from engine.rope import rope_tables

FINAL, LOGITS = k.Model._fields.index("final"), k.Model._fields.index("logits")


class CpuModel:
    """`forward(batch)` computes a step's KV into `pool`; `logits(wanted)` those of its rows."""

    is_batch_invariant: Final = True

    def __init__(
        self,
        config: ModelConfig,
        weights: CpuWeights,
        pool: PageArena,
        offsets: Offsets,
        *,
        max_num_tokens: int,
        num_threads: int,
        board: Board | None = None,
    ) -> None:
        """`pool` and `offsets` are those of the KV heads that `weights` have; `board` is shared by
        all ranks, where there are several.
        """
        self._config = config
        self._board = board
        self.weights = weights
        self._pool = pool
        self._num_threads = num_threads
        self._max_num_tokens = 0
        self._max_num_logits = 0
        self._sizes = sizes = PaddedSizes.of(config)
        self._vocab_padded = -(-config.vocab_size // PANEL) * PANEL
        assert pool.layout.head_dim == sizes.head_dim
        assert pool.layout.num_kv_heads == len(weights.share.kv_heads)
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

    @property
    def converter(self) -> Converter:
        return self._land_converted

    def _land_converted(
        self,
        source: Tensor,
        element: ElementKind,
        kind: PageKind,
        moves: NDArray[np.int64],
        tags: NDArray[np.uint8],
    ) -> tuple[NDArray[np.bool_], NDArray[np.uint64]]:
        return land_converted(source, element, kind, moves, tags, self._pages)

    def _reserve(self, tokens: int) -> None:
        """Workspaces for this many rows; a board has room for a certain number of them."""
        config, weights, sizes = self._config, self.weights, self._sizes
        board, share = self._board, self.weights.share
        assert board is None or not self._max_num_tokens, f"a step of {tokens} rows"
        tokens = tokens if board is None else board.sizes.num_rows
        self._max_num_tokens = tokens
        q_width = len(share.heads) * sizes.head_dim
        kv_width = len(share.kv_heads) * sizes.head_dim
        scratch = self._scratch_floats()
        self._workspaces = []
        model = k.Model(
            num_layers=config.num_layers,
            hidden=sizes.hidden,
            inter=len(share.inter),
            heads=len(share.heads),
            kv_heads=len(share.kv_heads),
            head_dim=sizes.head_dim,
            vocab_padded=self._vocab_padded,
            first_token=share.vocab.start,
            num_tokens=len(share.vocab),
            kind=weights.kind,
            x=self._workspace(tokens, sizes.hidden),
            normed=self._workspace(tokens, sizes.hidden),
            qkv=self._workspace(tokens, q_width + 2 * kv_width),
            attended=self._workspace(tokens, q_width),
            **self._sums(tokens),
            act=self._workspace(tokens, len(share.inter)),
            scratch=self._workspace(self._num_threads, scratch),
            scratch_step=scratch * 4,
            cos=self._cos.ctypes.data,
            sin=self._sin.ctypes.data,
            embedding=weights.embedding,
            final_norm=weights.final_norm,
            head=weights.head,
            final=0,
            logits=0,
            rank=share.rank,
            num_ranks=share.num_ranks,
            board=0 if board is None else board.address,
        )
        self._model = np.array(model, dtype=np.int64)
        self._reserve_logits(max(1, self._max_num_logits))

    def _sums(self, tokens: int) -> dict[str, int]:
        """What is added to the residual, and the embedded rows: alone, one workspace does."""
        if self._board is None:
            delta = self._workspace(tokens, self._sizes.hidden)
            return {"out": delta, "down": delta, "part_bytes": 0, "embedded": 0}
        sizes, start = self._board.sizes, self._board.address
        embedded, out, down, _ = (start + place for place in sizes.places)
        return {"out": out, "down": down, "part_bytes": sizes.part_bytes, "embedded": embedded}

    def _reserve_logits(self, count: int) -> None:
        self._max_num_logits = count
        if self._board is None:
            self._logits = np.zeros((count, self._vocab_padded), dtype=np.float32)
        else:
            place = self._board.sizes.places[-1]
            self._logits = self._board.floats(place, count, self._vocab_padded)
        self._final = np.zeros((count, self._sizes.hidden), dtype=np.float32)
        self._model[FINAL], self._model[LOGITS] = self._final.ctypes.data, self._logits.ctypes.data

    def _scratch_floats(self) -> int:
        """Per thread: for an attention run, or for the pairs of one gate and up task."""
        group = len(self.weights.share.heads) // len(self.weights.share.kv_heads)
        layout = self._pool.layout
        attention = scratch_floats(MAX_RUN_TOKENS, group, layout.head_dim, layout.block_size)
        return max(attention, WIDE_FLOATS + k.INT8_ROW_BLOCK * k.PANEL_GROUP * PANEL)

    def _workspace(self, rows: int, columns: int) -> int:
        self._workspaces.append(np.zeros((rows, columns), dtype=np.float32))
        return self._workspaces[-1].ctypes.data
