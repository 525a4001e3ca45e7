"""How long a forward pass takes, as a linear model of what is in it.

A worker fits the model to the steps it runs and tells the router; the router predicts times to
first token from it and chooses how many prompt tokens a step may carry beside running streams.

    duration = fixed + prefill tokens + pairs attended by them + decodes + context read by them
"""

from dataclasses import dataclass

from common.scheduling.plan import StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """What a step's duration depends on."""

    num_prefill_tokens: int = 0
    num_pairs: int = 0
    """Query-key pairs of the chunks (`num_pairs` below), together."""
    num_decodes: int = 0
    num_context_tokens: int = 0
    """Tokens in the caches of the decoding outputs, together."""

    @staticmethod
    def of(plan: StepPlan, num_context_tokens: int) -> "StepShape":
        return StepShape(
            num_prefill_tokens=sum(chunk.num_tokens for chunk in plan.chunks),
            num_pairs=sum(num_pairs(chunk.start, chunk.num_tokens) for chunk in plan.chunks),
            num_decodes=len(plan.decodes),
            num_context_tokens=num_context_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Seconds: for any step, and for each unit of `StepShape`. None of them is negative."""

    fixed_s: float
    prefill_token_s: float
    pair_s: float
    decode_s: float
    context_token_s: float

    def step_s(self, shape: StepShape) -> float:
        return (
            self.fixed_s
            + self.prefill_token_s * shape.num_prefill_tokens
            + self.pair_s * shape.num_pairs
            + self.decode_s * shape.num_decodes
            + self.context_token_s * shape.num_context_tokens
        )

    def prefill_s(
        self,
        start: int,
        num_tokens: int,
        chunk_tokens: int,
        num_decodes: int = 0,
        num_context_tokens: int = 0,
    ) -> float:
        """Time to compute `num_tokens` prompt tokens from position `start` on, at most
        `chunk_tokens` (> 0) of them a step, each step beside the given decodes.
        """
        num_steps = -(-num_tokens // chunk_tokens)
        beside = self.decode_s * num_decodes + self.context_token_s * num_context_tokens
        return (
            num_steps * (self.fixed_s + beside)
            + self.prefill_token_s * num_tokens
            + self.pair_s * num_pairs(start, num_tokens)
        )


def num_pairs(start: int, num_tokens: int) -> int:
    return num_tokens * start + num_tokens * (num_tokens + 1) // 2
