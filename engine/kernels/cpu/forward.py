"""The forward pass on CPU, in two calls per thread and step: `layers`, which writes the KV, and
`head`, which makes logits. So pages can be announced before the logits are there. The threads are
kept in step by barriers.

Every phase of a layer is cut into tasks that threads take from a counter. A task's arithmetic never
depends on the thread, on the other rows of the step or on how many there are. Phases of a layer:

    norm -> q, k, v -> rotary, round, store, seal -> attention -> output projection
    -> norm -> gate, up, silu -> down

Of several ranks each has its own heads, its own part of the feed-forward layer and of the
vocabulary, and all of the residual. The two products that end in the residual are sums over ranks:
each leaves its part (`Model.out`, `Model.down`) in memory that all see, they meet, and each adds
all parts to its residual, in the order of ranks. Two such places are used in turn, so that nobody
writes where another still reads.

`engine.cpu_model` owns the memory and passes addresses: `Model` for the step, `Layer` for
each layer, `Pages` for the pools. `items` and `runs` are those of `engine.batch`.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import njit, types

from engine.kernels.cpu.attention import Run, attend
from engine.kernels.cpu.int8_weights import WIDE_FLOATS, multiply_int8, widen_column
from engine.kernels.cpu.int8_weights import panel_bytes as int8_panel_bytes
from engine.kernels.cpu.matmul import I8_WEIGHTS, element_size, multiply, widen
from engine.kernels.cpu.pages import FP32, Pages, copy_bytes
from engine.kernels.cpu.rows import add_bias, add_row, rms_norm, rotate_head, round_row, silu_mul
from engine.kernels.cpu.sources import source_hash
from engine.kernels.cpu.store import item_at, store_item
from engine.kernels.cpu.sync import barrier, meet, take

ROW_BLOCK = 48  # rows that stay in cache while panels pass by
INT8_ROW_BLOCK = 96  # more of them share the widening of a panel
PANEL_GROUP = 4  # panels of one task
HEAD_GROUP = 16  # the same for the output head
ROW_TASK = 8  # rows of one norm task
PHASES = 8  # counters per layer
PANEL = 16


class Model(NamedTuple):
    """Sizes, workspaces and tensors of one rank that all layers share. Workspaces are fp32 rows."""

    num_layers: int
    hidden: int
    inter: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_padded: int  # of all ranks
    first_token: int  # of this rank's part of the vocabulary
    num_tokens: int  # of it, padded
    kind: int  # how matrices are stored
    x: int  # [rows, hidden]: the residual
    normed: int  # [rows, hidden]
    qkv: int  # [rows, (heads + 2 kv_heads) * head_dim]
    attended: int  # [rows, heads * head_dim]
    out: int  # [ranks, rows, hidden]: what is added to the residual after attention
    down: int  # the same after the feed-forward layer; of one rank the same place
    part_bytes: int  # from rank to rank
    embedded: int  # [rows, hidden], of all ranks; 0: `x` itself
    act: int  # [rows, inter]
    scratch: int
    scratch_step: int  # bytes of scratch per thread
    cos: int  # [positions, head_dim / 2]
    sin: int
    embedding: int  # [num_tokens, hidden] as stored; int8: panels, as the head's
    final_norm: int
    head: int  # panels
    final: int  # [logits, hidden]: normed rows for the head
    logits: int  # [logits, vocab_padded], of all ranks
    rank: int
    num_ranks: int
    board: int


class Layer(NamedTuple):
    """One layer's tensors; 0 where the model has none. Matrices are panels."""

    norm_1: int
    qkv: int
    qkv_bias: int
    q_norm: int
    k_norm: int
    out: int
    out_bias: int
    norm_2: int
    gate_up: int  # gate and up panels alternate
    down: int


@njit(nogil=True)
def _panel_bytes(kind, k):
    return int8_panel_bytes(k) if kind == I8_WEIGHTS else k * PANEL * element_size(kind)


@njit(nogil=True)
def _row_block(kind):
    return INT8_ROW_BLOCK if kind == I8_WEIGHTS else ROW_BLOCK


@njit(nogil=True)
def _multiply(kind, x, x_stride, w, k, out, out_stride, rows, panels, scratch):
    """out[rows, panels * 16] = x[rows, k] @ panels; `scratch` has WIDE_FLOATS."""
    if kind == I8_WEIGHTS:
        multiply_int8(x, x_stride, w, k, out, out_stride, rows, panels, scratch)
    else:
        multiply(kind, x, x_stride, w, k, out, out_stride, rows, panels)


