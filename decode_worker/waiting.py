"""Requests of a decode worker that wait for blocks: who may join, who is next, who is too late.

    check, add -> in line -> let_in -> admitted
                          -> deadline passed -> take_expired

Order and fairness are those of `FairLine`; within a client the oldest goes first. A request that
does not fit lets smaller ones pass for at most `MAX_OVERTAKEN_S`. Used by `Admission` alone.
"""

from collections import Counter
from collections.abc import Callable, Iterator

from common.errors import ContextLengthExceeded, DecodeFull, PromptTooLargeForPool
from common.messages import GenerateRequest
from common.pages import PageKind
from common.scheduling.fair_line import FairLine
from common.scheduling.kv_cache import KvCache
from common.scheduling.prompt_queue import MAX_OVERTAKEN_S, MAX_TRIED
from decode_worker.entries import Entry, Output


class WaitingRequests:
    def __init__(
        self, cache: KvCache, *, max_waiting: int, max_num_seqs: int, max_model_len: int
    ) -> None:
        self._cache = cache
        self._max_waiting = max_waiting
        self._max_num_seqs = max_num_seqs
        self._max_model_len = max_model_len
        self._line: FairLine[Entry] = FairLine()
        self._expired: list[Entry] = []
        self.num_tokens = 0
        """Prompt tokens of all that are in line."""

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._line)

    def check(self, request: GenerateRequest) -> None:
        """Raises when the request can never run here, or too many wait."""
        sampling = request.sampling
        total = request.num_prompt_tokens + sampling.max_tokens
        if total > self._max_model_len:
            raise ContextLengthExceeded(
                f"prompt ({request.num_prompt_tokens} tokens) and max_tokens "
                f"({sampling.max_tokens}) exceed the context of {self._max_model_len} tokens"
            )
        pages = self._most_pages(request, total)
        if not self._cache.fits(pages) or sampling.n > self._max_num_seqs:
            raise PromptTooLargeForPool(
                f"prompt ({request.num_prompt_tokens} tokens), max_tokens "
                f"({sampling.max_tokens}) and n ({sampling.n}) can never fit this worker's KV pool "
                f"({self._cache.max_tokens} tokens, {self._max_num_seqs} outputs)"
            )
        if len(self._line) >= self._max_waiting:
            raise DecodeFull(f"{len(self._line)} requests are waiting already", retry_after_s=1.0)

    def _most_pages(self, request: GenerateRequest, total: int) -> Counter[PageKind]:
        """Pages held when every output has reached its limit: full blocks of the prompt are
        shared.
        """
        size, n = self._cache.block_size, request.sampling.n
        num_shared = request.num_prompt_tokens // size
        num_own = -(-total // size) - num_shared
        num_block_0 = 1 if num_shared else n
        num_tails = n if total > size else 0
        return Counter(
            {
                PageKind.PACKED: num_shared + n * num_own - num_block_0,
                PageKind.EXACT: num_block_0 + num_tails,
            }
        )

    def add(self, entry: Entry) -> None:
        self._line.add(entry)
        self.num_tokens += entry.num_tokens

    def remove(self, entry: Entry) -> None:
        """Of one that is not wanted any more."""
        if entry not in self._expired:
            self._leave(entry)

    def let_in(
        self, now: float, has_place: Callable[[Entry], bool], admit: Callable[[Entry], bool]
    ) -> list[Entry]:
        """Offers requests in their order to `admit`, which takes one or says that it does not fit;
        stops when there is no place for the next one. Those whose deadline has passed leave.
        """
        admitted: list[Entry] = []
        expired: list[Entry] = []
        num_blocked = 0
        for entry in self._line:
            deadline_s = entry.request.deadline_s
            if deadline_s is not None and now - entry.arrival >= deadline_s:
                expired.append(entry)
            elif not has_place(entry):
                break
            elif admit(entry):
                admitted.append(entry)
            else:
                num_blocked += 1
                if num_blocked > MAX_TRIED or now - entry.arrival > MAX_OVERTAKEN_S:
                    break
        for entry in (*expired, *admitted):
            self._leave(entry)
        self._expired += expired
        for entry in admitted:
            self._line.charge(entry.client, entry.priority, entry.cost)
        return admitted

    def take_expired(self) -> list[Entry]:
        """Those whose time was up, since the last call."""
        expired, self._expired = self._expired, []
        return expired

    def generated(self, output: Output) -> None:
        """The output has ended; what it generated counts as served to its client."""
        num_tokens = output.num_tokens - output.entry.num_tokens
        if num_tokens > 0:
            self._line.charge(output.entry.client, output.entry.priority, num_tokens)

    def _leave(self, entry: Entry) -> None:
        self._line.remove(entry)
        self.num_tokens -= entry.num_tokens

    def check_invariants(self, waiting: list[Entry]) -> None:
        """`waiting` are all entries in that state."""
        self._line.check_invariants()
        in_line = {id(entry) for entry in self._line}
        assert in_line == {id(entry) for entry in waiting if entry not in self._expired}
        assert self.num_tokens == sum(entry.num_tokens for entry in self._line)
