"""What a decode worker and a prefill worker say to each other; as in common/messages.py.

    decode  <-Handoff->  prefill worker  -> HandoffRequest, ShareParams, PagesTaken,
                                            half-close
                                         <- WantParams, PagesReady, FirstTokens, Working
    decode  --Link-->    prefill worker  LinkRequest  ->  <-  LinkReply

KV pages never travel here: pages are named here and moved by NIXL.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from common.layout_facts import LayoutFacts
from common.messages import PROTOCOL_VERSION, GenerateRequest
from common.types import PromptLogprobs, TokenLogprobs
from common.wire import wire_message


@wire_message
@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffRequest:
    """First message of a hand-off. The receiver already holds the leading `num_held_blocks`
    blocks.
    """

    request: GenerateRequest
    incarnation: str
    num_held_blocks: int
    heartbeat_s: float = 0.0
    """The receiver wants `Working` that often; 0: never."""


@wire_message
@dataclass(frozen=True, slots=True, kw_only=True)
class WantParams:
    """The prefill worker does not know the parameters that the request shares; it goes on when a
    ShareParams has come.
    """

    key: str


@wire_message
@dataclass(frozen=True, slots=True, kw_only=True)
class PagesReady:
    """Finished pages of consecutive blocks, from block `first_block` of the prompt on. Columns.

    `kinds` holds a `PageKind` per page. A page's content hash is not sent: the receiver knows the
    tokens.
    """

    first_block: int
    kinds: bytes
    block_ids: tuple[int, ...]
    generations: tuple[int, ...]


@wire_message
@dataclass(frozen=True, slots=True, kw_only=True)
class FirstTokens:
    """One sampled token for each output, in output order. The prompt is computed and every page
    announced.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs | None, ...]
    num_cached_tokens: int
    prompt_logprobs: PromptLogprobs | None = None


@wire_message
@dataclass(frozen=True, slots=True, kw_only=True)
class Working:
    """The sender is there, and its loop turns."""


@wire_message
@dataclass(frozen=True, slots=True, kw_only=True)
class PagesTaken:
    """The receiver has verified copies of these blocks of the prompt; the sender may let go of
    them.
    """

    blocks: tuple[int, ...]


# --- Link --------------------------------------------------------------------------------------

RANKS_PROTOCOL: Final = 2
"""Of a LinkReply whose pages are in several ranks' pools: who does not know of ranks refuses it."""


class Memory(StrEnum):
    """Where a pool lies, in NIXL's words."""

    HOST = "DRAM"
    DEVICE = "VRAM"


@wire_message
@dataclass(frozen=True, slots=True, kw_only=True)
class PoolAddress:
    """How the pool of one rank is reached.

    `pages` are (base address, page bytes, number of pages) of the packed and of the exact pages.
    `heads` are the KV heads whose records a page has there, in the order in which they lie in it.
    """

    agent_name: str
    agent_metadata: bytes
    pages: tuple[tuple[int, int, int], ...]
    heads: tuple[int, ...]
    memory: Memory = Memory.HOST
    device: int = 0


@wire_message
@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRequest:
    incarnation: str
    layout: str
    layout_fingerprint: bytes
    protocol: int = PROTOCOL_VERSION


@wire_message
@dataclass(frozen=True, slots=True, kw_only=True)
class LinkReply:
    """Who the sender of pages is and how its pools are reached.

    `numeric_incarnation` is the value its pages' tags carry. `ranks` has the pool of each rank;
    `agent_name`, `agent_metadata` and `pages` repeat that of a rank that is alone, for workers that
    do not know of ranks.
    """

    incarnation: str
    numeric_incarnation: int
    layout: str
    layout_fingerprint: bytes
    agent_name: str
    agent_metadata: bytes
    pages: tuple[tuple[int, int, int], ...]
    heartbeat_s: float = 0.0
    """The sender says `Working` on every hand-off that asks for it, if this is not 0."""
    protocol: int = PROTOCOL_VERSION
    shares_parameters: bool = False
    ranks: tuple[PoolAddress, ...] = ()
    facts: LayoutFacts | None = None
    """What `layout` says in words; None: a worker of before."""
