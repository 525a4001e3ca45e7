"""Matrix product of activations with packed weights; the one matrix routine of the CPU engine.

Weights [n, k] are packed once into panels of 16 output columns, [ceil(n / 16), k, 16], in the dtype
of the checkpoint (fp32, bf16 or fp16), and widened in registers. Every output element is one chain
of fused multiply-adds over k in ascending order, so a row's bits do not depend on how many rows
there are, on the tile that computed it or on the number of threads. No padding of rows is needed.

`tile` is the inner loop, generated for each (rows, panels): accumulators stay in registers.
"""

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from engine.kernels.cpu.simd import (
    V8F,
    V8I,
    call_fma,
    call_prefetch,
    constant,
    f32x8,
    spread,
    store,
)

PANEL = 16
F32_WEIGHTS, BF16_WEIGHTS, F16_WEIGHTS, I8_WEIGHTS = 0, 1, 2, 3
I64 = ir.IntType(64)


def load_weights(builder: Any, at: Any, kind: int) -> Any:
    """Eight weights at address `at`, widened to fp32."""
    if kind == F32_WEIGHTS:
        return builder.load(builder.inttoptr(at, V8F.as_pointer()), align=4)
    if kind == BF16_WEIGHTS:
        half = ir.VectorType(ir.IntType(16), 8)
        bits = builder.zext(builder.load(builder.inttoptr(at, half.as_pointer()), align=2), V8I)
        return builder.bitcast(builder.shl(bits, constant(V8I, 16)), V8F)
    half = ir.VectorType(ir.HalfType(), 8)
    return builder.fpext(builder.load(builder.inttoptr(at, half.as_pointer()), align=2), V8F)


def offset(builder: Any, base: Any, by: int) -> Any:
    return builder.add(base, ir.Constant(I64, by)) if by else base


def broadcast(builder: Any, at: Any) -> Any:
    value = builder.load(builder.inttoptr(at, ir.FloatType().as_pointer()), align=4)
    return spread(builder, value, V8F)


@intrinsic(prefer_literal=True)
def tile(
    typingctx,
    x,
    x_stride,
    w,
    panel_stride,
    k_stride,
    k,
    out,
    out_stride,
    factors,
    ahead,
    ahead_step,
    rows,
    panels,
    kind,
):
    """out[rows, panels * 16] = x[rows, k] @ w[panels, k, 16] (+ out * factors).

    Addresses and strides in bytes; the last three are literal. `factors` is the address of one
    float per row, by which the old `out` is multiplied before the sum goes on from there; the
    literal 0 starts from zero, the literal 1 from `out` as it is. On the way cache lines are asked
    for, from address `ahead` on, `ahead_step` bytes further for every k; with the literal 0 none.
    """
    if not all(isinstance(a, types.IntegerLiteral) for a in (rows, panels, kind)):
        return None
    num_rows, num_panels, width = rows.literal_value, panels.literal_value, kind.literal_value
    prefetches = not isinstance(ahead, types.IntegerLiteral)
    start = factors.literal_value if isinstance(factors, types.IntegerLiteral) else None
    element = 4 if width == F32_WEIGHTS else 2

    def codegen(context, builder, signature, args):
        x_at, x_step, w_at, w_step, k_step, k_end, out_at, out_step, factor_at = args[:9]
        ahead_at, ahead_by = args[9:11]
        row_at = [
            builder.add(x_at, builder.mul(x_step, ir.Constant(I64, r))) for r in range(num_rows)
        ]
        out_row = [
            builder.add(out_at, builder.mul(out_step, ir.Constant(I64, r))) for r in range(num_rows)
        ]
        panel_at = [
            builder.add(w_at, builder.mul(w_step, ir.Constant(I64, p))) for p in range(num_panels)
        ]

        def out_place(r, j):
            return builder.inttoptr(offset(builder, out_row[r], j * 32), V8F.as_pointer())

        old = [[constant(V8F, 0.0)] * (2 * num_panels) for _ in range(num_rows)]
        for r in range(num_rows if start != 0 else 0):
            old[r] = [builder.load(out_place(r, j), align=4) for j in range(2 * num_panels)]
            if start is None:
                factor = broadcast(builder, offset(builder, factor_at, 4 * r))
                old[r] = [builder.fmul(value, factor) for value in old[r]]
        entry = builder.block
        body = builder.append_basic_block("tile.body")
        done = builder.append_basic_block("tile.done")
        builder.branch(body)
        builder.position_at_end(body)
        index = builder.phi(I64)
        sums = [[builder.phi(V8F) for _ in range(2 * num_panels)] for _ in range(num_rows)]
        x_offset = builder.mul(index, ir.Constant(I64, 4))
        w_offset = builder.mul(index, k_step)
        if prefetches:
            call_prefetch(builder, builder.add(ahead_at, builder.mul(index, ahead_by)))
        weights = [
            load_weights(
                builder,
                offset(builder, builder.add(panel_at[p], w_offset), half * 8 * element),
                width,
            )
            for p in range(num_panels)
            for half in range(2)
        ]
        new = []
        for r in range(num_rows):
            factor = broadcast(builder, builder.add(row_at[r], x_offset))
            new.append(
                [
                    call_fma(builder, factor, weight, s)
                    for weight, s in zip(weights, sums[r], strict=True)
                ]
            )
        following = builder.add(index, ir.Constant(I64, 1))
        index.add_incoming(ir.Constant(I64, 0), entry)
        index.add_incoming(following, builder.block)
        for r in range(num_rows):
            for s, first, n in zip(sums[r], old[r], new[r], strict=True):
                s.add_incoming(first, entry)
                s.add_incoming(n, builder.block)
        builder.cbranch(builder.icmp_signed("<", following, k_end), body, done)
        builder.position_at_end(done)
        for r in range(num_rows):
            for j, value in enumerate(new[r]):
                builder.store(value, out_place(r, j), align=4)
        return context.get_dummy_value()

    last = types.int64 if start is None else factors
    asked = (types.int64, types.int64) if prefetches else (ahead, types.int64)
    return types.void(*(types.int64,) * 8, last, *asked, rows, panels, kind), codegen


