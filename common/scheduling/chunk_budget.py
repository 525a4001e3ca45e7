"""How many prompt tokens a step may carry beside running streams.

    quiet step = the step with its decodes alone
    room       = ITL target - quiet step
    budget     = prompt tokens, from position 0 on, that the room has time for: a multiple of the
                 block size, at least one block, at most the worker's maximum

A router that was given a target sends budgets (`router/fleet/interleave.py`). Without a target the
worker calls the same function, and how many prompts wait decides (`itl_target_s`). `ChunkRoom`
deals the budget out to the prompts of one step. Nothing decodes: no limit but the maximum. All
pure; times in seconds.
"""

import math

from common.scheduling.step_time import StepShape, StepTimes, num_pairs

DEFAULT_ITL_S = 0.05
MAX_SHARES = 4
"""Without a target, a step may take 50 ms, which are 20 tokens a second, several times as fast as
anybody reads and what GPUs reach with room to spare. A device whose quiet step comes near that (a
CPU, a large model on few GPUs) would hardly ever get to prompts then: there every prompt that waits
gets as much of a step as all decodes together, which are one batch. With one prompt a stream never
gets slower than half its pace; with more, decodes in small batches beside starved prompts would
cost everybody more than longer steps do. Four such shares are most of what there is to gain
(docs/scheduling.md has the numbers).
"""

STRETCH = 1.25
"""A prompt's last piece may make the step so much longer than the target: a piece more would cost
it a whole step, to save the streams less than that.
"""

MAX_TOKENS = 2**31
"""What takes no time at all has room for."""

UNMEASURED_SHARE = 8
"""Of the maximum, while nothing is known of the step's times."""

ROUNDING = 1e-9
"""Of a time: far more than what sums of step times lose in their last bits, far less than a token.
A budget goes through seconds and comes back; without this allowance it could come back a token
short, and a whole block would be lost with it.
"""


def itl_target_s(asked_s: float | None, quiet_s: float, num_prompts: int = 1) -> float:
    """`asked_s`, or what holds without a target while so many prompts wait."""
    if asked_s is not None:
        return asked_s
    return max(DEFAULT_ITL_S, quiet_s * (1 + min(max(1, num_prompts), MAX_SHARES)))


def quiet_step_s(times: StepTimes, num_decodes: int, num_context_tokens: int) -> float:
    return times.step_s(StepShape(num_decodes=num_decodes, num_context_tokens=num_context_tokens))


def chunk_budget(
    times: StepTimes | None,
    asked_s: float | None,
    num_decodes: int,
    num_context_tokens: int,
    *,
    num_prompts: int = 1,
    block_size: int,
    max_tokens: int,
) -> int:
    """Prompt tokens for a step beside `num_decodes` streams. `asked_s` is the ITL target,
    `num_prompts` how many prompts have blocks and wait for their chunks.
    """
    if num_decodes == 0:
        return max_tokens
    if times is None:
        return _whole_blocks(max_tokens // UNMEASURED_SHARE, block_size)
    quiet_s = quiet_step_s(times, num_decodes, num_context_tokens)
    room_s = itl_target_s(asked_s, quiet_s, num_prompts) - quiet_s
    return _whole_blocks(min(max_tokens, tokens_within(times, 0, room_s)), block_size)


def tokens_within(times: StepTimes, start: int, room_s: float) -> int:
    """The most prompt tokens from position `start` on that take at most `room_s`.

    The inverse of `chunk_s`: `tokens_within(times, start, chunk_s(times, start, n)) == n` wherever
    a token takes time.
    """
    if room_s <= 0:
        return 0
    room_s *= 1 + ROUNDING
    # pair_s / 2 n^2 + linear n = room_s
    linear = times.prefill_token_s + times.pair_s * (start + 0.5)
    root = math.sqrt(linear * linear + 2 * times.pair_s * room_s)
    if linear + root <= 0:
        return MAX_TOKENS
    return int(min(2 * room_s / (linear + root), MAX_TOKENS))


def chunk_s(times: StepTimes, start: int, num_tokens: int) -> float:
    """What a chunk adds to a step."""
    return times.prefill_token_s * num_tokens + times.pair_s * num_pairs(start, num_tokens)


def _whole_blocks(num_tokens: int, block_size: int) -> int:
    return max(block_size, num_tokens - num_tokens % block_size)


class ChunkRoom:
    """What is left of one step's budget, dealt out chunk by chunk.

    By tokens alone, or (`within`) by time as well: a token further back in its prompt attends to
    more, so it takes more of the room.
    """

    def __init__(self, num_tokens: int, block_size: int) -> None:
        self._tokens = num_tokens
        self._block_size = block_size
        self._times: StepTimes | None = None
        self._room_s = math.inf
        self._stretch_s = 0.0
        self._is_untouched = True

    @staticmethod
    def within(
        times: StepTimes | None,
        budget: int,
        quiet_s: float,
        *,
        block_size: int,
        max_tokens: int,
    ) -> "ChunkRoom":
        """The time of `budget` tokens from position 0 on; stretched for a prompt's last piece, as
        long as that stays within `max_tokens`.
        """
        if times is None:
            return ChunkRoom(budget, block_size)
        room = ChunkRoom(max_tokens, block_size)
        room._times = times
        room._room_s = chunk_s(times, 0, budget)
        room._stretch_s = (STRETCH - 1) * (quiet_s + room._room_s)
        return room

    def take(self, start: int, num_left: int) -> int:
        """Tokens of the next chunk of a prompt that has `num_left` tokens from `start` on; 0 when
        there is no room for any.
        """
        num_tokens = self._fitting(start, num_left)
        if num_tokens == 0 and self._is_untouched and self._tokens >= self._block_size:
            num_tokens = min(num_left, self._block_size)  # slow is better than never
        if num_tokens:
            self._is_untouched = False
            self._tokens -= num_tokens
            if self._times is not None:
                self._room_s -= chunk_s(self._times, start, num_tokens)
        return num_tokens

    @property
    def is_full(self) -> bool:
        return self._tokens <= 0 or self._room_s <= 0

    def _fitting(self, start: int, num_left: int) -> int:
        most = self._tokens
        if self._times is not None:
            stretched = tokens_within(self._times, start, self._room_s + self._stretch_s)
            if num_left <= min(most, stretched):
                return num_left
            most = min(most, tokens_within(self._times, start, self._room_s))
        if num_left <= most:
            return num_left
        return most - most % self._block_size
