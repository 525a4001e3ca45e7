"""Eight fp32 lanes as a numba type, so that CPU kernels say exactly which instructions run, in
which order.

Nothing here may be reassociated or contracted by the compiler: a sum is the order in which it is
written, and `fma` is one rounding. So a row of a kernel gives the same bits whatever loop it stands
in. LLVM lowers the lanes to AVX2, or to whatever the machine has. Addresses are plain integers in
bytes (`address(array)`), since a numba array costs an alias check at every store.
"""

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.datamodel import PrimitiveModel
from numba.extending import intrinsic, register_model

F32 = ir.FloatType()
I32 = ir.IntType(32)
V8F = ir.VectorType(F32, 8)
V8I = ir.VectorType(I32, 8)
MAGIC = 12582912.0
"""1.5 * 2^23: added to a small float, it leaves the nearest integer in the low mantissa bits."""


class F32x8Type(types.Type):
    def __init__(self) -> None:
        super().__init__(name="F32x8")


f32x8 = F32x8Type()


@register_model(F32x8Type)
class F32x8Model(PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Any) -> None:
        super().__init__(dmm, fe_type, V8F)


def _pointer(builder: Any, address: Any, pointee: Any) -> Any:
    return builder.inttoptr(address, pointee.as_pointer())


def spread(builder: Any, value: Any, vector: Any) -> Any:
    """The value in every lane of a vector of this type."""
    undefined = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(undefined, value, ir.Constant(I32, 0))
    zeros = ir.Constant(ir.VectorType(I32, vector.count), [0] * vector.count)
    return builder.shuffle_vector(first, undefined, zeros)


def constant(vector: Any, value: float) -> Any:
    return ir.Constant(vector, [value] * 8)


def call_fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    kind = ir.FunctionType(V8F, [V8F, V8F, V8F])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.fma.v8f32")
    return builder.call(function, [a, b, c])


@intrinsic
def address(typingctx, array):
    """Address of an array's first element as int64."""

    def codegen(context, builder, signature, args):
        view = cgutils.create_struct_proxy(signature.args[0])(context, builder, value=args[0])
        return builder.ptrtoint(view.data, ir.IntType(64))

    return types.int64(array), codegen


