"""Parameters that hand-offs share: the first hand-off that needs them asks for them on its own
stream, others wait for it, and they are forgotten with the last one.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio

from common.clock import Clock
from common.errors import MalformedMessage, PullFailed
from common.handoff_messages import WantParams
from common.messages import ShareParams
from common.rpc import Stream
from common.shared_params import LargeParams, SharedTable


@dataclass(slots=True, eq=False)
class _Wanted:
    lock: anyio.Lock = field(default_factory=anyio.Lock)
    is_known: bool = False
    num_users: int = 0


class WantedParams:
    def __init__(self, vocab_size: int, within_s: float, clock: Clock) -> None:
        self._table = SharedTable(vocab_size)
        self._within_s = within_s
        self._clock = clock
        self._wanted: dict[str, _Wanted] = {}

    def __len__(self) -> int:
        return len(self._wanted)

    @asynccontextmanager
    async def of(self, key: str, stream: Stream) -> AsyncIterator[LargeParams]:
        """Raises MalformedMessage, Overloaded, PullFailed, or what ended the stream."""
        wanted = self._wanted.setdefault(key, _Wanted())
        wanted.num_users += 1
        try:
            async with wanted.lock:
                if not wanted.is_known:
                    await self._ask(key, stream)
                    wanted.is_known = True
            yield self._table.get(key)
        finally:
            wanted.num_users -= 1
            if not wanted.num_users:
                del self._wanted[key]
                self._table.drop(key)

    async def _ask(self, key: str, stream: Stream) -> None:
        with self._clock.deadline(self._within_s):
            await stream.send(WantParams(key=key))
            message = await stream.receive()
            if not isinstance(message, ShareParams) or message.key != key:
                raise MalformedMessage("expected the parameters that were asked for")
            self._table.put(message)
            return
        raise PullFailed(f"the parameters of a hand-off were not sent within {self._within_s:g} s")
