"""How much one call may ask for, and how many tokens each of its answers may have.

Pure: `Room` is what the model and the workers offer at the moment.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from common.errors import ContextLengthExceeded, InvalidRequest, PromptTooLargeForPool
from common.limits import MAX_OUTPUTS, MAX_SCORES
from common.messages import WorkerState
from router.generation.options import Options, check_products


def check_call(prompts: Sequence[list[int]], options: Options) -> None:
    """What is counted over all outputs of a call. Raises InvalidRequest."""
    n = options.sampling.n
    num_outputs = len(prompts) * n
    if num_outputs > MAX_OUTPUTS:
        raise InvalidRequest(f"more than {MAX_OUTPUTS} outputs in one request", param="n")
    _check_scores(sum(map(len, prompts)) * n, options.sampling.prompt_logprobs)
    check_products(num_outputs, options)


def _check_scores(num_tokens: int, num_top: int | None) -> None:
    """`num_tokens` counts a prompt once for each of its outputs, as the answer does."""
    if num_top is not None and num_tokens * (num_top + 1) > MAX_SCORES:
        raise InvalidRequest(
            f"log-probabilities of {num_tokens} prompt tokens with {num_top} alternatives each are "
            f"too many for one answer; the limit is {MAX_SCORES}",
            param="prompt_logprobs",
        )


@dataclass(frozen=True, slots=True)
class Room:
    """`max_model_len` is for prompt and answer together, `workers` those that decode."""

    max_model_len: int
    workers: Sequence[WorkerState]

    @property
    def pool(self) -> int:
        """Prompt and answer that some worker's idle pool can hold."""
        pools = [state.max_prompt_tokens for state in self.workers]
        return max(pools, default=self.max_model_len)

    def max_tokens(self, num_prompt: int, options: Options, default: int | None) -> int:
        """How many tokens the answer may have. Raises when prompt and answer cannot fit."""
        # an echo without an answer still computes one token, which nobody sees
        asked = options.max_tokens if options.max_tokens != 0 else 1
        self._check_fit(num_prompt, asked, options)
        max_tokens = asked
        if max_tokens is None:
            room = self._room(num_prompt, options)
            max_tokens = min(room, default or room)
        if options.sampling.min_tokens > max_tokens:
            raise InvalidRequest(
                f"min_tokens is {options.sampling.min_tokens}, but only {max_tokens} can be made",
                param="min_tokens",
            )
        return max_tokens

    def _check_fit(self, num_prompt: int, asked: int | None, options: Options) -> None:
        names, limit, pool = options.names, self.max_model_len, self.pool
        if num_prompt == 0:
            raise InvalidRequest("the prompt is empty: it has no tokens", param=names.prompt)
        if num_prompt + (asked or 1) > limit:
            is_prompt = num_prompt + 1 > limit
            wanted = "at least 1 token" if is_prompt else f"{names.max_tokens} of {asked}"
            total = num_prompt + (1 if is_prompt else asked or 1)
            raise ContextLengthExceeded(
                f"the prompt has {num_prompt} tokens, with {wanted} for the answer that is "
                f"{total}; the context holds {limit}",
                param=names.prompt if is_prompt else names.max_tokens,
            )
        if num_prompt + (asked or 1) > pool:
            raise PromptTooLargeForPool(
                f"the prompt has {num_prompt} tokens and its answer {asked or 1}; the KV pool of a "
                f"worker holds {pool}, however idle it is",
                param=names.prompt,
            )

    def _room(self, num_prompt: int, options: Options) -> int:
        """What each of the answers may have where the client does not say."""
        n = options.sampling.n
        room = min(self.max_model_len, self.pool) - num_prompt
        if n == 1:
            return room
        room = min(room, max((room_of_each(num_prompt, n, s) for s in self.workers), default=room))
        if room < 1:
            raise PromptTooLargeForPool(
                f"the prompt has {num_prompt} tokens; the KV pool of a worker cannot hold it "
                f"with {n} answers, however idle it is",
                param="n",
            )
        return room


def room_of_each(num_prompt: int, n: int, state: WorkerState) -> int:
    """Tokens that each of `n` answers can have in an idle pool: full blocks of the prompt are
    shared, all others are each answer's own.
    """
    size, pool = state.block_size, state.blocks
    # a worker of before does not say how many pages of each kind it has
    num_packed = pool.num_packed or max(0, state.max_prompt_tokens // size - 1)
    num_shared = num_prompt // size
    num_first = 1 if num_shared else n
    num_own = (num_packed + num_first - num_shared) // n
    room = (num_shared + num_own) * size - num_prompt
    has_tails = (num_shared + num_own) > 1
    if pool.num_exact and pool.num_exact < num_first + (n if has_tails else 0):
        return min(room, size - num_prompt) if pool.num_exact >= num_first else 0
    return room
