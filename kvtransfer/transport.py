"""The seam to whatever moves pages: NIXL between processes, plain copies inside one.

A transport owns a pool that others may read (`describe` says how) and a landing zone that its own
reads write to. It never writes into anybody's pool. Implementations: `nixl_transport.py`, and for
tests tests/fakes/memory_transport.py; both pass tests/kvtransfer/test_transport_contract.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from common.handoff_messages import LinkReply
from common.pages import PageKind
from common.types import BlockId
from kvtransfer.landing import Slot


class ReadEnd(Enum):
    DONE = auto()
    DISCONNECTED = auto()
    """The source is gone; nothing will be written any more."""
    UNKNOWN = auto()
    """It failed in a way that does not tell whether something may still be written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolAddress:
    """What a `LinkReply` carries about the pool: see there."""

    agent_name: str
    agent_metadata: bytes
    pages: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PageRead:
    """Read one page of the source's pool into one landing slot of the same kind; with `heads`, the
    records of these KV heads only.
    """

    kind: PageKind
    block_id: BlockId
    slot: Slot
    heads: tuple[int, ...] = ()


class Read(Protocol):
    async def wait(self) -> ReadEnd:
        """How the read ended. Cancelling the wait does not end the read; it may be waited for
        again.
        """
        ...


class Transport(Protocol):
    def describe(self) -> PoolAddress: ...

    async def link(self, source: LinkReply) -> None:
        """Makes reads from that incarnation possible. A repeat is a no-op. Raises PullFailed."""
        ...

    def unlink(self, incarnation: str) -> None:
        """Forgets an incarnation; reads from it end as disconnected or go on until they end."""
        ...

    def read(self, incarnation: str, pages: Sequence[PageRead]) -> Read:
        """Starts a read. Raises PullFailed at once when the source is not linked or known to be
        gone.
        """
        ...

    async def close(self) -> None: ...