def call_prefetch(builder: Any, at: Any) -> None:
    pointer = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [pointer, I32, I32, I32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    read, near, data = (ir.Constant(I32, n) for n in (0, 2, 1))
    builder.call(function, [builder.inttoptr(at, pointer), read, near, data])


@intrinsic
def prefetch(typingctx, at):
    """Ask for the cache line at address `at`; any address will do."""

    def codegen(context, builder, signature, args):
        call_prefetch(builder, args[0])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def load(typingctx, at):
    """Eight floats at address `at`."""

    def codegen(context, builder, signature, args):
        return builder.load(_pointer(builder, args[0], V8F), align=4)

    return f32x8(types.int64), codegen


@intrinsic
def store(typingctx, at, value):
    def codegen(context, builder, signature, args):
        builder.store(args[1], _pointer(builder, args[0], V8F), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, f32x8), codegen


@intrinsic
def splat(typingctx, value):
    """One float in all eight lanes."""

    def codegen(context, builder, signature, args):
        return spread(builder, args[0], V8F)

    return f32x8(types.float32), codegen


@intrinsic
def fma(typingctx, a, b, c):
    """a * b + c with one rounding."""

    def codegen(context, builder, signature, args):
        return call_fma(builder, *args)

    return f32x8(f32x8, f32x8, f32x8), codegen


def _binary(operation):
    @intrinsic
    def lanes(typingctx, a, b):
        def codegen(context, builder, signature, args):
            return getattr(builder, operation)(*args)

        return f32x8(f32x8, f32x8), codegen

    return lanes


add = _binary("fadd")
sub = _binary("fsub")
mul = _binary("fmul")
div = _binary("fdiv")


@intrinsic
def maximum(typingctx, a, b):
    """a where a > b, else b. A NaN in b stays; one in a is lost."""

    def codegen(context, builder, signature, args):
        return builder.select(builder.fcmp_ordered(">", args[0], args[1]), args[0], args[1])

    return f32x8(f32x8, f32x8), codegen


@intrinsic
def minimum(typingctx, a, b):
    """a where a < b, else b. A NaN in b stays; one in a is lost."""

    def codegen(context, builder, signature, args):
        return builder.select(builder.fcmp_ordered("<", args[0], args[1]), args[0], args[1])

    return f32x8(f32x8, f32x8), codegen


@intrinsic
def lane(typingctx, value, index):
    def codegen(context, builder, signature, args):
        return builder.extract_element(args[0], builder.trunc(args[1], I32))

    return types.float32(f32x8, types.int64), codegen


def _half(builder: Any, value: Any, first: int, count: int) -> Any:
    mask = ir.Constant(ir.VectorType(I32, count), list(range(first, first + count)))
    return builder.shuffle_vector(value, ir.Constant(value.type, ir.Undefined), mask)


@intrinsic
def total(typingctx, value):
    """Sum of the lanes, in one fixed tree: halves, quarters, pair."""

    def codegen(context, builder, signature, args):
        four = builder.fadd(_half(builder, args[0], 0, 4), _half(builder, args[0], 4, 4))
        two = builder.fadd(_half(builder, four, 0, 2), _half(builder, four, 2, 2))
        zero, one = ir.Constant(I32, 0), ir.Constant(I32, 1)
        return builder.fadd(builder.extract_element(two, zero), builder.extract_element(two, one))

    return types.float32(f32x8), codegen


@intrinsic
def largest(typingctx, value):
    """Largest lane (a NaN may be lost)."""

    def codegen(context, builder, signature, args):
        def bigger(a, b):
            return builder.select(builder.fcmp_ordered(">", a, b), a, b)

        four = bigger(_half(builder, args[0], 0, 4), _half(builder, args[0], 4, 4))
        two = bigger(_half(builder, four, 0, 2), _half(builder, four, 2, 2))
        zero, one = ir.Constant(I32, 0), ir.Constant(I32, 1)
        return bigger(builder.extract_element(two, zero), builder.extract_element(two, one))

    return types.float32(f32x8), codegen


@intrinsic
def keep_first(typingctx, value, count, otherwise):
    """Lanes below `count` from `value`, the others from `otherwise`."""

    def codegen(context, builder, signature, args):
        limit = spread(builder, builder.trunc(args[1], I32), V8I)
        index = ir.Constant(V8I, list(range(8)))
        return builder.select(builder.icmp_signed("<", index, limit), args[0], args[2])

    return f32x8(f32x8, types.int64, f32x8), codegen


@intrinsic
def keep_above(typingctx, value, limit, otherwise):
    """Lanes that are at least `limit` from `value`, the others from `otherwise`."""

    def codegen(context, builder, signature, args):
        return builder.select(builder.fcmp_ordered(">=", args[0], args[1]), args[0], args[2])

    return f32x8(f32x8, f32x8, f32x8), codegen


@intrinsic
def if_zero(typingctx, test, value, otherwise):
    """Lanes of `value` where `test` is zero, else of `otherwise`."""

    def codegen(context, builder, signature, args):
        is_zero = builder.fcmp_ordered("==", args[0], constant(V8F, 0.0))
        return builder.select(is_zero, args[1], args[2])

    return f32x8(f32x8, f32x8, f32x8), codegen


@intrinsic
def finite_or_zero(typingctx, value):
    def codegen(context, builder, signature, args):
        size = builder.and_(builder.bitcast(args[0], V8I), constant(V8I, 0x7FFFFFFF))
        is_bad = builder.icmp_unsigned(">=", size, constant(V8I, 0x7F800000))
        return builder.select(is_bad, constant(V8F, 0.0), args[0])

    return f32x8(f32x8), codegen


LOG2E = 1.4426950408889634
LN2_HIGH = 0.693145751953125
LN2_LOW = 1.428606765330187e-06
EXP_POLYNOMIAL = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    0.5,
)


