"""How many prompt tokens a step of this worker may carry, from what is known: a fixed number, a
router's budget, or the step times measured here. Used by `BatchScheduler` alone.
"""

from common.scheduling.chunk_budget import ChunkRoom, chunk_budget, quiet_step_s
from common.scheduling.step_fit import StepFit
from common.scheduling.step_time import StepShape, StepTimes


class ChunkLimit:
    def __init__(
        self, block_size: int, max_tokens: int, *, is_auto: bool, known: StepTimes | None = None
    ) -> None:
        """`known` step times are not measured."""
        self._block_size = block_size
        self._max_tokens = max_tokens
        self._is_auto = is_auto
        self._known = known
        self._fit = StepFit()
        self.told: int | None = None
        """By routers, beside running streams; None when none of them says."""

    @property
    def times(self) -> StepTimes | None:
        return self._known or self._fit.times

    def observe(self, shape: StepShape, duration_s: float) -> None:
        if self._known is None:
            self._fit.observe(shape, duration_s)

    def budget(self, num_decodes: int, num_context_tokens: int, num_prompts: int) -> int:
        """Prompt tokens from position 0 on, beside so many streams, for so many prompts."""
        if num_decodes == 0:
            return self._max_tokens
        if not self._is_auto:
            return max(self._block_size, self._max_tokens - num_decodes)
        if self.told is not None:
            return max(self._block_size, min(self.told, self._max_tokens))
        return chunk_budget(
            self.times,
            None,
            num_decodes,
            num_context_tokens,
            num_prompts=num_prompts,
            block_size=self._block_size,
            max_tokens=self._max_tokens,
        )

    def room(self, num_decodes: int, num_context_tokens: int, num_prompts: int) -> ChunkRoom:
        """The budget of the next step, to be dealt out."""
        budget = self.budget(num_decodes, num_context_tokens, num_prompts)
        if self.times is None or num_decodes == 0 or not self._is_auto:
            return ChunkRoom(budget, self._block_size)
        return ChunkRoom.within(
            self.times,
            budget,
            quiet_step_s(self.times, num_decodes, num_context_tokens),
            block_size=self._block_size,
            max_tokens=self._max_tokens,
        )
