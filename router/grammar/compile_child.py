"""The compiler's process: grammars in, checked grammars out, with bounds on memory and time.

Started by router/grammar/compiler.py, which reads and writes its pipes: a message is four bytes of
length and then JSON. It loads the tokenizer, so a grammar is compiled here as a worker compiles it
and its first mask is made. Whatever a grammar does to this process, up to killing it, is the
client's error. It ends with its pipe.
"""

import ctypes
import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

from llguidance import LLTokenizer

from common.errors import InvalidRequest
from common.grammar_limits import new_matcher
from common.limits import COMPILE_BYTES, COMPILE_S
from router.grammar.grammar_job import NICE, Job, read_message, write_message
from router.grammar.grammars import grammar_of

PR_SET_PDEATHSIG = 1
MAX_REASON_CHARS = 300
PAGE = os.sysconf("SC_PAGE_SIZE")


def run(tokenizer_path: str, vocab_size: int, eos_token_ids: list[int]) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tokenizer = LLTokenizer(tokenizer_path, n_vocab=vocab_size, eos_token=eos_token_ids)
    compiled(tokenizer, Job(kind="json", name="warm-up", source={"type": "object"}))
    limit = _address_space() + COMPILE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    # not before it has started: somebody may be waiting for it
    os.setpriority(os.PRIO_PROCESS, 0, NICE)
    write_message(sys.stdout.buffer, b"{}")
    while (data := read_message(sys.stdin.buffer)) is not None:
        _limit_time()
        answer = _answer(tokenizer, data)
        answer["is_last"] = _address_space() > limit - COMPILE_BYTES // 2  # a fresh one has room
        write_message(sys.stdout.buffer, json.dumps(answer).encode())


def _answer(tokenizer: LLTokenizer, data: bytes) -> dict[str, Any]:
    try:
        return {"grammar": compiled(tokenizer, Job.of(data))}
    except InvalidRequest as error:
        return {"error": error.message, "param": error.param}
    except MemoryError:
        os.abort()


def compiled(tokenizer: LLTokenizer, job: Job) -> str:
    """The grammar, which workers can use. Raises InvalidRequest."""
    grammar = grammar_of(job)
    matcher = new_matcher(tokenizer, grammar)
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        reason = " ".join(matcher.get_error().split())[:MAX_REASON_CHARS]
        if "panic" in reason:
            reason = "it is too large for the compiler"
        raise InvalidRequest(f"the output's format cannot be compiled: {reason}", param=job.name)
    return grammar


def _limit_time() -> None:
    """The signal of this limit ends the process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    soft = int(used.ru_utime + used.ru_stime + COMPILE_S) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (soft, most))


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * PAGE


if __name__ == "__main__":
    path, size, *ends = sys.argv[1:]  # noqa: TID251 - not options: the router's own words
    run(path, int(size), [int(end) for end in ends])