@intrinsic
def exp(typingctx, value):
    """e to the power of each lane, for lanes <= 88; below -87.3 the result is 0; NaN stays NaN
    (about 1 ulp).
    """

    def codegen(context, builder, signature, args):
        x = args[0]
        number = lambda v: constant(V8F, v)  # noqa: E731
        tiny = builder.fcmp_ordered("<", x, number(-87.3))
        safe = builder.select(tiny, number(0.0), x)
        shifted = call_fma(builder, safe, number(LOG2E), number(MAGIC))
        n = builder.fsub(shifted, number(MAGIC))
        r = call_fma(builder, n, number(-LN2_HIGH), safe)
        r = call_fma(builder, n, number(-LN2_LOW), r)
        p = number(EXP_POLYNOMIAL[0])
        for coefficient in EXP_POLYNOMIAL[1:]:
            p = call_fma(builder, p, r, number(coefficient))
        p = builder.fadd(call_fma(builder, p, builder.fmul(r, r), r), number(1.0))
        power = builder.shl(builder.bitcast(shifted, V8I), constant(V8I, 23))
        scaled = builder.bitcast(builder.add(builder.bitcast(p, V8I), power), V8F)
        is_nan = builder.fcmp_unordered("uno", x, x)
        return builder.select(is_nan, x, builder.select(tiny, number(0.0), scaled))

    return f32x8(f32x8), codegen


@intrinsic
def round_bf16(typingctx, value):
    """Each lane rounded to bf16 (nearest, ties to even), still as fp32. NaN stays NaN."""

    def codegen(context, builder, signature, args):
        bits = builder.bitcast(args[0], V8I)
        odd = builder.and_(builder.lshr(bits, constant(V8I, 16)), constant(V8I, 1))
        up = builder.add(bits, builder.add(odd, constant(V8I, 0x7FFF)))
        rounded = builder.bitcast(builder.and_(up, constant(V8I, 0xFFFF0000)), V8F)
        is_nan = builder.fcmp_unordered("uno", args[0], args[0])
        return builder.select(is_nan, args[0], rounded)

    return f32x8(f32x8), codegen


@intrinsic
def store_bf16(typingctx, at, value):
    """Write the upper halves of eight lanes that already are bf16 values (2 bytes each)."""

    def codegen(context, builder, signature, args):
        bits = builder.lshr(builder.bitcast(args[1], V8I), constant(V8I, 16))
        half = ir.VectorType(ir.IntType(16), 8)
        builder.store(builder.trunc(bits, half), _pointer(builder, args[0], half), align=2)
        return context.get_dummy_value()

    return types.void(types.int64, f32x8), codegen


@intrinsic
def load_bf16(typingctx, at):
    def codegen(context, builder, signature, args):
        half = ir.VectorType(ir.IntType(16), 8)
        bits = builder.zext(builder.load(_pointer(builder, args[0], half), align=2), V8I)
        return builder.bitcast(builder.shl(bits, constant(V8I, 16)), V8F)

    return f32x8(types.int64), codegen


def _widening(to_floats):
    """An intrinsic that reads sixteen bytes at `at`: each times `scale`
    plus the float at its place at `offset`, with one rounding, as fp32 at `out`.
    """

    @intrinsic
    def widen(typingctx, at, scale, offset, out):
        def codegen(context, builder, signature, args):
            at, scale, offset, out = args
            kind = ir.VectorType(ir.IntType(8), 16)
            data = builder.load(_pointer(builder, at, kind), align=1)
            factor = spread(builder, scale, V8F)
            for first, wide in zip((0, 8), to_floats(builder, data), strict=True):
                by = ir.Constant(ir.IntType(64), first * 4)
                addend = builder.load(_pointer(builder, builder.add(offset, by), V8F), align=4)
                place = _pointer(builder, builder.add(out, by), V8F)
                builder.store(call_fma(builder, wide, factor, addend), place, align=4)
            return context.get_dummy_value()

        return types.void(types.int64, types.float32, types.int64, types.int64), codegen

    return widen


