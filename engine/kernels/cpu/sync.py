"""A small team of threads that runs one kernel together: barriers and shared counters in an array
of 64-bit words.

Words 0 and 8 belong to the barrier (arrivals, phase; apart, so that they do not share a cache
line), and from `FIRST_COUNTER` on every parallel phase of a kernel has one counter from which its
threads take task numbers. Who takes which task never changes a result: a task's arithmetic does not
depend on its thread.
"""

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

FIRST_COUNTER = 16
SPINS_BEFORE_YIELD = 2000
I64 = ir.IntType(64)


@intrinsic
def fetch_add(typingctx, at, amount):
    """Add to the word at address `at`; what it held before."""

    def codegen(context, builder, signature, args):
        place = builder.inttoptr(args[0], I64.as_pointer())
        return builder.atomic_rmw("add", place, args[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def read_word(typingctx, at):
    def codegen(context, builder, signature, args):
        return builder.load_atomic(builder.inttoptr(args[0], I64.as_pointer()), "acquire", 8)

    return types.int64(types.int64), codegen


@intrinsic
def write_word(typingctx, at, value):
    def codegen(context, builder, signature, args):
        builder.store_atomic(args[1], builder.inttoptr(args[0], I64.as_pointer()), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def yield_thread(typingctx):
    """Let another thread have this core."""

    def codegen(context, builder, signature, args):
        kind = ir.FunctionType(ir.IntType(32), [])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, "sched_yield"), [])
        return context.get_dummy_value()

    return types.void(), codegen


@njit(nogil=True)
def barrier(sync, size):
    """Wait until all `size` threads are here. `sync` is the address of the words."""
    if size == 1:
        return
    phase = read_word(sync + 64)
    if fetch_add(sync, 1) + 1 == size:
        write_word(sync, 0)
        fetch_add(sync + 64, 1)
        return
    spins = 0
    while read_word(sync + 64) == phase:
        spins += 1
        if spins > SPINS_BEFORE_YIELD:
            yield_thread()


@njit(nogil=True)
def take(sync, counter):
    """The next task of this phase."""
    return fetch_add(sync + 8 * (FIRST_COUNTER + counter), 1)
