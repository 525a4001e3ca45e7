"""Which tokens a grammar allows next: one matcher per output that has a grammar, advanced token by
token.

A grammar is compiled in a thread of its own (`prepare`), before its request is in any step. A
matcher is made when its output starts and fed the tokens generated so far, so a grammar survives
hand-off, preemption and recovery without any state of its own on the wire. The masks of a step
depend on tokens that are known before its forward pass, so they are computed beside it: `begin`
before the pass, `Pending.masks` after it. The tokenizer is loaded with the first grammar.
"""

import ctypes
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par
from numpy.typing import NDArray

from common.grammar_limits import new_matcher
from common.limits import MAX_COMPILED_BYTES
from common.types import OutputKey

COMPILE_NICE = 10
LEAST_BYTES = 64 * 1024
"""Of a compiled grammar, beside its text."""

MAX_REASON_CHARS = 300
MAX_THREADS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenMasks:
    """`bits` [len(rows), words] int32: bit i of a row's words is set where token i is allowed."""

    rows: NDArray[np.int64]
    bits: NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """Masks under way, for the outputs at `rows` of a step."""

    rows: NDArray[np.int64]
    bits: Future[NDArray[np.int32]]

    def masks(self, repeats: Sequence[int]) -> TokenMasks:
        """For a step in which output i stands for `repeats[i]` rows. Waits until they are there."""
        starts = np.cumsum([0, *repeats[:-1]])
        counts = np.asarray(repeats)[self.rows]
        rows = [np.arange(starts[row], starts[row] + repeats[row]) for row in self.rows.tolist()]
        return TokenMasks(
            rows=np.concatenate(rows), bits=np.repeat(self.bits.result(), counts, axis=0)
        )


class GrammarTable:
    def __init__(self, tokenizer: Path, *, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._path = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._tokenizer: LLTokenizer | None = None
        self._executor: LLExecutor | None = None
        self._beside = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._compiling = ThreadPoolExecutor(
            1, thread_name_prefix="compile", initializer=_step_back
        )
        self._compiled = CompiledCache()
        self._lock = threading.Lock()
        self._matchers: dict[OutputKey, LLMatcher] = {}

    def __len__(self) -> int:
        return len(self._matchers)

    def start(self, key: OutputKey, grammar: str, output: Iterable[int]) -> None:
        """`output` is what has been generated under the grammar so far."""
        matcher = self._compile(grammar).deep_copy()
        for token_id in output:
            matcher.consume_token(token_id)
        self._matchers[key] = matcher

    def drop(self, key: OutputKey) -> None:
        self._matchers.pop(key, None)

    def record(self, key: OutputKey, token_id: int) -> None:
        if matcher := self._matchers.get(key):
            matcher.consume_token(token_id)

    def has_failed(self, key: OutputKey) -> bool:
        """The grammar cannot be used, or was left: tokens sampled under it mean nothing."""
        matcher = self._matchers.get(key)
        return matcher is not None and matcher.is_error()

    def failure(self, key: OutputKey) -> str:
        """Why it has failed, in few words."""
        reason = self._matchers[key].get_error()
        return " ".join(reason.split())[:MAX_REASON_CHARS]

    def begin(self, keys: Sequence[OutputKey]) -> Pending | None:
        """Masks for the next tokens of these outputs; None when none of them has a grammar."""
        if not self._matchers:
            return None
        found = [
            (row, matcher)
            for row, key in enumerate(keys)
            if (matcher := self._matchers.get(key)) is not None and not matcher.is_error()
        ]
        if not found:
            return None
        rows = np.array([row for row, _ in found], dtype=np.int64)
        matchers = [matcher for _, matcher in found]
        return Pending(rows=rows, bits=self._beside.submit(self._fill, matchers))

    def _fill(self, matchers: list[LLMatcher]) -> NDArray[np.int32]:
        bits = allocate_token_bitmask(len(matchers), self._vocab_size)
        if self._executor is None:
            self._executor = LLExecutor(MAX_THREADS)
        places = [(matcher, row) for row, matcher in enumerate(matchers)]
        fill_next_token_bitmask_par(self._executor, places, bits)
        return bits

    def prepare(self, grammar: str) -> Future[object]:
        """Compiles it beside the steps. Callable from any thread."""
        return self._compiling.submit(self._compile, grammar)

    def _compile(self, grammar: str) -> LLMatcher:
        with self._lock:
            matcher = self._compiled.get(grammar)
        if matcher is not None:
            return matcher
        if self._tokenizer is None:
            self._tokenizer = LLTokenizer(
                str(self._path), n_vocab=self._vocab_size, eos_token=self._eos_token_ids
            )
        before = allocated_bytes()
        matcher = new_matcher(self._tokenizer, grammar)
        num_bytes = max(allocated_bytes() - before, LEAST_BYTES + len(grammar))
        with self._lock:
            self._compiled.put(grammar, matcher, num_bytes)
        return matcher


def _step_back() -> None:
    """The thread that calls this lets others go first (on Linux a thread has a priority of its
    own).
    """
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), COMPILE_NICE)


class CompiledCache:
    """The least recently used grammar goes first; the latest one stays, whatever its size."""

    def __init__(self, max_bytes: int = MAX_COMPILED_BYTES) -> None:
        self._max_bytes = max_bytes
        self.num_bytes = 0
        self._kept: OrderedDict[str, tuple[LLMatcher, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, grammar: str) -> LLMatcher | None:
        if grammar not in self._kept:
            return None
        self._kept.move_to_end(grammar)
        return self._kept[grammar][0]

    def put(self, grammar: str, matcher: LLMatcher, num_bytes: int) -> None:
        self._forget(grammar)
        self._kept[grammar] = matcher, num_bytes
        self.num_bytes += num_bytes
        while self.num_bytes > self._max_bytes and len(self._kept) > 1:
            self._forget(next(iter(self._kept)))

    def _forget(self, grammar: str) -> None:
        _, num_bytes = self._kept.pop(grammar, (None, 0))
        self.num_bytes -= num_bytes


class _Mallinfo(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks"),
            *("uordblks", "fordblks", "keepcost"),
        )
    )


def allocated_bytes() -> int:
    """Of the whole process, by glibc's allocator, which the compiler uses; 0 without it. Other
    threads may add to it meanwhile: then a grammar counts as larger than it is.
    """
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        return 0
    mallinfo.restype = _Mallinfo
    found = mallinfo()
    return int(found.uordblks + found.hblkhd)
