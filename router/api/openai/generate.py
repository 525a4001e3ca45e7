"""POST /v1/chat/completions and /v1/completions: from the body to a generation to the answer.

The other endpoints that generate (responses.py, anthropic/messages.py) differ in `read` and
`format` only.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.types import Scope

from common.errors import InvalidRequest, TandemError
from common.limits import MAX_OUTPUTS
from router.api.openai.format import Answering, ChatFormat, CompletionFormat, Format
from router.generation.generation import DEFAULT_COMPLETION_TOKENS, Generation, TextService
from router.generation.options import Options, read_chat_options, read_completion_options
from router.reading.fields import Fields
from router.reading.json_body import shortened
from router.server.exchange import Endpoint, Exchange
from router.text.chat_messages import normalized_messages
from router.text.chat_template import Message
from router.text.text_output import Piece

TIMEOUT_HEADER = "x-request-timeout"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A request that has been read. `texts` holds prompts as they were given, where as texts."""

    prompts: list[list[int]]
    options: Options
    texts: list[str | None] | None = None
    continued: str = ""
    """The last message's words, where the answer is to repeat them (a chat's `echo`)."""


class GenerateEndpoint(Endpoint):
    path = ""
    default_max_tokens: int | None = None

    def __init__(self, service: TextService, max_body_bytes: int) -> None:
        super().__init__(self.path, service.new_request_id)
        self._service = service
        self._max_body_bytes = max_body_bytes

    async def answer(self, exchange: Exchange, scope: Scope) -> None:
        arrived_at = self._service.clock.now()
        body = await exchange.json_object(self._max_body_bytes)
        await exchange.unless_gone(lambda: self._generate(exchange, body, arrived_at))

    def ended(self, error: TandemError | None) -> None:
        count_request(self._service, self.path, error)

    def endpoint_of(self, fields: Fields) -> "GenerateEndpoint":
        """Whose words the body is in."""
        return self

    async def read(self, fields: Fields) -> Ask:
        """Everything in the body must be read."""
        raise NotImplementedError

    def format(self, answering: Answering, fields: Fields) -> Format:
        raise NotImplementedError

    async def _generate(self, exchange: Exchange, body: dict[str, Any], arrived_at: float) -> None:
        service = self._service
        fields = Fields(body)
        endpoint = self.endpoint_of(Fields(body))
        service.check_model(fields.text("model"))
        ask = await endpoint.read(fields)
        options = await service.checked(ask.options, ask.prompts, exchange.key, exchange.peer)
        request_id = service.new_request_id()
        generation = service.start(
            request_id,
            ask.prompts,
            options,
            arrived_at=arrived_at,
            default_max_tokens=endpoint.default_max_tokens,
            timeout_s=timeout_of(exchange),
            key=exchange.key,
        )
        if ask.texts is not None:
            generation.prompt_texts = ask.texts
        try:
            form = endpoint.format(answering(service, request_id, ask, options, generation), fields)
            if options.stream:
                await _stream(exchange, generation, form)
            else:
                pieces = await generation.whole()
                write = partial(form.whole, pieces, generation.usage())
                await exchange.reply(200, await generation.written(pieces, write))
        finally:
            generation.close()


def answering(
    service: TextService, request_id: str, ask: Ask, options: Options, generation: Generation
) -> Answering:
    return Answering(
        call_id=request_id,
        model=service.model_name,
        created=service.wall_clock(),
        texts=service.tokenizer.texts,
        options=options,
        generation=generation,
        splitter=service.splitter(options, generation.prompt_ids(0)),
        new_call_id=service.new_call_id,
        continued=ask.continued,
    )


def timeout_of(exchange: Exchange) -> float | None:
    """Seconds that the client gives the request, from its header."""
    given = exchange.header(TIMEOUT_HEADER)
    if given is None:
        return None
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds < 1e9:
        raise InvalidRequest(f"{TIMEOUT_HEADER} must be seconds above 0, got {shortened(given)}")
    return seconds


async def _stream(exchange: Exchange, generation: Generation, form: Format) -> None:
    """Headers go out with the first piece, so that an error before it has its own status."""
    pieces = await generation.pieces()
    await exchange.start_events()
    events = form.first_events(generation.num_choices)
    while True:
        write = partial(_events, form, pieces)
        events += await generation.written(pieces, write)
        if generation.is_done:
            break
        await exchange.send_events(events)
        events = b""
        pieces = await generation.pieces()
    await exchange.end_events(events + form.last_events(generation.usage()))


def _events(form: Format, pieces: Sequence[Piece]) -> bytes:
    return b"".join(map(form.events, pieces))


class ChatEndpoint(GenerateEndpoint):
    path = "/v1/chat/completions"

    async def read(self, fields: Fields) -> Ask:
        return await read_chat(self._service, fields)

    def format(self, answering: Answering, fields: Fields) -> Format:
        return ChatFormat(answering)


