"""Turns of outputs whose grammars are slow.

A mask of a wide grammar takes longer than a step of many streams, and a step waits for all of its
masks. So the masks of one step may take about as long as the step without them; outputs that do not
fit wait for their turn. Quick grammars, nearly all of them, are never left out. Pure; `RunningSet`
asks before each step and tells what its masks took.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping

from common.types import OutputKey
from decode_worker.entries import Output

MAX_GRAMMARS = 1024
LEAST_ROOM_S = 0.01


class FormTurns:
    def __init__(self) -> None:
        self._costs: OrderedDict[str, float] = OrderedDict()
        """Seconds of one mask, by grammar; only of slow ones."""
        self._turns: dict[OutputKey, int] = {}
        self._num_turns = 0

    def observe(
        self, outputs: Mapping[OutputKey, Output], took: Iterable[tuple[OutputKey, float]]
    ) -> None:
        """What one mask of each of these slow outputs took."""
        for key, seconds in took:
            output = outputs.get(key)
            grammar = None if output is None else output.entry.request.sampling.grammar
            if grammar is not None:
                self._costs[grammar] = seconds
                self._costs.move_to_end(grammar)
        while len(self._costs) > MAX_GRAMMARS:
            self._costs.popitem(last=False)

    def in_step(
        self, outputs: Mapping[OutputKey, Output], quiet_s: float
    ) -> dict[OutputKey, Output] | None:
        """Those that decode in the next step, which takes `quiet_s` without masks; None: all do."""
        if not self._costs:
            return None
        slow = {
            key: cost
            for key, output in outputs.items()
            if (cost := self._costs.get(output.entry.request.sampling.grammar or "")) is not None
        }
        room_s = max(quiet_s, LEAST_ROOM_S)
        if sum(slow.values()) <= room_s:
            self._turns.clear()
            return None
        self._turns = {key: self._turns.get(key, 0) for key in slow}
        taken: set[OutputKey] = set()
        for key in sorted(slow, key=self._turns.__getitem__):
            if taken and slow[key] > room_s:
                break
            taken.add(key)
            room_s -= slow[key]
        self._num_turns += 1
        self._turns.update(dict.fromkeys(taken, self._num_turns))
        return {key: o for key, o in outputs.items() if key in taken or key not in slow}
