"""What a decode worker says about a prefill worker whose pages it cannot read."""

import anyio
import pytest

from common.clock import MonotonicClock
from common.errors import PrefillLost, WorkerLost
from common.rpc import Stream
from common.types import Role
from decode_worker.links import Links, how_to_agree
from decode_worker.peers import AllowedPeers
from worker.watch import Identity

OURS = "fp8_e4m3, blocks of 16, 30 layers, 3 KV heads of 64, weights auto, offsets aa, layout 11"
IDENTITY = Identity(
    role=Role.DECODE,
    incarnation="00000000000000d0",
    metrics="",
    model_fingerprint=b"model",
    layout=OURS,
    layout_fingerprint=b"layout",
    block_size=16,
    max_model_len=100,
    vocab_size=100,
)


def test_t38_the_advice_is_about_what_differs() -> None:
    offsets = how_to_agree(OURS, OURS.replace("offsets aa, layout 11", "offsets bb, layout 22"))
    assert "tandem calibrate" in offsets
    assert "--kv-codec" not in offsets
    codec = how_to_agree(OURS, OURS.replace("e4m3", "e5m2").replace("layout 11", "layout 33"))
    assert "--kv-codec" in codec
    assert "calibrate" not in codec
    weights = how_to_agree(OURS, OURS.replace("layout 11", "layout 44"))
    assert weights.startswith("the models differ")


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
        page_bytes=0,
    )

    async def ask() -> None:
        for number in range(3000):
            with pytest.raises(PrefillLost):
                await links.get(f"10.0.0.1:{number}", None)

    anyio.run(ask)
    assert opened == set()
    assert links.num_remembered == 0
