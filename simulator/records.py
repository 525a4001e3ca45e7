"""What clients saw: one record for each request, and a histogram of all gaps between tokens.

Instants are the simulation's seconds, at the client (after the messages' latency).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

_RESOLUTION: Final = math.log(1.002)
"""Gaps are counted in classes 0.2 % wide."""


@dataclass(slots=True, eq=False)
class Record:
    number: int
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    admitted_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float = 0.0
    num_tokens: int = 0
    num_cached_tokens: int = 0
    num_local_prefills: int = 0
    """Times that the decode worker was told to prefill by itself."""
    worst_gap_s: float = 0.0
    num_retries: int = 0
    error: str | None = None
    has_finished: bool = False
    token_times: list[float] | None = None
    """Kept only when asked for."""

    @property
    def ttft_s(self) -> float:
        assert self.first_token_s is not None
        return self.first_token_s - self.arrival_s

    @property
    def mean_gap_s(self) -> float:
        """Of all gaps between its tokens; 0 when there is one token."""
        assert self.first_token_s is not None
        return (self.last_token_s - self.first_token_s) / max(1, self.num_tokens - 1)

    def meets(self, ttft_s: float, itl_s: float) -> bool:
        return self.has_finished and self.ttft_s <= ttft_s and self.mean_gap_s <= itl_s


@dataclass(slots=True)
class Gaps:
    """Gaps between tokens by size."""

    counts: dict[int, int] = field(default_factory=dict)

    def add_all(self, gaps: Mapping[float, int]) -> None:
        """Numbers of gaps by their size in seconds."""
        for gap_s, count in gaps.items():
            index = round(math.log(max(gap_s, 1e-7)) / _RESOLUTION)
            self.counts[index] = self.counts.get(index, 0) + count

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def percentile(self, share: float) -> float:
        """The smallest class with at least that share of all gaps at or below it; 0 without any."""
        wanted = share * self.total
        seen = 0
        for index in sorted(self.counts):
            seen += self.counts[index]
            if seen >= wanted:
                return math.exp(index * _RESOLUTION)
        return 0.0

    def num_above(self, gap_s: float) -> int:
        limit = round(math.log(max(gap_s, 1e-7)) / _RESOLUTION)
        return sum(count for index, count in self.counts.items() if index > limit)


@dataclass(slots=True)
class WorkerRecord:
    name: str
    busy_s: float = 0.0
    num_steps: int = 0
    num_prompt_tokens: int = 0
    peak_running: int = 0
    peak_held_pages: int = 0


@dataclass(slots=True)
class Outcome:
    """Of a whole simulation. `duration_s` is the time from the first arrival to the last token."""

    records: list[Record]
    gaps: Gaps
    workers: list[WorkerRecord]
    duration_s: float
    num_events: int

    @property
    def finished(self) -> list[Record]:
        return [record for record in self.records if record.has_finished]

    @property
    def output_tokens_per_s(self) -> float:
        return sum(record.num_tokens for record in self.records) / max(self.duration_s, 1e-9)

    def ttft(self, share: float) -> float:
        return percentile([record.ttft_s for record in self.finished], share)

    def goodput(self, ttft_s: float, itl_s: float) -> float:
        """Requests a second that met both targets."""
        num_good = sum(record.meets(ttft_s, itl_s) for record in self.records)
        return num_good / max(self.duration_s, 1e-9)

    def attainment(self, ttft_s: float, itl_s: float) -> float:
        """Share of all requests that met both targets."""
        return sum(r.meets(ttft_s, itl_s) for r in self.records) / max(1, len(self.records))


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value with at least that share of all values at or below it; nan without any."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[max(0, math.ceil(round(share * len(ordered), 9)) - 1)]
