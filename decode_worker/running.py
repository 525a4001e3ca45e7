"""The outputs that get a token in every step: which are in the next one, the pages they grow by.

A second step may be planned while the first one runs, before its tokens are known (they are
*unread*): outputs go on with one more token than they have, without those that end with it for
certain. Nothing is evicted meanwhile: when pages run short, no further step is planned before those
under way are applied.

A step is *quiet* when it is one token for each output and nothing else. Whoever knows the tokens
beforehand (the simulator) may take many quiet steps at once. Used by `BatchScheduler` alone.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from common.pages import PageKind
from common.scheduling.chunk_budget import quiet_step_s
from common.scheduling.kv_cache import KvCache
from common.scheduling.plan import OutputStart, StepResult
from common.scheduling.step_time import StepTimes
from common.types import BlockId, OutputKey
from decode_worker.entries import Entry, Output, State
from decode_worker.flights import Flights
from decode_worker.form_turns import FormTurns

GivenPages = list[tuple[OutputKey, BlockId]]


class Decodes(NamedTuple):
    """Outputs of one step, with the pages and the tails that were added for it."""

    outputs: dict[OutputKey, Output]
    grown: GivenPages
    tails: GivenPages
    num_context_tokens: int


class RunningSet:
    def __init__(self, cache: KvCache, flights: Flights) -> None:
        self._cache = cache
        self._flights = flights
        self._outputs: dict[OutputKey, Output] = {}
        self._to_start: dict[OutputKey, Output] = {}
        self._form_turns = FormTurns()
        self._is_short = False
        """Pages lacked for a step beside one that is under way."""
        self.num_context_tokens = 0
        """Tokens in the caches of all outputs, together."""

    def __len__(self) -> int:
        return len(self._outputs)

    @property
    def outputs(self) -> Mapping[OutputKey, Output]:
        return self._outputs

    @property
    def entries(self) -> Iterator[Entry]:
        return (output.entry for output in self._outputs.values())

    @property
    def must_wait(self) -> bool:
        """No further step before one that is under way has been applied."""
        return self._is_short and len(self._flights) > 0

    def add(self, output: Output) -> None:
        self._outputs[output.key] = output
        if not output.is_started:
            self._to_start[output.key] = output
        self.num_context_tokens += output.num_tokens

    def remove(self, output: Output) -> None:
        """Nothing if it does not run."""
        if self._outputs.pop(output.key, None) is not None:
            self.num_context_tokens -= output.num_tokens
            self._to_start.pop(output.key, None)

    # --- the next step ---------------------------------------------------------------------------

    def next_step(self, times: StepTimes | None, make_room: Callable[[Output], bool]) -> Decodes:
        """`make_room` evicts somebody so that the output may grow; False: the output itself is
        gone, or does without its page for now.
        """
        self._is_short = False
        going_on = self._going_on()
        quiet_s = 0.0
        if times is not None:
            quiet_s = quiet_step_s(times, len(going_on), self.num_context_tokens)
        taking_turns = self._form_turns.in_step(going_on, quiet_s)
        outputs, grown, tails = self._grow(
            going_on if taking_turns is None else taking_turns, make_room
        )
        return Decodes(outputs, grown, tails, self._context_of(outputs))

    def _going_on(self) -> dict[OutputKey, Output]:
        """Outputs that want one more token than they have, unread ones counted."""
        latest = self._flights.latest
        if not latest:
            return self._outputs
        return {
            key: output
            for key, output in self._outputs.items()
            if not (latest.get(key) is output and output.num_tokens + 1 >= output.entry.most_tokens)
        }

    def _context_of(self, decodes: dict[OutputKey, Output]) -> int:
        """Tokens in the caches of a step's outputs, when it runs."""
        latest = self._flights.latest
        if not len(self._flights) and len(decodes) == len(self._outputs):
            return self.num_context_tokens
        return sum(
            output.num_tokens + (latest.get(key) is output) for key, output in decodes.items()
        )

    def _grow(
        self, going_on: dict[OutputKey, Output], make_room: Callable[[Output], bool]
    ) -> tuple[dict[OutputKey, Output], GivenPages, GivenPages]:
        """Those of the outputs that have a page for their next token, and what was given to them
        for it.
        """
        num_running, latest = len(self._outputs), self._flights.latest
        grown: GivenPages = []
        tails: GivenPages = []
        stalled: set[OutputKey] = set()
        for output in self._opening(going_on):
            if output.key not in self._outputs:
                continue  # evicted for another one
            had_tail = output.table.tail is not None
            is_unread = latest.get(output.key) is output
            if not self._has_grown(output, output.num_tokens + is_unread, make_room):
                stalled.add(output.key)
                continue
            grown.append((output.key, output.table.block_ids[-1]))
            if output.table.tail is not None and not had_tail:
                tails.append((output.key, output.table.tail))
        if not stalled and len(self._outputs) == num_running:
            return dict(going_on), grown, tails
        decodes = {
            key: output
            for key, output in going_on.items()
            if key in self._outputs and key not in stalled
        }
        return decodes, _of(decodes, grown), _of(decodes, tails)

    def _opening(self, outputs: dict[OutputKey, Output]) -> list[Output]:
        """Those whose next token opens a block: no other one needs pages."""
        size, latest = self._cache.block_size, self._flights.latest
        if not latest:
            return [output for output in outputs.values() if output.num_tokens % size == 1]
        return [
            output
            for key, output in outputs.items()
            if (output.num_tokens + (latest.get(key) is output)) % size == 1
        ]

    def _has_grown(
        self, output: Output, num_tokens: int, make_room: Callable[[Output], bool]
    ) -> bool:
        while not self._cache.grow(output.table, num_tokens):
            if len(self._flights):
                self._is_short = True
                return False
            if not make_room(output):
                return False
        return True

    def starts(self) -> tuple[list[OutputStart], tuple[tuple[BlockId, BlockId], ...]]:
        """Outputs the runner does not know yet: those prefilled elsewhere, and the siblings of a
        local prefill; with the exact pages that are to be copied for them.
        """
        starts: list[OutputStart] = []
        copies: list[tuple[BlockId, BlockId]] = []
        for output in self._to_start.values():
            output.is_started = True
            if output.copy is not None:
                copies.append(output.copy)
            entry = output.entry
            last = np.asarray(output.last_tokens[-1:], dtype=np.int32)
            starts.append(
                OutputStart(
                    key=output.key,
                    token_ids=np.append(entry.token_ids, last),
                    num_prompt_tokens=entry.request.num_prompt_tokens,
                    sampling=entry.request.sampling,
                    output_index=output.index,
                    block_ids=tuple(output.table.block_ids),
                    tail=output.table.tail,
                )
            )
        self._to_start.clear()
        return starts, tuple(copies)

    def computed(self, output: Output) -> None:
        """The output's last known token is in the cache now."""
        self.num_context_tokens += 1
        if output.num_tokens % self._cache.block_size == 0:
            self._seal(output)

    def _seal(self, output: Output) -> None:
        output.chain.extend(output.last_tokens)
        output.last_tokens.clear()
        self._cache.name(output.table, output.chain.full, len(output.chain.full))

    def observe(self, result: StepResult) -> None:
        """How long a step's masks took."""
        self._form_turns.observe(self._outputs, result.slow_masks)

    # --- quiet steps -----------------------------------------------------------------------------

    def num_quiet_steps(self, most: int) -> int:
        """How many steps from now on, at most `most`, end no output and could lack no page."""
        if self._to_start or not self._outputs or len(self._flights):
            return 0
        for output in self._outputs.values():
            most = min(most, output.entry.most_tokens - output.num_tokens - 1)
        while most > 0 and not self._cache.can_allocate(self._pages_wanted(most)):
            most //= 2
        return max(0, most)

    def _pages_wanted(self, num_steps: int) -> Counter[PageKind]:
        size = self._cache.block_size
        wanted: Counter[PageKind] = Counter()
        for output in self._outputs.values():
            last = output.num_tokens + num_steps - 1
            wanted[PageKind.PACKED] += -(-last // size) - -(-(output.num_tokens - 1) // size)
            wanted[PageKind.EXACT] += output.table.tail is None and last > size
        return wanted

    def take_quiet_steps(
        self, num_steps: int, token_of: Callable[[OutputKey], int]
    ) -> list[OutputKey]:
        """In each step, growth and naming for the outputs that open or fill a block, in the order
        in which they would have come; nothing for the others.
        """
        size = self._cache.block_size
        phases: list[list[tuple[Output, int, int]]] = [[] for _ in range(size)]
        for output in self._outputs.values():
            phase = (output, output.num_tokens, token_of(output.key))
            phases[output.num_tokens % size].append(phase)
        for step in range(num_steps):
            for output, start, token_id in phases[(1 - step) % size]:
                _advance(output, start + step, token_id)
                grown = self._cache.grow(output.table, output.num_tokens)
                assert grown
            for output, start, token_id in phases[-step % size]:
                _advance(output, start + step, token_id)
                self._seal(output)
        for output, start, token_id in (item for phase in phases for item in phase):
            _advance(output, start + num_steps, token_id)
        self.num_context_tokens += num_steps * len(self._outputs)
        return list(self._outputs)

    def check_invariants(self) -> None:
        assert self._to_start == {k: o for k, o in self._outputs.items() if not o.is_started}
        assert self.num_context_tokens == sum(o.num_tokens for o in self._outputs.values())
        for output in self._outputs.values():
            assert output.entry.state is State.RUNNING
            assert not output.has_ended


def _advance(output: Output, num_tokens: int, token_id: int) -> None:
    output.last_tokens.extend([token_id] * (num_tokens - output.num_tokens))
    output.num_tokens = num_tokens


def _of(decodes: dict[OutputKey, Output], pages: Iterable[tuple[OutputKey, BlockId]]) -> GivenPages:
    return [item for item in pages if item[0] in decodes]
