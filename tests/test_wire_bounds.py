"""Messages between processes are read as they are declared: nothing else is built."""

import tracemalloc
from typing import Any

import msgpack
import pytest

from common.errors import MalformedMessage
from common.handoff_messages import PagesTaken
from common.limits import MAX_MESSAGE_ITEMS
from common.messages import Failed, Submit, TokenBatch, Watch
from common.types import FinishReason, TokenLogprobs
from common.wire import decode, encode

NUM_LISTS = 4_000_000


def lists(count: int) -> bytes:
    return b"\xdd" + count.to_bytes(4, "big") + b"\x90" * count


def test_t04_an_unknown_field_is_skipped_and_not_built() -> None:
    data = b"\x82\xa1t\xa5Watch\xa4more" + lists(NUM_LISTS)
    tracemalloc.start()
    try:
        assert decode(data) == Watch()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 3 * len(data)  # a list each would be 56 bytes more for one


@pytest.mark.parametrize("head", [b"\x82\xa1t\xa5Watch\xa8protocol", b"\x81\xa1t"])
def test_t04_a_list_in_place_of_a_scalar_is_refused_at_its_header(head: bytes) -> None:
    data = head + lists(NUM_LISTS)
    tracemalloc.start()
    try:
        with pytest.raises(MalformedMessage):
            decode(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 3 * len(data)


def test_items_of_all_lists_are_counted() -> None:
    within = PagesTaken(blocks=tuple(range(MAX_MESSAGE_ITEMS - 10)))
    assert decode(encode(within)) == within
    beyond = encode(PagesTaken(blocks=(7,) * (MAX_MESSAGE_ITEMS + 1)))
    with pytest.raises(MalformedMessage, match="more than"):
        decode(beyond)


def test_deep_nesting_in_an_unknown_field_is_refused() -> None:
    data = b"\x82\xa1t\xa5Watch\xa4more" + b"\x91" * 100_000 + b"\x00"
    with pytest.raises(MalformedMessage):
        decode(data)


def test_older_processes_send_the_name_last() -> None:
    message = Failed(request_id="a", code="draining", message="m", retry_after_s=1.0)
    fields = {"request_id": "a", "code": "draining", "message": "m", "retry_after_s": 1.0}
    assert decode(msgpack.packb(fields | {"t": "Failed"})) == message
    assert decode(msgpack.packb({"t": "Failed"} | fields)) == message


BATCH = TokenBatch(
    request_ids=("a", "b"),
    output_indices=(0, 1),
    token_ids=(5, 6),
    finish_reasons=(None, FinishReason.STOP),
    logprobs=(None, TokenLogprobs(logprob=-1.0, top_ids=(3,), top_logprobs=(-0.5,))),
)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("token_ids", [5, [6]]),
        ("token_ids", [5, True]),
        ("token_ids", [5, 6.0]),
        ("token_ids", {"a": 1}),
        ("request_ids", [b"a", "b"]),
        ("finish_reasons", [None, "gone"]),
        ("logprobs", [None, 5]),
        ("logprobs", [None, {"logprob": 1.0, "top_ids": [1], "top_logprobs": "x"}]),
    ],
)
def test_columns_hold_what_they_are_declared_to(column: str, value: Any) -> None:
    assert decode(encode(BATCH)) == BATCH
    fields = msgpack.unpackb(encode(BATCH)) | {column: value}
    with pytest.raises(MalformedMessage):
        decode(msgpack.packb(fields))


def test_bytes_after_a_message_are_refused() -> None:
    with pytest.raises(MalformedMessage, match="after"):
        decode(encode(Watch()) + b"\x00")


def test_a_cut_message_is_refused_at_every_length() -> None:
    data = encode(BATCH)
    for length in range(len(data)):
        with pytest.raises(MalformedMessage):
            decode(data[:length])


def test_a_missing_field_is_named() -> None:
    with pytest.raises(MalformedMessage, match="request"):
        decode(msgpack.packb({"t": Submit.__name__}))
