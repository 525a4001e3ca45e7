"""The whole forward pass on CPU: one call per thread and step, the threads of a team in step by
barriers.

Every phase of a layer is cut into tasks that threads take from a counter. A task's arithmetic never
depends on the thread, on the other rows of the step or on how many there are. Phases of a layer:

    norm -> qkv -> rotary, round, store, seal -> attention -> output -> norm -> gate, up, silu ->
    down

The arrays are addresses of memory that `common.engine.cpu_model` owns; `Dims` names the columns of
`dims`.
"""

import numpy as np
from numba import njit

from common.kernels.cpu.attention import attend
from common.kernels.cpu.matmul import multiply, widen
from common.kernels.cpu.pages import FP32, load_rows, seal, store_exact, zero_bytes
from common.kernels.cpu.rows import add_bias, add_row, rms_norm, rotate_head, round_row, silu_mul
from common.kernels.cpu.sync import barrier, take

# columns of `dims`
LAYERS, HIDDEN, INTER, HEADS, KV_HEADS, HEAD_DIM, BLOCK, KIND, VOCAB_PADDED = range(9)
PACKED_BYTES, PACKED_KIND, SCALES, EXACT_BYTES, EXACT_KIND = range(9, 14)
NUM_DIMS = 14

# columns of `layers`: addresses of one layer's tensors, 0 where a model has none
NORM_1, QKV, QKV_BIAS, Q_NORM, K_NORM, OUT, OUT_BIAS, NORM_2, GATE_UP, DOWN = range(10)
NUM_TENSORS = 10

# columns of `memory`: addresses of workspaces, pools and tables
(
    X,
    H,
    QKV_ROWS,
    ATTN,
    ACT,
    SCRATCH,
    SCRATCH_STEP,
    COS,
    SIN,
    PACKED,
    EXACT,
    FINAL_NORM,
    HEAD,
    LOGITS,
    EMBED,
) = range(15)
NUM_MEMORY = 15

# columns of `items`: tokens of one request that fall into one block
ITEM_ROW, ITEM_COUNT, ITEM_POSITION, ITEM_EXACT, ITEM_PACKED, ITEM_FROM_PAGE = range(6)
NUM_ITEM = 6

# columns of `runs`: consecutive query tokens of one request, at most MAX_RUN_TOKENS
RUN_ROW, RUN_COUNT, RUN_POSITION, RUN_TABLE, RUN_OWN, RUN_AFTER = range(6)
NUM_RUN = 6

ROW_BLOCK = 48  # rows of x that stay in cache while panels pass by
PANEL_GROUP = 4  # panels of one task
ROW_TASK = 8  # rows of one norm task
PHASES = 9  # counters per layer
HEAD_GROUP = 16  # panels of one task of the output head


