"""A small team of threads that runs one kernel together: barriers and shared counters in an array
of 64-bit words. And the teams of several processes, the ranks of a worker: a barrier of their own.

Words 0 and 8 belong to the barrier (arrivals, phase; apart, so that they do not share a cache
line), and from `FIRST_COUNTER` on every parallel phase of a kernel has one counter from which its
threads take task numbers. Who takes which task never changes a result: a task's arithmetic does not
depend on its thread.

A *board* is memory that all ranks share. Its first words are the barrier between them: arrivals,
phase, whether a rank is lost, how long to spin, and how long to sleep at most; each on a cache line
of its own. Ranks may outnumber cores, so who waits for longer than a short spin sleeps (futex). It
wakes now and then to see whether a rank is lost; then nobody waits any more, and what is computed
means nothing.
"""

import platform

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

FIRST_COUNTER = 16
SPINS_BEFORE_YIELD = 2000
ARRIVED, PHASE, LOST, SPINS, SLEEP = range(0, 320, 64)
"""Where words of a board are, in bytes."""
BOARD_WORDS = 64
SLEEP_NS = 50_000_000
FUTEX = 98 if platform.machine() == "aarch64" else 202
FUTEX_WAIT, FUTEX_WAKE = 0, 1
EVERYBODY = 2**31 - 1
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


@intrinsic
def futex(typingctx, at, operation, value, timeout):
    """The system call on the lower half of the word at `at`; `timeout` is the address of a
    timespec.
    """

    def codegen(context, builder, signature, args):
        kind = ir.FunctionType(I64, [I64] * 7)
        call = cgutils.get_or_insert_function(builder.module, kind, "syscall")
        number, zero = ir.Constant(I64, FUTEX), ir.Constant(I64, 0)
        return builder.call(call, [number, *args, zero, zero])

    return types.int64(types.int64, types.int64, types.int64, types.int64), codegen


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
def _wait_for_ranks(board, num_ranks):
    phase = read_word(board + PHASE)
    if fetch_add(board + ARRIVED, 1) + 1 == num_ranks:
        write_word(board + ARRIVED, 0)
        fetch_add(board + PHASE, 1)
        futex(board + PHASE, FUTEX_WAKE, EVERYBODY, 0)
        return
    spins, enough = 0, read_word(board + SPINS)
    while read_word(board + PHASE) == phase and read_word(board + LOST) == 0:
        spins += 1
        if spins > enough:
            futex(board + PHASE, FUTEX_WAIT, phase & 0xFFFFFFFF, board + SLEEP)


@njit(nogil=True)
def meet(sync, size, board, num_ranks):
    """As `barrier`, for the teams of all ranks. Does not wait where one is lost."""
    if num_ranks == 1:
        barrier(sync, size)
        return
    phase = read_word(sync + 64)
    if fetch_add(sync, 1) + 1 == size:
        write_word(sync, 0)
        if read_word(board + LOST) == 0:
            _wait_for_ranks(board, num_ranks)
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
