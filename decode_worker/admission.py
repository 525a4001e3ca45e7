"""Who comes in: blocks for the whole prompt, and a place among the outputs that run at once.

    waiting.add -> let_in (blocks and places) -> [away -> has_arrived] -> ended

A request takes a place for each output when it is admitted. One that waits for a prefill worker for
longer than `PLACE_S` gives its place up, so that a prefill worker which hangs holds nobody else up;
when its prompt is here after all, it runs as soon as there is a place again, before anybody new.

`n` > 1: all outputs share the prompt's full blocks; each has its own open block. Used by
`BatchScheduler` alone.
"""

from collections import Counter
from collections.abc import Iterator

from common.pages import PageKind
from common.scheduling.kv_cache import BlockTable, KvCache
from common.scheduling.prompt_queue import shareable
from common.types import RequestId, output_key
from decode_worker.entries import Entry, Output, State
from decode_worker.flights import Flights
from decode_worker.waiting import WaitingRequests

PLACE_S = 2.0
"""How long a prompt may be under way from a prefill worker before its place is another's."""


class Admission:
    def __init__(
        self,
        cache: KvCache,
        flights: Flights,
        *,
        max_waiting: int,
        max_num_seqs: int,
        max_model_len: int,
    ) -> None:
        self._cache = cache
        self._flights = flights
        self.waiting = WaitingRequests(
            cache,
            max_waiting=max_waiting,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
        )
        self._max_num_seqs = max_num_seqs
        self._holding: dict[RequestId, Entry] = {}
        self._num_outputs = 0
        self._num_without_place = 0
        self._away: dict[RequestId, tuple[float, Entry]] = {}
        """Those that are computed elsewhere and still have their places, and since when."""
        self._ready: dict[RequestId, Entry] = {}
        """Those whose prompts are here, and whose places are another's."""

    @property
    def num_holding(self) -> int:
        """Requests that hold blocks."""
        return len(self._holding)

    @property
    def ready(self) -> Iterator[Entry]:
        return iter(self._ready.values())

    def is_oldest(self, entry: Entry) -> bool:
        """Of those that hold blocks."""
        return all(entry.order <= other.order for other in self._holding.values())

    # --- coming in -------------------------------------------------------------------------------

    def let_in(self, now: float) -> list[Entry]:
        """Those that have got their blocks now."""
        self._free_places(now)
        return self.waiting.let_in(now, self._has_place, self._take_blocks)

    def _has_place(self, entry: Entry) -> bool:
        return not self._ready and self._has_room(entry.request.sampling.n)

    def _has_room(self, num_outputs: int) -> bool:
        return self._num_outputs - self._num_without_place + num_outputs <= self._max_num_seqs

    def _take_blocks(self, entry: Entry) -> bool:
        size = self._cache.block_size
        hashes = shareable(entry.chain.full, entry.num_tokens, size, entry.request.sampling)
        n = entry.request.sampling.n
        # afterwards every running output can grow by one block, and the other outputs get their
        # open blocks
        growing = self._num_outputs + 2 * n
        spare = Counter({PageKind.PACKED: growing, PageKind.EXACT: 2 * n})
        if not (self._holding or self._flights.hold_pages):
            spare = Counter({PageKind.PACKED: n - 1, PageKind.EXACT: n - 1})
        table = self._cache.start(hashes, entry.num_tokens, spare)
        if table is None:
            return False
        entry.table = table
        entry.num_cached_tokens = table.num_named * size
        for offset in range(n):
            self._add_output(entry, offset, table)
        self._num_outputs += n
        self._holding[entry.request.request_id] = entry
        entry.move(State.ADMITTED)
        return True

    def _add_output(self, entry: Entry, offset: int, table: BlockTable) -> None:
        copy = None
        if offset > 0:
            forked = self._cache.fork(table, entry.num_tokens)
            assert forked is not None, "admission kept pages for it"
            table, copy = forked
        index = entry.request.output_index + offset
        entry.outputs.append(
            Output(
                key=output_key(entry.request.request_id, index),
                entry=entry,
                index=index,
                table=table,
                chain=entry.chain.copy() if offset else entry.chain,
                num_tokens=entry.num_tokens,
                copy=copy,
            )
        )

    # --- places of prompts that are computed elsewhere -------------------------------------------

    def away(self, entry: Entry, now: float) -> None:
        self._away[entry.request.request_id] = (now, entry)

    def place_freed_in(self, now: float) -> float | None:
        """When somebody who waits should be looked at again, whatever happens; None: never."""
        if not self._away or not len(self.waiting):
            return None
        since, _ = next(iter(self._away.values()))
        return max(0.0, since + PLACE_S - now)

    def _free_places(self, now: float) -> None:
        while self._away:
            request_id, (since, entry) = next(iter(self._away.items()))
            if now - since < PLACE_S:
                return
            del self._away[request_id]
            entry.has_place = False
            self._num_without_place += len(entry.outputs)

    def has_arrived(self, entry: Entry) -> bool:
        """The prompt is here. Whether the request has a place; if not, it is `ready`."""
        self._away.pop(entry.request.request_id, None)
        if entry.has_place or (not self._ready and self._has_room(len(entry.outputs))):
            self._take_place(entry)
            return True
        self._ready[entry.request.request_id] = entry
        return False

    def take_ready(self) -> Iterator[Entry]:
        """Those that have got a place by now, the oldest first."""
        while self._ready:
            request_id, entry = next(iter(self._ready.items()))
            if not self._has_room(len(entry.outputs)):
                return
            del self._ready[request_id]
            self._take_place(entry)
            yield entry

    def _take_place(self, entry: Entry) -> None:
        if not entry.has_place:
            entry.has_place = True
            self._num_without_place -= len(entry.outputs)

    # --- going out -------------------------------------------------------------------------------

    def output_ended(self, output: Output) -> None:
        self._num_outputs -= 1
        self._num_without_place -= not output.entry.has_place
        self.waiting.generated(output)

    def ended(self, entry: Entry) -> None:
        request_id = entry.request.request_id
        self._holding.pop(request_id, None)
        self._away.pop(request_id, None)
        self._ready.pop(request_id, None)

    def check_invariants(self, entries: list[Entry]) -> None:
        """`entries` are all that the scheduler knows."""
        assert self._num_outputs == sum(len(entry.outputs) for entry in entries)
        without = [entry for entry in entries if not entry.has_place]
        assert self._num_without_place == sum(len(entry.outputs) for entry in without)
        assert all(entry.state is State.REMOTE for entry in without)
        assert all(not entry.has_place for entry in self._ready.values())
        assert self._num_outputs - self._num_without_place <= self._max_num_seqs
        waiting = [entry for entry in entries if entry.state is State.WAITING]
        self.waiting.check_invariants(waiting)
        holding = {e.request.request_id: e for e in entries if e.state is not State.WAITING}
        assert self._holding == holding
