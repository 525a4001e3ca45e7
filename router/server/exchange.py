"""One HTTP request and its answer, on bare ASGI: body within bounds, errors in OpenAI's shape,
disconnects noticed.

Every endpoint of the router answers through an `Exchange`, so an error looks the same wherever it
arises.
"""

import json
import math
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import anyio
from starlette.types import Receive, Scope, Send

from common.clock import MonotonicClock
from common.errors import (
    Cancelled,
    RequestTimeout,
    RequestTooLarge,
    TandemError,
    Unauthorized,
    UnsupportedMediaType,
)
from router.admission.keys import Key
from router.server.bodies import Bodies, ClientGone
from router.server.outcome import explained

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
KEY_IN_SCOPE = "tandem.key"
BODIES_IN_SCOPE = "tandem.bodies"
_DEPTH = 4
"""How deep in an answer its long lists (of tokens, of scores) lie."""
_SLICE = 128
_TYPES = {401: "authentication_error", 429: "rate_limit_error", 499: "cancelled"}


def request_id_of(headers: Mapping[str, bytes], new_request_id: Callable[[], str]) -> str:
    """The client's own, where it is usable."""
    given = headers.get("x-request-id", b"").decode("latin-1")
    return given if _REQUEST_ID.fullmatch(given) else new_request_id()


def headers_of(scope: Scope) -> dict[str, bytes]:
    return {name.decode("latin-1"): value for name, value in scope["headers"]}


class Exchange:
    def __init__(
        self, scope: Scope, receive: Receive, send: Send, new_request_id: Callable[[], str]
    ) -> None:
        self._receive = receive
        self._send = send
        self._headers = headers_of(scope)
        self.request_id = request_id_of(self._headers, new_request_id)
        self.has_started = False
        self.key: Key | None = scope.get(KEY_IN_SCOPE)
        self.peer: str = (scope.get("client") or ("",))[0]
        bodies: Bodies = scope.get(BODIES_IN_SCOPE) or Bodies(MonotonicClock())
        self._hold = bodies.hold()

    def header(self, name: str) -> str | None:
        value = self._headers.get(name)
        return None if value is None else value.decode("latin-1")

    async def json_object(self, max_bytes: int) -> dict[str, Any]:
        """The body. Raises InvalidRequest, RequestTooLarge, UnsupportedMediaType or ClientGone."""
        media_type = (self.header("content-type") or "application/json").split(";")[0].strip()
        if media_type.lower() != "application/json":
            raise UnsupportedMediaType(f"content-type must be application/json, not {media_type}")
        encoding = self.header("content-encoding")
        if encoding not in (None, "", "identity"):
            raise UnsupportedMediaType(f"content-encoding {encoding} is not supported")
        return await self.parse(await self.body(max_bytes))

    def has_body(self) -> bool:
        return self.header("content-length") not in (None, "0") or (
            self.header("transfer-encoding") is not None
        )

    async def body(self, max_bytes: int) -> bytes:
        """Raises RequestTooLarge, RequestTimeout, Overloaded or ClientGone."""
        return await self._hold.read(self._receive, self.header("content-length"), max_bytes)

    async def parse(self, body: bytes) -> dict[str, Any]:
        """A JSON object. Raises InvalidRequest."""
        return await self._hold.parse(body)

    def close(self) -> None:
        """The request is over."""
        self._hold.end()

    async def unless_gone(self, work: Callable[[], Awaitable[None]]) -> None:
        """Does `work`, and cancels it when the client goes away: then raises ClientGone."""
        outcome: list[Exception | None] = []

        async def do() -> None:
            try:
                await work()
                outcome.append(None)
            except Exception as error:  # carried out of the group as it is
                outcome.append(error)
            group.cancel_scope.cancel()

        async with anyio.create_task_group() as group:
            group.start_soon(do)
            while (await self._receive())["type"] != "http.disconnect":
                pass
            group.cancel_scope.cancel()
        if not outcome:
            raise ClientGone
        if outcome[0] is not None:
            raise outcome[0]

    # --- answers ----------------------------------------------------------------------------------

    async def reply(
        self,
        status: int,
        body: bytes,
        headers: list[tuple[bytes, bytes]] | None = None,
        content_type: bytes = b"application/json",
    ) -> None:
        length = (b"content-length", str(len(body)).encode())
        await self._start(status, content_type, [length, *(headers or [])])
        await self._send({"type": "http.response.body", "body": body})

    async def reply_json(self, status: int, value: Any) -> None:
        await self.reply(status, to_json(value))

    async def reply_error(self, error: TandemError, body: bytes) -> None:
        headers = []
        if error.http_status in (429, 503):
            seconds = max(1, math.ceil(error.retry_after_s or 1.0))
            headers.append((b"retry-after", str(seconds).encode()))
        if isinstance(error, Unauthorized):
            headers.append((b"www-authenticate", b"Bearer"))
        if isinstance(error, RequestTooLarge | RequestTimeout):
            headers.append((b"connection", b"close"))
        await self.reply(error.http_status, body, headers)

    async def start_events(self) -> None:
        await self._start(200, b"text/event-stream", [(b"cache-control", b"no-cache")])

    async def send_events(self, events: bytes) -> None:
        await self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def end_events(self, events: bytes) -> None:
        await self._send({"type": "http.response.body", "body": events, "more_body": False})

    async def _start(
        self, status: int, content_type: bytes, headers: list[tuple[bytes, bytes]]
    ) -> None:
        self.has_started = True
        all_headers = [
            (b"content-type", content_type),
            (b"x-request-id", self.request_id.encode("latin-1")),
            *headers,
        ]
        await self._send({"type": "http.response.start", "status": status, "headers": all_headers})


