"""The compiler's process: whose turn it is, what is remembered, and what its death means."""

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from common.errors import InternalError, InvalidRequest, Overloaded
from common.limits import MAX_COMPILING, MAX_COMPILING_OF_CLIENT
from router.grammar.compiler import CompileChild, GrammarCompiler, Outcome, OutcomeCache
from router.grammar.grammar_job import Job


def job(name: str) -> Job:
    return Job(kind="regex", name=name, source=name)


class SlowChild:
    """Compiles when it is told to."""

    def __init__(self) -> None:
        self.compiled: list[str] = []
        self.outcomes: dict[str, Outcome | Exception] = {}

    def start(self) -> None:
        pass

    def compile(self, job: Job) -> Outcome:
        self.compiled.append(job.name)
        outcome = self.outcomes.get(job.name, f"grammar of {job.name}")
        if isinstance(outcome, OSError):
            raise outcome
        assert not isinstance(outcome, Exception) or isinstance(outcome, InvalidRequest)
        return outcome

    def close(self) -> None:
        pass


def run(test: Callable[[GrammarCompiler, SlowChild], Awaitable[None]]) -> None:
    async def main() -> None:
        child = SlowChild()
        compiler = GrammarCompiler(child)
        try:
            await test(compiler, child)
        finally:
            compiler.close()

    asyncio.run(main())


def test_clients_take_turns() -> None:
    async def test(compiler: GrammarCompiler, child: SlowChild) -> None:
        names = [("a", f"a{i}") for i in range(6)] + [("b", "b0"), ("c", "c0"), ("b", "b1")]
        waiting = [compiler.compile(job(name), client) for client, name in names]
        await asyncio.gather(*waiting)
        # the first was under way before anybody else came
        assert child.compiled == ["a0", "a1", "b0", "c0", "a2", "b1", "a3", "a4", "a5"]

    run(test)


def test_lines_are_bounded_for_a_client_and_for_all() -> None:
    async def test(compiler: GrammarCompiler, child: SlowChild) -> None:
        async def ask(client: str, number: int) -> str:
            return await compiler.compile(job(f"{client}{number}"), client)

        first = [asyncio.ensure_future(ask("a", i)) for i in range(MAX_COMPILING_OF_CLIENT + 2)]
        found = await asyncio.gather(*first, return_exceptions=True)
        # one is under way and not in line
        assert [type(outcome) for outcome in found[-1:]] == [Overloaded]
        assert all(isinstance(outcome, str) for outcome in found[:-1])
        everybody = [asyncio.ensure_future(ask(f"c{i}", 0)) for i in range(MAX_COMPILING + 2)]
        found = await asyncio.gather(*everybody, return_exceptions=True)
        assert sum(isinstance(outcome, Overloaded) for outcome in found) == 1

    run(test)


def test_what_is_known_or_under_way_is_not_compiled_again() -> None:
    async def test(compiler: GrammarCompiler, child: SlowChild) -> None:
        child.outcomes["bad"] = InvalidRequest("no", param="guided_regex")
        for _ in range(2):
            assert await compiler.compile(job("x"), "a") == "grammar of x"
        both = await asyncio.gather(*(compiler.compile(job("y"), who) for who in ("a", "b")))
        assert list(both) == ["grammar of y"] * 2
        for _ in range(3):
            with pytest.raises(InvalidRequest, match="no") as error:
                await compiler.compile(job("bad"), "a")
            assert error.value.param == "guided_regex"
        assert child.compiled == ["x", "y", "bad"]

    run(test)


def test_one_who_goes_away_takes_nothing_from_who_waits_for_the_same() -> None:
    async def test(compiler: GrammarCompiler, child: SlowChild) -> None:
        gone = asyncio.ensure_future(compiler.compile(job("x"), "a"))
        stays = asyncio.ensure_future(compiler.compile(job("x"), "b"))
        await asyncio.sleep(0)
        gone.cancel()
        assert await stays == "grammar of x"
        assert gone.cancelled()

    run(test)


def test_a_child_that_cannot_be_had_is_our_error_and_not_remembered() -> None:
    async def test(compiler: GrammarCompiler, child: SlowChild) -> None:
        child.outcomes["x"] = OSError("no memory for a process")
        with pytest.raises(InternalError):
            await compiler.compile(job("x"), "a")
        del child.outcomes["x"]
        assert await compiler.compile(job("x"), "a") == "grammar of x"

    run(test)


def test_outcomes_are_kept_by_their_size() -> None:
    cache = OutcomeCache(max_chars=3_000)
    for number in range(5):
        cache.put(bytes([number]), "x" * 500)  # 700 each
    assert [cache.get(bytes([n])) is not None for n in range(5)] == [False, True, True, True, True]
    cache.get(b"\x01")
    cache.put(b"new", InvalidRequest("y" * 500))
    assert cache.get(b"\x01") is not None
    assert cache.get(b"\x02") is None


# --- the process itself ---------------------------------------------------------------------------

SCRIPT = """
import os, signal, sys
from router.grammar.grammar_job import Job, read_message, write_message
write_message(sys.stdout.buffer, b"{}")
while (data := read_message(sys.stdin.buffer)) is not None:
    job = Job.of(data)
    if job.name == "once" and not os.path.exists(job.source):
        open(job.source, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    if job.name.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, job.name))
    is_last = b"true" if job.name == "last" else b"false"
    answer = b'{"grammar": "%d", "is_last": %s}' % (os.getpid(), is_last)
    write_message(sys.stdout.buffer, answer)
"""


@pytest.fixture
def child() -> CompileChild:
    return CompileChild((sys.executable, "-c", SCRIPT))


def pid(child: CompileChild) -> int:
    return int(str(child.compile(job("pid"))))


@pytest.mark.parametrize("name", ["SIGXCPU", "SIGABRT", "SIGSEGV"])
def test_t01_what_a_grammar_kills_is_replaced(child: CompileChild, name: str) -> None:
    first = pid(child)
    assert pid(child) == first
    outcome = child.compile(job(name))
    assert isinstance(outcome, InvalidRequest)
    assert "3 s of processor time and 256 MiB of memory" in outcome.message
    assert outcome.param == name
    assert pid(child) != first
    child.close()


def test_a_death_that_the_grammar_did_not_cause_costs_a_second_try(
    child: CompileChild, tmp_path: Path
) -> None:
    once = Job(kind="regex", name="once", source=str(tmp_path / "died"))
    assert isinstance(child.compile(once), str)
    os.kill(pid(child), signal.SIGKILL)
    assert isinstance(child.compile(job("pid")), str)
    child.close()


def test_a_child_that_has_grown_answers_and_is_replaced(child: CompileChild) -> None:
    first = pid(child)
    assert child.compile(job("last")) == str(first)
    assert pid(child) != first
    child.close()


def test_a_closed_child_does_not_come_back(child: CompileChild) -> None:
    assert pid(child) > 0
    child.close()
    with pytest.raises(OSError, match="shutting down"):
        child.compile(job("x"))
