"""Matrix product of activations with int8 weights, to the bits of fp32 weights of the same values.

A panel is 16 output columns, as in `matmul`; along k it is cut into groups of 32 (the last one may
be half as long): 16 bf16 factors, one for each column, then [k of the group, 16] int8. A weight is
integer times factor, rounded to fp32 before it is used, so a group's factor costs no bits of the
sum, and every output is the same chain of fused multiply-adds as with fp32 weights.

Up to FEW rows widen weights in registers, once per tile: reading them is all that counts. More
rows share weights that were widened into scratch, in slices that stay in the first-level cache.
`engine/int8_weights.py` makes the panels.
"""

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from engine.kernels.cpu.loops import Loop
from engine.kernels.cpu.matmul import (
    BF16_WEIGHTS,
    F32_WEIGHTS,
    I64,
    PANEL,
    broadcast,
    load_weights,
    offset,
    tile,
    tile_rows,
)
from engine.kernels.cpu.simd import V8F, V8I, call_fma, call_prefetch, constant

GROUP = 32
SCALE_BYTES = 2 * PANEL  # of one group of a panel
FEW = 8
SLICE = 288  # most inputs widened at once: 18 KB of one panel as fp32
WIDE_FLOATS = SLICE * PANEL
"""Scratch that `multiply_int8` needs."""
UNROLL = 4


@njit(nogil=True)
def panel_bytes(k):
    return k * PANEL + -(-k // GROUP) * SCALE_BYTES


def _load_int8(builder: Any, at: Any) -> Any:
    """Eight int8 at address `at` as fp32."""
    eighth = ir.VectorType(ir.IntType(8), 8)
    stored = builder.load(builder.inttoptr(at, eighth.as_pointer()), align=1)
    return builder.sitofp(builder.sext(stored, V8I), V8F)


@intrinsic(prefer_literal=True)
def _tile(typingctx, x, x_stride, w, panel_stride, k, out, out_stride, rows, panels):
    """out[rows, panels * 16] = x[rows, k] @ w[panels]; as `matmul.tile`, for int8 panels."""
    if not all(isinstance(a, types.IntegerLiteral) for a in (rows, panels)):
        return None
    num_rows, num_panels = rows.literal_value, panels.literal_value

    def codegen(context, builder, signature, args):
        x_at, x_step, w_at, w_step, k_end, out_at, out_step = args[:7]

        def times(value, n):
            return builder.mul(value, ir.Constant(I64, n))

        row_at = [builder.add(x_at, times(x_step, r)) for r in range(num_rows)]
        panel_at = [builder.add(w_at, times(w_step, p)) for p in range(num_panels)]
        columns = [(p, half) for p in range(num_panels) for half in range(2)]
        zeros = [constant(V8F, 0.0)] * (num_rows * len(columns))
        num_groups = builder.sdiv(
            builder.add(k_end, ir.Constant(I64, GROUP - 1)), ir.Constant(I64, GROUP)
        )
        groups = Loop(builder, "int8.group", num_groups, zeros)
        first = times(groups.index, GROUP)
        left = builder.sub(k_end, first)
        whole = ir.Constant(I64, GROUP)
        count = builder.select(builder.icmp_signed("<", left, whole), left, whole)
        group_at = [
            builder.add(at, times(groups.index, GROUP * PANEL + SCALE_BYTES)) for at in panel_at
        ]
        scales = [
            load_weights(builder, offset(builder, group_at[p], half * 16), BF16_WEIGHTS)
            for p, half in columns
        ]
        rounds = builder.sdiv(count, ir.Constant(I64, UNROLL))
        inner = Loop(builder, "int8.k", rounds, groups.values)
        sums = inner.values
        w_offset = times(inner.index, UNROLL * PANEL)
        for at in group_at:  # the same place of the next tile's panels
            ahead = builder.add(builder.add(at, w_offset), times(w_step, num_panels))
            call_prefetch(builder, ahead)
        x_offset = times(builder.add(first, times(inner.index, UNROLL)), 4)
        for step in range(UNROLL):
            weights = [
                builder.fmul(
                    _load_int8(
                        builder,
                        offset(
                            builder,
                            builder.add(group_at[p], w_offset),
                            SCALE_BYTES + step * PANEL + half * 8,
                        ),
                    ),
                    scale,
                )
                for (p, half), scale in zip(columns, scales, strict=True)
            ]
            new = []
            for r in range(num_rows):
                factor = broadcast(
                    builder, offset(builder, builder.add(row_at[r], x_offset), 4 * step)
                )
                old = sums[r * len(columns) : (r + 1) * len(columns)]
                new += [
                    call_fma(builder, factor, weight, s)
                    for weight, s in zip(weights, old, strict=True)
                ]
            sums = new
        inner.close(sums)
        groups.close(sums)
        for r in range(num_rows):
            to = builder.add(out_at, times(out_step, r))
            for j in range(len(columns)):
                place = builder.inttoptr(offset(builder, to, j * 32), V8F.as_pointer())
                builder.store(sums[r * len(columns) + j], place, align=4)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 7, rows, panels), codegen


