"""Names of the blocks of prompts that are being placed, and who holds them.

    hashes = book.hashes(request)          nothing is computed yet
    book.hits(hashes)                      worker -> leading prompt tokens in its prefix cache

A chain is computed as far as some worker holds it and one block further, about a microsecond for
each, and kept for the request's next question. For a large prompt this is done beforehand on a
thread (`prepare`), so that the event loop does not wait for it.
"""

from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice

import anyio.to_thread

from common.messages import GenerateRequest
from common.scheduling.block_hash import block_hashes, root_hash
from router.fleet.fleet import Fleet
from router.fleet.worker import BlockNaming

LARGE_TOKENS = 16_384
"""Prompts from here on (a millisecond) are hashed on a thread."""
_MAX_PREPARED = 32


class PromptHashes:
    """One prompt's chain, in one way of naming blocks; grows while it is read."""

    def __init__(self, token_ids: bytes, salt: str, naming: BlockNaming) -> None:
        self.naming = naming
        # the last token is always computed, with its block
        num_shareable = max(0, len(token_ids) // 4 - 1) // naming.block_size
        root = root_hash(naming.model_fingerprint, naming.block_size, salt)
        made = block_hashes(root, naming.block_size, token_ids)
        self._rest = islice(made, num_shareable)
        self._known: list[bytes] = []

    @property
    def num_known(self) -> int:
        """Blocks that have been hashed so far."""
        return len(self._known)

    def __iter__(self) -> Iterator[bytes]:
        yield from self._known
        for content_hash in self._rest:
            self._known.append(content_hash)
            yield content_hash


class HashBook:
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._prepared: OrderedDict[tuple[bytes, str], list[PromptHashes]] = OrderedDict()

    async def prepare(self, token_ids: bytes, salt: str) -> None:
        """Hashes a large prompt ahead of `hashes`, as far as it is known, off the event loop."""
        if not len(self._fleet.prefix_index):
            return
        chains = self._chains(token_ids, salt)
        for chain in chains:
            await anyio.to_thread.run_sync(self._fleet.prefix_index.longest, chain)
        self._prepared[token_ids, salt] = chains
        if len(self._prepared) > _MAX_PREPARED:
            self._prepared.popitem(last=False)

    def hashes(self, request: GenerateRequest) -> list[PromptHashes]:
        """Empty when nothing of the prompt may come from a cache, or nobody tells what it holds."""
        if request.sampling.prompt_logprobs is not None or not len(self._fleet.prefix_index):
            return []
        token_ids, salt = request.token_ids, request.cache_salt
        if len(token_ids) >= 4 * LARGE_TOKENS:
            prepared = self._prepared.pop((token_ids, salt), None)
            if prepared is not None:
                return prepared
        return self._chains(token_ids, salt)

    def hits(self, chains: list[PromptHashes]) -> dict[int, int]:
        """Leading prompt tokens held, by `Worker.order`; workers that hold nothing are left out."""
        match = self._fleet.prefix_index.match
        return {
            worker: count * chain.naming.block_size
            for chain in chains
            for worker, count in match(chain).items()
        }

    def _chains(self, token_ids: bytes, salt: str) -> list[PromptHashes]:
        return [PromptHashes(token_ids, salt, naming) for naming in self._fleet.block_namings()]
