"""Compiles the forms of answers in a process of its own, so that none of them, known or not, can
hurt the router.

    compile(job, client) -> cache, or in line -> the child (router/grammar/compile_child.py) ->
    grammar

`CompileLine` decides whose turn it is: clients by turns, each with a bounded line. The child is one
process, kept warm, and replaced when it dies. What it died of is the client's error, and remembered
like any other answer, so that a second try costs nothing.
"""

import asyncio
import hashlib
import json
import logging
import os
import select
import signal
import subprocess
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from common.errors import InternalError, InvalidRequest, Overloaded
from common.limits import (
    COMPILE_BYTES,
    COMPILE_S,
    MAX_COMPILED_BYTES,
    MAX_COMPILING,
    MAX_COMPILING_OF_CLIENT,
    MIB,
)
from router.grammar.grammar_job import NICE, Job, read_message, write_message

log = logging.getLogger(__name__)

WALL_S = 10 * COMPILE_S
"""By the clock on the wall, where the machine has no time for the child."""
START_S = 60.0
NUM_TRIES = 2
_OWN_DEATHS = tuple(
    -number for number in (signal.SIGXCPU, signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS)
)
"""What a grammar does to the child: time, memory, the stack."""

Outcome = str | InvalidRequest


class Compile(Protocol):
    """What the compiler needs of a child: it blocks, one job at a time."""

    def start(self) -> None: ...

    def compile(self, job: Job) -> Outcome: ...

    def close(self) -> None: ...


@dataclass(slots=True, eq=False)
class _Waiting:
    job: Job
    key: bytes
    future: "asyncio.Future[str]"


class CompileLine:
    """Who waits for the compiler. Pure counting; clients get turns."""

    def __init__(self) -> None:
        self._lines: OrderedDict[str, deque[_Waiting]] = OrderedDict()
        self.num_waiting = 0

    def add(self, client: str, waiting: _Waiting) -> None:
        """Raises Overloaded."""
        line = self._lines.get(client, ())
        if self.num_waiting >= MAX_COMPILING or len(line) >= MAX_COMPILING_OF_CLIENT:
            raise Overloaded(
                f"{self.num_waiting} formats of answers wait to be compiled; the limit is "
                f"{MAX_COMPILING}, and {MAX_COMPILING_OF_CLIENT} for each client",
                retry_after_s=1.0,
            )
        self._lines.setdefault(client, deque()).append(waiting)
        self.num_waiting += 1

    def next(self) -> _Waiting | None:
        """One whose client still waits for it."""
        while self._lines:
            client, line = self._lines.popitem(last=False)
            waiting = line.popleft()
            self.num_waiting -= 1
            if line:
                self._lines[client] = line  # behind all others
            if not waiting.future.done():
                return waiting
        return None


class OutcomeCache:
    """What became of each job, the least recently used forgotten first. Bounded by characters."""

    def __init__(self, max_chars: int = MAX_COMPILED_BYTES) -> None:
        self._max_chars = max_chars
        self._num_chars = 0
        self._outcomes: OrderedDict[bytes, Outcome] = OrderedDict()

    def get(self, key: bytes) -> Outcome | None:
        if key in self._outcomes:
            self._outcomes.move_to_end(key)
        return self._outcomes.get(key)

    def put(self, key: bytes, outcome: Outcome) -> None:
        if key not in self._outcomes:
            self._num_chars += _num_chars(outcome)
        self._outcomes[key] = outcome
        while self._num_chars > self._max_chars:
            _, oldest = self._outcomes.popitem(last=False)
            self._num_chars -= _num_chars(oldest)


