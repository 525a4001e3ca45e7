"""How a router reaches others: names to addresses, and addresses to connections."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from common.addresses import join_address
from common.rpc import Connect

REFRESH_S = 2.0

Resolve = Callable[[str, int], Awaitable[list[str]]]
"""Host and port to addresses that can be connected to."""


async def resolve(host: str, port: int) -> list[str]:
    """All addresses behind `host`, in a stable order; none when the name is not known (yet)."""
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return []
    addresses = dict.fromkeys(join_address(str(info[4][0]), port) for info in found)
    if host == "localhost" and len(addresses) > 1:
        # 127.0.0.1 and ::1 are one machine: take the one a worker most likely listens on
        return [a for a in addresses if not a.startswith("[")][:1]
    return sorted(addresses)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    router_id: str
    """What this router says it is."""
    connect: Connect
    resolve: Resolve = resolve
    refresh_s: float = REFRESH_S
    """How often names are looked up again."""