V16H = ir.VectorType(ir.IntType(16), 16)


def _halves(builder, bits):
    """Both halves of sixteen fp16 numbers, given by their bits, as fp32."""
    halves = builder.bitcast(bits, ir.VectorType(ir.HalfType(), 16))
    return [builder.fpext(_half(builder, halves, first, 8), V8F) for first in (0, 8)]


def _by_shift(mantissa_bits):
    """How sixteen fp8 bytes with so many bits of mantissa become floats: as they are, and with 0x7F
    and 0xFF as NaN. Moved into the bits of an fp16 a number is 2^-12 (four bits) or 2^-8 (three) of
    itself, subnormal or not, and the processor widens fp16 without the penalty that fp32
    subnormals have.
    """
    by = 10 - mantissa_bits
    all_ones = 0x7F << by

    def as_fp16(builder, data):
        bits = builder.shl(builder.sext(data, V16H), ir.Constant(V16H, [by] * 16))
        return builder.and_(bits, ir.Constant(V16H, [all_ones - 0x8000] * 16))

    def finite(builder, data):
        return _halves(builder, as_fp16(builder, data))

    def any_number(builder, data):
        bits, ones = as_fp16(builder, data), ir.Constant(V16H, [all_ones] * 16)
        is_nan = builder.icmp_signed("==", builder.and_(bits, ones), ones)
        return _halves(builder, builder.or_(bits, builder.sext(is_nan, V16H)))

    return finite, any_number


finite_e3m4, _from_e3m4 = _by_shift(4)
finite_e4m3, _from_e4m3 = _by_shift(3)


def from_e5m2(builder, data):
    """An e5m2 number is the upper half of an fp16."""
    return _halves(builder, builder.shl(builder.zext(data, V16H), ir.Constant(V16H, [8] * 16)))


def finite_int8(builder, data):
    for first in (0, 8):
        yield builder.sitofp(builder.sext(_half(builder, data, first, 8), V8I), V8F)


def _from_int8(builder, data):
    """-128 is NaN."""
    for first, number in zip((0, 8), finite_int8(builder, data), strict=True):
        kind = ir.VectorType(ir.IntType(8), 8)
        odd = ir.Constant(kind, [-128] * 8)
        is_nan = builder.icmp_signed("==", _half(builder, data, first, 8), odd)
        yield builder.select(is_nan, constant(V8F, float("nan")), number)


widen_e3m4 = _widening(_from_e3m4)
"""`scale` is 4096 times the block's."""
widen_e4m3 = _widening(_from_e4m3)
"""`scale` is 256 times the block's."""
widen_e5m2 = _widening(from_e5m2)
widen_int8 = _widening(_from_int8)


@intrinsic
def load_int4(typingctx, at):
    """Eight four-bit numbers from four bytes, low halves first, as fp32."""

    def codegen(context, builder, signature, args):
        four = ir.VectorType(ir.IntType(8), 4)
        data = builder.load(_pointer(builder, args[0], four), align=1)
        low = builder.and_(data, ir.Constant(four, [15] * 4))
        high = builder.lshr(data, ir.Constant(four, [4] * 4))
        both = builder.shuffle_vector(low, high, ir.Constant(V8I, [0, 4, 1, 5, 2, 6, 3, 7]))
        return builder.uitofp(builder.zext(both, V8I), V8F)

    return f32x8(types.int64), codegen


