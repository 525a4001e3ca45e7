"""A step's batch: the arrays that a forward pass reads, made from a plan.

Rows of the step are the chunks' tokens in plan order, then one row per decode. An *item* is a
request's tokens that fall into one block (what is stored, and sealed when the block is full); a
*run* is consecutive query tokens that attend together.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from common.scheduling.plan import PrefillChunk, StepPlan
from common.types import OutputKey
from engine.outputs import NO_PAGE, READ, OutputTable

MAX_RUN_TOKENS = 64
"""Query tokens of one run: enough to make loading a block cheap, few enough to share among threads.
"""

ITEM_FIELDS = 6
"""Row, number of tokens, first position, exact page or -1, packed page to seal or -1, 1 when it is
sealed from the exact page (else from the rows)."""
RUN_FIELDS = 6
"""Row, number of tokens, first position, table row, exact page of the own block or -1, tokens of
the chunk that follow."""

_NOTHING = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    token_ids: NDArray[np.int32]
    """[num_rows]"""
    positions: NDArray[np.int32]
    """[num_rows]"""
    items: NDArray[np.int64]
    """[num_items, ITEM_FIELDS]"""
    runs: NDArray[np.int64]
    """[num_runs, RUN_FIELDS]"""
    tables: NDArray[np.int32]
    """[table rows, max_blocks], shared with the `OutputTable`"""
    wanted: NDArray[np.int64]
    """[num_logits]: rows whose logits are wanted: finished prompts first, then decodes, then the
    rows of prompts whose log-probabilities are wanted"""
    num_sampled: int
    """Leading entries of `wanted` that tokens are sampled from."""
    scored: tuple["ScoredRows", ...] = ()
    unread_rows: NDArray[np.int64] = field(default_factory=lambda: _NOTHING)
    """Rows whose token nobody has read yet: it is among those of the latest step,"""
    unread_places: NDArray[np.int64] = field(default_factory=lambda: _NOTHING)
    """[len(unread_rows)], in these places."""

    def own_tables(self, block_size: int) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """`runs`, and no more of `tables` than they read: [requests of the step, blocks of the
        longest], in which the runs' table rows count.
        """
        runs = self.runs.copy()
        used, runs[:, 3] = np.unique(runs[:, 3], return_inverse=True)
        last_blocks = (runs[:, 2] + runs[:, 1] - 1) // block_size
        return runs, self.tables[used, : int(last_blocks.max()) + 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredRows:
    """Rows of a chunk that predict prompt tokens, in the order of `wanted`."""

    key: OutputKey
    targets: NDArray[np.int32]
    num_top: int


def make_batch(plan: StepPlan, outputs: OutputTable, block_size: int) -> StepBatch:
    tokens: list[NDArray[np.int32]] = []
    positions: list[NDArray[np.int32]] = []
    items: list[NDArray[np.int64]] = []
    runs: list[NDArray[np.int64]] = []
    wanted: list[int] = []
    scored: list[ScoredRows] = []
    scored_rows: list[int] = []
    unread_rows, unread_places = _NOTHING, _NOTHING
    row = 0
    for chunk in plan.chunks:
        table_row, chunk_tokens = outputs.place_chunk(chunk)
        assert len(chunk_tokens) == chunk.num_tokens
        assert chunk.start % block_size == 0
        tokens.append(chunk_tokens)
        positions.append(np.arange(chunk.start, chunk.start + chunk.num_tokens, dtype=np.int32))
        items.append(_chunk_items(chunk, row, block_size))
        runs.append(_chunk_runs(chunk, row, table_row))
        if found := outputs.scored(chunk):
            scored.append(ScoredRows(key=chunk.key, targets=found[0], num_top=found[1]))
            scored_rows.extend(range(row, row + len(found[0])))
        row += chunk.num_tokens
        if chunk.num_outputs:
            wanted.append(row - 1)
    decodes = outputs.rows(plan.decodes)
    if len(decodes):
        step_rows = np.arange(row, row + len(decodes), dtype=np.int64)
        tokens.append(outputs.last_token[decodes])
        positions.append((outputs.num_tokens[decodes] - 1).astype(np.int32))
        decode_items, decode_runs = _decode_rows(decodes, step_rows, outputs, block_size)
        items.append(decode_items)
        runs.append(decode_runs)
        wanted.extend(step_rows.tolist())
        is_unread = outputs.unread[decodes] != READ
        unread_rows, unread_places = step_rows[is_unread], outputs.unread[decodes][is_unread]
    return StepBatch(
        token_ids=np.concatenate(tokens),
        positions=np.concatenate(positions),
        items=np.concatenate(items),
        runs=np.concatenate(runs),
        tables=outputs.tables,
        wanted=np.array(wanted + scored_rows, dtype=np.int64),
        num_sampled=len(wanted),
        scored=tuple(scored),
        unread_rows=unread_rows,
        unread_places=unread_places,
    )


def _chunk_items(chunk: PrefillChunk, row: int, block_size: int) -> NDArray[np.int64]:
    """Block 0 goes to its exact page, a full block to its packed page, the block left open to the
    tail.
    """
    end = chunk.start + chunk.num_tokens
    starts = np.arange(chunk.start, end, block_size, dtype=np.int64)
    counts = np.minimum(block_size, end - starts)
    blocks = starts // block_size
    table = np.array(chunk.block_ids, dtype=np.int64)[blocks]
    is_full = counts == block_size
    tail = NO_PAGE if chunk.tail is None else chunk.tail
    exact = np.where(blocks == 0, table, np.where(is_full, NO_PAGE, tail))
    packed = np.where((blocks > 0) & is_full, table, NO_PAGE)
    assert ((exact >= 0) | (packed >= 0)).all(), (
        f"chunk of {chunk.key} leaves a block open and has no tail"
    )
    return np.stack(
        [row + starts - chunk.start, counts, starts, exact, packed, np.zeros_like(starts)], axis=1
    )


def _chunk_runs(chunk: PrefillChunk, row: int, table_row: int) -> NDArray[np.int64]:
    firsts = np.arange(0, chunk.num_tokens, MAX_RUN_TOKENS, dtype=np.int64)
    counts = np.minimum(MAX_RUN_TOKENS, chunk.num_tokens - firsts)
    tables, own = np.full_like(firsts, table_row), np.full_like(firsts, NO_PAGE)
    after = chunk.num_tokens - firsts - counts
    return np.stack([row + firsts, counts, chunk.start + firsts, tables, own, after], axis=1)


def _decode_rows(
    rows: NDArray[np.int64], step_rows: NDArray[np.int64], outputs: OutputTable, block_size: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Items and runs of decode tokens: each is one token, written to the page of its request's open
    block.
    """
    positions = outputs.num_tokens[rows] - 1
    blocks = positions // block_size
    entries = outputs.tables[rows, blocks].astype(np.int64)
    own = np.where(blocks == 0, entries, outputs.tail[rows])
    assert (own >= 0).all(), "a decode has no open page"
    assert (blocks < outputs.num_blocks[rows]).all(), "a decode has no block to grow into"
    seals = (blocks > 0) & (positions % block_size == block_size - 1)
    packed = np.where(seals, entries, NO_PAGE)
    ones, zeros = np.ones_like(rows), np.zeros_like(rows)
    items = np.stack([step_rows, ones, positions, own, packed, ones], axis=1)
    runs = np.stack([step_rows, ones, positions, rows, own, zeros], axis=1)
    return items, runs
