"""Links to prefill workers: who is there, does it store KV as we do, can its pool be read.

A link is made once per incarnation, by one task however many requests wait for it. A worker that
came back on the same address is a new incarnation: the old one's state is forgotten before the new
one's is added.
"""

import logging
from itertools import zip_longest

import anyio

from common.clock import Clock
from common.errors import LayoutMismatch, MalformedMessage, PrefillLost, TandemError, WorkerLost
from common.handoff_messages import RANKS_PROTOCOL, LinkReply, LinkRequest
from common.messages import PROTOCOL_VERSION
from common.pages import OFFSETS_FILE, PageKind
from common.rpc import Connect, Peer
from decode_worker.actions import Link
from decode_worker.peers import AllowedPeers
from kvtransfer.landing import LandingZone
from kvtransfer.transport import PageRead, ReadEnd, Transport
from worker.metrics import WorkerMetrics
from worker.watch import Identity

log = logging.getLogger(__name__)

LINK_TIMEOUT_S = 10.0
SELF_TEST_PAGES = 32
MAX_PEERS = 1024
"""Prefill workers that there are links to; a link that was dropped counts until room is needed."""


def how_to_agree(ours: str, theirs: str) -> str:
    """What to do about two layouts (`layout_text`, which ends with a hash of them) that differ."""
    differing = [
        mine
        for mine, other in zip_longest(ours.split(", ")[:-1], theirs.split(", ")[:-1], fillvalue="")
        if mine != other
    ]
    if not differing:
        return "the models differ: start both workers with the same one"
    if all(part.startswith("offsets ") for part in differing):
        return (
            "only the offsets do: run `tandem calibrate --model DIR --text FILE` with the same "
            f"text on both, or copy {OFFSETS_FILE} from one model directory to the other"
        )
    return (
        "start both workers with the same model, --kv-codec, --block-size and --weight-dtype, and "
        "--batch-invariant on both or neither (on both it needs the same kind of GPU and the same "
        "--dtype)"
    )