class Endpoint:
    """An ASGI application that answers one kind of request."""

    def __init__(self, name: str, new_request_id: Callable[[], str]) -> None:
        self.name = name
        self._new_request_id = new_request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, self._new_request_id)
        error: TandemError | None = None
        try:
            await self.answer(exchange, scope)
        except ClientGone:
            error = Cancelled("the client went away")
        except Exception as found:
            error = explained(found, f"{self.name}, request {exchange.request_id},")
            await self._explain(exchange, error)
        finally:
            exchange.close()
        self.ended(error)

    async def answer(self, exchange: Exchange, scope: Scope) -> None:
        """Answers the request. Raises whatever the client must be told instead."""
        raise NotImplementedError

    def ended(self, error: TandemError | None) -> None:
        """Called once per request, when all is said."""

    def error_body(self, error: TandemError) -> bytes:
        return error_body(error)

    def error_event(self, error: TandemError) -> bytes:
        return error_event(error)

    async def _explain(self, exchange: Exchange, error: TandemError) -> None:
        if exchange.has_started:
            await exchange.end_events(self.error_event(error))
        else:
            await exchange.reply_error(error, self.error_body(error))


def error_object(error: TandemError) -> dict[str, Any]:
    fallback = "invalid_request_error" if error.http_status < 500 else "server_error"
    kind = _TYPES.get(error.http_status, fallback)
    return {
        "error": {
            "message": error.message,
            "type": kind,
            "param": error.param,
            "code": error.code,
        }
    }


def error_body(error: TandemError) -> bytes:
    return to_json(error_object(error))


def error_event(error: TandemError) -> bytes:
    """In a stream: no finish_reason and no [DONE] follow it."""
    return b"data: " + error_body(error) + b"\n\n"


def to_json(value: Any) -> bytes:
    """ASCII only: U+2028 and its like would split lines for some clients."""
    return json.dumps(value, separators=(",", ":")).encode("ascii")


def large_json(value: Any, depth: int = 0) -> bytes:
    """The same as `to_json`, but never long at a time: an encoder holds the interpreter until it is
    through, and other threads (the event loop's) with it.
    """
    if isinstance(value, dict) and depth < _DEPTH:
        return b"{%s}" % b",".join(
            to_json(name) + b":" + large_json(inner, depth + 1) for name, inner in value.items()
        )
    if not isinstance(value, list | tuple) or (depth >= _DEPTH and len(value) <= _SLICE):
        return to_json(value)
    if len(value) > _SLICE:
        slices = [value[i : i + _SLICE] for i in range(0, len(value), _SLICE)]
        return b"[%s]" % b",".join(to_json(part)[1:-1] for part in slices)
    return b"[%s]" % b",".join(large_json(inner, depth + 1) for inner in value)
