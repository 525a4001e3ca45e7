"""Whatever arrives on an internal port gets an error, and nothing else happens."""

import asyncio
import contextlib
import dataclasses
import typing
from enum import Enum
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common import handoff_messages
from common.errors import MalformedMessage, TandemError
from common.handoff_messages import HandoffRequest
from common.messages import GenerateRequest, Hello, Submit, pack_tokens
from common.request_checks import checked_tokens
from common.types import SamplingParams
from common.wire import _registry, decode, encode
from tests.fakes.fleet import Fleet, fleet
from tests.fakes.hash_model import VOCAB_SIZE, expected_tokens
from tests.fakes.virtual_time import VirtualTimeLoop

assert handoff_messages  # registers every message, with those of common/messages.py

JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.binary(max_size=20)
    | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)


def value_of(hint: Any) -> st.SearchStrategy[Any]:
    """Any value of the right type; the range is not cared for."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return instance_of(typing.cast(type, hint))
    if origin is tuple:
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return st.lists(value_of(arguments[0]), max_size=4).map(tuple)
        return st.tuples(*(value_of(a) for a in arguments))
    if arguments:
        inner = next(a for a in arguments if a is not type(None))
        return st.none() | value_of(inner)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return st.sampled_from(list(hint))
    kinds: dict[Any, st.SearchStrategy[Any]] = {
        int: st.integers(-(2**63), 2**64 - 1) | st.integers(-2, 5),
        float: st.floats(allow_nan=False),
        str: st.text(max_size=12),
        bytes: st.binary(max_size=24) | st.lists(st.integers(0, 2000), max_size=9).map(pack_tokens),
        bool: st.booleans(),
    }
    return kinds[hint]


def instance_of(cls: type) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(cls)
    return st.fixed_dictionaries(
        {f.name: value_of(hints[f.name]) for f in dataclasses.fields(cls)}
    ).map(lambda fields: cls(**fields))


any_message = st.sampled_from(sorted(_registry)).flatmap(lambda name: instance_of(_registry[name]))


@settings(max_examples=300, deadline=None)
@given(message=any_message)
def test_every_message_comes_back_as_it_was_sent(message: object) -> None:
    assert decode(encode(message)) == message


@settings(max_examples=400, deadline=None)
@given(data=st.binary(max_size=200) | JUNK.map(msgpack.packb))
def test_bytes_that_are_no_message_are_refused(data: bytes) -> None:
    with pytest.raises(MalformedMessage):
        decode(data)


@settings(max_examples=400, deadline=None)
@given(message=any_message, junk=JUNK, data=st.data())
def test_a_message_with_one_field_replaced_is_read_or_refused(
    message: object, junk: object, data: st.DataObject
) -> None:
    fields = msgpack.unpackb(encode(message), strict_map_key=True)
    fields[data.draw(st.sampled_from(sorted(fields)))] = junk
    with contextlib.suppress(MalformedMessage):
        decode(msgpack.packb(fields))


def test_deep_nesting_and_size_are_bounded() -> None:
    deep: Any = 1
    for _ in range(600):
        deep = [deep]
    with pytest.raises(MalformedMessage):
        decode(msgpack.packb({"t": "Cancel", "request_id": deep}))
    with pytest.raises(MalformedMessage, match="over the limit"):
        decode(bytes(17 * 1024 * 1024))


REQUEST = GenerateRequest(
    request_id="x",
    token_ids=pack_tokens([1, 2, 3]),
    num_prompt_tokens=3,
    sampling=SamplingParams(max_tokens=4),
)


@pytest.mark.parametrize(
    "change",
    [
        {"token_ids": b""},
        {"token_ids": b"abc"},
        {"token_ids": pack_tokens([1, -1])},
        {"token_ids": pack_tokens([VOCAB_SIZE])},
        {"num_prompt_tokens": 0},
        {"num_prompt_tokens": 4},
        {"output_index": -1},
        {"age_s": float("inf")},
        {"sampling": SamplingParams(max_tokens=0)},
        {"sampling": SamplingParams(max_tokens=4, n=0)},
        {"sampling": SamplingParams(max_tokens=4, n=10**9)},
        {"sampling": SamplingParams(max_tokens=4, temperature=-1.0)},
        {"sampling": SamplingParams(max_tokens=4, temperature=float("inf"))},
        {"sampling": SamplingParams(max_tokens=4, top_p=0.0)},
        {"sampling": SamplingParams(max_tokens=4, repetition_penalty=0.0)},
        {"sampling": SamplingParams(max_tokens=4, logit_bias=((VOCAB_SIZE, 1.0),))},
        {"sampling": SamplingParams(max_tokens=4, stop_token_ids=(-1,))},
        {"sampling": SamplingParams(max_tokens=4, logprobs=10**9)},
        {"sampling": SamplingParams(max_tokens=4, seed=2**64)},
    ],
)
def test_what_could_hurt_a_worker_is_refused(change: dict[str, Any]) -> None:
    assert checked_tokens(REQUEST, VOCAB_SIZE).tolist() == [1, 2, 3]
    with pytest.raises(MalformedMessage):
        checked_tokens(dataclasses.replace(REQUEST, **change), VOCAB_SIZE)


CANARY = list(range(50, 120))
CANARY_SAMPLING = SamplingParams(max_tokens=8, temperature=0)


async def attack(f: Fleet, address: str, method: str, sent: list[object]) -> None:
    """Sends the messages; whatever comes back is read until the stream ends or has been quiet."""
    stream = f.network.connect_from("attacker")(address).open(method)
    try:
        for message in sent:
            await stream.send(message)
        await stream.finish()
        async with asyncio.timeout(1.0):
            while await stream.receive() is not None:
                pass
    except (TandemError, TimeoutError):
        pass
    finally:
        stream.cancel()


@settings(max_examples=60, deadline=None)
@given(
    method=st.sampled_from(["Watch", "Session", "Handoff", "Link"]),
    first=st.none() | any_message,
    rest=st.lists(any_message, max_size=5),
    submits=st.lists(instance_of(GenerateRequest), max_size=3),
)
def test_hostile_streams_change_nothing(
    method: str, first: object | None, rest: list[object], submits: list[GenerateRequest]
) -> None:
    async def main() -> None:
        async with fleet(num_packed=64, num_exact=24) as f:
            p, d = f.workers["p0"], f.workers["d0"]
            openers: dict[str, object] = {
                "Session": Hello(router_id="attacker", incarnation=d.identity.incarnation),
                "Handoff": HandoffRequest(
                    request=submits[0] if submits else REQUEST,
                    incarnation=p.identity.incarnation,
                    num_held_blocks=0,
                ),
            }
            opener = first if first is not None else openers.get(method)
            sent = [
                m for m in [opener, *(Submit(request=r) for r in submits), *rest] if m is not None
            ]
            address = "d0" if method == "Session" else "p0"
            await attack(f, address, method, sent)
            outputs = await f.client().generate(CANARY, CANARY_SAMPLING)
            assert outputs.tokens == {0: expected_tokens(CANARY, CANARY_SAMPLING)}
            await asyncio.sleep(2)
            f.check_at_rest()

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(main())
