"""What is asked of a fleet: arrivals, lengths, and prompts that share prefixes or do not.

    poisson(...)                    arrivals at a rate, with a seed
    closed_loop(...)                so many at once, the next one when one ends
    read_trace(path)                a Mooncake trace

A prompt is a tuple of spans of token ids, made into an array when it arrives; every span that no
other prompt shares has ids of its own, so nothing is found in a prefix cache by accident.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.errors import InvalidRequest

TRACE_BLOCK_TOKENS = 512
"""Prompt tokens that one of a trace's `hash_ids` stands for."""
_LAST_TOKEN_ID = 2**31 - 1

Lengths = Callable[[np.random.Generator], int]
"""Draws one length."""


class MalformedTrace(InvalidRequest):
    """A line of a trace is not what it should be; the message names file and line."""

    code = "malformed_trace"


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive token ids."""

    first: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRequest:
    """`arrival_s` counts from the workload's start; a closed loop does not look at it."""

    arrival_s: float
    prompt: tuple[Span, ...]
    output_tokens: int
    priority: int = 0

    @property
    def prompt_tokens(self) -> int:
        return sum(span.count for span in self.prompt)

    def token_ids(self) -> NDArray[np.int32]:
        """[prompt_tokens] int32."""
        spans = [
            np.arange(span.first, span.first + span.count, dtype=np.int32) for span in self.prompt
        ]
        return spans[0] if len(spans) == 1 else np.concatenate(spans)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests in the order of their arrival; with `concurrency` so many at once instead."""

    requests: tuple[SimulatedRequest, ...]
    concurrency: int | None = None

    @property
    def mean_tokens(self) -> float:
        """Prompt and output together."""
        total = sum(r.prompt_tokens + r.output_tokens for r in self.requests)
        return total / max(1, len(self.requests))

    def at_most(self, max_model_len: int) -> "Workload":
        """Without the requests that no worker with that context could take."""
        kept = [r for r in self.requests if r.prompt_tokens + r.output_tokens <= max_model_len]
        return replace(self, requests=tuple(kept))


def fixed(length: int) -> Lengths:
    return lambda _: length


def uniform(low: int, high: int) -> Lengths:
    """Both ends included."""
    return lambda rng: int(rng.integers(low, high + 1))


def lognormal(mean: float, sigma: float, most: int) -> Lengths:
    """With that mean, at least 1 and at most `most`."""
    location = np.log(mean) - sigma * sigma / 2
    return lambda rng: int(min(most, max(1.0, rng.lognormal(location, sigma))))


def poisson(
    *,
    num_requests: int,
    rate: float,
    prompt: Lengths,
    output: Lengths,
    seed: int,
    shared_prefix: int = 0,
) -> Workload:
    """`rate` requests a second; each prompt begins with the same `shared_prefix` tokens, further
    to what `prompt` draws.
    """
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1.0 / rate, num_requests))
    return Workload(requests=_requests(rng, arrivals, prompt, output, shared_prefix))


def closed_loop(
    *,
    num_requests: int,
    concurrency: int,
    prompt: Lengths,
    output: Lengths,
    seed: int,
    shared_prefix: int = 0,
) -> Workload:
    rng = np.random.default_rng(seed)
    arrivals = np.zeros(num_requests)
    return Workload(
        requests=_requests(rng, arrivals, prompt, output, shared_prefix), concurrency=concurrency
    )


def _requests(
    rng: np.random.Generator,
    arrivals: NDArray[np.float64],
    prompt: Lengths,
    output: Lengths,
    shared_prefix: int,
) -> tuple[SimulatedRequest, ...]:
    next_id = shared_prefix
    found = []
    for arrival in arrivals:
        count = prompt(rng)
        own = Span(next_id, count)
        next_id = _after(next_id, count)
        found.append(
            SimulatedRequest(
                arrival_s=float(arrival),
                prompt=(Span(0, shared_prefix), own) if shared_prefix else (own,),
                output_tokens=output(rng),
            )
        )
    return tuple(found)


def _after(first: int, count: int) -> int:
    """Where the next span of its own may begin; after two thousand million ids, at 0 again."""
    end = first + count
    return end if end < _LAST_TOKEN_ID - 2**22 else 0


# --- traces ---------------------------------------------------------------------------------------


def read_trace(path: Path, max_requests: int | None = None) -> Workload:
    """A Mooncake trace: JSON lines with `timestamp` (ms), `input_length`, `output_length` and
    `hash_ids`, one for each 512 tokens of the prompt; equal ids stand for equal tokens after equal
    prefixes. Raises MalformedTrace.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise MalformedTrace(f"cannot read {path}: {error}") from error
    numbers: dict[int, int] = {}
    requests = [
        _parse_line(line, f"{path}, line {number}", numbers)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not requests:
        raise MalformedTrace(f"{path} holds no request")
    requests.sort(key=lambda request: request.arrival_s)
    start = requests[0].arrival_s
    shifted = [replace(r, arrival_s=r.arrival_s - start) for r in requests[:max_requests]]
    return Workload(requests=tuple(shifted))


def _parse_line(line: str, where: str, numbers: dict[int, int]) -> SimulatedRequest:
    """`numbers` gives every hash id a small number, in order of appearance."""
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise MalformedTrace(f"{where}: not JSON: {error}") from error
    if not isinstance(entry, dict):
        raise MalformedTrace(f"{where}: not a JSON object")
    timestamp = entry.get("timestamp")
    if isinstance(timestamp, bool) or not isinstance(timestamp, int | float) or timestamp < 0:
        raise MalformedTrace(f"{where}: timestamp must be milliseconds, not {timestamp!r}")
    input_length = _count(entry, "input_length", where)
    output_length = _count(entry, "output_length", where)
    hash_ids = entry.get("hash_ids")
    if not isinstance(hash_ids, list) or not all(type(item) is int for item in hash_ids):
        raise MalformedTrace(f"{where}: hash_ids must be a list of integers")
    num_blocks = -(-input_length // TRACE_BLOCK_TOKENS)
    if len(hash_ids) != num_blocks:
        raise MalformedTrace(
            f"{where}: {input_length} tokens are {num_blocks} blocks of {TRACE_BLOCK_TOKENS},"
            f" but there are {len(hash_ids)} hash_ids"
        )
    return SimulatedRequest(
        arrival_s=timestamp / 1000.0,
        prompt=_spans(hash_ids, input_length, numbers),
        output_tokens=output_length,
    )


def _count(entry: dict[str, Any], key: str, where: str) -> int:
    value = entry.get(key)
    if type(value) is not int or value < 1:
        raise MalformedTrace(f"{where}: {key} must be a positive integer, not {value!r}")
    return value


def _spans(hash_ids: Sequence[int], input_length: int, numbers: dict[int, int]) -> tuple[Span, ...]:
    spans: list[Span] = []
    left = input_length
    for hash_id in hash_ids:
        number = numbers.setdefault(hash_id, len(numbers))
        count = min(left, TRACE_BLOCK_TOKENS)
        first = number * TRACE_BLOCK_TOKENS % (_LAST_TOKEN_ID - 2 * TRACE_BLOCK_TOKENS)
        if spans and spans[-1].first + spans[-1].count == first:
            spans[-1] = Span(spans[-1].first, spans[-1].count + count)
        else:
            spans.append(Span(first, count))
        left -= count
    return tuple(spans)
