"""What a decode worker's core wants done: values that the service carries out over gRPC and NIXL,
the simulator's host on virtual time.
"""

from dataclasses import dataclass
from typing import NewType

from common.scheduling.plan import ForeignPages
from common.types import RequestId
from kvtransfer import destination

SessionId = NewType("SessionId", int)
PullId = NewType("PullId", int)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A prefill worker that pages can be read from."""

    address: str
    incarnation: str
    numeric_incarnation: int
    round_trip_s: float
    """Of a message to the prefill worker and back, when the link came up."""
    shares_parameters: bool = False
    """Whether it understands `ShareParams`."""
    heartbeat_s: float = 0.0
    """How often it says something while it computes; 0: not at all."""
    foreign: ForeignPages | None = None
    """Its pages are converted when they land."""
    page_bytes: tuple[int, int] = (0, 0)
    """Of a packed and of an exact page there."""


# --- to routers -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tell:
    session: SessionId
    message: object
    is_from_prefill: bool = False
    """Its tokens were sampled by the prefill worker, which has counted them."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The request is forgotten. `reason`: an output's finish reason, error, preempted or abort."""

    request_id: RequestId
    reason: str


# --- of a hand-off --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Connect:
    """A link, and over it the hand-off's stream: `connected`; if that cannot be, `StreamEnded`."""

    pull: PullId
    request_id: RequestId
    address: str
    incarnation: str | None


@dataclass(frozen=True, slots=True)
class Send:
    pull: PullId
    message: object


@dataclass(frozen=True, slots=True)
class Finish:
    """Half-closes the stream, after what was sent before."""

    pull: PullId


@dataclass(frozen=True, slots=True)
class Cut:
    """Ends the stream, or the attempt to connect, at once. Reads and landings go on."""

    pull: PullId


@dataclass(frozen=True, slots=True)
class DropLink:
    """Its worker is gone or silent; the next hand-off makes a new one."""

    link: Link


@dataclass(frozen=True, slots=True)
class Read:
    """Answered by `ReadEnded`, or by `ReadFailed` when it cannot be started."""

    pull: PullId
    request_id: RequestId
    link: Link
    read: destination.StartRead


@dataclass(frozen=True, slots=True)
class Land:
    """Answered by `Landed`."""

    pull: PullId
    request_id: RequestId
    land: destination.Land


@dataclass(frozen=True, slots=True)
class Expect:
    """`Stalled` unless another one comes for this pull in so many seconds; None: in any time."""

    pull: PullId
    within_s: float | None


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Nothing can land any more: the worker must drain and be started anew."""

    reason: str


# --- for those who keep count ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NoteFirstTokens:
    request_id: RequestId
    num_missing: int
    """Pages that have not landed yet."""


@dataclass(frozen=True, slots=True)
class NotePulled:
    request_id: RequestId
    exposed_s: float
    """From the first token until the last page was usable."""


Action = (
    Tell
    | Ended
    | Connect
    | Send
    | Finish
    | Cut
    | DropLink
    | Read
    | Land
    | Expect
    | GiveUp
    | NoteFirstTokens
    | NotePulled
)
