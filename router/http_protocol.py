"""uvicorn's HTTP protocol, except that a client may close its sending side and still get its
answer.

The end of a client's stream means either "I have sent all" (half-close) or "I am gone"; the two
look alike until something is written, which a client that is gone answers with a reset. So while
such a connection waits for its answer it is probed: with `100 Continue`, which every client skips,
before the answer starts, and with an SSE comment in a stream. A reset then ends the request like
any disconnect.
"""

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from common.errors import InvalidRequest
from router.http_exchange import error_body

PROBE_S = 0.4
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_COMMENT = b"3\r\n:\n\n\r\n"


class HalfCloseProtocol(HttpToolsProtocol):
    _probe: asyncio.TimerHandle | None = None

    def eof_received(self) -> bool:  # type: ignore[override]
        """True keeps the sending side open."""
        cycle = self.cycle
        if self.scheme == "https" or cycle is None or cycle.response_complete:
            return False
        cycle.keep_alive = False
        if cycle.more_body or cycle.scope["http_version"] == "1.0":
            return False
        self._send_probe()
        return True

    def send_400_response(self, msg: str) -> None:
        """Bytes that are no HTTP request are answered like any other bad request."""
        body = error_body(InvalidRequest("this is not an HTTP request"))
        head = (
            "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._probe is not None:
            self._probe.cancel()
        super().connection_lost(exc)

    def _send_probe(self) -> None:
        cycle = self.cycle
        if cycle.response_complete or self.transport.is_closing():
            return
        if not cycle.response_started:
            self.transport.write(_CONTINUE)
        elif cycle.chunked_encoding:
            self.transport.write(_COMMENT)
        self._probe = self.loop.call_later(PROBE_S, self._send_probe)
