"""What rank 0 and a follower say to each other about transfers, over their socket.

    rank 0 -> follower   TransferLink, TransferUnlink, TransferRead
    rank 0 <- follower   TransferOpened, once; then TransferLinked, TransferEnded

Closing the socket ends it, on either side.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from common.errors import TandemError
from common.handoff_messages import LinkReply, PoolAddress
from common.pages import PageKind
from common.wire import wire_message
from kvtransfer.transport import PageRead, ReadEnd


@wire_message
@dataclass(frozen=True, slots=True, kw_only=True)
class TransferFailure:
    """An error, as in `common.messages.Failed`."""

    code: str
    message: str

    @classmethod
    def of(cls, error: TandemError) -> "TransferFailure":
        return cls(code=error.code, message=error.message)


@wire_message
@dataclass(frozen=True, slots=True, kw_only=True)
class TransferOpened:
    """The follower's pool, or why it cannot be read."""

    pool: PoolAddress | None = None
    failure: TransferFailure | None = None


@wire_message
@dataclass(frozen=True, slots=True, kw_only=True)
class TransferLink:
    call: int
    source: LinkReply


@wire_message
@dataclass(frozen=True, slots=True, kw_only=True)
class TransferUnlink:
    incarnation: str


@wire_message
@dataclass(frozen=True, slots=True, kw_only=True)
class TransferRead:
    """`PageRead`s as columns. `heads` is empty when all want all."""

    call: int
    incarnation: str
    kinds: bytes
    block_ids: tuple[int, ...]
    slots: tuple[int, ...]
    slot_kinds: bytes
    heads: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of(cls, call: int, incarnation: str, pages: Sequence[PageRead]) -> "TransferRead":
        return cls(
            call=call,
            incarnation=incarnation,
            kinds=bytes(page.kind for page in pages),
            block_ids=tuple(page.block_id for page in pages),
            slots=tuple(page.slot[1] for page in pages),
            slot_kinds=bytes(page.slot[0] for page in pages),
            heads=tuple(page.heads for page in pages) if any(p.heads for p in pages) else (),
        )

    @property
    def pages(self) -> list[PageRead]:
        heads = self.heads or ((),) * len(self.kinds)
        columns = (self.kinds, self.block_ids, self.slot_kinds, self.slots, heads)
        return [
            PageRead(
                kind=PageKind(kind),
                block_id=block_id,
                slot=(PageKind(slot_kind), slot),
                heads=of_page,
            )
            for kind, block_id, slot_kind, slot, of_page in zip(*columns, strict=True)
        ]


@wire_message
@dataclass(frozen=True, slots=True, kw_only=True)
class TransferLinked:
    call: int
    failure: TransferFailure | None = None


@wire_message
@dataclass(frozen=True, slots=True, kw_only=True)
class TransferEnded:
    """How a read ended that TransferRead asked for."""

    call: int
    end: ReadEnd
