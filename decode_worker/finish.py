"""When an output ends by its tokens. (Stop strings are text, and text is the router's.)"""

from common.types import FinishReason, SamplingParams


def finish_reason(
    sampling: SamplingParams, token_id: int, num_output_tokens: int
) -> FinishReason | None:
    """`num_output_tokens` counts `token_id` too. A stop token exactly at the limit is a stop."""
    if token_id in sampling.stop_token_ids and num_output_tokens >= sampling.min_tokens:
        return FinishReason.STOP
    if num_output_tokens >= sampling.max_tokens:
        return FinishReason.LENGTH
    return None
