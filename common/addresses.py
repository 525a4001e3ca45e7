"""`host:port` texts; IPv6 hosts stand in brackets."""

import socket

from common.errors import ConfigError


def split_address(address: str) -> tuple[str, int]:
    """Raises ConfigError when it is not `host:port` with a port from 0 to 65535."""
    host, colon, port = address.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"{address!r} is not HOST:PORT")
    if ":" in host and not is_bracketed:
        raise ConfigError(f"{address!r}: write an IPv6 host in brackets, as in [::1]:8000")
    return host.strip("[]"), int(port)


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listen(address: str, option: str) -> socket.socket:
    """Raises ConfigError, naming the option, when the address cannot be had."""
    host, port = split_address(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server(
            (host, port), family=family, backlog=2048, dualstack_ipv6=host == "::"
        )
    except OSError as error:
        raise ConfigError(f"{option} {address}: cannot listen: {error.strerror}") from None
