"""Where a gRPC call comes from."""

from typing import Any


def grpc_peer(context: Any) -> str:
    """The address without the port."""
    peer: str = context.peer()
    return peer.rpartition(":")[0]
