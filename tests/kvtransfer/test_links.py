"""What a decode worker says about a prefill worker whose pages it cannot read."""

import re
from dataclasses import replace
from typing import Any

import anyio
import pytest

from common.clock import MonotonicClock
from common.errors import LayoutMismatch, PrefillLost, WorkerLost
from common.handoff_messages import LinkReply
from common.layout_facts import LayoutFacts, fit
from common.rpc import Stream
from common.scheduling.plan import ForeignPages
from common.types import Role
from decode_worker.links import Links, check_layout
from decode_worker.peers import AllowedPeers
from worker.watch import Identity

FACTS = LayoutFacts(
    page_format="TKV3",
    model="11" * 16,
    num_layers=30,
    num_kv_heads=3,
    head_dim=64,
    codec="fp8_e4m3",
    block_size=16,
    weights="auto",
    offsets="aa" * 16,
)
IDENTITY = Identity(
    role=Role.DECODE,
    incarnation="00000000000000d0",
    metrics="",
    model_fingerprint=b"model",
    layout="the layout",
    layout_fingerprint=b"layout",
    facts=FACTS,
    block_size=16,
    max_model_len=100,
    vocab_size=100,
)


def reply_of(facts: LayoutFacts | None, **changes: Any) -> LinkReply:
    plain = LinkReply(
        incarnation="p",
        numeric_incarnation=1,
        layout="another layout",
        layout_fingerprint=b"layout" if facts == FACTS else b"another",
        agent_name="",
        agent_metadata=b"",
        pages=(),
        facts=facts,
    )
    return replace(plain, **changes)


def refusal(facts: LayoutFacts | None = FACTS, **changes: Any) -> str:
    with pytest.raises(LayoutMismatch) as error:
        check_layout(IDENTITY, reply_of(facts, **changes), "p:1")
    return error.value.message


def test_t38_the_advice_is_about_what_differs() -> None:
    assert refusal(replace(FACTS, offsets="bb" * 16)) == (
        "pages of p:1 cannot be read here: offsets bbbbbbbbbbbb at the prefill worker and "
        "aaaaaaaaaaaa at the decode worker: run `tandem calibrate --model DIR --text FILE` with "
        "the same text on both, or copy kv_offsets.tandem from one model directory to the other"
    )
    assert refusal(replace(FACTS, codec="fp8_e5m2")) == (
        "pages of p:1 cannot be read here: KV codec fp8_e5m2 at the prefill worker and fp8_e4m3 at "
        "the decode worker: start both workers with the same --kv-codec"
    )
    assert refusal(replace(FACTS, model="22" * 16, num_layers=2, offsets="")).endswith(
        "start both workers with the same --model"
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"page_format": "TKV2", "codec": "x"}, "page format TKV2 .* finish the upgrade"),
        ({"block_size": 32}, "block size 32 .* the same --block-size"),
        ({"weights": "fp8"}, "weights fp8 .* and auto .* the same --weight-dtype"),
        ({"arithmetic": "2 ranks"}, "arithmetic 2 ranks .* and not promised .* --batch-invariant"),
        ({"head_dim": 80}, "stored head size 80 .* the same kind of device"),
        ({"weights": "fp8", "block_size": 32}, "block size .*weights .*--block-size; .*-dtype"),
    ],
)
def test_each_fact_that_differs_is_named_with_what_to_do(
    changes: dict[str, Any], said: str
) -> None:
    assert re.search(said, refusal(replace(FACTS, **changes)))


def test_workers_of_other_releases_are_told_apart() -> None:
    assert "another layout at p:1; they seem to be of different releases" in refusal(None)
    assert "the layout here" in refusal(FACTS, layout_fingerprint=b"same facts, other bytes")
    assert "p:1 speaks protocol 99 on links" in refusal(protocol=99)
    for protocol in (1, 2):
        check_layout(IDENTITY, reply_of(FACTS, protocol=protocol), "p:1")


CONVERTING = replace(FACTS, converts=True)
IDENTITY_THAT_CONVERTS = replace(IDENTITY, facts=CONVERTING)


