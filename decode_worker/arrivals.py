"""What a session's requests need before the scheduler sees them: the parameters they share with
others, and a compiled grammar, which is made beside the steps.
"""

from collections.abc import Awaitable, Callable

import anyio

from common.messages import GenerateRequest
from common.shared_params import SharedTable, joined
from common.types import RequestId


class Arrivals:
    def __init__(self, vocab_size: int, prepare: Callable[[str], Awaitable[None]]) -> None:
        self.shared = SharedTable(vocab_size)
        self._prepare = prepare
        self._preparing: dict[RequestId, anyio.CancelScope] = {}

    def whole(self, request: GenerateRequest) -> GenerateRequest:
        """With the parameters that it shares. Raises Overloaded when they were not kept."""
        return joined(request, self.shared.get(request.shared)) if request.shared else request

    async def prepared(self, request: GenerateRequest) -> bool:
        """Whether it is still wanted, once its grammar has been compiled."""
        grammar = request.sampling.grammar
        if grammar is None:
            return True
        with anyio.CancelScope() as scope:
            self._preparing[request.request_id] = scope
            try:
                await self._prepare(grammar)
            finally:
                del self._preparing[request.request_id]
        return not scope.cancelled_caught

    def __contains__(self, request_id: RequestId) -> bool:
        """Whether it is being prepared."""
        return request_id in self._preparing

    def cancel(self, request_id: RequestId) -> None:
        self._preparing[request_id].cancel()
