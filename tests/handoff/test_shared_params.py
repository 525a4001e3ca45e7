"""T02: what many prompts of one call have in common is sent once and held once, at the decode
worker and at the prefill worker.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import anyio
import msgpack
import pytest

from common.errors import InvalidRequest, MalformedMessage, Overloaded, TandemError
from common.handoff_messages import HandoffRequest, WantParams
from common.messages import Cancel, GenerateRequest, ShareParams, Submit, UnshareParams, pack_tokens
from common.rpc import Stream
from common.shared_params import (
    LargeParams,
    SharedKeys,
    SharedTable,
    is_large,
    joined,
    without_large,
)
from common.types import Role, SamplingParams
from common.wire import decode, encode
from prefill_worker.wanted_params import WantedParams
from router.fleet.session import Session
from tests.fakes.fleet import Fleet, Worker, fleet
from tests.fakes.hash_model import VOCAB_SIZE, expected_tokens
from tests.fakes.router import router
from tests.fakes.virtual_time import LoopClock, VirtualTimeLoop

NUM_PROMPTS = 8
BIAS = tuple((i % VOCAB_SIZE, (i % 7) / 2) for i in range(5_000))
LARGE = SamplingParams(
    max_tokens=6, temperature=0, logit_bias=BIAS, bad_words=((1, 2), (3,)), grammar="g" * 2_000
)


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        with anyio.fail_after(300.0):
            await main()

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(bounded())


def request(name: str = "r", sampling: SamplingParams = LARGE) -> GenerateRequest:
    return GenerateRequest(
        request_id=name, token_ids=pack_tokens([1, 2]), num_prompt_tokens=2, sampling=sampling
    )


def watch_starts(worker: Worker) -> list[SamplingParams]:
    """The parameters of every output that starts on the worker."""
    seen: list[SamplingParams] = []
    execute = worker.device.runner.execute

    def watched(plan: Any) -> Any:
        seen.extend(start.sampling for start in plan.starts)
        return execute(plan)

    worker.device.runner.execute = watched
    return seen


def assert_nothing_is_kept(workers: Fleet) -> None:
    for worker in workers.workers.values():
        service = worker.service
        if worker.identity.role is Role.PREFILL:
            assert len(service._wanted_params) == 0
        else:
            sessions = service._sessions.values()
            assert all(len(session.arrivals.shared) == 0 for session in sessions)
            worker.core.check_invariants()  # without hand-offs there are no shared keys
            assert worker.core.num_handoffs == 0


def test_t02_a_call_sends_its_parameters_once_to_each_worker() -> None:
    async def main() -> None:
        async with fleet() as workers, router(workers) as r:
            starts = {name: watch_starts(workers.workers[name]) for name in ("p0", "d0")}
            prompts = [[index + 1] * 60 for index in range(NUM_PROMPTS)]
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(r.generate(prompt, LARGE)) for prompt in prompts]
            for prompt, task in zip(prompts, tasks, strict=True):
                assert task.result().tokens == expected_tokens(prompt, LARGE)
            assert len(starts["p0"]) == NUM_PROMPTS
            for seen in starts.values():
                assert seen
                assert {params.logit_bias for params in seen} == {BIAS}
                assert {id(params.logit_bias) for params in seen} == {id(seen[0].logit_bias)}
                assert {id(params.grammar) for params in seen} == {id(seen[0].grammar)}
                assert {params.bad_words for params in seen} == {LARGE.bad_words}
            one = len(encode(LargeParams.of(LARGE).message("k")))
            sent = workers.workers["d0"].metric("handoff_stream_bytes_total")
            assert one < sent < 1.5 * one
            await r.settle()
            assert_nothing_is_kept(workers)

    run(main)


def test_older_workers_get_whole_requests() -> None:
    async def main() -> None:
        async with fleet() as workers, router(workers) as r:
            decode_worker = workers.workers["d0"]
            starts = watch_starts(decode_worker)
            for seen in r.fleet.linked():
                seen.state = replace(seen.state, shares_parameters=False)
            answer = await r.generate([5] * 40, LARGE)
            assert answer.tokens == expected_tokens([5] * 40, LARGE)
            assert [params.logit_bias for params in starts] == [BIAS]
            await r.settle()
            assert_nothing_is_kept(workers)

    run(main)


def test_a_request_that_is_cancelled_while_its_grammar_is_compiled_leaves_nothing() -> None:
    async def main() -> None:
        async with fleet() as workers:
            worker = workers.workers["d0"]
            may_compile = asyncio.Event()
            worker.device.prepare = lambda grammar: may_compile.wait()  # type: ignore[method-assign,assignment,return-value]
            client = workers.client()
            ids = [(await client.submit([1, 2, 3], LARGE))[0] for _ in range(2)]
            await asyncio.sleep(0.1)
            (session,) = worker.service._sessions.values()
            assert [name in session.arrivals for name in ids] == [True, True]
            await client.stream.send(Cancel(request_id=ids[0]))
            await asyncio.sleep(0.1)
            assert [name in session.arrivals for name in ids] == [False, True]
            assert worker.scheduler.num_waiting + worker.scheduler.num_running == 0
            may_compile.set()
            await asyncio.sleep(5.0)
            assert [len(client._outputs[name][0].tokens.get(0, ())) for name in ids] == [0, 6]
            workers.check_at_rest()

    run(main)


def test_streams_go_on_while_a_grammar_is_compiled() -> None:
    async def main() -> None:
        async with fleet() as workers:
            worker = workers.workers["d0"]
            may_compile = asyncio.Event()
            worker.device.prepare = lambda grammar: may_compile.wait()  # type: ignore[method-assign,assignment,return-value]
            client = workers.client()
            waits = await client.submit([1, 2, 3], LARGE)
            runs = await client.submit([4, 5], SamplingParams(max_tokens=9, temperature=0))
            await runs[3].wait()
            assert not waits[1].tokens
            may_compile.set()
            await waits[3].wait()
            assert len(waits[1].tokens[0]) == 6

    run(main)


# --- the parts ------------------------------------------------------------------------------------


def test_a_message_holds_the_parameters_and_a_request_goes_without_them() -> None:
    message = LargeParams.of(LARGE).message("k")
    assert decode(encode(message)) == message
    table = SharedTable(VOCAB_SIZE)
    params = table.put(message)
    assert params == LargeParams.of(LARGE)
    light = without_large(request(), "k")
    assert len(encode(Submit(request=light))) < 500
    assert joined(light, table.get("k")) == request()
    assert is_large(LARGE)
    assert not is_large(light.sampling)
    table.drop("k")
    assert (len(table), table.num_bytes) == (0, 0)
    with pytest.raises(Overloaded):
        table.get("k")


def test_the_table_is_bounded_in_bytes() -> None:
    table = SharedTable(VOCAB_SIZE, max_bytes=1_000_000)
    message = LargeParams.of(LARGE).message("a")
    assert table.put(message) is not None
    assert table.put(replace(message, key="b")) is None
    assert table.put(message) is not None  # in its own place
    table.drop("a")
    assert table.put(replace(message, key="b")) is not None


@pytest.mark.parametrize(
    "fields",
    [
        {"bias_ids": b"123"},
        {"bias_ids": b"\x01\0\0\0", "biases": b""},
        {"bias_ids": b"\xff\xff\xff\xff", "biases": b"\0" * 8},
        {"bad_words": ((-1,),)},
        {"grammar": "g" * 300_000},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_parameters_that_cannot_be_meant_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(MalformedMessage):
        SharedTable(VOCAB_SIZE).put(ShareParams(key="k", **fields))


def test_keys_live_as_long_as_a_request_that_uses_them() -> None:
    keys = SharedKeys("p:")
    other = replace(LARGE, logit_bias=((1, 1.0),))
    assert keys.hold(LARGE) == ("p:1", True)
    assert keys.hold(replace(LARGE, seed=4)) == ("p:1", False)
    assert keys.hold(other) == ("p:2", True)
    assert keys.release(LARGE) is None
    assert keys.release(replace(LARGE, n=1)) == "p:1"
    assert keys.hold(LARGE) == ("p:3", True)
    assert len(keys) == 2


def test_the_message_of_a_request_is_what_older_workers_read() -> None:
    fields = msgpack.unpackb(encode(Submit(request=request(sampling=SamplingParams(max_tokens=1)))))
    assert fields["request"].pop("shared") == ""
    assert decode(msgpack.packb(fields)) == Submit(
        request=request(sampling=SamplingParams(max_tokens=1))
    )


class Recorded:
    """A stream that remembers what is sent, and gives what it is told to."""

    num_bytes = 0

    def __init__(self, *received: object) -> None:
        self.sent: list[object] = []
        self._received = list(received)

    async def send(self, message: object) -> None:
        self.sent.append(message)
        await asyncio.sleep(0)

    async def receive(self) -> object | None:
        await asyncio.sleep(0.1)
        found = self._received.pop(0) if self._received else None
        if isinstance(found, TandemError):
            raise found
        return found

    async def finish(self) -> None: ...

    def cancel(self) -> None: ...


def test_a_session_tells_once_and_takes_back_at_the_end() -> None:
    class Nobody:
        def __getattr__(self, name: str) -> Any:
            return lambda *args, **kwargs: None

    session = Session(Recorded(), "d0")
    for name in "abc":
        session.submit(request(name), Nobody(), shares=True)
    session.submit(request("d"), Nobody())
    session.forget("a")
    session.cancel("b")
    session.cancel("c")
    sent = [session.outbox.get_nowait() for _ in range(session.outbox.qsize())]
    kinds = [type(message).__name__ for message in sent]
    assert kinds == ["ShareParams", *["Submit"] * 4, "Cancel", "UnshareParams", "Cancel"]
    assert isinstance(sent[4], Submit)
    assert sent[4].request == request("d")
    assert sent[6] == UnshareParams(key="1")


def test_one_hand_off_asks_for_all_and_another_takes_its_place_when_it_fails() -> None:
    async def main() -> None:
        wanted = WantedParams(VOCAB_SIZE, 5.0, LoopClock())
        gone = Recorded(InvalidRequest("the stream broke"))
        answers = Recorded(LargeParams.of(LARGE).message("k"))
        silent = Recorded()
        found: list[object] = []

        async def use(stream: Stream) -> None:
            try:
                async with wanted.of("k", stream) as params:
                    found.append(params)
                    await asyncio.sleep(1.0)
            except TandemError as error:
                found.append(error.message)

        async with asyncio.TaskGroup() as group:
            for stream in (gone, answers, silent):
                group.create_task(use(stream))
        assert found == ["the stream broke", *[LargeParams.of(LARGE)] * 2]
        assert [stream.sent for stream in (gone, answers, silent)] == [
            [WantParams(key="k")],
            [WantParams(key="k")],
            [],
        ]
        assert len(wanted) == 0

    run(main)


def test_another_message_than_the_parameters_is_nonsense() -> None:
    async def main() -> None:
        wanted = WantedParams(VOCAB_SIZE, 5.0, LoopClock())
        other = HandoffRequest(request=request(), incarnation="x", num_held_blocks=0)
        for stream in (Recorded(other), Recorded(ShareParams(key="another"))):
            with pytest.raises(MalformedMessage):
                async with wanted.of("k", stream):
                    raise AssertionError
        assert len(wanted) == 0

    run(main)
