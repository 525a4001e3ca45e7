"""One gRPC call: where it comes from, and how it ends."""

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from common.errors import Cancelled, TandemError
from router.server.outcome import explained

_CODE = "tandem-code"


def peer_of(context: Any) -> str:
    """The address without the port."""
    peer: str = context.peer()
    return peer.rpartition(":")[0]


async def abort(context: Any, error: TandemError) -> None:
    await context.abort(
        getattr(grpc.StatusCode, error.grpc_status),
        error.message,
        trailing_metadata=((_CODE, error.code),),
    )


@contextlib.asynccontextmanager
async def told(context: Any) -> AsyncIterator[None]:
    """Errors become the call's status."""
    try:
        yield
    except TandemError as error:
        error.__traceback__ = None  # it would hold the message until the next full collection
        await abort(context, error)


@contextlib.asynccontextmanager
async def counted(
    method: str, ended: Callable[[str, TandemError | None], None]
) -> AsyncIterator[None]:
    """`ended` is told once how the request ended. What is raised is a TandemError."""
    error: TandemError | None = Cancelled("the client went away")
    try:
        yield
        error = None
    except Exception as found:
        error = explained(found, method)
        raise error from None
    finally:
        ended(method, error)
        error = None  # its traceback holds this frame, and the message with it