class GrammarCompiler:
    def __init__(self, child: Compile) -> None:
        self._child = child
        self._line = CompileLine()
        self._cache = OutcomeCache()
        self._under_way: dict[bytes, asyncio.Future[str]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="compiler")
        self._is_busy = False
        self._is_closed = False

    def warm(self) -> None:
        """Starts the child, unless it lives, before it is needed. Not waited for."""
        if not self._is_closed:
            self._thread.submit(self._child.start)

    async def compile(self, job: Job, client: str) -> str:
        """The grammar's text. Raises InvalidRequest or Overloaded."""
        key = hashlib.blake2b(job.to_bytes(), digest_size=16).digest()
        outcome = self._cache.get(key)
        if outcome is not None:
            return _given(outcome)
        future = self._under_way.get(key)
        if future is None:
            future = asyncio.get_running_loop().create_future()
            self._line.add(client, _Waiting(job, key, future))
            self._under_way[key] = future
            future.add_done_callback(partial(self._forget, key))
            self._advance()
        return await asyncio.shield(future)

    def _forget(self, key: bytes, future: "asyncio.Future[str]") -> None:
        del self._under_way[key]
        if not future.cancelled():
            future.exception()  # whoever asked may be gone

    def _advance(self) -> None:
        if self._is_busy:
            return
        waiting = self._line.next()
        if waiting is None:
            return
        self._is_busy = True
        loop = asyncio.get_running_loop()
        done = loop.run_in_executor(self._thread, self._child.compile, waiting.job)
        done.add_done_callback(partial(self._compiled, waiting))

    def _compiled(self, waiting: _Waiting, done: "asyncio.Future[Outcome]") -> None:
        self._is_busy = False
        future = waiting.future
        error = None if done.cancelled() else done.exception()
        if done.cancelled():
            future.cancel()
        elif error is not None:
            log.error("the compiler's process cannot be used: %s", error)
            if not future.done():
                future.set_exception(InternalError("the compiler's process cannot be used"))
        else:
            outcome = done.result()
            self._cache.put(waiting.key, outcome)
            if isinstance(outcome, str):
                future.set_result(outcome)
            else:
                future.set_exception(outcome)
                self.warm()
        self._advance()

    def close(self) -> None:
        """Ends the child; what is being compiled ends with it."""
        self._is_closed = True
        self._child.close()
        self._thread.shutdown(wait=False, cancel_futures=True)


class CompileChild:
    """The process. Every method but `close` is called by one thread."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = tuple(command)
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False
        self._num_starts = 0

    @classmethod
    def for_model(
        cls, tokenizer: str, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> "CompileChild":
        words = (tokenizer, str(vocab_size), *map(str, eos_token_ids))
        return cls((sys.executable, "-m", "router.grammar.compile_child", *words))

    def start(self) -> None:
        """Returns when the child is ready. Raises OSError when it cannot be had."""
        if self._is_closed:
            raise OSError("the router is shutting down")
        if self._process is not None and self._process.poll() is None:
            return
        self._end()
        process = self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        if self._num_starts:  # one that was killed may be killed again: not at others' cost
            os.setpriority(os.PRIO_PROCESS, process.pid, NICE)
        self._num_starts += 1
        if self._is_closed or _answer(process, START_S) is None:
            self._end()
            raise OSError(f"{self._command[2]} did not start")

    def compile(self, job: Job) -> Outcome:
        """Raises OSError when there can be no child."""
        for _ in range(NUM_TRIES):
            self.start()
            process = self._process
            assert process is not None
            answer = _asked(process, job)
            if answer is not None:
                if answer["is_last"]:
                    self._end()
                if "error" in answer:
                    return InvalidRequest(answer["error"], param=answer["param"])
                grammar: str = answer["grammar"]
                return grammar
            is_late = process.poll() is None
            self._end()
            if self._is_closed:
                raise OSError("the router is shutting down")
            log.warning(
                "the compiler's process ended (%s) over %s and is replaced",
                "too late" if is_late else process.returncode,
                job.name,
            )
            if is_late or process.returncode in _OWN_DEATHS:
                break  # anything else has nothing to do with the job
        return InvalidRequest(
            f"{job.name} cannot be compiled within {COMPILE_S:g} s of processor time and "
            f"{COMPILE_BYTES // MIB} MiB of memory",
            param=job.name,
        )

    def close(self) -> None:
        self._is_closed = True
        self._end()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                _close(pipe.close)


def _close(close: Callable[[], None]) -> None:
    try:
        close()
    except OSError as error:
        log.debug("closing the compiler's pipe: %s", error)


def _asked(process: "subprocess.Popen[bytes]", job: Job) -> dict[str, Any] | None:
    """None when the child has ended, or took too long."""
    assert process.stdin is not None
    try:
        write_message(process.stdin, job.to_bytes())
    except OSError:
        process.wait(WALL_S)
        return None
    answer: dict[str, Any] | None = _answer(process, WALL_S)
    return answer


def _answer(process: "subprocess.Popen[bytes]", within_s: float) -> Any:
    assert process.stdout is not None
    poll = select.poll()
    poll.register(process.stdout, select.POLLIN)
    if not poll.poll(within_s * 1000):
        return None
    data = read_message(process.stdout)
    if data is None:
        process.wait(WALL_S)
        return None
    return json.loads(data)


def _given(outcome: Outcome) -> str:
    if isinstance(outcome, str):
        return outcome
    raise InvalidRequest(outcome.message, param=outcome.param)


def _num_chars(outcome: Outcome) -> int:
    return len(outcome if isinstance(outcome, str) else outcome.message) + 200
