"""Finds stop strings in text that arrives piece by piece (Aho-Corasick).

A `StopSet` is built once per call, a `StopMatcher` follows one output. Text is held back only while
it is a true prefix of some stop string; everything else leaves at once. The first stop string to be
complete wins; of several that are complete at the same character, the longest.
"""

from collections import deque
from collections.abc import Sequence


class StopSet:
    """The automaton: for each state its children, its fallback, its depth, and the longest stop
    that ends there.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops)
        self.children: list[dict[str, int]] = [{}]
        self.depth = [0]
        self.match_length = [0]
        for stop in stops:
            self._add(stop)
        self.fallback = [0] * len(self.children)
        self._link()

    def _add(self, stop: str) -> None:
        state = 0
        for char in stop:
            following = self.children[state].get(char)
            if following is None:
                following = self.children[state][char] = len(self.children)
                self.children.append({})
                self.depth.append(self.depth[state] + 1)
                self.match_length.append(0)
            state = following
        self.match_length[state] = len(stop)

    def _link(self) -> None:
        waiting = deque(self.children[0].values())
        while waiting:
            state = waiting.popleft()
            for char, child in self.children[state].items():
                waiting.append(child)
                self.fallback[child] = self.step(self.fallback[state], char)
            if not self.match_length[state]:
                self.match_length[state] = self.match_length[self.fallback[state]]

    def step(self, state: int, char: str) -> int:
        while True:
            following = self.children[state].get(char)
            if following is not None:
                return following
            if state == 0:
                return 0
            state = self.fallback[state]


class StopMatcher:
    def __init__(self, stops: StopSet, *, include_stop: bool = False) -> None:
        self._stops = stops
        self._include_stop = include_stop
        self._state = 0
        self._held = ""
        self.matched: str | None = None
        """The stop string that was found."""

    def push(self, text: str, *, may_stop: bool = True) -> tuple[str, bool]:
        """The text that may leave now, and whether a stop string was found (then that is all).

        With `may_stop` false a match that would be complete within `text` does not count.
        """
        stops = self._stops
        state = self._state
        for position, char in enumerate(text):
            state = stops.step(state, char)
            length = stops.match_length[state]
            if length and may_stop:
                seen = self._held + text[: position + 1]
                self._held = ""
                self.matched = seen[len(seen) - length :]
                return (seen if self._include_stop else seen[: len(seen) - length]), True
        while state and not stops.children[state]:
            # a match that did not count: only a shorter prefix can still grow into one
            state = stops.fallback[state]
        self._state = state
        seen = self._held + text
        num_free = len(seen) - stops.depth[state]
        self._held = seen[num_free:]
        return seen[:num_free], False

    def flush(self) -> str:
        """What was held back; the output has ended without a stop string."""
        held, self._held = self._held, ""
        return held
