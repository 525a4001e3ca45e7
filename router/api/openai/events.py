"""What chat and completion answers have in common.

What is the same in all events of a stream is encoded once; per token only the text and the choice
are.
"""

from collections.abc import Callable
from typing import Any

from router.api.answering import Answering
from router.generation.generation import Usage
from router.server.exchange import large_json, to_json

DONE = b"data: [DONE]\n\n"


def written(answering: Answering, body: dict[str, Any]) -> bytes:
    """A whole answer."""
    options = answering.options
    has_scores = options.sampling.logprobs is not None or options.prompt_logprobs is not None
    return large_json(body) if has_scores else to_json(body)


def event_head(answering: Answering, call_id: str, kind: str) -> bytes:
    about = {
        "id": call_id,
        "object": kind,
        "created": answering.created,
        "model": answering.model,
    }
    return b"data: " + to_json(about)[:-1] + b',"choices":['


def usage_tail(answering: Answering) -> Callable[[], bytes]:
    """What ends each event of a stream after its choices."""
    if answering.options.has_usage_in_chunks:
        usage = answering.generation.usage
        return lambda: b'],"usage":%s}\n\n' % to_json(usage_object(usage()))
    tail = b'],"usage":null}\n\n' if answering.options.include_usage else b"]}\n\n"
    return lambda: tail


def last_event(answering: Answering, head: bytes, usage: Usage) -> bytes:
    """The usage alone, where it was asked for, and the end."""
    if not answering.options.include_usage:
        return DONE
    return head + b'],"usage":' + to_json(usage_object(usage)) + b"}\n\n" + DONE


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