@intrinsic
def bits_of(typingctx, value):
    """The bits of one float as int64 (0 to 2^32 - 1)."""

    def codegen(context, builder, signature, args):
        return builder.zext(builder.bitcast(args[0], I32), ir.IntType(64))

    return types.int64(types.float32), codegen


@intrinsic
def float_of(typingctx, bits):
    """The float with these bits (the low 32 of an int64)."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(builder.trunc(args[0], I32), F32)

    return types.float32(types.int64), codegen


def _scalar_memory(kind, llvm_type, align):
    @intrinsic
    def read(typingctx, at):
        def codegen(context, builder, signature, args):
            return builder.load(_pointer(builder, args[0], llvm_type), align=align)

        return kind(types.int64), codegen

    @intrinsic
    def write(typingctx, at, value):
        def codegen(context, builder, signature, args):
            builder.store(args[1], _pointer(builder, args[0], llvm_type), align=align)
            return context.get_dummy_value()

        return types.void(types.int64, kind), codegen

    return read, write


get_f32, put_f32 = _scalar_memory(types.float32, F32, 4)
get_u16, put_u16 = _scalar_memory(types.uint16, ir.IntType(16), 2)
get_u8, put_u8 = _scalar_memory(types.uint8, ir.IntType(8), 1)
get_u64, put_u64 = _scalar_memory(types.uint64, ir.IntType(64), 8)


def _storing_fp8(mantissa_bits, bias, largest_bits):
    """An intrinsic that rounds eight lanes to fp8 bytes: nearest, ties to even; beyond the largest
    number it saturates; NaN and infinities become NaN, 0x7F.
    """
    dropped = 23 - mantissa_bits
    smallest_bits = (128 - bias) << 23  # of the smallest normal number
    steps_per_one = 2.0 ** (bias - 1 + mantissa_bits)
    exponents = (127 - bias) << mantissa_bits

    @intrinsic
    def write(typingctx, at, value):
        def codegen(context, builder, signature, args):
            bits = builder.bitcast(args[1], V8I)
            sign = builder.and_(builder.lshr(bits, constant(V8I, 24)), constant(V8I, 0x80))
            size = builder.and_(bits, constant(V8I, 0x7FFFFFFF))
            is_bad = builder.icmp_unsigned(">=", size, constant(V8I, 0x7F800000))
            is_big = builder.icmp_unsigned(">", size, constant(V8I, largest_bits))
            size = builder.select(is_big, constant(V8I, largest_bits), size)
            # normal numbers: rebias the exponent, drop mantissa bits
            odd = builder.and_(builder.lshr(size, constant(V8I, dropped)), constant(V8I, 1))
            up = builder.add(size, builder.add(odd, constant(V8I, (1 << dropped - 1) - 1)))
            normal = builder.lshr(up, constant(V8I, dropped))
            normal = builder.sub(normal, constant(V8I, exponents))
            # below: a whole number of smallest steps, rounded by adding 1.5 * 2^23
            factor, magic = constant(V8F, steps_per_one), constant(V8F, MAGIC)
            steps = call_fma(builder, builder.bitcast(size, V8F), factor, magic)
            subnormal = builder.and_(builder.bitcast(steps, V8I), constant(V8I, 0x1F))
            is_small = builder.icmp_unsigned("<", size, constant(V8I, smallest_bits))
            code = builder.or_(builder.select(is_small, subnormal, normal), sign)
            code = builder.select(is_bad, constant(V8I, 0x7F), code)
            _put_bytes(builder, args[0], code, 8)
            return context.get_dummy_value()

        return types.void(types.int64, f32x8), codegen

    return write


def _put_bytes(builder, at, codes, count):
    byte = ir.VectorType(ir.IntType(8), count)
    builder.store(builder.trunc(codes, byte), _pointer(builder, at, byte), align=1)


store_e3m4 = _storing_fp8(4, 3, 0x41F00000)  # 30
store_e4m3 = _storing_fp8(3, 7, 0x43E00000)  # 448
store_e5m2 = _storing_fp8(2, 15, 0x47600000)  # 57344


@intrinsic
def store_int8(typingctx, at, value):
    """Eight lanes of at most 127, rounded to bytes (ties to even); -128 for what is not finite."""

    def codegen(context, builder, signature, args):
        size = builder.and_(builder.bitcast(args[1], V8I), constant(V8I, 0x7FFFFFFF))
        is_bad = builder.icmp_unsigned(">=", size, constant(V8I, 0x7F800000))
        whole = builder.bitcast(builder.fadd(args[1], constant(V8F, MAGIC)), V8I)
        _put_bytes(builder, args[0], builder.select(is_bad, constant(V8I, 0x80), whole), 8)
        return context.get_dummy_value()

    return types.void(types.int64, f32x8), codegen


@intrinsic
def store_int4(typingctx, at, value):
    """Eight lanes from 0 to 15, rounded (ties to even), two to a byte."""

    def codegen(context, builder, signature, args):
        whole = builder.bitcast(builder.fadd(args[1], constant(V8F, MAGIC)), V8I)
        whole = builder.and_(whole, constant(V8I, 0xF))
        four = ir.VectorType(I32, 4)
        low = builder.shuffle_vector(whole, whole, ir.Constant(four, [0, 2, 4, 6]))
        high = builder.shuffle_vector(whole, whole, ir.Constant(four, [1, 3, 5, 7]))
        codes = builder.or_(low, builder.shl(high, ir.Constant(four, [4] * 4)))
        _put_bytes(builder, args[0], codes, 4)
        return context.get_dummy_value()

    return types.void(types.int64, f32x8), codegen


@intrinsic
def finite_size(typingctx, value):
    """Absolute value of each lane, 0 where it is not finite."""

    def codegen(context, builder, signature, args):
        size = builder.and_(builder.bitcast(args[0], V8I), constant(V8I, 0x7FFFFFFF))
        is_bad = builder.icmp_unsigned(">=", size, constant(V8I, 0x7F800000))
        return builder.bitcast(builder.select(is_bad, constant(V8I, 0), size), V8F)

    return f32x8(f32x8), codegen


@intrinsic
def transpose8(typingctx, source, source_stride, target, target_stride):
    """Eight rows of eight floats at `source`, written as columns at `target`; strides in bytes."""

    def codegen(context, builder, signature, args):
        source, source_stride, target, target_stride = args

        def place(base, stride, r):
            at = builder.add(base, builder.mul(stride, ir.Constant(ir.IntType(64), r)))
            return _pointer(builder, at, V8F)

        def shuffle(a, b, mask):
            return builder.shuffle_vector(a, b, ir.Constant(V8I, mask))

        rows = [builder.load(place(source, source_stride, r), align=4) for r in range(8)]
        pairs = []
        for r in range(0, 8, 2):
            pairs.append(shuffle(rows[r], rows[r + 1], [0, 8, 1, 9, 4, 12, 5, 13]))
            pairs.append(shuffle(rows[r], rows[r + 1], [2, 10, 3, 11, 6, 14, 7, 15]))
        fours = []
        for base in (0, 4):
            for i in (0, 1):
                a, b = pairs[base + i], pairs[base + 2 + i]
                fours.append(shuffle(a, b, [0, 1, 8, 9, 4, 5, 12, 13]))
                fours.append(shuffle(a, b, [2, 3, 10, 11, 6, 7, 14, 15]))
        for i in range(4):
            low = shuffle(fours[i], fours[i + 4], [0, 1, 2, 3, 8, 9, 10, 11])
            high = shuffle(fours[i], fours[i + 4], [4, 5, 6, 7, 12, 13, 14, 15])
            builder.store(low, place(target, target_stride, i), align=4)
            builder.store(high, place(target, target_stride, i + 4), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), codegen
