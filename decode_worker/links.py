"""Links to prefill workers: who is there, does it store KV as we do, can its pool be read.

A link is made once per incarnation, by one task however many requests wait for it. A worker that
came back on the same address is a new incarnation: the old one's state is forgotten before the new
one's is added.
"""

import logging

import anyio

from common.clock import Clock
from common.errors import LayoutMismatch, MalformedMessage, PrefillLost, TandemError, WorkerLost
from common.handoff_messages import RANKS_PROTOCOL, LinkReply, LinkRequest
from common.layout_facts import fit
from common.messages import PROTOCOL_VERSION, RefusedLink
from common.pages import PageKind
from common.rpc import Connect, Peer
from common.scheduling.plan import ForeignPages
from decode_worker.actions import Link
from decode_worker.peers import AllowedPeers
from kvtransfer.landing import LandingZone
from kvtransfer.rank_reads import whole_page_bytes
from kvtransfer.transport import PageRead, ReadEnd, Transport
from worker.metrics import WorkerMetrics
from worker.watch import Identity

log = logging.getLogger(__name__)

LINK_TIMEOUT_S = 10.0
SELF_TEST_PAGES = 32
MAX_PEERS = 1024
"""Prefill workers that there are links to; a link that was dropped counts until room is needed."""
MAX_REFUSED = 64


def check_layout(ours: Identity, reply: LinkReply, address: str) -> ForeignPages | None:
    """What the pages are converted from; None: they are like ours. Raises LayoutMismatch, with what
    differs and what to do.
    """
    if reply.protocol not in (PROTOCOL_VERSION, RANKS_PROTOCOL):
        raise LayoutMismatch(
            f"{address} speaks protocol {reply.protocol} on links, this worker "
            f"{PROTOCOL_VERSION} and {RANKS_PROTOCOL}: run the same release on both"
        )
    if reply.facts is not None:
        found = fit(reply.facts, ours.facts)
        if found.misfit is not None:
            raise LayoutMismatch(f"pages of {address} cannot be read here: {found.misfit}")
        if found.converts:
            return ForeignPages(reply.facts.codec, reply.layout_fingerprint)
    if reply.layout_fingerprint != ours.layout_fingerprint:
        raise LayoutMismatch(
            f"KV layouts differ: {ours.layout} here, {reply.layout} at {address}; they seem to be "
            "of different releases: run the same one on both"
        )
    return None


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
        allowed: AllowedPeers | None = None,
    ) -> None:
        """`allowed` None: any address."""
        self._identity = identity
        self._transport = transport
        self._zone = zone
        self._connect = connect
        self._clock = clock
        self._metrics = metrics
        self._allowed = allowed or AllowedPeers(None)
        self._links: dict[str, Link] = {}
        self._peers: dict[str, Peer] = {}
        self._locks: dict[str, anyio.Lock] = {}
        self._refused: dict[str, RefusedLink] = {}

    @property
    def refused(self) -> tuple[RefusedLink, ...]:
        """Prefill workers that pages can never be read from, the latest ones."""
        return tuple(self._refused.values())

    async def get(self, address: str, incarnation: str | None) -> tuple[Link, Peer]:
        """With the peer that it leads to. Raises PrefillLost when it is gone or another
        incarnation, LayoutMismatch, PullFailed.
        """
        refused = self._refused.get(address)
        if refused is not None and refused.incarnation == incarnation:
            raise LayoutMismatch(refused.reason)
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

    def _refuse(self, refused: RefusedLink) -> None:
        self._metrics.links_refused.inc()
        log.error("no link to %s: %s", refused.address, refused.reason)
        self._refused.pop(refused.address, None)
        self._refused[refused.address] = refused
        if len(self._refused) > MAX_REFUSED:
            del self._refused[next(iter(self._refused))]

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
        self._refused.pop(address, None)
        old = self._links.pop(address, None)
        if old is not None and old.incarnation != reply.incarnation:
            self._transport.unlink(old.incarnation)
        try:
            foreign = check_layout(self._identity, reply, address)
            await self._transport.link(reply)
        except LayoutMismatch as error:
            self._refuse(
                RefusedLink(address=address, incarnation=reply.incarnation, reason=error.message)
            )
            raise
        link = Link(
            address=address,
            incarnation=reply.incarnation,
            numeric_incarnation=reply.numeric_incarnation,
            round_trip_s=round_trip_s,
            shares_parameters=reply.shares_parameters,
            heartbeat_s=reply.heartbeat_s,
            foreign=foreign,
            page_bytes=whole_page_bytes(reply.ranks),
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
        if not isinstance(reply, LinkReply):
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
        rate = len(slots) * link.page_bytes[PageKind.PACKED] / seconds
        self._metrics.link_bandwidth.labels(link.address).set(rate)
        log.info("link to %s is up: %.2f GB/s", link.address, rate / 1e9)