@njit(nogil=True)
def _linear(kind, x, x_stride, w, k, out, out_stride, rows, panels, group, sync, counter):
    """Tasks: (block of rows, group of panels)."""
    element = 4 if kind == 0 else 2
    row_blocks = -(-rows // ROW_BLOCK)
    groups = -(-panels // group)
    while True:
        task = take(sync, counter)
        if task >= row_blocks * groups:
            return
        row, panel = task // groups * ROW_BLOCK, task % groups * group
        multiply(
            kind, x + row * x_stride, x_stride, w + panel * k * 16 * element, k,
            out + row * out_stride + panel * 64, out_stride,
            min(ROW_BLOCK, rows - row), min(group, panels - panel),
        )  # fmt: skip


@njit(nogil=True)
def _gate_up(kind, x, hidden, w, inter, out, rows, scratch, sync, counter):
    """Gate and up panels alternate in `w`; a task computes a few pairs and joins them at once."""
    element = 4 if kind == 0 else 2
    pairs = inter // 16
    group = PANEL_GROUP // 2
    row_blocks, groups = -(-rows // ROW_BLOCK), -(-pairs // group)
    while True:
        task = take(sync, counter)
        if task >= row_blocks * groups:
            return
        row, pair = task // groups * ROW_BLOCK, task % groups * group
        count, num_pairs = min(ROW_BLOCK, rows - row), min(group, pairs - pair)
        at = w + pair * 2 * hidden * 16 * element
        multiply(
            kind,
            x + row * hidden * 4,
            hidden * 4,
            at,
            hidden,
            scratch,
            PANEL_GROUP * 64,
            count,
            2 * num_pairs,
        )
        for r in range(count):
            source = scratch + r * PANEL_GROUP * 64
            target = out + (row + r) * inter * 4 + pair * 64
            for p in range(num_pairs):
                silu_mul(source + p * 128, source + p * 128 + 64, 16, target + p * 64)


@njit(nogil=True)
def _norm_rows(x, delta, bias, weight, n, eps, out, rows, sync, counter):
    """x += delta (when its address is not 0); out = norm(x)."""
    while True:
        first = take(sync, counter) * ROW_TASK
        if first >= rows:
            return
        for r in range(first, min(first + ROW_TASK, rows)):
            at = r * n * 4
            if delta:
                add_row(x + at, delta + at, bias, n)
            rms_norm(x + at, weight, n, eps, out + at)


@njit(nogil=True)
def _store_item(layer, item, head, dims, eps, scale, tensors, memory, scratch):
    """Rotary, rounding, store and seal for one item and one KV head (with the q heads of its
    group).
    """
    heads, kv_heads, head_dim, block_size = dims[HEADS], dims[KV_HEADS], dims[HEAD_DIM], dims[BLOCK]
    group, head_bytes = heads // kv_heads, head_dim * 4
    row_bytes = (heads + 2 * kv_heads) * head_bytes
    exact_kind, packed_kind = dims[EXACT_KIND], dims[PACKED_KIND]
    rows = memory[QKV_ROWS] + item[ITEM_ROW] * row_bytes
    k_rows, v_rows = (
        rows + (heads + head) * head_bytes,
        rows + (heads + kv_heads + head) * head_bytes,
    )
    bias = tensors[QKV_BIAS]
    count, position = item[ITEM_COUNT], item[ITEM_POSITION]
    for t in range(count):
        at = t * row_bytes
        if bias:
            add_bias(
                rows + at + head * group * head_bytes,
                bias + head * group * head_bytes,
                group * head_dim,
            )
            add_bias(k_rows + at, bias + (heads + head) * head_bytes, head_dim)
            add_bias(v_rows + at, bias + (heads + kv_heads + head) * head_bytes, head_dim)
        cos = memory[COS] + (position + t) * head_bytes // 2
        sin = memory[SIN] + (position + t) * head_bytes // 2
        for g in range(group):
            rotate_head(
                rows + at + (head * group + g) * head_bytes,
                cos,
                sin,
                head_dim,
                tensors[Q_NORM],
                eps,
                scale,
            )
        rotate_head(k_rows + at, cos, sin, head_dim, tensors[K_NORM], eps, np.float32(1.0))
        if exact_kind != FP32:
            round_row(k_rows + at, head_dim)
            round_row(v_rows + at, head_dim)

    slice_index = layer * 2 * kv_heads + head
    slots = block_size * head_dim
    k_page = np.int64(0)
    element = 4 if exact_kind == FP32 else 2
    exact_slice = slots * element
    if item[ITEM_EXACT] >= 0:
        k_page = memory[EXACT] + item[ITEM_EXACT] * dims[EXACT_BYTES] + slice_index * exact_slice
        v_page = k_page + kv_heads * exact_slice
        offset = position % block_size
        slot_bytes = head_dim * element
        for t in range(count):
            store_exact(
                k_rows + t * row_bytes, head_dim, k_page + (offset + t) * slot_bytes, exact_kind
            )
            store_exact(
                v_rows + t * row_bytes, head_dim, v_page + (offset + t) * slot_bytes, exact_kind
            )
        if offset == 0:
            zero_bytes(k_page + count * slot_bytes, (block_size - count) * slot_bytes)
            zero_bytes(v_page + count * slot_bytes, (block_size - count) * slot_bytes)
    if item[ITEM_PACKED] >= 0:
        page = memory[PACKED] + item[ITEM_PACKED] * dims[PACKED_BYTES]
        packed_slice = slots * (4 if packed_kind == 0 else (2 if packed_kind == 1 else 1))
        scale_at = page + dims[SCALES] + slice_index
        k_at = page + slice_index * packed_slice
        v_at = k_at + kv_heads * packed_slice
        if item[ITEM_FROM_PAGE]:
            load_rows(k_page, slots, exact_kind, np.float32(1.0), scratch)
            seal(scratch, head_bytes, block_size, head_dim, k_at, packed_kind, scale_at)
            load_rows(k_page + kv_heads * exact_slice, slots, exact_kind, np.float32(1.0), scratch)
            seal(scratch, head_bytes, block_size, head_dim, v_at, packed_kind, scale_at + kv_heads)
        else:
            seal(k_rows, row_bytes, block_size, head_dim, k_at, packed_kind, scale_at)
            seal(v_rows, row_bytes, block_size, head_dim, v_at, packed_kind, scale_at + kv_heads)


@njit(nogil=True)
def _store_items(layer, items, dims, eps, scale, tensors, memory, scratch, sync, counter):
    kv_heads = dims[KV_HEADS]
    while True:
        task = take(sync, counter)
        if task >= len(items) * kv_heads:
            return
        _store_item(
            layer,
            items[task // kv_heads],
            task % kv_heads,
            dims,
            eps,
            scale,
            tensors,
            memory,
            scratch,
        )


@njit(nogil=True)
def _attend_runs(layer, runs, tables, dims, memory, scratch, sync, counter):
    heads, kv_heads, head_dim = dims[HEADS], dims[KV_HEADS], dims[HEAD_DIM]
    group, head_bytes = heads // kv_heads, head_dim * 4
    row_bytes = (heads + 2 * kv_heads) * head_bytes
    while True:
        task = take(sync, counter)
        if task >= len(runs) * kv_heads:
            return
        run, head = runs[len(runs) - 1 - task // kv_heads], task % kv_heads
        rows = memory[QKV_ROWS] + run[RUN_ROW] * row_bytes
        attend(
            rows + head * group * head_bytes,
            rows + (heads + head) * head_bytes,
            rows + (heads + kv_heads + head) * head_bytes, row_bytes,
            run[RUN_COUNT], run[RUN_AFTER], run[RUN_POSITION], run[RUN_OWN], tables[run[RUN_TABLE]],
            group, head_dim, dims[BLOCK],
            memory[PACKED], dims[PACKED_BYTES], dims[PACKED_KIND],
            memory[EXACT], dims[EXACT_BYTES], dims[EXACT_KIND],
            layer * 2 * kv_heads + head, kv_heads, dims[SCALES], scratch,
            memory[ATTN] + (run[RUN_ROW] * heads + head * group) * head_bytes, heads * head_bytes,
        )  # fmt: skip


@njit(nogil=True)
def _embed(tokens, embedding, hidden, kind, out, sync, counter):
    """Rows of the embedding, widened to fp32."""
    element = 4 if kind == 0 else 2
    while True:
        first = take(sync, counter) * ROW_TASK
        if first >= len(tokens):
            return
        for r in range(first, min(first + ROW_TASK, len(tokens))):
            widen(embedding + tokens[r] * hidden * element, hidden, kind, out + r * hidden * 4)


@njit(nogil=True)
def _final_rows(wanted, x, delta, weight, n, eps, out):
    """The last residual and norm, on the rows whose logits are wanted."""
    for i in range(len(wanted)):
        at = wanted[i] * n * 4
        add_row(x + at, delta + at, 0, n)
        rms_norm(x + at, weight, n, eps, out + i * n * 4)


@njit(nogil=True, cache=True)
def forward(me, size, sync, dims, eps, scale, layers, memory, tokens, items, runs, tables, wanted):
    """One step on thread `me` of `size`: logits of the `wanted` rows [len(wanted), vocab padded] at
    memory[LOGITS].
    """
    rows, hidden, kind = len(tokens), dims[HIDDEN], dims[KIND]
    heads, kv_heads, inter = dims[HEADS], dims[KV_HEADS], dims[INTER]
    q_width = heads * dims[HEAD_DIM]
    qkv_width = q_width + 2 * kv_heads * dims[HEAD_DIM]
    x, h, qkv = memory[X], memory[H], memory[QKV_ROWS]
    scratch = memory[SCRATCH] + me * memory[SCRATCH_STEP]
    _embed(tokens, memory[EMBED], hidden, kind, x, sync, 0)
    barrier(sync, size)
    delta = np.int64(0)
    for layer in range(dims[LAYERS]):
        tensors = layers[layer]
        base = 1 + layer * PHASES
        _norm_rows(x, delta, np.int64(0), tensors[NORM_1], hidden, eps, h, rows, sync, base)
        barrier(sync, size)
        _linear(
            kind,
            h,
            hidden * 4,
            tensors[QKV],
            hidden,
            qkv,
            qkv_width * 4,
            rows,
            qkv_width // 16,
            PANEL_GROUP,
            sync,
            base + 1,
        )
        barrier(sync, size)
        _store_items(layer, items, dims, eps, scale, tensors, memory, scratch, sync, base + 2)
        barrier(sync, size)
        _attend_runs(layer, runs, tables, dims, memory, scratch, sync, base + 3)
        barrier(sync, size)
        _linear(
            kind,
            memory[ATTN],
            q_width * 4,
            tensors[OUT],
            q_width,
            qkv,
            hidden * 4,
            rows,
            hidden // 16,
            PANEL_GROUP,
            sync,
            base + 4,
        )
        barrier(sync, size)
        _norm_rows(x, qkv, tensors[OUT_BIAS], tensors[NORM_2], hidden, eps, h, rows, sync, base + 5)
        barrier(sync, size)
        _gate_up(
            kind, h, hidden, tensors[GATE_UP], inter, memory[ACT], rows, scratch, sync, base + 6
        )
        barrier(sync, size)
        _linear(
            kind,
            memory[ACT],
            inter * 4,
            tensors[DOWN],
            inter,
            qkv,
            hidden * 4,
            rows,
            hidden // 16,
            PANEL_GROUP,
            sync,
            base + 7,
        )
        barrier(sync, size)
        delta = qkv
    base = 1 + dims[LAYERS] * PHASES
    if me == 0:
        _final_rows(wanted, x, delta, memory[FINAL_NORM], hidden, eps, h)
    barrier(sync, size)
    padded = dims[VOCAB_PADDED]
    _linear(
        kind,
        h,
        hidden * 4,
        memory[HEAD],
        hidden,
        memory[LOGITS],
        padded * 4,
        len(wanted),
        padded // 16,
        HEAD_GROUP,
        sync,
        base,
    )
