"""What a prefill worker tells a decode worker that wants to read its pages."""

from typing import Final

from common.handoff_messages import RANKS_PROTOCOL, LinkReply, PoolAddress
from common.messages import PROTOCOL_VERSION
from worker.watch import HEARTBEAT_S, Identity

NOWHERE: Final = PoolAddress(agent_name="", agent_metadata=b"", pages=(), heads=())


def link_reply(identity: Identity, ranks: tuple[PoolAddress, ...]) -> LinkReply:
    """Workers that do not know of ranks read from one that is alone, and refuse others by their
    protocol.
    """
    is_alone = len(ranks) == 1
    first = ranks[0] if is_alone else NOWHERE
    return LinkReply(
        incarnation=identity.incarnation,
        numeric_incarnation=identity.numeric_incarnation,
        layout=identity.layout,
        layout_fingerprint=identity.layout_fingerprint,
        agent_name=first.agent_name,
        agent_metadata=first.agent_metadata,
        pages=first.pages,
        shares_parameters=True,
        heartbeat_s=HEARTBEAT_S,
        protocol=PROTOCOL_VERSION if is_alone else RANKS_PROTOCOL,
        ranks=ranks,
        facts=identity.facts,
    )
