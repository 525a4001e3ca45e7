"""POST /v1/completions, and /invocations, which takes chats too."""

from typing import Any

from common.errors import InvalidRequest
from common.limits import MAX_OUTPUTS
from router.api.answering import Answering, Format
from router.api.calls import Body, GenerateEndpoint
from router.api.openai.chat import ChatEndpoint
from router.api.openai.completion_format import CompletionFormat
from router.generation.ask import DEFAULT_COMPLETION_TOKENS, Ask, Prompt, Texts, TokenIds
from router.generation.options import Vocabulary, read_completion_options
from router.generation.service import TextService
from router.reading.fields import Fields
from router.reading.protocols import Names


class CompletionEndpoint(GenerateEndpoint):
    path = "/v1/completions"

    def read(self, body: Body, vocabulary: Vocabulary) -> Ask:
        return read_completion(body.fields, vocabulary)

    def format(self, answering: Answering, fields: Fields) -> Format:
        return CompletionFormat(answering)


class Invocations(GenerateEndpoint):
    """Where a hosting platform knows one path only: what the body holds says what it asks for."""

    path = "/invocations"

    def __init__(self, service: TextService, max_body_bytes: int) -> None:
        super().__init__(service, max_body_bytes)
        self._chat = ChatEndpoint(service, max_body_bytes)
        self._completion = CompletionEndpoint(service, max_body_bytes)

    def endpoint_of(self, body: Body) -> GenerateEndpoint:
        if body.fields.has("messages"):
            return self._chat
        if body.fields.has("prompt"):
            return self._completion
        raise InvalidRequest("messages or a prompt must be given", param="messages")


def read_completion(fields: Fields, vocabulary: Vocabulary) -> Ask:
    options = read_completion_options(fields, vocabulary, Names())
    prompt = _prompt(fields, vocabulary.size)
    fields.finish()
    return Ask(prompt=prompt, options=options, default_max_tokens=DEFAULT_COMPLETION_TOKENS)


def _prompt(fields: Fields, vocab_size: int) -> Prompt:
    """A text, a list of texts, token ids, or a list of lists of them."""
    given: Any = fields.take("prompt")
    if isinstance(given, str):
        return Texts([given])
    if given is None:
        raise InvalidRequest("prompt is required", param="prompt")
    if not isinstance(given, list) or not given:
        raise fields.wrong("prompt", "must be a text, token ids, or a list of either", given)
    if isinstance(given[0], str | list) and len(given) > MAX_OUTPUTS:
        raise fields.wrong("prompt", f"must hold at most {MAX_OUTPUTS} prompts", len(given))
    if all(isinstance(prompt, str) for prompt in given):
        return Texts(given)
    if not all(isinstance(prompt, list) for prompt in given):
        if any(isinstance(prompt, str | list) for prompt in given):
            raise fields.wrong("prompt", "must not mix texts, token ids and lists", given)
        given = [given]
    return TokenIds([fields.token_ids("prompt", ids, vocab_size) for ids in given])
