"""uvicorn's HTTP protocol with bounds: what stands before and between bodies has 64 KiB and 200
headers, a connection that sends no request is closed, and there are only so many connections.

Headers are counted before they are kept: bytes reach the parser in pieces, and every byte that
brings neither the end of a head nor a part of a body counts (names and values, the URL, chunk
extensions, trailers, empty lines). The router's protocol (router/server/http_protocol.py) and the
servers of metrics are made of this one.
"""

import asyncio
import json

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from common.errors import HeadersTooLarge, InvalidRequest, RequestTimeout, TandemError
from common.limits import HEAD_S, MAX_HEADER_BYTES, MAX_HEADERS

PIECE = 16 * 1024
_PHRASES = {400: "Bad Request", 408: "Request Timeout", 431: "Request Header Fields Too Large"}


class BoundedProtocol(HttpToolsProtocol):
    max_connections: int | None = None
    _num_head_bytes = 0
    _num_headers = 0
    _refusal: TandemError | None = None
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.max_connections is not None and len(self.connections) > self.max_connections:
            transport.close()
            return
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_awaiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if len(data) <= PIECE:
            self._feed(data)
            return
        view = memoryview(data)
        for start in range(0, len(data), PIECE):
            if self.transport.is_closing() or self.parser is None:
                return
            self._feed(bytes(view[start : start + PIECE]))

    def _feed(self, data: bytes) -> None:
        self._num_head_bytes += len(data)  # callbacks of the parser set it back
        self.parse(data)
        if self._num_head_bytes > MAX_HEADER_BYTES and self._refusal is None:
            self.refuse(_too_many_bytes())

    def parse(self, data: bytes) -> None:
        """One piece, by the parser."""
        super().data_received(data)

    def forget_head(self) -> None:
        """The same head will be read again."""
        self._num_head_bytes = 0

    # --- the parser's callbacks -------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._num_headers = 0
        if self._head_timer is None:
            self._await_head()
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        if self._num_headers > MAX_HEADERS:
            self._refusal = HeadersTooLarge(f"more than {MAX_HEADERS} headers")
            raise self._refusal
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        num_bytes = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if num_bytes > MAX_HEADER_BYTES:
            self._refusal = _too_many_bytes()
            raise self._refusal
        self._num_head_bytes = 0
        self._stop_awaiting()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_head_bytes = 0
        super().on_message_complete()

    # --- answers without an application -----------------------------------------------------------

    def send_400_response(self, msg: str) -> None:
        """Bytes that are no HTTP request, or a refusal that a callback of the parser has raised."""
        self.refuse(self._refusal or InvalidRequest("this is not an HTTP request"))

    def refuse(self, error: TandemError) -> None:
        """Answered like any other bad request, and closed."""
        self._refusal = error
        self._stop_awaiting()
        if self.transport.is_closing():
            return
        cycle = self.cycle
        if cycle is None or cycle.response_complete or not cycle.response_started:
            body = self.refusal_body(error)
            status = error.http_status
            head = (
                f"HTTP/1.1 {status} {_PHRASES[status]}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self.transport.close()

    def refusal_body(self, error: TandemError) -> bytes:
        return json.dumps({"error": error.message}).encode()

    # --- time -------------------------------------------------------------------------------------

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_S, self._head_is_late)

    def _stop_awaiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self._num_head_bytes:
            self.refuse(RequestTimeout(f"the request's head was not there within {HEAD_S:g} s"))
        else:
            self.transport.close()


def _too_many_bytes() -> HeadersTooLarge:
    return HeadersTooLarge(f"more than {MAX_HEADER_BYTES} bytes of headers")
