"""What routers and workers say to each other. Nouns; durations, never instants; token lists as
int32 bytes.

    router  --Watch-->   worker          Watch, then WorkerState whenever it changes
    router  --SelfTest-> worker          SelfTest  ->  <-  SelfTestDone
    router  <-Session->  decode worker   -> Hello, ShareParams, Submit, Route, Cancel,
                                            UnshareParams, ChunkBudget
                                         <- Admitted, PrefillDone, TokenBatch, Failed

What workers say to each other is in common/handoff_messages.py.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from common.errors import MalformedMessage, TandemError, from_code
from common.layout_facts import LayoutFacts
from common.scheduling.step_time import StepTimes
from common.types import (
    FinishReason,
    PromptLogprobs,
    RequestId,
    Role,
    SamplingParams,
    TokenLogprobs,
)
from common.wire import wire_message

PROTOCOL_VERSION = 1


def pack_tokens(token_ids: NDArray[np.int32] | list[int]) -> bytes:
    return np.asarray(token_ids, dtype="<i4").tobytes()


def unpack_tokens(data: bytes) -> NDArray[np.int32]:
    """[num_tokens] int32, read-only. Raises MalformedMessage."""
    if len(data) % 4:
        raise MalformedMessage("token ids are not whole 32-bit words")
    return np.frombuffer(data, dtype="<i4").astype(np.int32, copy=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One request as workers know it. A resubmission carries the tokens generated so far in
    `token_ids`.

    `num_prompt_tokens` is the length of the original prompt. `output_index` is the index of the
    first output that this request stands for (0, unless a single output of n > 1 is resubmitted).
    """

    request_id: RequestId
    token_ids: bytes
    num_prompt_tokens: int
    sampling: SamplingParams
    output_index: int = 0
    priority: int = 0
    cache_salt: str = ""
    deadline_s: float | None = None
    age_s: float = 0.0
    """Time since the router first saw the request; older ones are evicted last."""
    client: str = ""
    """Whose request it is, as the router knows by the API key: waiting is fair between clients."""
    shared: str = ""
    """Not empty: bias, bad words and grammar are those of the `ShareParams` with this key."""


# --- Watch -------------------------------------------------------------------------------------


@wire_message
@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    protocol: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLoad:
    """Packed and exact pages of a pool, counted together: total = free + cached + held."""

    total: int
    free: int
    cached: int
    held: int
    num_packed: int = 0
    """Of each kind, out of the total; 0: a worker of before, which does not say."""
    num_exact: int = 0


@wire_message
@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedLink:
    """A prefill worker whose pages a decode worker cannot read, and why."""

    address: str
    incarnation: str
    reason: str


@wire_message
@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerState:
    """Who a worker is (fixed for an incarnation) and how busy it is."""

    role: Role
    incarnation: str
    pid: int
    metrics: str
    model_fingerprint: str
    layout: str
    block_size: int
    max_model_len: int
    max_prompt_tokens: int
    """Longest prompt plus answer that the idle pool can hold."""
    draining: bool
    blocks: PoolLoad
    running: int
    waiting: int
    num_queued_tokens: int
    """Prompt tokens accepted and not computed yet."""
    num_decodes: int = 0
    """Outputs that get a token in every step."""
    num_context_tokens: int = 0
    """Tokens in the caches of these outputs, together."""
    chunk_tokens: int = 0
    """Prompt tokens that a step may carry at present."""
    step_times: StepTimes | None = None
    """None until enough steps were measured."""
    handoff_s: float = 0.0
    """At a decode worker: what a hand-off adds to the time to first token, measured."""
    shares_parameters: bool = False
    """Whether it understands `ShareParams`."""
    unhealthy: str = ""
    """Why the worker wants no requests although it answers; empty when it is well."""
    heartbeat_s: float = 0.0
    """Its state comes at least that often, changed or not; 0: only when it has changed."""
    facts: LayoutFacts | None = None
    """What `layout` says in words; None: a worker of before."""
    num_ranks: int = 1
    refused_links: tuple[RefusedLink, ...] = ()
    """At a decode worker: the latest ones."""
    protocol: int = PROTOCOL_VERSION