@njit(nogil=True)
def element_size(kind):
    return 4 if kind == F32_WEIGHTS else 2


@njit(nogil=True)
def tile_rows(left):
    """Rows of the next tile, 6, 4, 3, 2 or 1: in all as few that leave the units idle as can be."""
    if left >= 6 and left != 7 and left != 8 and left != 11:
        return 6
    if left >= 4 and left != 5:
        return 4
    return min(left, 3)


def _panel_rows(kind):
    """The product of `rows` rows of x and `panels` consecutive panels, for one width of weights."""
    line = 64 if kind == F32_WEIGHTS else 32

    @njit(nogil=True)
    def run(x, x_stride, w, k, out, out_stride, rows, panels):
        step = k * line
        panel = 0
        # each pass over a panel asks for a part of the next one, so that memory is always busy
        by = line // -(-rows // 6)
        if rows <= 2:  # few rows: several panels at once, for enough independent sums
            while panel + 4 <= panels:
                at, to = w + panel * step, out + panel * 64
                for r in range(rows):
                    xr, o = x + r * x_stride, to + r * out_stride
                    tile(xr, x_stride, at, step, line, k, o, out_stride, 0, 0, 0, 1, 4, kind)
                panel += 4
        while panel < panels:
            at, to = w + panel * step, out + panel * 64
            r, ahead = 0, at + step
            while r < rows:
                xr, o = x + r * x_stride, to + r * out_stride
                count = tile_rows(rows - r)
                if count == 6:
                    tile(xr, x_stride, at, step, line, k, o, out_stride, 0, ahead, by, 6, 1, kind)
                elif count == 4:
                    tile(xr, x_stride, at, step, line, k, o, out_stride, 0, ahead, by, 4, 1, kind)
                elif count == 3:
                    tile(xr, x_stride, at, step, line, k, o, out_stride, 0, ahead, by, 3, 1, kind)
                elif count == 2:
                    tile(xr, x_stride, at, step, line, k, o, out_stride, 0, ahead, by, 2, 1, kind)
                else:
                    tile(xr, x_stride, at, step, line, k, o, out_stride, 0, ahead, by, 1, 1, kind)
                r += count
                ahead += k * by
            panel += 1

    return run


_rows_f32 = _panel_rows(F32_WEIGHTS)
_rows_bf16 = _panel_rows(BF16_WEIGHTS)
_rows_f16 = _panel_rows(F16_WEIGHTS)


@njit(nogil=True)
def multiply(kind, x, x_stride, w, k, out, out_stride, rows, panels):
    """out[rows, panels * 16] = x[rows, k] @ panels, by the width that the weights are stored in."""
    if kind == F32_WEIGHTS:
        _rows_f32(x, x_stride, w, k, out, out_stride, rows, panels)
    elif kind == BF16_WEIGHTS:
        _rows_bf16(x, x_stride, w, k, out, out_stride, rows, panels)
    else:
        _rows_f16(x, x_stride, w, k, out, out_stride, rows, panels)


@intrinsic(prefer_literal=True)
def _load_wide(typingctx, at, kind):
    """Eight stored weights as fp32."""
    if not isinstance(kind, types.IntegerLiteral):
        return None
    width = kind.literal_value

    def codegen(context, builder, signature, args):
        return load_weights(builder, args[0], width)

    return f32x8(types.int64, kind), codegen


@njit(nogil=True)
def widen(source, count, kind, target):
    """`count` stored weights as fp32 at `target`."""
    for i in range(0, count, 8):
        if kind == F32_WEIGHTS:
            store(target + i * 4, _load_wide(source + i * 4, F32_WEIGHTS))
        elif kind == BF16_WEIGHTS:
            store(target + i * 4, _load_wide(source + i * 2, BF16_WEIGHTS))
        else:
            store(target + i * 4, _load_wide(source + i * 2, F16_WEIGHTS))