@njit(nogil=True)
def _linear(kind, x, w, k, out, out_stride, rows, panels, group, scratch, sync, counter):
    """out[rows, panels * 16] = x[rows, k] @ w; `out_stride` in bytes. Tasks: (block of rows, group
    of panels).
    """
    groups, block = -(-panels // group), _row_block(kind)
    num_tasks = -(-rows // block) * groups
    step = _panel_bytes(kind, k)
    task = take(sync, counter)
    while task < num_tasks:
        row, panel = task // groups * block, task % groups * group
        at, to = x + row * k * 4, out + row * out_stride + panel * PANEL * 4
        count, width = min(block, rows - row), min(group, panels - panel)
        _multiply(kind, at, k * 4, w + panel * step, k, to, out_stride, count, width, scratch)
        task = take(sync, counter)


@njit(nogil=True)
def _gate_up(model, w, rows, scratch, sync, counter):
    """act = silu(gate) * up; a task computes a few pairs of panels and joins them at once."""
    hidden, inter, kind = model.hidden, model.inter, model.kind
    pairs, group = inter // PANEL, PANEL_GROUP // 2
    groups, block = -(-pairs // group), _row_block(kind)
    num_tasks = -(-rows // block) * groups
    pair_bytes = 2 * _panel_bytes(kind, hidden)
    stride = PANEL_GROUP * PANEL * 4
    wide, scratch = scratch, scratch + WIDE_FLOATS * 4
    task = take(sync, counter)
    while task < num_tasks:
        row, pair = task // groups * block, task % groups * group
        count, width = min(block, rows - row), min(group, pairs - pair)
        at = model.normed + row * hidden * 4
        w_at = w + pair * pair_bytes
        _multiply(kind, at, hidden * 4, w_at, hidden, scratch, stride, count, 2 * width, wide)
        for r in range(count):
            gate = scratch + r * stride
            to = model.act + (row + r) * inter * 4 + pair * PANEL * 4
            for p in range(width):
                silu_mul(gate + p * 128, gate + p * 128 + 64, PANEL, to + p * 64)
        task = take(sync, counter)


@njit(nogil=True)
def _add_parts(model, parts, bias, at):
    """x += the sum over ranks (+ bias), of the row at byte `at`."""
    add_row(model.x + at, parts + at, bias, model.hidden)
    for rank in range(1, model.num_ranks):
        add_row(model.x + at, parts + rank * model.part_bytes + at, 0, model.hidden)


@njit(nogil=True)
def _norm_rows(model, parts, bias, weight, eps, rows, sync, counter):
    """x += parts (+ bias), or, where there are none, what is embedded; normed = norm(x)."""
    n = model.hidden
    first = take(sync, counter) * ROW_TASK
    while first < rows:
        for r in range(first, min(first + ROW_TASK, rows)):
            at = r * n * 4
            if parts:
                _add_parts(model, parts, bias, at)
            elif model.embedded:
                copy_bytes(model.embedded + at, model.x + at, n * 4)
            rms_norm(model.x + at, weight, n, eps, model.normed + at)
        first = take(sync, counter) * ROW_TASK


@njit(nogil=True)
def _rotate_rows(model, layer, item, head, head_eps, scale, exact_kind):
    """Bias, QK-norm, rotary and rounding of an item's q, k and v, for one KV head; in place.

    Where its K and V rows start, and the bytes from row to row.
    """
    head_bytes, group = model.head_dim * 4, model.heads // model.kv_heads
    row_bytes = (model.heads + 2 * model.kv_heads) * head_bytes
    q_offset = head * group * head_bytes
    k_offset = (model.heads + head) * head_bytes
    v_offset = k_offset + model.kv_heads * head_bytes
    rows = model.qkv + item.row * row_bytes
    for t in range(item.num_tokens):
        row = rows + t * row_bytes
        if layer.qkv_bias:
            add_bias(row + q_offset, layer.qkv_bias + q_offset, group * model.head_dim)
            add_bias(row + k_offset, layer.qkv_bias + k_offset, model.head_dim)
            add_bias(row + v_offset, layer.qkv_bias + v_offset, model.head_dim)
        angle = (item.position + t) * head_bytes // 2
        cos, sin = model.cos + angle, model.sin + angle
        for g in range(group):
            at = row + q_offset + g * head_bytes
            rotate_head(at, cos, sin, model.head_dim, layer.q_norm, head_eps, scale)
        k_row, one = row + k_offset, np.float32(1.0)
        rotate_head(k_row, cos, sin, model.head_dim, layer.k_norm, head_eps, one)
        if exact_kind != FP32:
            round_row(k_row, model.head_dim)
            round_row(row + v_offset, model.head_dim)
    return rows + k_offset, rows + v_offset, row_bytes


@njit(nogil=True)
def _store_items(model, layer, index, items, head_eps, scale, pages, scratch, sync, counter):
    """Tasks: (item, KV head)."""
    task = take(sync, counter)
    while task < len(items) * model.kv_heads:
        item, head = item_at(items, task // model.kv_heads), task % model.kv_heads
        k_rows, v_rows, row_bytes = _rotate_rows(
            model, layer, item, head, head_eps, scale, pages.exact_kind
        )
        store_item(k_rows, v_rows, row_bytes, item, index, head, pages, scratch)
        task = take(sync, counter)


@njit(nogil=True)
def _attend_runs(model, index, runs, tables, pages, scratch, sync, counter):
    """Tasks: (run, KV head), the last runs first, since those of a chunk see the most."""
    head_bytes, group = model.head_dim * 4, model.heads // model.kv_heads
    row_bytes = (model.heads + 2 * model.kv_heads) * head_bytes
    out_stride = model.heads * head_bytes
    task = take(sync, counter)
    while task < len(runs) * model.kv_heads:
        fields = runs[len(runs) - 1 - task // model.kv_heads]
        row, count, position, table, own_page, num_after = fields
        head = task % model.kv_heads
        rows = model.qkv + row * row_bytes
        run = Run(
            rows + head * group * head_bytes,
            rows + (model.heads + head) * head_bytes,
            rows + (model.heads + model.kv_heads + head) * head_bytes,
            row_bytes,
            row_bytes,
            model.attended + row * out_stride + head * group * head_bytes,
            out_stride,
            count,
            num_after,
            position,
            own_page,
        )
        slice_index = index * 2 * model.kv_heads + head
        attend(run, tables[table], pages, slice_index, group, scratch)
        task = take(sync, counter)


@njit(nogil=True)
def _embed(model, tokens, sync, counter):
    """Rows of the embedding, widened to fp32: of the tokens that this rank has."""
    hidden, kind = model.hidden, model.kind
    rows = model.embedded if model.embedded else model.x
    first = take(sync, counter) * ROW_TASK
    while first < len(tokens):
        for r in range(first, min(first + ROW_TASK, len(tokens))):
            to, token = rows + r * hidden * 4, tokens[r] - model.first_token
            if token < 0 or token >= model.num_tokens:
                continue
            if kind == I8_WEIGHTS:
                widen_column(model.embedding, hidden, token, to)
            else:
                widen(model.embedding + token * hidden * element_size(kind), hidden, kind, to)
        first = take(sync, counter) * ROW_TASK


@njit(nogil=True)
def _final_rows(model, wanted, eps):
    """The last residual and norm, on the rows whose logits are wanted."""
    row_bytes = model.hidden * 4
    for i in range(len(wanted)):
        at = wanted[i] * row_bytes
        _add_parts(model, model.down, 0, at)
        to = model.final + i * row_bytes
        rms_norm(model.x + at, model.final_norm, model.hidden, eps, to)


@njit(nogil=True)
def _model(m):
    return Model(
        m[0], m[1], m[2], m[3], m[4], m[5], m[6], m[7], m[8], m[9], m[10],
        m[11], m[12], m[13], m[14], m[15], m[16], m[17], m[18], m[19], m[20], m[21],
        m[22], m[23], m[24], m[25], m[26], m[27], m[28], m[29], m[30],
    )  # fmt: skip


@njit(nogil=True)
def _layer(t):
    return Layer(t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7], t[8], t[9])


@njit(nogil=True)
def _pages(p):
    return Pages(
        p[0], p[1], p[2], p[3], p[4], p[5], p[6], p[7], p[8], p[9], p[10], p[11], p[12], p[13],
        p[14], p[15], p[16],
    )  # fmt: skip


@njit(nogil=True)
def _layers(
    me, size, sync, model_fields, layer_fields, page_fields, eps, head_eps, scale, tokens, items,
    runs, tables,
):  # fmt: skip
    model, pages = _model(model_fields), _pages(page_fields)
    rows, hidden, kind = len(tokens), model.hidden, model.kind
    q_width = model.heads * model.head_dim
    qkv_panels = (q_width + 2 * model.kv_heads * model.head_dim) // PANEL
    hidden_panels, hidden_bytes = hidden // PANEL, hidden * 4
    part = model.rank * model.part_bytes
    board, num_ranks = model.board, model.num_ranks
    scratch = model.scratch + me * model.scratch_step
    _embed(model, tokens, sync, 0)
    meet(sync, size, board, num_ranks)
    for index in range(model.num_layers):
        layer, count = _layer(layer_fields[index]), 1 + index * PHASES
        _norm_rows(model, model.down if index else 0, 0, layer.norm_1, eps, rows, sync, count)
        barrier(sync, size)
        _linear(
            kind, model.normed, layer.qkv, hidden, model.qkv, qkv_panels * PANEL * 4, rows,
            qkv_panels, PANEL_GROUP, scratch, sync, count + 1,
        )  # fmt: skip
        barrier(sync, size)
        _store_items(model, layer, index, items, head_eps, scale, pages, scratch, sync, count + 2)
        barrier(sync, size)
        _attend_runs(model, index, runs, tables, pages, scratch, sync, count + 3)
        barrier(sync, size)
        _linear(
            kind, model.attended, layer.out, q_width, model.out + part, hidden_bytes, rows,
            hidden_panels, PANEL_GROUP, scratch, sync, count + 4,
        )  # fmt: skip
        meet(sync, size, board, num_ranks)
        _norm_rows(model, model.out, layer.out_bias, layer.norm_2, eps, rows, sync, count + 5)
        barrier(sync, size)
        _gate_up(model, layer.gate_up, rows, scratch, sync, count + 6)
        barrier(sync, size)
        _linear(
            kind, model.act, layer.down, model.inter, model.down + part, hidden_bytes, rows,
            hidden_panels, PANEL_GROUP, scratch, sync, count + 7,
        )  # fmt: skip
        meet(sync, size, board, num_ranks)


@njit(nogil=True)
def _head(me, size, sync, model_fields, eps, wanted):
    model = _model(model_fields)
    if me == 0:
        _final_rows(model, wanted, eps)
    barrier(sync, size)
    _linear(
        model.kind, model.final, model.head, model.hidden, model.logits + model.first_token * 4,
        model.vocab_padded * 4, len(wanted), model.num_tokens // PANEL, HEAD_GROUP,
        model.scratch + me * model.scratch_step, sync, 0,
    )  # fmt: skip
    if model.num_ranks > 1:
        meet(sync, size, model.board, model.num_ranks)


NUMBERS, NUMBERS_2D = types.int64[::1], types.int64[:, ::1]
LAYERS_SIGNATURE = types.void(
    types.int64, types.int64, types.int64, NUMBERS, NUMBERS_2D, NUMBERS, types.float32,
    types.float32, types.float32, types.int32[::1], NUMBERS_2D, NUMBERS_2D, types.int32[:, ::1],
)  # fmt: skip
HEAD_SIGNATURE = types.void(types.int64, types.int64, types.int64, NUMBERS, types.float32, NUMBERS)


def _compiled(sources):
    """Compiled when this module is imported, or loaded from numba's cache (NUMBA_CACHE_DIR)."""

    @njit(LAYERS_SIGNATURE, nogil=True, cache=True)
    def layers(
        me, size, sync, model_fields, layer_fields, page_fields, eps, head_eps, scale, tokens,
        items, runs, tables,
    ):  # fmt: skip
        """A step's KV into the pages and its rows to `Model.x` and `Model.down`, on thread `me` of
        `size`.

        `eps` is that of norms over the hidden size, `head_eps` that of norms over a head. The
        `_fields` are the numbers of a `Model`, of a `Layer` per row, and of `Pages`; `sync` is
        the address of zeroed words for barriers and counters.
        """
        if sources != 0:
            _layers(
                me, size, sync, model_fields, layer_fields, page_fields, eps, head_eps, scale,
                tokens, items, runs, tables,
            )  # fmt: skip

    @njit(HEAD_SIGNATURE, nogil=True, cache=True)
    def head(me, size, sync, model_fields, eps, wanted):
        """Logits of the `wanted` rows of the latest `layers`, at `Model.logits`."""
        if sources != 0:
            _head(me, size, sync, model_fields, eps, wanted)

    return layers, head


layers: Any
head: Any
layers, head = _compiled(source_hash())