@wire_message
@dataclass(frozen=True, slots=True, kw_only=True)
class KvEvents:
    """Changes of a worker's prefix cache, in order, on its Watch stream.

    `stored` and `removed` hold 16-byte block hashes one after another; removals come first. The
    first message of a stream is a snapshot (several ones, when it is large: only the first has
    `is_snapshot`), so a new stream resynchronises by itself. `sequence` counts the messages of one
    stream from 0 on; a gap means that the stream must be opened anew.
    """

    sequence: int
    stored: bytes = b""
    removed: bytes = b""
    is_snapshot: bool = False


@wire_message
@dataclass(frozen=True, slots=True, kw_only=True)
class SelfTest:
    """To a worker that has failed requests, on a stream of its own: compute something whose result
    is known.
    """

    protocol: int = PROTOCOL_VERSION


@wire_message
@dataclass(frozen=True, slots=True, kw_only=True)
class SelfTestDone:
    """`fault` says what is wrong; empty when nothing is."""

    fault: str = ""


# --- Session -----------------------------------------------------------------------------------


@wire_message
@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """First message of a session: which router this is, and which life of the worker it means to
    talk to.
    """

    router_id: str
    incarnation: str
    protocol: int = PROTOCOL_VERSION


@wire_message
@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    request: GenerateRequest


@wire_message
@dataclass(frozen=True, slots=True, kw_only=True)
class ShareParams:
    """Parameters that several requests share, told before the first of them (in a session), or when
    a prefill worker wants them. Bias is columns: int32 ids, float64 values.
    """

    key: str
    bias_ids: bytes = b""
    biases: bytes = b""
    bad_words: tuple[tuple[int, ...], ...] = ()
    grammar: str | None = None


@wire_message
@dataclass(frozen=True, slots=True, kw_only=True)
class UnshareParams:
    """No request under way, and none to come, uses these."""

    key: str


@wire_message
@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """The decode worker has blocks for the prompt. `num_cached_tokens` of it are in its own prefix
    cache.

    The router answers with a Route, unless `needs_route` is false (nothing is left worth a
    hand-off, or the worker is colocated): then it prefills by itself.
    """

    request_id: RequestId
    num_cached_tokens: int
    needs_route: bool


@wire_message
@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Where the prompt is computed: the address of a prefill worker and its incarnation; None:
    locally.
    """

    request_id: RequestId
    prefill: str | None
    incarnation: str | None = None


@wire_message
@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """The request, or one output of it, is not wanted any more."""

    request_id: RequestId
    output_index: int | None = None
    has_stopped: bool = False
    """All that was asked for is there (the router found a stop string): this is no abort."""


@wire_message
@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkBudget:
    """From the router: at most so many prompt tokens in a step that also carries decodes. Holds
    as long as the session; with several sessions the smallest holds.
    """

    max_tokens: int


@wire_message
@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillDone:
    """The prompt is computed. Precedes the first token in the session. `num_cached_tokens` were not
    computed anew.
    """

    request_id: RequestId
    num_cached_tokens: int
    prompt_logprobs: PromptLogprobs | None = None


@wire_message
@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """Columns over the tokens of one step that belong to this session.

    `finish_reasons[i]` is set on the last token of an output; the worker forgets the request when
    all its outputs have ended. `logprobs` is empty when no row asked for any.
    """

    request_ids: tuple[RequestId, ...]
    output_indices: tuple[int, ...]
    token_ids: tuple[int, ...]
    finish_reasons: tuple[FinishReason | None, ...]
    logprobs: tuple[TokenLogprobs | None, ...] = ()


@wire_message
@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The request (all its outputs) ended in an error; `code` names a class of common/errors.py."""

    request_id: RequestId
    code: str
    message: str
    retry_after_s: float | None = None
    at_prefill: bool = False
    """It went wrong at the prefill worker, or on the way from there."""

    @staticmethod
    def of(request_id: RequestId, error: TandemError, *, at_prefill: bool = False) -> "Failed":
        return Failed(
            request_id=request_id,
            code=error.code,
            message=error.message,
            retry_after_s=error.retry_after_s,
            at_prefill=at_prefill,
        )

    def error(self) -> TandemError:
        return from_code(self.code, self.message, self.retry_after_s)
