"""Prompts that a prefill worker computes: what has come of them.

Made by `BatchScheduler`, called by `Pulls`.
"""

from common.handoff_messages import FirstTokens
from common.scheduling.kv_cache import KvCache
from common.types import RequestId
from decode_worker.entries import Facts, State
from decode_worker.flights import Flights, Pin
from decode_worker.requests import Requests


class RemotePrompts:
    def __init__(self, cache: KvCache, flights: Flights, requests: Requests) -> None:
        self._cache = cache
        self._flights = flights
        self._requests = requests

    def first_tokens(self, request_id: RequestId, tokens: FirstTokens) -> Facts:
        """The prefill worker's samples, one for each output. Forwarded at once; the pages may land
        later.
        """
        entry = self._requests[request_id]
        assert entry.state is State.REMOTE
        assert not entry.has_first_tokens
        facts = Facts()
        num_cached_tokens = max(tokens.num_cached_tokens, entry.num_cached_tokens)
        facts.prefilled.append(entry.prefilled(num_cached_tokens, tokens.prompt_logprobs))
        self._requests.take_first(entry, tokens.token_ids, tokens.logprobs, facts)
        return facts

    def pin(self, request_id: RequestId) -> Pin:
        """A landing is about to write the prompt's blocks: they are not freed before `unpin`."""
        return self._flights.pin(self._requests[request_id])

    def unpin(self, pin: Pin) -> None:
        self._flights.unpin(pin)

    def keep_apart(self, request_id: RequestId) -> None:
        """What the request's blocks hold from now on is not what this worker computes for their
        tokens: nobody shares them.
        """
        for output in self._requests[request_id].outputs:
            output.table.is_apart = True

    def landed(self, request_id: RequestId, num_leading: int) -> None:
        """The prompt's first `num_leading` blocks (an open last one counted) are in the pool."""
        entry = self._requests[request_id]
        assert entry.table is not None
        num_full = min(num_leading, entry.num_tokens // self._cache.block_size)
        self._cache.name(entry.table, entry.chain.full, num_full)

    def landed_all(self, request_id: RequestId) -> None:
        """Every page of the prompt is in the pool: with its first tokens, the request can run."""
        entry = self._requests[request_id]
        entry.has_landed = True
        self._requests.run_if_ready(entry)