class CompletionEndpoint(GenerateEndpoint):
    path = "/v1/completions"
    default_max_tokens = DEFAULT_COMPLETION_TOKENS

    async def read(self, fields: Fields) -> Ask:
        service = self._service
        options = await service.reading(
            fields, partial(read_completion_options, fields, service.vocabulary)
        )
        given = fields.take("prompt")
        fields.finish()
        prompts = await completion_prompts(self._service, fields, given, options)
        texts: list[str | None] | None = None
        if options.keeps_last is not None:
            pass  # what is left of a prompt is not what the client wrote
        elif isinstance(given, str):
            texts = [given]
        elif all(isinstance(prompt, str) for prompt in given):
            texts = list(given)
        return Ask(prompts=prompts, options=options, texts=texts)

    def format(self, answering: Answering, fields: Fields) -> Format:
        return CompletionFormat(answering)


class Invocations(GenerateEndpoint):
    """Where a hosting platform knows one path only: what the body holds says what it asks for."""

    path = "/invocations"

    def __init__(self, service: TextService, max_body_bytes: int) -> None:
        super().__init__(service, max_body_bytes)
        self._chat = ChatEndpoint(service, max_body_bytes)
        self._completion = CompletionEndpoint(service, max_body_bytes)

    def endpoint_of(self, fields: Fields) -> GenerateEndpoint:
        if fields.take("messages") is not None:
            return self._chat
        if fields.take("prompt") is not None:
            return self._completion
        raise InvalidRequest("messages or a prompt must be given", param="messages")


async def read_chat(
    service: TextService, fields: Fields, places: Sequence[str] | None = None
) -> Ask:
    """A request in the words of chat completions. `places`: what the client calls its messages."""
    options = await service.reading(fields, partial(read_chat_options, fields, service.vocabulary))
    given = fields.take("messages")
    continues = fields.boolean("continue_final_message", False)
    add_generation_prompt = fields.boolean("add_generation_prompt", not continues)
    variables = fields.object("chat_template_kwargs") or {}
    effort = fields.text("reasoning_effort")
    echo = fields.boolean("echo", False)
    fields.finish()
    if continues and add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message needs add_generation_prompt to be false",
            param="continue_final_message",
        )
    if options.tools is not None:
        variables = {"tools": list(options.tools.tools)} | variables
    if effort is not None:
        variables = {"reasoning_effort": effort} | variables
    takes_parts = service.tokenizer.template.takes_parts
    messages = await service.reading(
        fields, partial(normalized_messages, given, takes_parts=takes_parts, places=places)
    )
    prompt = await chat_prompt(
        service,
        messages,
        add_generation_prompt,
        variables,
        continues=continues,
        options=options,
    )
    continued = _words(messages[-1], add_generation_prompt) if echo else ""
    return Ask(prompts=[prompt], options=options, continued=continued)


def _words(message: Message, add_generation_prompt: bool) -> str:
    """Those of a last message that the answer goes on with: of one role, they are one message."""
    if add_generation_prompt and message["role"] != "assistant":
        return ""
    content = message["content"]
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content)


async def chat_prompt(
    service: TextService,
    messages: list[Message],
    add_generation_prompt: bool,
    variables: dict[str, Any],
    *,
    continues: bool = False,
    options: Options | None = None,
) -> list[int]:
    """`messages` as `normalized_messages` gives them."""
    for name in ("messages", "add_generation_prompt"):
        if name in variables:
            raise InvalidRequest(f"chat_template_kwargs must not hold {name}", param=name)
    return await service.encode_chat(
        messages,
        add_generation_prompt,
        variables,
        continue_final_message=continues,
        options=options,
    )


async def completion_prompts(
    service: TextService, fields: Fields, given: Any, options: Options
) -> list[list[int]]:
    """A text, a list of texts, token ids, or a list of lists of them."""
    if isinstance(given, str):
        return await service.encode_texts([given], options)
    if given is None:
        raise InvalidRequest("prompt is required", param="prompt")
    if not isinstance(given, list) or not given:
        raise fields.wrong("prompt", "must be a text, token ids, or a list of either", given)
    if isinstance(given[0], str | list) and len(given) > MAX_OUTPUTS:
        raise fields.wrong("prompt", f"must hold at most {MAX_OUTPUTS} prompts", len(given))
    prompts = await service.reading(
        fields, partial(_listed_prompts, fields, given, service.vocabulary.size)
    )
    if isinstance(prompts[0], str):
        return await service.encode_texts(given, options)
    return [service.cut(ids, options) for ids in prompts]


def _listed_prompts(fields: Fields, given: list[Any], vocab_size: int) -> list[Any]:
    """Texts, or lists of token ids."""
    if all(isinstance(prompt, str) for prompt in given):
        return given
    if not all(isinstance(prompt, list) for prompt in given):
        if any(isinstance(prompt, str | list) for prompt in given):
            raise fields.wrong("prompt", "must not mix texts, token ids and lists", given)
        given = [given]
    return [fields.token_ids("prompt", ids, vocab_size) for ids in given]


def count_request(service: TextService, endpoint: str, error: TandemError | None) -> None:
    metrics = service.metrics
    if error is None:
        metrics.requests.labels(endpoint, "success").inc()
        return
    outcome = "error"
    if error.code == "cancelled":
        outcome = "abort"
    elif error.http_status < 500:
        outcome = "rejected"
    metrics.requests.labels(endpoint, outcome).inc()
    metrics.errors.labels(error.code).inc()
