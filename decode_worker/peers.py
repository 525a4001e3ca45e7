"""Which prefill workers a route may name.

Whoever opens a session names the prefill workers of its requests by address, and this worker
connects to them. Over mTLS only routers have sessions, and they are believed. In plain text
anybody who reaches the port could make this worker connect to any address: there, only addresses
of `--prefill-peers` are used or, on a worker that listens on loopback, other loopback addresses.
"""

import ipaddress
import socket
from collections.abc import Awaitable, Callable, Sequence

import anyio

from common.addresses import split_address
from common.errors import ConfigError, PrefillLost
from worker.config import WorkerConfig

Resolve = Callable[[str, int], Awaitable[list[str]]]


async def resolve(host: str, port: int) -> list[str]:
    """The IP addresses of a name; none when it has none."""
    try:
        found = await anyio.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [str(entry[4][0]) for entry in found]


class AllowedPeers:
    """`names` None: any address of `is_loopback_only`'s kind."""

    def __init__(
        self,
        names: Sequence[str] | None,
        *,
        is_loopback_only: bool = False,
        resolve: Resolve = resolve,
    ) -> None:
        self._names = None if names is None else [split_address(name) for name in names]
        self._is_loopback_only = is_loopback_only
        self._resolve = resolve

    @staticmethod
    def of(config: WorkerConfig) -> "AllowedPeers":
        if config.prefill_peers:
            return AllowedPeers(config.prefill_peers)
        host, _ = split_address(config.listen)
        is_plain = config.internal_tls is None
        return AllowedPeers(None, is_loopback_only=is_plain and is_loopback(host))

    @property
    def is_everybody(self) -> bool:
        return self._names is None and not self._is_loopback_only

    async def check(self, address: str) -> None:
        """Raises PrefillLost, so that the request is computed elsewhere."""
        if self.is_everybody:
            return
        try:
            host, port = split_address(address)
        except ConfigError:
            raise PrefillLost("a route names something that is no address") from None
        if not await self._allows(host, port):
            raise PrefillLost(
                f"this worker does not connect to {address}: name it with --prefill-peers, or use "
                "--internal-tls"
            )

    async def _allows(self, host: str, port: int) -> bool:
        if self._names is None:
            return not self._is_loopback_only or is_loopback(host)
        if (host, port) in self._names:
            return True
        candidates = [name for name, its_port in self._names if its_port == port]
        for name in candidates:
            if host in await self._resolve(name, port):
                return True
        return False


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
