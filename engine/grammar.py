"""Which tokens a grammar allows next: one matcher per output that has a grammar, advanced token by
token.

A grammar is compiled in a thread of its own (`prepare`), before its request is in any step. A
matcher is made when its output starts and fed the tokens generated so far, so a grammar survives
hand-off, preemption and recovery without any state of its own on the wire. The masks of a step
depend on tokens that are known before its forward pass, so they are computed beside it: `begin`
before the pass, `Pending.masks` after it. Grammars whose masks are slow are timed by themselves.
"""

import ctypes
import os
import threading
import time
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

SLOW_MASK_S = 0.002
MAX_SUSPECTS = 1024
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
    filled: Future["Filled"]

    def slow(self) -> list[tuple[int, float]]:
        """Outputs of the step whose masks took long, with the seconds of one mask. Waits."""
        seconds = self.filled.result().seconds
        return [(int(self.rows[place]), took) for place, took in seconds.items()]

    def masks(self, repeats: Sequence[int]) -> TokenMasks:
        """For a step in which output i stands for `repeats[i]` rows. Waits until they are there."""
        starts = np.cumsum([0, *repeats[:-1]])
        counts = np.asarray(repeats)[self.rows]
        rows = [np.arange(starts[row], starts[row] + repeats[row]) for row in self.rows.tolist()]
        return TokenMasks(
            rows=np.concatenate(rows), bits=np.repeat(self.filled.result().bits, counts, axis=0)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Filled:
    bits: NDArray[np.int32]
    seconds: dict[int, float]
    """Of one mask, by its place, where it is slow."""


@dataclass(slots=True, eq=False)
class Following:
    """An output's matcher and the text of its grammar."""

    matcher: LLMatcher
    grammar: str


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
        self.compiled = CompiledCache()
        self._lock = threading.Lock()
        self._matchers: dict[OutputKey, Following] = {}
        self._suspects: OrderedDict[str, None] = OrderedDict()
        """Grammars whose masks may be slow: they are timed by themselves."""

    def __len__(self) -> int:
        return len(self._matchers)

    def start(self, key: OutputKey, grammar: str, output: Iterable[int]) -> None:
        """`output` is what has been generated under the grammar so far."""
        matcher = self._compile(grammar).deep_copy()
        for token_id in output:
            matcher.consume_token(token_id)
        self._matchers[key] = Following(matcher, grammar)

    def drop(self, key: OutputKey) -> None:
        self._matchers.pop(key, None)

    def record(self, key: OutputKey, token_id: int) -> None:
        if following := self._matchers.get(key):
            following.matcher.consume_token(token_id)

    def has_failed(self, key: OutputKey) -> bool:
        """The grammar cannot be used, or was left: tokens sampled under it mean nothing."""
        following = self._matchers.get(key)
        return following is not None and following.matcher.is_error()

    def failure(self, key: OutputKey) -> str:
        """Why it has failed, in few words."""
        reason = self._matchers[key].matcher.get_error()
        return " ".join(reason.split())[:MAX_REASON_CHARS]

    def begin(self, keys: Sequence[OutputKey]) -> Pending | None:
        """Masks for the next tokens of these outputs; None when none of them has a grammar."""
        if not self._matchers:
            return None
        found = [
            (row, following)
            for row, key in enumerate(keys)
            if (following := self._matchers.get(key)) and not following.matcher.is_error()
        ]
        if not found:
            return None
        rows = np.array([row for row, _ in found], dtype=np.int64)
        wanted = [following for _, following in found]
        return Pending(rows=rows, filled=self._beside.submit(self._fill, wanted))

    def _fill(self, wanted: list[Following]) -> Filled:
        bits = allocate_token_bitmask(len(wanted), self._vocab_size)
        if self._executor is None:
            self._executor = LLExecutor(MAX_THREADS)
        groups: dict[str, list[int]] = {}
        for place, following in enumerate(wanted):
            name = following.grammar if following.grammar in self._suspects else ""
            groups.setdefault(name, []).append(place)
        seconds: dict[int, float] = {}
        for name, places in groups.items():
            began = time.perf_counter()
            pairs = [(wanted[place].matcher, place) for place in places]
            fill_next_token_bitmask_par(self._executor, pairs, bits)
            took = (time.perf_counter() - began) / len(places)
            if took < SLOW_MASK_S:
                self._suspects.pop(name, None)
                continue
            for place in places:
                self._suspects[wanted[place].grammar] = None
            seconds.update(dict.fromkeys(places, took))
        while len(self._suspects) > MAX_SUSPECTS:
            self._suspects.popitem(last=False)
        return Filled(bits=bits, seconds=seconds)

    def prepare(self, grammar: str) -> Future[object]:
        """Compiles it beside the steps. Callable from any thread."""
        return self._compiling.submit(self._compile, grammar)

    def _compile(self, grammar: str) -> LLMatcher:
        with self._lock:
            matcher = self.compiled.get(grammar)
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
            self.compiled.put(grammar, matcher, num_bytes)
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
