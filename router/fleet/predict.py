"""How long until the first token, and at whose cost: pure functions of what workers report.

    at a prefill worker   its queue + its part of the prompt + the hand-off
    on the decode worker  its queue + its part of the prompt, in chunks beside the running decodes

A worker's part is what its prefix cache does not hold. All times are seconds. Queued prompts are
taken to be computed first, which errs on the long side: workers let short prompts overtake.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from common.scheduling.chunk_budget import chunk_s, itl_target_s, quiet_step_s
from common.scheduling.step_time import StepTimes
from router.fleet.worker import Worker

DEFAULT_CHUNK_TOKENS = 512
"""Where a worker does not say."""
TYPICAL_OUTPUT_TOKENS = 256
"""How long an answer is taken to be, at most: nobody knows it beforehand."""
DELAY_WEIGHT = 1 / 16
"""What a second of delay of a running stream costs while its inter-token latency stays within the
target; beyond the target it costs a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a request asks of workers. `cached_tokens` has the leading prompt tokens that a worker
    holds already, by `Worker.order`.
    """

    num_tokens: int
    max_tokens: int = TYPICAL_OUTPUT_TOKENS
    num_outputs: int = 1
    cached_tokens: Mapping[int, int] = field(default_factory=dict)

    def num_left(self, worker: Worker) -> int:
        return self.num_tokens - self.cached_tokens.get(worker.order, 0)


def remote_s(prefill: Worker, times: StepTimes, demand: Demand) -> float:
    """Until a prefill worker has sampled the first token; the hand-off is not in it."""
    return _queue_s(prefill, times, max(1, prefill.num_requests)) + _own_s(prefill, times, demand)


def local_s(decode: Worker, times: StepTimes, demand: Demand) -> float:
    """Until a decode worker has computed the rest of the prompt itself."""
    num_prompts = max(1, decode.num_queued_tokens // max(1, demand.num_tokens))
    return _queue_s(decode, times, num_prompts) + _own_s(decode, times, demand)


def delay_cost_s(
    decode: Worker, times: StepTimes, demand: Demand, asked_s: float | None = None
) -> float:
    """What a prefill on the decode worker costs its running streams, together. `asked_s` is the
    target for inter-token latency, if one is set.
    """
    state = decode.state
    left = demand.num_left(decode)
    if state.num_decodes == 0 or left <= 0:
        return 0.0
    work_s = chunk_s(times, demand.num_tokens - left, left)
    quiet_s = quiet_step_s(times, state.num_decodes, state.num_context_tokens)
    room_s = max(0.0, itl_target_s(asked_s, quiet_s) - quiet_s)
    beyond_s = max(0.0, work_s - room_s * _num_steps(decode, times, left, work_s))
    return state.num_decodes * (DELAY_WEIGHT * (work_s - beyond_s) + beyond_s)


def _own_s(worker: Worker, times: StepTimes, demand: Demand) -> float:
    left = demand.num_left(worker)
    return _steps_s(worker, times, left, chunk_s(times, demand.num_tokens - left, left))


def _queue_s(worker: Worker, times: StepTimes, num_prompts: int) -> float:
    """Until the tokens that wait at `worker`, in prompts of like length, are computed."""
    num_tokens = worker.num_queued_tokens
    if num_tokens <= 0:
        return 0.0
    pairs = num_tokens * num_tokens / (2 * num_prompts)
    return _steps_s(
        worker, times, num_tokens, times.prefill_token_s * num_tokens + times.pair_s * pairs
    )


def _steps_s(worker: Worker, times: StepTimes, num_tokens: int, work_s: float) -> float:
    quiet_s = quiet_step_s(times, worker.state.num_decodes, worker.state.num_context_tokens)
    return _num_steps(worker, times, num_tokens, work_s) * quiet_s + work_s


def _num_steps(worker: Worker, times: StepTimes, num_tokens: int, work_s: float) -> int:
    """Chunks are bounded by tokens and, beside running streams, by the time that so many tokens
    take at the beginning of a prompt.
    """
    state = worker.state
    chunk_tokens = state.chunk_tokens or DEFAULT_CHUNK_TOKENS
    num_steps = -(-num_tokens // chunk_tokens)
    room_s = chunk_s(times, 0, chunk_tokens)
    if state.num_decodes and room_s > 0:
        num_steps = max(num_steps, math.ceil(work_s / room_s))
    return num_steps


def crowding_s(decode: Worker, times: StepTimes, demand: Demand) -> float:
    """What the streams at `decode` cost the request while it is answered, and it them; and the wait
    for one of them to end where the pool is full.
    """
    state = decode.state
    num_output = min(demand.max_tokens, TYPICAL_OUTPUT_TOKENS)
    num_streams = max(state.num_decodes, decode.num_in_flight)
    slower_s = times.decode_s * num_streams + times.context_token_s * state.num_context_tokens
    added_s = demand.num_outputs * (times.decode_s + times.context_token_s * demand.num_tokens)
    cost = num_output * (demand.num_outputs * slower_s + num_streams * added_s)
    num_ahead = state.waiting + (_needs_blocks(decode, demand) and num_streams > 0)
    if num_ahead:
        answer_s = TYPICAL_OUTPUT_TOKENS * (times.fixed_s + slower_s)
        cost += num_ahead * answer_s / max(1, num_streams)
    return cost


def _needs_blocks(decode: Worker, demand: Demand) -> bool:
    blocks = decode.state.blocks
    room = (blocks.free + blocks.cached) * decode.state.block_size
    return demand.num_left(decode) > room


def with_prefill(times: StepTimes, other: StepTimes | None) -> StepTimes:
    """A decode worker's times, to predict a prefill with. While it has hardly prefilled it cannot
    know what that costs: it is not taken to be faster than `other`, of a prefill worker beside it.
    (What was never seen is reported to cost as much as its twin, common/scheduling/step_fit.py.)
    """
    if other is None:
        return times
    has_prefilled = times.prefill_token_s != times.decode_s
    return replace(
        times,
        fixed_s=max(times.fixed_s, other.fixed_s),
        prefill_token_s=max(times.prefill_token_s * has_prefilled, other.prefill_token_s),
        pair_s=max(times.pair_s * has_prefilled, other.pair_s),
    )
