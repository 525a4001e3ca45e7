"""The seam to whatever moves pages: NIXL between processes, plain copies inside one.

A transport is one rank's: it owns a pool that others may read (`describe` says how) and a landing
zone that its own reads write to. It never writes into anybody's pool. Blocks and landing slots have
the same numbers in all ranks of a worker, whose records lie in the pages of several; what a rank
reads of a page are the records of the heads that it holds. Implementations: `nixl_transport.py`,
`group.py` (the transports of all ranks as one), and for tests tests/fakes/memory_transport.py; all
pass tests/kvtransfer/test_transport_contract.py.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from common.handoff_messages import LinkReply, PoolAddress
from common.pages import PageKind
from common.types import BlockId
from kvtransfer.landing import Slot


class ReadEnd(IntEnum):
    """The worst last."""

    DONE = 0
    DISCONNECTED = 1
    """The source is gone; nothing will be written any more."""
    UNKNOWN = 2
    """It failed in a way that does not tell whether something may still be written."""


def worst(ends: Iterable[ReadEnd]) -> ReadEnd:
    """How a read ended whose parts ended so."""
    return max(ends, default=ReadEnd.DONE)


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
    async def open(self) -> None:
        """Before anything else. Raises ConfigError where the machine does not allow it."""
        ...

    def describe(self) -> tuple[PoolAddress, ...]:
        """The pools of all ranks that it speaks for."""
        ...

    async def link(self, source: LinkReply) -> None:
        """Makes reads from that incarnation possible. A repeat is a no-op. Raises LayoutMismatch
        where they can never be, PullFailed where they cannot be now.
        """
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
