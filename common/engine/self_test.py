"""Start-up self-test: rows come out the same whatever stands beside them. On a CPU, and on a GPU
with `--batch-invariant`, that means to the bit; a GPU's own matrix routines round differently for
other numbers of rows, so without it a margin holds that wrong kernels miss by far.

A prompt of 512 tokens is computed in one chunk, then its first 1 to 64 tokens again as smaller
chunks, then token by token as decodes, through the first layers and the output head. Runs before
the worker takes requests, in pages that nobody uses yet, and leaves them zeroed.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from common.engine.backend import Backend
from common.engine.batch import StepBatch, make_batch
from common.engine.outputs import OutputTable
from common.engine.pools import PageArena
from common.errors import ConfigError, InternalError
from common.model_config import ModelConfig
from common.scheduling.plan import OutputStart, PrefillChunk, StepPlan
from common.types import SamplingParams

KEY = "self-test/0"
LONG, SHORT = 512, 64
TAIL = 1  # an exact page; exact page 0 is block 0's
NUM_LAYERS = 2
"""Layers that the test runs through: the second reads what the first has stored."""


GPU_MARGIN = 0.1
"""Of the largest logit of a row."""


def check_row_invariance(config: ModelConfig, backend: Backend, pool: PageArena) -> None:
    test = _SelfTest(config, backend, pool)
    try:
        test.run()
    finally:
        pool.packed[:] = 0
        pool.exact[:] = 0


class _SelfTest:
    def __init__(self, config: ModelConfig, backend: Backend, pool: PageArena) -> None:
        block_size = pool.layout.block_size
        longest = min(LONG, config.max_position_embeddings - 1)
        room = min((1 + len(pool.packed)) * block_size, longest)
        if len(pool.exact) < 2 or room < 2 * block_size:
            raise ConfigError("the KV pool is too small for the self-test", param="kv_blocks")
        self._config = config
        self._backend = backend
        self._block_size = block_size
        self._device = pool.packed.device
        self._num_packed, self._num_exact = len(pool.packed), len(pool.exact)
        self._tokens = _tokens(room, config.vocab_size)

    def run(self) -> None:
        num_short = min(SHORT, len(self._tokens) - 1)
        wanted = self._chunk_logits(len(self._tokens), num_short)
        for count in range(1, num_short + 1):
            found = self._chunk_logits(count, count)[-1]
            self._compare(found, wanted[count - 1], f"chunk of {count}")
        for position, found in enumerate(self._decode_logits(num_short)):
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
            tail=TAIL if is_open and len(table) > 1 else None,
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
        outputs.give_tail(KEY, TAIL)
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
        """Exact page 0, then packed pages 0, 1, ..."""
        return (0, *range(-(-num_tokens // self._block_size) - 1))

    def _forward(self, batch: StepBatch) -> NDArray[np.float32]:
        self._backend.forward(batch, NUM_LAYERS)
        return self._backend.logits(batch.wanted).cpu().numpy().copy()

    def _compare(self, found: NDArray[np.float32], wanted: NDArray[np.float32], what: str) -> None:
        compare(found, wanted, what, 0.0 if self._backend.is_batch_invariant else GPU_MARGIN)


def _tokens(count: int, vocab_size: int) -> NDArray[np.int32]:
    """A fixed scatter over the vocabulary."""
    return (np.arange(count, dtype=np.int64) * 7919 % vocab_size).astype(np.int32)


def compare(
    found: NDArray[np.float32], wanted: NDArray[np.float32], what: str, margin: float
) -> None:
    """Raises InternalError unless the rows [vocab_size] are the same: to the bit with no margin,
    else within this share of the largest logit.
    """
    if not np.isfinite(wanted).all():
        raise InternalError(
            "self-test: the model's logits are not finite; are the weights damaged?"
        )
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