@intrinsic
def _widen_group(typingctx, group, count, to):
    """[count, 16] fp32 at `to`: `count` rows of the group of a panel at address `group`."""

    def codegen(context, builder, signature, args):
        group_at, count, to = args
        scales = [
            load_weights(builder, offset(builder, group_at, half * 16), BF16_WEIGHTS)
            for half in range(2)
        ]
        loop = Loop(builder, "widen", count, [])
        w_at = builder.add(group_at, builder.mul(loop.index, ir.Constant(I64, PANEL)))
        out = builder.add(to, builder.mul(loop.index, ir.Constant(I64, 4 * PANEL)))
        for half, scale in enumerate(scales):
            weights = _load_int8(builder, offset(builder, w_at, SCALE_BYTES + 8 * half))
            place = builder.inttoptr(offset(builder, out, 32 * half), V8F.as_pointer())
            builder.store(builder.fmul(weights, scale), place, align=4)
        loop.close([])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def _widened(typingctx, group, row, column):
    """The weight of one row and column of a group, as fp32."""

    def codegen(context, builder, signature, args):
        group_at, row, column = args
        scale_at = builder.add(group_at, builder.mul(column, ir.Constant(I64, 2)))
        bits = builder.load(builder.inttoptr(scale_at, ir.IntType(16).as_pointer()), align=2)
        bits = builder.shl(builder.zext(bits, ir.IntType(32)), ir.Constant(ir.IntType(32), 16))
        at = builder.add(builder.mul(row, ir.Constant(I64, PANEL)), column)
        at = builder.add(builder.add(group_at, at), ir.Constant(I64, SCALE_BYTES))
        stored = builder.load(builder.inttoptr(at, ir.IntType(8).as_pointer()), align=1)
        value = builder.sitofp(stored, ir.FloatType())
        return builder.fmul(value, builder.bitcast(bits, ir.FloatType()))

    return types.float32(types.int64, types.int64, types.int64), codegen


@njit(nogil=True)
def _few_rows(x, x_stride, w, k, out, out_stride, rows, panels):
    step = panel_bytes(k)
    panel = 0
    if rows <= 2:
        while panel + 2 <= panels:
            at, to = w + panel * step, out + panel * 64
            if rows == 1:
                _tile(x, x_stride, at, step, k, to, out_stride, 1, 2)
            else:
                _tile(x, x_stride, at, step, k, to, out_stride, 2, 2)
            panel += 2
    while panel < panels:
        at, r = w + panel * step, 0
        while r < rows:
            xr, to = x + r * x_stride, out + r * out_stride + panel * 64
            left = rows - r
            count = 4 if left >= 4 and left != 5 else min(left, 3)
            if count == 4:
                _tile(xr, x_stride, at, step, k, to, out_stride, 4, 1)
            elif count == 3:
                _tile(xr, x_stride, at, step, k, to, out_stride, 3, 1)
            elif count == 2:
                _tile(xr, x_stride, at, step, k, to, out_stride, 2, 1)
            else:
                _tile(xr, x_stride, at, step, k, to, out_stride, 1, 1)
            r += count
        panel += 1


def _slice_rows(start):
    """out (+)= x[rows, k] @ wide[k, 16]; from zero, or with `start` 1 from `out` as it is."""

    @njit(nogil=True)
    def run(x, x_stride, wide, k, out, out_stride, rows):
        r = 0
        while r < rows:
            at, to = x + r * x_stride, out + r * out_stride
            count = tile_rows(rows - r)
            if count == 6:
                tile(at, x_stride, wide, 0, 64, k, to, out_stride, start, 0, 0, 6, 1, F32_WEIGHTS)
            elif count == 4:
                tile(at, x_stride, wide, 0, 64, k, to, out_stride, start, 0, 0, 4, 1, F32_WEIGHTS)
            elif count == 3:
                tile(at, x_stride, wide, 0, 64, k, to, out_stride, start, 0, 0, 3, 1, F32_WEIGHTS)
            elif count == 2:
                tile(at, x_stride, wide, 0, 64, k, to, out_stride, start, 0, 0, 2, 1, F32_WEIGHTS)
            else:
                tile(at, x_stride, wide, 0, 64, k, to, out_stride, start, 0, 0, 1, 1, F32_WEIGHTS)
            r += count

    return run


_first_slice, _next_slice = _slice_rows(0), _slice_rows(1)


@njit(nogil=True)
def multiply_int8(x, x_stride, w, k, out, out_stride, rows, panels, scratch):
    """out[rows, panels * 16] = x[rows, k] @ panels. `scratch` has WIDE_FLOATS."""
    if rows <= FEW:
        _few_rows(x, x_stride, w, k, out, out_stride, rows, panels)
        return
    num_slices = -(-k // SLICE)
    part = -(-k // (num_slices * GROUP)) * GROUP
    for panel in range(panels):
        group = w + panel * panel_bytes(k)
        to = out + panel * 64
        for start in range(0, k, part):
            length = min(part, k - start)
            for first in range(0, length, GROUP):
                count = min(GROUP, length - first)
                _widen_group(group, count, scratch + first * PANEL * 4)
                group += count * PANEL + SCALE_BYTES
            if start:
                _next_slice(x + start * 4, x_stride, scratch, length, to, out_stride, rows)
            else:
                _first_slice(x, x_stride, scratch, length, to, out_stride, rows)


@njit(nogil=True)
def widen_column(w, k, column, out):
    """One column of all panels at `w` as k floats at `out`: a row of the embedding."""
    group = w + column // PANEL * panel_bytes(k)
    for first in range(0, k, GROUP):
        count = min(GROUP, k - first)
        for row in range(count):
            _store_float(out + (first + row) * 4, _widened(group, row, column % PANEL))
        group += count * PANEL + SCALE_BYTES


@intrinsic
def _store_float(typingctx, at, value):
    def codegen(context, builder, signature, args):
        builder.store(args[1], builder.inttoptr(args[0], ir.FloatType().as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32), codegen
