"""The large part of a request's parameters, sent and held once for all prompts of a call.

Prompts of one call share these parameters as objects (`dataclasses.replace` keeps them), so whoever
sends a request knows by identity what it has sent already:

    sender:    SharedKeys.hold(sampling) -> key, sent before with ShareParams; release at the end
    receiver:  SharedTable.put(message); joined(request, params) -> the request as it was meant

A receiver says that it understands (`shares_parameters`), so older processes get whole requests.
"""

from dataclasses import dataclass, replace

import numpy as np

from common.errors import MalformedMessage, Overloaded
from common.limits import MAX_SHARED_BYTES, SHARED_FROM_CHARS, SHARED_FROM_IDS
from common.messages import GenerateRequest, ShareParams
from common.request_checks import check_sampling
from common.types import SamplingParams

_Identity = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class LargeParams:
    """Objects that outputs hold in common."""

    logit_bias: tuple[tuple[int, float], ...]
    bad_words: tuple[tuple[int, ...], ...]
    grammar: str | None

    @staticmethod
    def of(sampling: SamplingParams) -> "LargeParams":
        return LargeParams(sampling.logit_bias, sampling.bad_words, sampling.grammar)

    def message(self, key: str) -> ShareParams:
        ids = np.array([token_id for token_id, _ in self.logit_bias], dtype="<i4")
        biases = np.array([bias for _, bias in self.logit_bias], dtype="<f8")
        return ShareParams(
            key=key,
            bias_ids=ids.tobytes(),
            biases=biases.tobytes(),
            bad_words=self.bad_words,
            grammar=self.grammar,
        )


def is_large(sampling: SamplingParams) -> bool:
    num_ids = len(sampling.logit_bias) + sum(map(len, sampling.bad_words))
    return num_ids >= SHARED_FROM_IDS or len(sampling.grammar or "") >= SHARED_FROM_CHARS


def without_large(request: GenerateRequest, key: str) -> GenerateRequest:
    small = replace(request.sampling, logit_bias=(), bad_words=(), grammar=None)
    return replace(request, sampling=small, shared=key)


def joined(request: GenerateRequest, params: LargeParams) -> GenerateRequest:
    sampling = replace(
        request.sampling,
        logit_bias=params.logit_bias,
        bad_words=params.bad_words,
        grammar=params.grammar,
    )
    return replace(request, sampling=sampling, shared="")


@dataclass(slots=True)
class _Held:
    key: str
    params: LargeParams
    """Kept, so that their identity stays theirs."""
    num_users: int = 0


class SharedKeys:
    """At a sender: the names of what it has told, as long as a request uses it."""

    def __init__(self, prefix: str = "") -> None:
        self._prefix = prefix
        self._held: dict[_Identity, _Held] = {}
        self._num_keys = 0

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, sampling: SamplingParams) -> tuple[str, bool]:
        """The key, and whether it is new: then the other side must be told what it means."""
        identity = _identity(sampling)
        held = self._held.get(identity)
        if held is None:
            self._num_keys += 1
            key = f"{self._prefix}{self._num_keys}"
            held = self._held[identity] = _Held(key, LargeParams.of(sampling))
        held.num_users += 1
        return held.key, held.num_users == 1

    def release(self, sampling: SamplingParams) -> str | None:
        """The key, if nobody uses it any more."""
        identity = _identity(sampling)
        held = self._held[identity]
        held.num_users -= 1
        if held.num_users:
            return None
        del self._held[identity]
        return held.key


def _identity(sampling: SamplingParams) -> _Identity:
    return id(sampling.logit_bias), id(sampling.bad_words), id(sampling.grammar)


class SharedTable:
    """At a receiver: what keys mean. Bounded in bytes; what does not fit is not kept, and requests
    that need it are refused as if there were too many.
    """

    def __init__(self, vocab_size: int, max_bytes: int = MAX_SHARED_BYTES) -> None:
        self._vocab_size = vocab_size
        self._max_bytes = max_bytes
        self._params: dict[str, tuple[LargeParams, int]] = {}
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._params)

    def put(self, message: ShareParams) -> LargeParams | None:
        """None when there is no room. Raises MalformedMessage."""
        params = read_params(message, self._vocab_size)
        num_bytes = _num_bytes(message)
        self.drop(message.key)
        if self.num_bytes + num_bytes > self._max_bytes:
            return None
        self._params[message.key] = params, num_bytes
        self.num_bytes += num_bytes
        return params

    def get(self, key: str) -> LargeParams:
        """Raises Overloaded."""
        found = self._params.get(key)
        if found is None:
            raise Overloaded(
                "the parameters of requests under way take more than "
                f"{self._max_bytes} bytes at this worker",
                retry_after_s=1.0,
            )
        return found[0]

    def drop(self, key: str) -> None:
        _, num_bytes = self._params.pop(key, (None, 0))
        self.num_bytes -= num_bytes


def read_params(message: ShareParams, vocab_size: int) -> LargeParams:
    """Raises MalformedMessage for what cannot be meant."""
    if len(message.bias_ids) % 4 or len(message.biases) != 2 * len(message.bias_ids):
        raise MalformedMessage("the columns of a bias differ in length")
    ids = np.frombuffer(message.bias_ids, dtype="<i4").tolist()
    biases = np.frombuffer(message.biases, dtype="<f8").tolist()
    params = LargeParams(
        logit_bias=tuple(zip(ids, biases, strict=True)),
        bad_words=message.bad_words,
        grammar=message.grammar,
    )
    check_sampling(
        SamplingParams(
            max_tokens=1,
            logit_bias=params.logit_bias,
            bad_words=params.bad_words,
            grammar=params.grammar,
        ),
        vocab_size,
    )
    return params


def _num_bytes(message: ShareParams) -> int:
    """About what the objects take."""
    num_ids = len(message.bias_ids) // 4 + sum(map(len, message.bad_words))
    return 200 + 120 * num_ids + len(message.grammar or "")
