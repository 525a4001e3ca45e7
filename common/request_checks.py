"""What a worker checks of a request before the engine sees it.

The router has checked all of this before, with better error messages. But whoever reaches a
worker's port can send it anything, so it checks again whatever could hurt it.
"""

import math

import numpy as np
from numpy.typing import NDArray

from common.errors import MalformedMessage
from common.limits import (
    MAX_GRAMMAR_CHARS,
    MAX_ID_CHARS,
    MAX_LISTED_IDS,
    MAX_WIRE_LOGPROBS,
    MAX_WIRE_OUTPUTS,
    MAX_WIRE_SALT_CHARS,
)
from common.messages import GenerateRequest, unpack_tokens
from common.types import SamplingParams

MAX_PRIORITY = 2**31


def checked_tokens(request: GenerateRequest, vocab_size: int) -> NDArray[np.int32]:
    """The request's token ids [num_tokens] int32. Raises MalformedMessage for what cannot be
    meant.
    """
    check_names(request)
    token_ids = unpack_tokens(request.token_ids)
    num_tokens = len(token_ids)
    expect(num_tokens > 0, "a prompt has at least one token")
    expect(0 < request.num_prompt_tokens <= num_tokens, "num_prompt_tokens is out of range")
    expect(int(token_ids.min()) >= 0, "a token id is negative")
    expect(int(token_ids.max()) < vocab_size, f"a token id is not below {vocab_size}")
    expect(0 <= request.output_index < MAX_WIRE_OUTPUTS, "output_index is out of range")
    expect(request.age_s >= 0 and math.isfinite(request.age_s), "age_s is out of range")
    expect(abs(request.priority) <= MAX_PRIORITY, "priority is out of range")
    check_sampling(request.sampling, vocab_size)
    return token_ids


def check_names(request: GenerateRequest) -> None:
    """What this worker, and its log, remember of a request by name."""
    expect(0 < len(request.request_id) <= MAX_ID_CHARS, "request_id is too long, or empty")
    expect(len(request.client) <= MAX_ID_CHARS, "the client's name is too long")
    expect(len(request.cache_salt) <= MAX_WIRE_SALT_CHARS, "cache_salt is too long")


def check_sampling(sampling: SamplingParams, vocab_size: int) -> None:
    expect(1 <= sampling.n <= MAX_WIRE_OUTPUTS, "n is out of range")
    expect(1 <= sampling.max_tokens < 2**31, "max_tokens is out of range")
    expect(0 <= sampling.min_tokens < 2**31, "min_tokens is out of range")
    expect(-(2**63) <= sampling.seed < 2**64, "seed is not a 64-bit number")
    expect(0 <= sampling.top_k < 2**31, "top_k is out of range")
    expect(0 <= sampling.temperature <= 1e6, "temperature is out of range")
    expect(0 < sampling.top_p <= 1, "top_p is out of range")
    expect(0 <= sampling.min_p <= 1, "min_p is out of range")
    expect(0 < sampling.repetition_penalty <= 1e6, "repetition_penalty is out of range")
    for name in ("presence_penalty", "frequency_penalty"):
        expect(abs(getattr(sampling, name)) <= 1e6, f"{name} is out of range")
    for wanted in (sampling.logprobs, sampling.prompt_logprobs):
        expect(wanted is None or 0 <= wanted <= MAX_WIRE_LOGPROBS, "logprobs is out of range")
    ids = [token_id for listed in listed_ids(sampling).values() for token_id in listed]
    expect(len(ids) <= MAX_LISTED_IDS, "too many token ids in the sampling parameters")
    expect(all(0 <= i < vocab_size for i in ids), f"a token id is not below {vocab_size}")
    expect(len(sampling.grammar or "") <= MAX_GRAMMAR_CHARS, "the grammar is too long")
    expect(all(abs(bias) <= 1e6 for _, bias in sampling.logit_bias), "a bias is out of range")


def listed_ids(sampling: SamplingParams) -> dict[str, list[int]]:
    """The token ids of each parameter that lists some."""
    return {
        "logit_bias": [token_id for token_id, _ in sampling.logit_bias],
        "stop_token_ids": list(sampling.stop_token_ids),
        "bad_words": [token_id for word in sampling.bad_words for token_id in word],
    }


def expect(is_so: bool, otherwise: str) -> None:
    if not is_so:
        raise MalformedMessage(otherwise)
