"""One worker as the router knows it."""

from dataclasses import dataclass, field

from common.messages import WorkerState
from common.types import Role
from router.fleet.breaker import Breaker

KvIdentity = tuple[str, str, int]


@dataclass(slots=True, eq=False)
class Worker:
    """One life of a worker process. `num_in_flight` counts what this router placed there and has
    not seen the end of.

    States lag behind: prompt tokens placed since the last but one state are counted apart, in
    `num_unseen_tokens`. (The last state may have left the worker before they arrived there; the one
    before it certainly has.)
    """

    address: str
    state: WorkerState
    order: int
    is_linked: bool = True
    has_session: bool = False
    num_in_flight: int = 0
    num_states: int = 0
    unseen: tuple[int, int] = (0, 0)
    """Prompt tokens placed since the last state, and between the last two."""
    breaker: Breaker = field(default_factory=Breaker)

    @property
    def can_decode(self) -> bool:
        return self.state.role is not Role.PREFILL

    @property
    def num_unseen_tokens(self) -> int:
        return sum(self.unseen)

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens that wait to be computed there."""
        return self.state.num_queued_tokens + sum(self.unseen)

    @property
    def num_requests(self) -> int:
        """Our own count is fresh; the worker's own covers other routers' requests."""
        return max(self.num_in_flight, self.state.running + self.state.waiting)

    @property
    def kv_identity(self) -> KvIdentity:
        """Two workers store KV alike when these are equal."""
        return (self.state.model_fingerprint, self.state.layout, self.state.block_size)


@dataclass(frozen=True, slots=True, order=True)
class BlockNaming:
    """What hashes of blocks depend on, apart from tokens and salt."""

    model_fingerprint: bytes
    block_size: int
