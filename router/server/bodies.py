"""Bodies of requests under way: read within bounds of size, time and memory together, and parsed.

One `Bodies` for a router; each exchange has a `Hold` on it, which ends with the exchange.
"""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from common.clock import Clock
from common.errors import Overloaded, RequestTimeout, RequestTooLarge
from common.limits import (
    BODY_S,
    LARGE_BODY_BYTES,
    MAX_BODIES_BYTES,
    PARSING_THREADS,
    SMALL_BODY_BYTES,
)
from router.reading.json_body import parse_json_object
from router.reading.side_threads import SideThreads

Receive = Callable[[], Awaitable[Any]]


class ClientGone(Exception):
    """The client closed the connection; nobody reads an answer."""


class Bodies:
    def __init__(self, clock: Clock, max_bytes: int = MAX_BODIES_BYTES) -> None:
        self.clock = clock
        self._max_bytes = max_bytes
        self._threads = SideThreads(PARSING_THREADS)
        self.num_bytes = 0

    def hold(self) -> "Hold":
        return Hold(self)

    def grow(self, num_bytes: int) -> None:
        if self.num_bytes + num_bytes > self._max_bytes:
            raise Overloaded(
                f"the bodies of requests under way have {self.num_bytes} bytes; the limit of all "
                f"of them is {self._max_bytes}",
                retry_after_s=1.0,
            )
        self.num_bytes += num_bytes

    async def parse(self, body: bytes) -> dict[str, Any]:
        """Few large ones at a time: they share the interpreter with the event loop."""
        parse = partial(parse_json_object, body)
        return await self._threads.run_if(len(body) >= LARGE_BODY_BYTES, parse)


class Hold:
    """What one request holds of the memory for bodies. Small bodies cost nothing."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self._num_bytes = 0

    async def read(self, receive: Receive, announced: str | None, max_bytes: int) -> bytes:
        """Raises RequestTooLarge, RequestTimeout, Overloaded or ClientGone."""
        if announced is not None and announced.isdigit() and int(announced) > max_bytes:
            raise RequestTooLarge(f"the body has {announced} bytes; the limit is {max_bytes}")
        with self._bodies.clock.deadline(BODY_S):
            return await self._read(receive, max_bytes)
        raise RequestTimeout(f"the body was not there within {BODY_S:g} s")

    async def _read(self, receive: Receive, max_bytes: int) -> bytes:
        parts: list[bytes] = []
        num_bytes = 0
        while True:
            message = await receive()
            if message["type"] != "http.request":
                raise ClientGone
            part = message.get("body", b"")
            num_bytes += len(part)
            if num_bytes > max_bytes:
                raise RequestTooLarge(f"the body is larger than the limit of {max_bytes} bytes")
            if num_bytes > SMALL_BODY_BYTES:
                self._bodies.grow(num_bytes - self._num_bytes)
                self._num_bytes = num_bytes
            parts.append(part)
            if not message.get("more_body", False):
                return b"".join(parts)

    async def parse(self, body: bytes) -> dict[str, Any]:
        return await self._bodies.parse(body)

    def end(self) -> None:
        """Idempotent."""
        self._bodies.num_bytes -= self._num_bytes
        self._num_bytes = 0
