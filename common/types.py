"""Words that every part of Tandem shares: ids, sampling parameters, the reasons why a request ends.

A request enters at the router, which turns it into a `GenerateRequest` of token ids. Workers never
see text.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

RequestId = str
"""One client call, one id end to end, minted by the router."""

BlockId = int
"""Index of a block in one worker's pool (packed and exact pages are numbered apart)."""

OutputKey = str
"""One of the n continuations of a request inside a worker: `<request_id>/<output index>`."""


def output_key(request_id: RequestId, output_index: int) -> OutputKey:
    return f"{request_id}/{output_index}"


def output_seed(seed: int, output_index: int) -> int:
    """Seed of one continuation, 64 bits. The same wherever and how often the request is
    resubmitted.
    """
    if output_index == 0:
        return seed & 0xFFFFFFFFFFFFFFFF
    digest = hashlib.blake2b(
        (seed & 0xFFFFFFFFFFFFFFFF).to_bytes(8, "little") + output_index.to_bytes(4, "little"),
        digest_size=8,
    )
    return int.from_bytes(digest.digest(), "little")


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    COLOCATED = "colocated"


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen. Checked by the router; workers check again what could hurt them.

    `temperature` 0 is greedy. `top_k` 0 and `top_p` 1 are off. `stop_token_ids` holds every id that
    ends the request (end of text included, unless the client asked to ignore it). `logprobs` is the
    number of alternatives wanted beside the sampled token's own (None: no logprobs). `min_tokens`
    masks the stop ids until that many tokens are generated. `bad_words` are token sequences whose
    last token is never sampled after the others. `prompt_logprobs` asks for the same as `logprobs`
    for the prompt's tokens. `grammar` (llguidance's form) allows only tokens that keep the output
    a prefix of the language; it rules over bias and `min_tokens`.
    """

    max_tokens: int
    seed: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    n: int = 1
    bad_words: tuple[tuple[int, ...], ...] = ()
    prompt_logprobs: int | None = None
    grammar: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Log-probability of the sampled token and of the most likely alternatives, best first."""

    logprob: float
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]

    def first(self, count: int) -> "TokenLogprobs":
        """With at most `count` alternatives."""
        return TokenLogprobs(
            logprob=self.logprob,
            top_ids=self.top_ids[:count],
            top_logprobs=self.top_logprobs[:count],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLogprobs:
    """Log-probabilities of a prompt's tokens from the second one on, as columns.

    `logprobs` (float32) and `ranks` (int32, 1 is the most likely) have a value per token; `top_ids`
    (int32) and `top_logprobs` (float32) `num_top` per token, best first.
    """

    num_top: int
    logprobs: bytes = b""
    ranks: bytes = b""
    top_ids: bytes = b""
    top_logprobs: bytes = b""

    @staticmethod
    def joined(num_top: int, parts: Iterable["PromptLogprobs"]) -> "PromptLogprobs":
        parts = list(parts)
        return PromptLogprobs(
            num_top=num_top,
            logprobs=b"".join(part.logprobs for part in parts),
            ranks=b"".join(part.ranks for part in parts),
            top_ids=b"".join(part.top_ids for part in parts),
            top_logprobs=b"".join(part.top_logprobs for part in parts),
        )
