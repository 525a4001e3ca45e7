"""How a worker's pages get to other workers, and theirs to it: one transport for all its ranks."""

from kvtransfer.group import GroupTransport
from kvtransfer.nixl_transport import NixlTransport
from kvtransfer.transport import Transport
from worker.main import Parts, die


async def open_transport(parts: Parts) -> Transport:
    """Raises ConfigError where the machine does not allow it."""
    own = NixlTransport(
        parts.identity.incarnation,
        parts.runner.pool,
        parts.runner.landing,
        parts.ownership,
        landing_of=parts.runner.pages.own.landings.of,
    )
    transport: Transport = own
    if parts.group is not None:
        transport = GroupTransport(own, parts.group.transfers, die)
    await transport.open()
    return transport
