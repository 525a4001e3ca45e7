"""Start-up self-test: rows come out the same whatever stands beside them. On a CPU, and on a GPU
with `--batch-invariant`, that means to the bit; a GPU's own matrix routines round differently for
other numbers of rows, so without it a margin holds that wrong kernels miss by far.

When a worker starts, a prompt of 512 tokens is computed in one chunk, then its first 1 to 64 tokens
again as smaller chunks, then token by token as decodes, through the first layers and the output
head. That is in pages that nobody uses yet, and leaves them zeroed.

Then, and whenever a worker is in doubt, a short prompt goes through all layers: its numbers must be
finite, and the same again as decodes where bits are promised. That needs a few pages of its own and
no quiet device.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from common.device import self_test_tokens
from common.errors import ConfigError, InternalError
from common.model_config import ModelConfig
from common.scheduling.plan import OutputStart, PrefillChunk, StepPlan
from common.types import BlockId, SamplingParams
from engine.backend import Backend
from engine.batch import StepBatch, make_batch
from engine.outputs import OutputTable
from engine.pools import PageArena

KEY = "self-test/0"
LONG, SHORT = 512, 64
TAIL = 1  # an exact page; exact page 0 is block 0's
NUM_LAYERS = 2
"""Layers that rows are compared in: the second reads what the first has stored."""
NUM_DEEP_DECODES = 4
"""Tokens that go through all layers again as decodes."""


GPU_MARGIN = 0.1
"""Of the largest logit of a row."""


def check_at_start(
    config: ModelConfig, backend: Backend, pool: PageArena, erase: Callable[[], None]
) -> float:
    """`erase` sets all of the pool to zero, in every rank. Raises InternalError, or ConfigError
    when the pool is too small. Returns how many seconds a short prompt through all layers took.
    """
    size = pool.layout.block_size
    longest = min(LONG, config.max_position_embeddings - 1)
    room = min((1 + len(pool.packed)) * size, longest)
    if len(pool.exact) < 2 or room < 2 * size:
        raise ConfigError("the KV pool is too small for the self-test", param="kv_blocks")
    table = (0, *range(-(-room // size) - 1))
    test = _SelfTest(config, backend, pool, table, TAIL, room)
    try:
        test.compare_rows()
        began = time.perf_counter()
        test.check_all_layers()
        return time.perf_counter() - began
    finally:
        erase()


def check_all_layers(
    config: ModelConfig,
    backend: Backend,
    pool: PageArena,
    table: tuple[BlockId, ...],
    tail: BlockId,
) -> None:
    """While the worker serves, in pages that are held for it: block 0 and `tail` exact ones, the
    others packed. Raises InternalError.
    """
    num_tokens = min(self_test_tokens(pool.layout.block_size), config.max_position_embeddings - 1)
    _SelfTest(config, backend, pool, table, tail, num_tokens).check_all_layers()


class _SelfTest:
    def __init__(
        self,
        config: ModelConfig,
        backend: Backend,
        pool: PageArena,
        table: tuple[BlockId, ...],
        tail: BlockId,
        num_tokens: int,
    ) -> None:
        self._config = config
        self._backend = backend
        self._block_size = pool.layout.block_size
        self._device = pool.packed.device
        self._num_packed, self._num_exact = len(pool.packed), len(pool.exact)
        self._block_ids = table
        self._tail = tail
        self._num_layers: int | None = None
        self._tokens = _tokens(num_tokens, config.vocab_size)

    def compare_rows(self) -> None:
        self._num_layers = min(NUM_LAYERS, self._config.num_layers)
        num_short = min(SHORT, len(self._tokens) - 1)
        wanted = self._chunk_logits(len(self._tokens), num_short)
        for count in range(1, num_short + 1):
            found = self._chunk_logits(count, count)[-1]
            self._compare(found, wanted[count - 1], f"chunk of {count}")
        for position, found in enumerate(self._decode_logits(num_short)):
            self._compare(found, wanted[position], f"decode at position {position}")

    def check_all_layers(self) -> None:
        self._num_layers = None
        count = min(self_test_tokens(self._block_size), len(self._tokens))
        wanted = self._chunk_logits(count, count - 1)
        check_finite(wanted)
        for position, found in enumerate(self._decode_logits(min(NUM_DEEP_DECODES, count - 1))):
            check_finite(found)
            if self._backend.is_batch_invariant:
                self._compare(found, wanted[position], f"decode at position {position}")

    def _chunk_logits(self, count: int, num_wanted: int) -> NDArray[np.float32]:
        """Logits of the first `num_wanted` tokens of a chunk of `count`; of the last, if all."""
        outputs = self._outputs((), count)
        table, is_open = self._table(count), count % self._block_size > 0
        chunk = PrefillChunk(
            key=KEY,
            start=0,
            num_tokens=count,
            block_ids=table,
            tail=self._tail if is_open and len(table) > 1 else None,
        )
        batch = make_batch(StepPlan(step=0, chunks=(chunk,)), outputs, self._block_size)
        wanted = np.arange(min(count, num_wanted), dtype=np.int64)
        if count == num_wanted:
            wanted = wanted[-1:]
        return self._forward(replace(batch, wanted=wanted))

    def _decode_logits(self, count: int) -> Iterator[NDArray[np.float32]]:
        """Logits of the first tokens, fed one at a time."""
        outputs = self._outputs(self._table(count), 1)
        rows = outputs.rows((KEY,))
        outputs.give_tail(KEY, self._tail)
        for position in range(count):
            batch = make_batch(StepPlan(step=0, decodes=(KEY,)), outputs, self._block_size)
            yield self._forward(batch)[0]
            token = self._tokens[position + 1 : position + 2].astype(np.int64)
            outputs.record(outputs.sampled(rows, np.zeros_like(token)), token, token >= 0)

    def _outputs(self, block_ids: tuple[int, ...], num_tokens: int) -> OutputTable:
        outputs = OutputTable(
            max_blocks=1 + LONG // self._block_size,
            num_packed=self._num_packed,
            num_exact=self._num_exact,
            vocab_size=self._config.vocab_size,
            device=str(self._device),
        )
        outputs.start(
            OutputStart(
                key=KEY,
                token_ids=self._tokens[:num_tokens],
                num_prompt_tokens=num_tokens,
                sampling=SamplingParams(max_tokens=1, temperature=0.0),
                block_ids=block_ids,
            )
        )
        return outputs

    def _table(self, num_tokens: int) -> tuple[int, ...]:
        return self._block_ids[: -(-num_tokens // self._block_size)]

    def _forward(self, batch: StepBatch) -> NDArray[np.float32]:
        self._backend.forward(batch, self._num_layers)
        return self._backend.logits(batch.wanted).cpu().numpy().copy()

    def _compare(self, found: NDArray[np.float32], wanted: NDArray[np.float32], what: str) -> None:
        compare(found, wanted, what, 0.0 if self._backend.is_batch_invariant else GPU_MARGIN)


def _tokens(count: int, vocab_size: int) -> NDArray[np.int32]:
    """A fixed scatter over the vocabulary."""
    return (np.arange(count, dtype=np.int64) * 7919 % vocab_size).astype(np.int32)


def check_finite(logits: NDArray[np.float32]) -> None:
    if not np.isfinite(logits).all():
        raise InternalError(
            "self-test: the model's logits are not finite; are the weights damaged?"
        )


def compare(
    found: NDArray[np.float32], wanted: NDArray[np.float32], what: str, margin: float
) -> None:
    """Raises InternalError unless the rows [vocab_size] are the same: to the bit with no margin,
    else within this share of the largest logit.
    """
    check_finite(wanted)
    apart = float(np.abs(found - wanted).max())
    if margin and not apart <= margin * float(np.abs(wanted).max()):
        raise InternalError(
            f"self-test: a {what} gives other logits than a long chunk (up to {apart:.2e} apart, "
            f"the largest is {float(np.abs(wanted).max()):.2e}); a kernel is wrong on this GPU"
        )
    if not margin and not np.array_equal(found.view(np.int32), wanted.view(np.int32)):
        raise InternalError(
            f"self-test: a {what} gives other bits than a long chunk (up to {apart:.2e} apart); "
            "this machine's kernels are not independent of the batch"
        )