class Links:
    def __init__(
        self,
        *,
        identity: Identity,
        transport: Transport,
        zone: LandingZone,
        connect: Connect,
        clock: Clock,
        metrics: WorkerMetrics,
        page_bytes: int,
        allowed: AllowedPeers | None = None,
    ) -> None:
        """`allowed` None: any address."""
        self._identity = identity
        self._transport = transport
        self._zone = zone
        self._connect = connect
        self._clock = clock
        self._metrics = metrics
        self._page_bytes = page_bytes
        self._allowed = allowed or AllowedPeers(None)
        self._links: dict[str, Link] = {}
        self._peers: dict[str, Peer] = {}
        self._locks: dict[str, anyio.Lock] = {}

    async def get(self, address: str, incarnation: str | None) -> tuple[Link, Peer]:
        """With the peer that it leads to. Raises PrefillLost when it is gone or another
        incarnation, LayoutMismatch, PullFailed.
        """
        lock = self._locks.setdefault(address, anyio.Lock())
        try:
            async with lock:
                link = self._links.get(address)
                if link is None or (incarnation is not None and link.incarnation != incarnation):
                    link = await self._make(address)
                peer = self._peers[address]
        finally:
            await self._forget_unused(address, lock)
        if incarnation is not None and link.incarnation != incarnation:
            raise PrefillLost(f"the prefill worker at {address} was restarted")
        return link, peer

    def drop(self, link: Link) -> None:
        """The link's worker is gone or silent; the next request makes a new one."""
        if self._links.get(link.address) == link:
            del self._links[link.address]
            self._transport.unlink(link.incarnation)

    async def _forget_unused(self, address: str, lock: anyio.Lock | None) -> None:
        """Of an address that has no link, and that nobody is making one to, nothing is kept."""
        state = None if lock is None else lock.statistics()
        if address in self._links or (state and (state.locked or state.tasks_waiting)):
            return
        self._locks.pop(address, None)
        peer = self._peers.pop(address, None)
        if peer is not None:
            with anyio.CancelScope(shield=True):
                await peer.close()

    @property
    def num_remembered(self) -> int:
        return len(self._peers) + len(self._locks) + len(self._links)

    async def close(self) -> None:
        for peer in self._peers.values():
            await peer.close()

    async def _make(self, address: str) -> Link:
        await self._allowed.check(address)
        if len(self._peers) >= MAX_PEERS and address not in self._peers:
            for other in list(self._peers):
                await self._forget_unused(other, self._locks.get(other))
            if len(self._peers) >= MAX_PEERS:
                raise PrefillLost(f"this worker has links to {MAX_PEERS} prefill workers already")
        peer = self._peers.get(address)
        if peer is None:
            peer = self._peers[address] = self._connect(address)
        try:
            with self._clock.deadline(LINK_TIMEOUT_S) as bound:
                reply = await self._ask(peer, address)
                asked_at = self._clock.now()
                reply = await self._ask(peer, address)  # once more, over an open connection
                round_trip_s = self._clock.now() - asked_at
        except WorkerLost as error:
            raise PrefillLost(f"no link to the prefill worker: {error.message}") from error
        if bound.cancelled_caught:
            raise PrefillLost(f"the prefill worker at {address} does not answer")
        if reply.layout_fingerprint != self._identity.layout_fingerprint:
            raise LayoutMismatch(
                f"KV layouts differ: {self._identity.layout} here, {reply.layout} at {address}; "
                f"{how_to_agree(self._identity.layout, reply.layout)}"
            )
        old = self._links.pop(address, None)
        if old is not None and old.incarnation != reply.incarnation:
            self._transport.unlink(old.incarnation)
        await self._transport.link(reply)
        link = Link(
            address=address,
            incarnation=reply.incarnation,
            numeric_incarnation=reply.numeric_incarnation,
            round_trip_s=round_trip_s,
            shares_parameters=reply.shares_parameters,
            heartbeat_s=reply.heartbeat_s,
        )
        await self._self_test(link, reply)
        self._links[address] = link
        return link

    async def _ask(self, peer: Peer, address: str) -> LinkReply:
        stream = peer.open("Link")
        try:
            await stream.send(
                LinkRequest(
                    incarnation=self._identity.incarnation,
                    layout=self._identity.layout,
                    layout_fingerprint=self._identity.layout_fingerprint,
                )
            )
            reply = await stream.receive()
        finally:
            stream.cancel()
        protocols = (PROTOCOL_VERSION, RANKS_PROTOCOL)
        if not isinstance(reply, LinkReply) or reply.protocol not in protocols:
            raise MalformedMessage(f"{address} does not speak protocol {PROTOCOL_VERSION}")
        return reply

    async def _self_test(self, link: Link, reply: LinkReply) -> None:
        """Reads some pages and measures: a route is used only over a link that moves bytes."""
        num_packed = min((pool.pages[0][2] for pool in reply.ranks if pool.pages), default=0)
        num_pages = min(SELF_TEST_PAGES, num_packed)
        slots = [
            slot for _ in range(num_pages) if (slot := self._zone.take(PageKind.PACKED)) is not None
        ]
        if not slots:
            return
        pages = [
            PageRead(kind=PageKind.PACKED, block_id=n, slot=slot) for n, slot in enumerate(slots)
        ]
        started = self._clock.now()
        try:
            read = self._transport.read(link.incarnation, pages)
        except TandemError:
            self._zone.give_back(slots)
            raise
        end = ReadEnd.UNKNOWN
        try:
            with self._clock.deadline(LINK_TIMEOUT_S):
                end = await read.wait()
        finally:
            if end is ReadEnd.UNKNOWN:
                self._zone.quarantine(slots)
            else:
                self._zone.give_back(slots)
        if end is not ReadEnd.DONE:
            raise PrefillLost(f"pages of {link.address} cannot be read")
        # virtual time may stand still meanwhile
        seconds = max(self._clock.now() - started, 1e-9)
        rate = len(slots) * self._page_bytes / seconds
        self._metrics.link_bandwidth.labels(link.address).set(rate)
        log.info("link to %s is up: %.2f GB/s", link.address, rate / 1e9)
