"""Streams of messages between processes, over gRPC.

Every internal call is a two-way stream of messages (common/messages.py). A `Stream` is one end of
it; the one here runs over grpc.aio, tests/fakes/memory_network.py has one inside a process. A
stream that ends with a `TandemError` on one side raises the same error on the other; a lost peer
raises `WorkerLost`. A server stops serving a stream by returning (clean end) or raising.

Keepalive: pings every 2 s also without calls, answered within 5 s, so a silent peer is noticed
within 7 s.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import grpc
import grpc.aio
from anyio.lowlevel import checkpoint_if_cancelled

from common.errors import (
    ConfigError,
    InternalError,
    MalformedMessage,
    NotAllowed,
    TandemError,
    WorkerLost,
    from_code,
)
from common.limits import MAX_MESSAGE_BYTES
from common.wire import decode, encode

log = logging.getLogger(__name__)

SERVICE = "tandem.Worker"
KEEPALIVE_S = 2.0
KEEPALIVE_TIMEOUT_S = 5.0
_ERROR_CODE = "tandem-code"
TLS_NAME = "tandem-internal"
"""What certificates between processes name, whatever the address."""

OPTIONS: list[tuple[str, Any]] = [
    ("grpc.keepalive_time_ms", int(KEEPALIVE_S * 1000)),
    ("grpc.keepalive_timeout_ms", int(KEEPALIVE_TIMEOUT_S * 1000)),
    # gRPC waits for the answer of a ping by this bound, whatever the keepalive's own is: 60 s by
    # default
    ("grpc.http2.ping_timeout_ms", int(KEEPALIVE_TIMEOUT_S * 1000)),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1000),
    ("grpc.http2.min_ping_interval_without_data_ms", 1000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),
    ("grpc.enable_retries", 0),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.use_local_subchannel_pool", 1),
]


class Stream(Protocol):
    """One end of a two-way stream of messages. `num_bytes` counts both directions, encoded."""

    num_bytes: int

    async def send(self, message: object) -> None:
        """One task at a time. Raises WorkerLost when the other side is gone, or the error it ended
        with.
        """
        ...

    async def receive(self) -> object | None:
        """The next message; None when the other side has sent its last one. Raises like `send`."""
        ...

    async def finish(self) -> None:
        """This side sends nothing more (half-close)."""
        ...

    def cancel(self) -> None:
        """Ends the stream at once, on both sides."""
        ...


Handler = Callable[[Stream], Awaitable[None]]
MayCall = Callable[[str, Sequence[str]], bool]


class Peer(Protocol):
    """A process that can be called."""

    def open(self, method: str) -> Stream: ...

    async def close(self) -> None: ...


Connect = Callable[[str], Peer]


class GrpcStream:
    """Client end."""

    def __init__(self, address: str) -> None:
        self._call: Any
        self._address = address
        self.num_bytes = 0

    def begin(self, method: Any) -> None:
        """`method` makes a call of the serializers it is given."""
        self._call = method(request_serializer=self._encode, response_deserializer=self._decode)()

    def _encode(self, message: object) -> bytes:
        data = encode(message)
        self.num_bytes += len(data)
        return data

    def _decode(self, data: bytes) -> object:
        self.num_bytes += len(data)
        return _decode_or_error(data)

    async def send(self, message: object) -> None:
        try:
            await self._call.write(message)
        except asyncio.InvalidStateError:
            raise WorkerLost(f"the stream to {self._address} has ended") from None
        except grpc.aio.AioRpcError as error:
            raise _translated(error, self._address) from None
        except asyncio.CancelledError:
            await _raise_if_cancelled()
            raise WorkerLost(f"the stream to {self._address} was cancelled") from None

    async def receive(self) -> object | None:
        try:
            message = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise _translated(error, self._address) from None
        except asyncio.CancelledError:
            await _raise_if_cancelled()
            raise WorkerLost(f"the stream to {self._address} was cancelled") from None
        if message is grpc.aio.EOF:
            # the status, and with it a typed error, arrives only after the last message
            code = await self._call.code()
            if code != grpc.StatusCode.OK:
                raise _translated_status(
                    code,
                    await self._call.details(),
                    await self._call.trailing_metadata(),
                    self._address,
                )
            return None
        if isinstance(message, MalformedMessage):
            raise message
        return message  # type: ignore[no-any-return]

    async def finish(self) -> None:
        with contextlib.suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
            await self._call.done_writing()

    def cancel(self) -> None:
        self._call.cancel()


async def _raise_if_cancelled() -> None:
    """For a CancelledError that came out of grpc. It speaks alike of a cancelled task and of a call
    that was cancelled under a task (by `cancel`, or with its channel); the latter must not end the
    task without a word. And its errors lack the mark by which anyio's scopes know their own: those
    would pass through `move_on_after` and the like, so they are raised anew.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        await checkpoint_if_cancelled()
        raise asyncio.CancelledError


class Credentials(Protocol):
    """Where a peer gets its TLS from (common/internal_tls.py)."""

    def stamp(self) -> tuple[int, ...]:
        """Changes when `channel_credentials` would give something new."""
        ...

    def channel_credentials(self) -> grpc.ChannelCredentials: ...


