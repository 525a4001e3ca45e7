"""Matrix product with packed elements of one byte, widened in registers: for the few query rows of
a decode, where writing a page down as floats would cost more than the products.

Every sum is the chain of multiply-adds that `tile` makes of the widened page, so bits are equal.
"""

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from engine.kernels.cpu.loops import Loop
from engine.kernels.cpu.matmul import broadcast, offset
from engine.kernels.cpu.pages import E3M4, E4M3, E5M2, INT8
from engine.kernels.cpu.simd import (
    I32,
    V8F,
    call_fma,
    constant,
    finite_e3m4,
    finite_e4m3,
    finite_int8,
    from_e5m2,
    spread,
)

I64 = ir.IntType(64)
V16B = ir.VectorType(ir.IntType(8), 16)
TO_FLOATS = {E3M4: finite_e3m4, E4M3: finite_e4m3, E5M2: from_e5m2, INT8: finite_int8}
V32B = ir.VectorType(ir.IntType(8), 32)
MAX_ROWS = 4
COLUMN = 16  # bytes


@intrinsic
def transpose_bytes(typingctx, source, stride, target):
    """Columns of the sixteen rows of sixteen bytes at `source`, `stride` apart, at `target`."""

    def codegen(context, builder, signature, args):
        source, stride, target = args
        rows = []
        for r in range(16):
            at = builder.add(source, builder.mul(stride, ir.Constant(I64, r)))
            rows.append(builder.load(builder.inttoptr(at, V16B.as_pointer()), align=1))
        # each of four rounds interleaves vector i with vector i + 8
        order = [i // 2 + i % 2 * 16 for i in range(16)]
        masks = [ir.Constant(ir.VectorType(I32, 16), [i + by for i in order]) for by in (0, 8)]
        for _ in range(4):
            pairs = [(rows[i], rows[i + 8]) for i in range(8)]
            rows = [builder.shuffle_vector(a, b, mask) for a, b in pairs for mask in masks]
        for r, row in enumerate(rows):
            at = builder.add(target, ir.Constant(I64, COLUMN * r))
            builder.store(row, builder.inttoptr(at, V16B.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def _has_code(typingctx, at, num_bytes, mask, code):
    """Whether one of the bytes at `at`, a multiple of 32 of them, is `code` under `mask`."""

    def codegen(context, builder, signature, args):
        at, num_bytes, mask, code = args
        masks, codes = (
            spread(builder, builder.trunc(value, ir.IntType(8)), V32B) for value in (mask, code)
        )
        none = ir.Constant(V32B, [0] * 32)
        rounds = builder.udiv(num_bytes, ir.Constant(I64, 32))
        loop = Loop(builder, "codes", rounds, [none])
        place = builder.add(at, builder.mul(loop.index, ir.Constant(I64, 32)))
        data = builder.load(builder.inttoptr(place, V32B.as_pointer()), align=1)
        is_code = builder.icmp_signed("==", builder.and_(data, masks), codes)
        found = builder.or_(loop.values[0], builder.sext(is_code, V32B))
        loop.close([found])
        whole = ir.IntType(256)
        return builder.icmp_signed("!=", builder.bitcast(found, whole), ir.Constant(whole, 0))

    return types.boolean(*(types.int64,) * 4), codegen


@njit(nogil=True)
def is_finite(kind, at, num_bytes):
    """Whether so many elements of one byte can be widened here: none is a number's NaN, for which
    the loops have no time. (e5m2's needs no care.)
    """
    if kind in (E3M4, E4M3):
        return not _has_code(at, num_bytes, 0x7F, 0x7F)
    return kind == E5M2 or not _has_code(at, num_bytes, 0xFF, 0x80)


@intrinsic(prefer_literal=True)
def byte_tile(
    typingctx,
    x,
    x_stride,
    w,
    w_stride,
    k,
    scale,
    addend,
    per_k,
    out,
    out_stride,
    factors,
    rows,
    kind,
):
    """out[rows, 16] = x[rows, k] @ (w[k, 16] * scale + addend) (+ out * factors).

    Addresses and strides in bytes. w holds bytes of `kind`, a literal; none is NaN. `addend` is
    the address of sixteen floats, or with the literal `per_k` 1 of one float for every k. `factors`
    is the address of one float per row; the literal 0 starts from zero.
    """
    literals = (per_k, rows, kind)
    if not all(isinstance(a, types.IntegerLiteral) for a in literals):
        return None
    is_per_k, num_rows, element = (a.literal_value for a in literals)
    starts_at_zero = isinstance(factors, types.IntegerLiteral)

    def codegen(context, builder, signature, args):
        x_at, x_step, w_at, w_step, k_end, scale, addend, _, out_at, out_step, factor_at = args[:11]
        x_row = [
            builder.add(x_at, builder.mul(x_step, ir.Constant(I64, r))) for r in range(num_rows)
        ]
        out_row = [
            builder.add(out_at, builder.mul(out_step, ir.Constant(I64, r))) for r in range(num_rows)
        ]

        def floats(at: Any) -> Any:
            return builder.inttoptr(at, V8F.as_pointer())

        places = [floats(offset(builder, row, 32 * j)) for row in out_row for j in range(2)]
        old = [constant(V8F, 0.0)] * len(places)
        if not starts_at_zero:
            rows_of = [offset(builder, factor_at, 4 * r) for r in range(num_rows) for _ in range(2)]
            old = [
                builder.fmul(builder.load(place, align=4), broadcast(builder, at))
                for place, at in zip(places, rows_of, strict=True)
            ]
        scales = spread(builder, scale, V8F)
        if not is_per_k:
            addends = [
                builder.load(floats(offset(builder, addend, 32 * j)), align=4) for j in range(2)
            ]
        loop = Loop(builder, "bytes", k_end, old)
        at = builder.add(w_at, builder.mul(loop.index, w_step))
        data = builder.load(builder.inttoptr(at, V16B.as_pointer()), align=1)
        by_index = builder.mul(loop.index, ir.Constant(I64, 4))
        if is_per_k:
            addends = [broadcast(builder, builder.add(addend, by_index))] * 2
        numbers = [
            call_fma(builder, part, scales, also)
            for part, also in zip(TO_FLOATS[element](builder, data), addends, strict=True)
        ]
        new = []
        for r in range(num_rows):
            factor = broadcast(builder, builder.add(x_row[r], by_index))
            sums = loop.values[2 * r : 2 * r + 2]
            new += [call_fma(builder, factor, n, s) for n, s in zip(numbers, sums, strict=True)]
        loop.close(new)
        for place, value in zip(places, new, strict=True):
            builder.store(value, place, align=4)
        return context.get_dummy_value()

    start = factors if starts_at_zero else types.int64
    arguments = (types.int64,) * 5 + (types.float32, types.int64, per_k)
    return types.void(*arguments, types.int64, types.int64, start, rows, kind), codegen


def _kernels(kind):
    """`scores` and `values` of one kind of element, for 1 to 4 rows."""

    @njit(nogil=True)
    def scores(q, q_stride, columns, head_dim, scale, addend, out, rows):
        """out[rows, 16] = q[rows, head_dim] @ columns, [head_dim, 16] bytes."""
        if rows == 4:
            byte_tile(q, q_stride, columns, 16, head_dim, scale, addend, 1, out, 64, 0, 4, kind)
        elif rows == 3:
            byte_tile(q, q_stride, columns, 16, head_dim, scale, addend, 1, out, 64, 0, 3, kind)
        elif rows == 2:
            byte_tile(q, q_stride, columns, 16, head_dim, scale, addend, 1, out, 64, 0, 2, kind)
        else:
            byte_tile(q, q_stride, columns, 16, head_dim, scale, addend, 1, out, 64, 0, 1, kind)

    @njit(nogil=True)
    def values(weights, page, head_dim, scale, addend, out, factors, rows):
        """out[rows, head_dim] = out * factors + weights[rows, 16] @ page, [16, head_dim] bytes."""
        step = head_dim * 4
        for d in range(0, head_dim, 16):
            w, a, to = page + d, addend + d * 4, out + d * 4
            if rows == 4:
                byte_tile(weights, 64, w, head_dim, 16, scale, a, 0, to, step, factors, 4, kind)
            elif rows == 3:
                byte_tile(weights, 64, w, head_dim, 16, scale, a, 0, to, step, factors, 3, kind)
            elif rows == 2:
                byte_tile(weights, 64, w, head_dim, 16, scale, a, 0, to, step, factors, 2, kind)
            else:
                byte_tile(weights, 64, w, head_dim, 16, scale, a, 0, to, step, factors, 1, kind)

    return scores, values


_scores_e3m4, _values_e3m4 = _kernels(E3M4)
_scores_e4m3, _values_e4m3 = _kernels(E4M3)
_scores_e5m2, _values_e5m2 = _kernels(E5M2)
_scores_int8, _values_int8 = _kernels(INT8)


@njit(nogil=True)
def is_byte(kind):
    return kind in (E3M4, E4M3, E5M2, INT8)


@njit(nogil=True)
def _next_rows(left):
    return 3 if left == 5 else min(left, MAX_ROWS)


@njit(nogil=True)
def score_bytes(kind, q, rows, page, head_dim, scale, addend, columns, out):
    """out[rows, 16] = q[rows, head_dim] @ page [16, head_dim] transposed; `columns` has room for
    the page's bytes.
    """
    for i in range(0, head_dim, 16):
        transpose_bytes(page + i, head_dim, columns + i * 16)
    r, step = 0, head_dim * 4
    while r < rows:
        count, at, to = _next_rows(rows - r), q + r * step, out + r * 64
        if kind == E3M4:
            _scores_e3m4(at, step, columns, head_dim, scale, addend, to, count)
        elif kind == E4M3:
            _scores_e4m3(at, step, columns, head_dim, scale, addend, to, count)
        elif kind == E5M2:
            _scores_e5m2(at, step, columns, head_dim, scale, addend, to, count)
        else:
            _scores_int8(at, step, columns, head_dim, scale, addend, to, count)
        r += count


@njit(nogil=True)
def accumulate_bytes(kind, weights, rows, page, head_dim, scale, addend, out, factors):
    """out[rows, head_dim] = out * factors + weights[rows, 16] @ page [16, head_dim]."""
    r = 0
    while r < rows:
        count, at, to = _next_rows(rows - r), weights + r * 64, out + r * head_dim * 4
        if kind == E3M4:
            _values_e3m4(at, page, head_dim, scale, addend, to, factors + r * 4, count)
        elif kind == E4M3:
            _values_e4m3(at, page, head_dim, scale, addend, to, factors + r * 4, count)
        elif kind == E5M2:
            _values_e5m2(at, page, head_dim, scale, addend, to, factors + r * 4, count)
        else:
            _values_int8(at, page, head_dim, scale, addend, to, factors + r * 4, count)
        r += count