@pytest.mark.parametrize("codec", ["bf16", "fp32"])
def test_exact_pages_are_converted_where_that_can_be(codec: str) -> None:
    exact = replace(FACTS, codec=codec, offsets="00" * 16)
    reply = reply_of(exact)
    foreign = check_layout(IDENTITY_THAT_CONVERTS, reply, "p:1")
    assert foreign == ForeignPages(codec, b"another")
    assert check_layout(IDENTITY_THAT_CONVERTS, reply_of(FACTS), "p:1") is None
    assert "device cannot convert pages: start both workers with the same --kv-codec" in refusal(
        exact
    )


@pytest.mark.parametrize(
    ("theirs", "ours", "said"),
    [
        ({"codec": "int8"}, {}, "KV codec int8 .* and fp8_e4m3 .* the same --kv-codec"),
        ({"codec": "fp32"}, {"codec": "bf16"}, "KV codec fp32 .* and bf16"),
        ({}, {"codec": "bf16"}, "KV codec fp8_e4m3 .* and bf16"),
        ({"codec": "bf16", "block_size": 32}, {}, "KV codec .* block size 32"),
        ({"codec": "bf16", "weights": "int8"}, {}, "weights int8"),
        ({"codec": "bf16", "is_batch_invariant": True}, {}, "what --batch-invariant promises"),
        ({"codec": "bf16"}, {"is_batch_invariant": True}, "what --batch-invariant promises"),
        ({"codec": "of the next release"}, {}, "KV codec of the next release"),
    ],
)
def test_all_else_is_refused(theirs: dict[str, Any], ours: dict[str, Any], said: str) -> None:
    found = fit(replace(FACTS, **theirs), replace(CONVERTING, **ours))
    assert not found.converts
    assert found.misfit is not None
    assert re.search(said, found.misfit)


# --- which prefill workers a route may name (T36) -------------------------------------------------


async def names(host: str, port: int) -> list[str]:
    return {"prefill": ["10.0.0.1", "10.0.0.2"]}.get(host, [])


def allows(peers: AllowedPeers, address: str) -> bool:
    async def ask() -> bool:
        try:
            await peers.check(address)
        except PrefillLost:
            return False
        return True

    return anyio.run(ask)


def test_t36_only_named_addresses_are_connected_to() -> None:
    peers = AllowedPeers(("prefill:7000", "10.1.1.1:9"), resolve=names)
    found = [a for a in (
        "10.0.0.1:7000", "10.0.0.2:7000", "prefill:7000", "10.1.1.1:9",
        "10.0.0.3:7000", "10.0.0.1:7001", "10.1.1.1:7000", "169.254.169.254:80", "nonsense", "",
    ) if allows(peers, a)]  # fmt: skip
    assert found == ["10.0.0.1:7000", "10.0.0.2:7000", "prefill:7000", "10.1.1.1:9"]


def test_t36_a_worker_on_loopback_stays_there() -> None:
    peers = AllowedPeers(None, is_loopback_only=True)
    assert allows(peers, "127.0.0.1:7000")
    assert allows(peers, "[::1]:7000")
    assert allows(peers, "localhost:1")
    assert not allows(peers, "10.0.0.1:7000")
    assert not allows(peers, "metadata.internal:80")


class NobodyAnswers:
    """A peer whose process is gone."""

    def __init__(self, address: str, opened: set[str]) -> None:
        self._address = address
        self._opened = opened
        opened.add(address)

    def open(self, method: str) -> Stream:
        raise WorkerLost("gone")

    async def close(self) -> None:
        self._opened.remove(self._address)


def test_t36_addresses_that_do_not_answer_are_forgotten() -> None:
    opened: set[str] = set()
    links = Links(
        identity=IDENTITY,
        transport=None,  # type: ignore[arg-type]
        zone=None,  # type: ignore[arg-type]
        connect=lambda address: NobodyAnswers(address, opened),
        clock=MonotonicClock(),
        metrics=None,  # type: ignore[arg-type]
    )

    async def ask() -> None:
        for number in range(3000):
            with pytest.raises(PrefillLost):
                await links.get(f"10.0.0.1:{number}", None)

    anyio.run(ask)
    assert opened == set()
    assert links.num_remembered == 0