class GrpcPeer:
    """A channel to one address. With new credentials, new streams use a new channel."""

    def __init__(self, address: str, credentials: Credentials | None = None) -> None:
        self._address = address
        self._credentials = credentials
        self._stamp: tuple[int, ...] = ()
        self._channels: list[grpc.aio.Channel] = []
        if credentials is None:
            self._channels.append(grpc.aio.insecure_channel(address, options=OPTIONS))

    def open(self, method: str) -> GrpcStream:
        if self._credentials is not None:
            self._renew(self._credentials)
        if not self._channels:
            raise WorkerLost(f"the certificates for {self._address} cannot be read")
        stream = GrpcStream(self._address)
        stream.begin(partial(self._channels[-1].stream_stream, f"/{SERVICE}/{method}"))
        return stream

    def _renew(self, credentials: Credentials) -> None:
        try:
            stamp = credentials.stamp()
            if stamp == self._stamp:
                return
            found = credentials.channel_credentials()
        except OSError:
            return  # being replaced: the next stream looks again
        self._stamp = stamp
        options = [*OPTIONS, ("grpc.ssl_target_name_override", TLS_NAME)]
        self._channels.append(grpc.aio.secure_channel(self._address, found, options=options))

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close(grace=None)


def connect(address: str) -> GrpcPeer:
    return GrpcPeer(address)


class _ServerStream:
    """Server end."""

    def __init__(self, requests: AsyncIterator[object], context: Any) -> None:
        self._requests = requests
        self._context = context
        self._task = asyncio.current_task()
        self.num_bytes = 0

    async def send(self, message: object) -> None:
        try:
            await self._context.write(message)
        except (
            grpc.aio.AioRpcError,
            grpc.aio.BaseError,
            asyncio.InvalidStateError,
            OSError,
        ) as error:
            raise WorkerLost(f"the caller is gone: {type(error).__name__}") from None
        except asyncio.CancelledError:
            await _raise_if_cancelled()
            raise

    async def receive(self) -> object | None:
        try:
            message = await anext(self._requests)
        except StopAsyncIteration:
            return None
        except (grpc.aio.AioRpcError, grpc.aio.BaseError, asyncio.InvalidStateError) as error:
            raise WorkerLost(f"the caller is gone: {type(error).__name__}") from None
        except asyncio.CancelledError:
            await _raise_if_cancelled()
            raise
        if isinstance(message, MalformedMessage):
            raise message
        return message

    async def finish(self) -> None:
        """A server finishes by returning from its handler."""

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()


class RpcServer:
    """Serves handlers by method name on one address; `port` is the one really taken."""

    def __init__(self, server: grpc.aio.Server, port: int) -> None:
        self._server = server
        self.port = port

    async def stop(self, grace_s: float) -> None:
        await self._server.stop(grace_s)


async def serve(
    address: str,
    handlers: Mapping[str, Handler],
    credentials: grpc.ServerCredentials | None = None,
    may_call: MayCall | None = None,
) -> RpcServer:
    """`may_call` decides by the names in a caller's certificate. Raises ConfigError when the
    address cannot be had.
    """
    server = grpc.aio.server(options=OPTIONS)
    methods = {
        name: grpc.stream_stream_rpc_method_handler(
            _adapt(name, handler, may_call),
            request_deserializer=_decode_or_error,
            response_serializer=encode,
        )
        for name, handler in handlers.items()
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
    try:
        port = (
            server.add_insecure_port(address)
            if credentials is None
            else server.add_secure_port(address, credentials)
        )
    except RuntimeError:
        port = 0
    if port == 0:
        raise ConfigError(f"--listen {address}: cannot listen: is the port taken?")
    await server.start()
    return RpcServer(server, port)


def _adapt(method: str, handler: Handler, may_call: MayCall | None) -> Any:
    async def serve_stream(requests: AsyncIterator[object], context: Any) -> None:
        try:
            if may_call is not None and not may_call(method, _names_of(context)):
                raise NotAllowed(f"the caller's certificate is not one for {method}")
            await handler(_ServerStream(requests, context))
        except TandemError as error:
            await _abort(context, error)
        except asyncio.CancelledError:
            raise
        except Exception:
            log.exception("a stream handler failed")
            await _abort(context, InternalError("internal error; see the worker's log"))

    return serve_stream


def _names_of(context: Any) -> list[str]:
    """Those that the caller's certificate was made for."""
    found = context.auth_context().get("x509_subject_alternative_name", ())
    return [name.decode("utf-8", "replace") for name in found]


async def _abort(context: Any, error: TandemError) -> None:
    with contextlib.suppress(grpc.aio.BaseError, asyncio.InvalidStateError):
        await context.abort(
            getattr(grpc.StatusCode, error.grpc_status),
            error.message,
            trailing_metadata=((_ERROR_CODE, error.code),),
        )


def _decode_or_error(data: bytes) -> object:
    """gRPC would turn an exception here into a bare status; keep it typed."""
    try:
        return decode(data)
    except MalformedMessage as error:
        return error


def _translated(error: grpc.aio.AioRpcError, address: str) -> TandemError:
    return _translated_status(error.code(), error.details(), error.trailing_metadata(), address)


def _translated_status(
    code: grpc.StatusCode, details: str | None, trailing: Any, address: str
) -> TandemError:
    for key, value in trailing or ():
        if key == _ERROR_CODE:
            return from_code(str(value), details or "")
    return WorkerLost(f"{address}: {code.name.lower()}: {details or 'connection lost'}")
