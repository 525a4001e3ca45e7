"""The bounded HTTP protocol (common/http_protocol.py), with three differences.

A client may offer to upgrade (every stock Java client offers HTTP/2): the offer is ignored, as
RFC 9110 allows, and the request is read as the HTTP/1.1 that it is. uvicorn's parser would stop
behind its head and lose its body.

An answer of unknown length to HTTP/1.0 (which proxies still speak) ends with the connection, since
chunks are HTTP/1.1's.

A client may close its sending side and still get its answer.

The end of a client's stream means either "I have sent all" (half-close) or "I am gone"; the two
look alike until something is written, which a client that is gone answers with a reset. So while
such a connection waits for its answer it is probed: with `100 Continue`, which every client skips,
before the answer starts, and with an SSE comment in a stream. A reset then ends the request like
any disconnect.
"""

import httptools
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from common.clock import LoopTimers, Timer
from common.errors import TandemError
from common.http_protocol import BoundedProtocol
from router.server.exchange import error_body

PROBE_S = 0.4
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_COMMENT = b"3\r\n:\n\n\r\n"


_OF_AN_UPGRADE = (b"upgrade", b"http2-settings")


class HttpProtocol(BoundedProtocol):
    _probe: Timer | None = None

    def parse(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        waiting = [data]
        while waiting and self.parser is not None:
            piece = waiting.pop(0)
            try:
                self.parser.feed_data(piece)
            except httptools.HttpParserError:
                return self.send_400_response("")
            except httptools.HttpParserUpgrade as upgrade:
                if self.parser.get_method() == b"CONNECT":
                    return self.send_400_response("")
                # the parser has read the head and no more
                (head_end,) = upgrade.args
                waiting = [self._head_without_upgrade(), piece[head_end:], *waiting]
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
                self.forget_head()

    def on_headers_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def _head_without_upgrade(self) -> bytes:
        head = [b"%s %s HTTP/1.1" % (self.parser.get_method(), self.url)]
        for name, value in self.headers:
            if name == b"connection":
                tokens = [token.strip() for token in value.split(b",")]
                kept = [token for token in tokens if token.lower() not in _OF_AN_UPGRADE]
                value = b", ".join(kept) or b"keep-alive"
            if name not in _OF_AN_UPGRADE:
                head.append(b"%s: %s" % (name, value))
        return b"\r\n".join(head) + b"\r\n\r\n"

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGIApp) -> None:  # type: ignore[override]
        if cycle.scope["http_version"] == "1.0":
            app = _until_close(app, cycle)
        super()._start_asgi_task(cycle, app)  # type: ignore[arg-type]

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

    def refusal_body(self, error: TandemError) -> bytes:
        return error_body(error)

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
        self._probe = LoopTimers().call_later(PROBE_S, self._send_probe)


def _until_close(app: ASGIApp, cycle: RequestResponseCycle) -> ASGIApp:
    """`app`, whose answer without a length is written as it comes."""

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        is_unbounded = False

        async def unchunked(message: Message) -> None:
            nonlocal is_unbounded
            if message["type"] == "http.response.start":
                names = [name.lower() for name, _ in message.get("headers", [])]
                is_unbounded = b"content-length" not in names
                cycle.chunked_encoding = False if is_unbounded else None
            elif is_unbounded:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, unchunked)

    return run
