"""One error tree. Each leaf knows its answer: code, HTTP status, gRPC status.

Foreign exceptions are translated at the seam that meets them. An error crosses a process as its
code and message (`common.messages.Failed`); `from_code` makes the same class of it again.
"""

from typing import ClassVar


class TandemError(Exception):
    """Something Tandem can explain. `str(error)` is written for the person who reads it."""

    code: ClassVar[str] = "internal_error"
    http_status: ClassVar[int] = 500
    grpc_status: ClassVar[str] = "INTERNAL"

    def __init__(
        self, message: str, *, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class InvalidRequest(TandemError):
    """The client must change the request."""

    code = "invalid_request"
    http_status = 400
    grpc_status = "INVALID_ARGUMENT"


class UnsupportedParameter(InvalidRequest):
    """Well formed, but not something this server does."""

    code = "unsupported_parameter"


class ContextLengthExceeded(InvalidRequest):
    code = "context_length_exceeded"


class GrammarFailed(InvalidRequest):
    """The grammar that the answer must follow compiles, but cannot be followed: it has no end, or
    needs more than a matcher may use.
    """

    code = "grammar_failed"

    @classmethod
    def because(cls, reason: str) -> "GrammarFailed":
        return cls(f"the output's grammar cannot be followed: {reason}")


class PromptTooLargeForPool(InvalidRequest):
    """The prompt and its answer can never fit the KV pool of a worker, however idle it is."""

    code = "prompt_too_large_for_pool"


class Unauthorized(TandemError):
    """No API key, or one that is not known."""

    code = "invalid_api_key"
    http_status = 401
    grpc_status = "UNAUTHENTICATED"


class NotAllowed(TandemError):
    """The caller is known, and this is not its part."""

    code = "not_allowed"
    http_status = 403
    grpc_status = "PERMISSION_DENIED"


class ModelNotFound(TandemError):
    code = "model_not_found"
    http_status = 404
    grpc_status = "NOT_FOUND"


class NotFound(TandemError):
    code = "not_found"
    http_status = 404
    grpc_status = "NOT_FOUND"


class MethodNotAllowed(TandemError):
    code = "method_not_allowed"
    http_status = 405
    grpc_status = "UNIMPLEMENTED"


class RequestTooLarge(TandemError):
    code = "request_too_large"
    http_status = 413
    grpc_status = "RESOURCE_EXHAUSTED"


class HeadersTooLarge(TandemError):
    code = "headers_too_large"
    http_status = 431
    grpc_status = "RESOURCE_EXHAUSTED"


class RequestTimeout(TandemError):
    """The client took too long to send its request."""

    code = "request_timeout"
    http_status = 408
    grpc_status = "DEADLINE_EXCEEDED"


class UnsupportedMediaType(TandemError):
    code = "unsupported_media_type"
    http_status = 415
    grpc_status = "INVALID_ARGUMENT"


class Overloaded(TandemError):
    """Too much is waiting already."""

    code = "overloaded"
    http_status = 429
    grpc_status = "RESOURCE_EXHAUSTED"


class NotReady(TandemError):
    """No worker of a needed role can take the request yet."""

    code = "not_ready"
    http_status = 503
    grpc_status = "UNAVAILABLE"


class Draining(NotReady):
    """The worker finishes what it has and takes nothing new."""

    code = "draining"


class WorkerLost(TandemError):
    """The worker that ran the request is gone or silent."""

    code = "worker_lost"
    http_status = 503
    grpc_status = "UNAVAILABLE"


class DecodeLost(WorkerLost):
    code = "decode_lost"


class PrefillLost(WorkerLost):
    code = "prefill_lost"


class PullFailed(TandemError):
    """A read of pages ended in an error, or did not end in time."""

    code = "pull_failed"
    http_status = 503
    grpc_status = "UNAVAILABLE"


class PageRefused(TandemError):
    """A page that arrived is not the page that was asked for (stale, torn or foreign), again and
    again.
    """

    code = "page_refused"
    http_status = 503
    grpc_status = "UNAVAILABLE"


class DecodeFull(Overloaded):
    """The decode worker has no room and its waiting line is full."""

    code = "decode_full"


class Preempted(TandemError):
    """Evicted from the pool to make room for older requests; resubmit prompt and tokens so far."""

    code = "preempted"
    http_status = 503
    grpc_status = "UNAVAILABLE"


class LayoutMismatch(TandemError):
    """Two workers do not store KV in the same way; the message names both and how to repair it."""

    code = "layout_mismatch"
    http_status = 503
    grpc_status = "FAILED_PRECONDITION"


class Cancelled(TandemError):
    code = "cancelled"
    http_status = 499
    grpc_status = "CANCELLED"


class DeadlineExceeded(TandemError):
    code = "deadline_exceeded"
    http_status = 504
    grpc_status = "DEADLINE_EXCEEDED"


class MalformedMessage(TandemError):
    """An internal message that cannot be what its sender meant."""

    code = "malformed_message"
    grpc_status = "INVALID_ARGUMENT"


class UnsupportedModel(TandemError):
    """The checkpoint asks for something the engine does not have; the message names it."""

    code = "unsupported_model"


class ConfigError(TandemError):
    """A flag, a configuration key or the machine does not allow what was asked for."""

    code = "config_error"


class InternalError(TandemError):
    """A defect of ours. The message is safe to show."""


def _leaves(cls: type[TandemError]) -> dict[str, type[TandemError]]:
    found = {cls.code: cls}
    for child in cls.__subclasses__():
        found |= _leaves(child)
    return found


BY_CODE: dict[str, type[TandemError]] = _leaves(TandemError)
BY_CODE["internal_error"] = InternalError


def first_of(group: BaseExceptionGroup[TandemError]) -> TandemError:
    """The error that ended a group of tasks."""
    found: BaseException = group
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    assert isinstance(found, TandemError)
    return found


def from_code(code: str, message: str, retry_after_s: float | None = None) -> TandemError:
    """The error another process sent. An unknown code (a newer peer) becomes `InternalError`."""
    return BY_CODE.get(code, InternalError)(message, retry_after_s=retry_after_s)
