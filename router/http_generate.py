"""POST /v1/chat/completions and /v1/completions: from the body to a generation to the answer."""

from typing import Any

from starlette.types import Scope

from common.errors import InvalidRequest, TandemError
from router.fields import Fields
from router.generation import DEFAULT_COMPLETION_TOKENS, Generation, TextService
from router.http_exchange import Endpoint, Exchange
from router.http_format import DONE, ChatFormat, CompletionFormat, Format
from router.messages import normalized_messages
from router.options import MAX_OUTPUTS, Options, read_chat_options, read_completion_options


class GenerateEndpoint(Endpoint):
    """What the two have in common; `read` and `format` differ."""

    path = ""

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

    async def read(self, fields: Fields) -> tuple[list[list[int]], Options]:
        """Prompts and options. Everything in the body must be read."""
        raise NotImplementedError

    def start(
        self, request_id: str, prompts: list[list[int]], options: Options, arrived_at: float
    ) -> Generation:
        raise NotImplementedError

    def format(self, request_id: str, options: Options) -> Format:
        raise NotImplementedError

    async def _generate(self, exchange: Exchange, body: dict[str, Any], arrived_at: float) -> None:
        fields = Fields(body)
        self._service.check_model(fields.text("model"))
        prompts, options = await self.read(fields)
        request_id = self._service.new_request_id()
        generation = self.start(request_id, prompts, options, arrived_at)
        try:
            form = self.format(request_id, options)
            if options.stream:
                await _stream(exchange, generation, form, options)
            else:
                pieces = await generation.whole()
                await exchange.reply(200, form.whole(pieces, generation.usage()))
        finally:
            generation.close()


async def _stream(
    exchange: Exchange, generation: Generation, form: Format, options: Options
) -> None:
    """Headers go out with the first piece, so that an error before it has its own status."""
    pieces = await generation.pieces()
    await exchange.start_events()
    events = form.first_events(generation.num_choices)
    while True:
        events += b"".join(map(form.events, pieces))
        if generation.is_done:
            break
        await exchange.send_events(events)
        events = b""
        pieces = await generation.pieces()
    if options.include_usage:
        events += form.usage_event(generation.usage())
    await exchange.end_events(events + DONE)


class ChatEndpoint(GenerateEndpoint):
    path = "/v1/chat/completions"

    async def read(self, fields: Fields) -> tuple[list[list[int]], Options]:
        service = self._service
        options = read_chat_options(fields, service.vocabulary)
        given = fields.take("messages")
        add_generation_prompt = fields.boolean("add_generation_prompt", True)
        variables = fields.object("chat_template_kwargs") or {}
        fields.finish()
        return [await chat_prompt(service, given, add_generation_prompt, variables)], options

    def start(
        self, request_id: str, prompts: list[list[int]], options: Options, arrived_at: float
    ) -> Generation:
        return self._service.start(
            request_id, prompts, options, arrived_at=arrived_at, default_max_tokens=None
        )

    def format(self, request_id: str, options: Options) -> Format:
        service = self._service
        return ChatFormat(
            request_id,
            service.model_name,
            service.wall_clock(),
            service.tokenizer.texts,
            include_usage=options.include_usage,
        )


class CompletionEndpoint(GenerateEndpoint):
    path = "/v1/completions"

    async def read(self, fields: Fields) -> tuple[list[list[int]], Options]:
        options = read_completion_options(fields, self._service.vocabulary)
        given = fields.take("prompt")
        fields.finish()
        return await completion_prompts(self._service, fields, given), options

    def start(
        self, request_id: str, prompts: list[list[int]], options: Options, arrived_at: float
    ) -> Generation:
        return self._service.start(
            request_id,
            prompts,
            options,
            arrived_at=arrived_at,
            default_max_tokens=DEFAULT_COMPLETION_TOKENS,
        )

    def format(self, request_id: str, options: Options) -> Format:
        service = self._service
        return CompletionFormat(
            request_id,
            service.model_name,
            service.wall_clock(),
            service.tokenizer.texts,
            include_usage=options.include_usage,
        )


async def chat_prompt(
    service: TextService, given: Any, add_generation_prompt: bool, variables: dict[str, Any]
) -> list[int]:
    if "messages" in variables:
        raise InvalidRequest("chat_template_kwargs must not hold messages", param="messages")
    template = service.tokenizer.template
    messages = normalized_messages(given, takes_parts=template.takes_parts)
    return await service.encode_chat(messages, add_generation_prompt, variables)


async def completion_prompts(service: TextService, fields: Fields, given: Any) -> list[list[int]]:
    """A text, a list of texts, token ids, or a list of lists of them."""
    if isinstance(given, str):
        return [await service.encode_text(given)]
    if given is None:
        raise InvalidRequest("prompt is required", param="prompt")
    if not isinstance(given, list) or not given:
        raise fields.wrong("prompt", "must be a text, token ids, or a list of either", given)
    if isinstance(given[0], str | list) and len(given) > MAX_OUTPUTS:
        raise fields.wrong("prompt", f"must hold at most {MAX_OUTPUTS} prompts", len(given))
    if all(isinstance(prompt, str) for prompt in given):
        return [await service.encode_text(prompt) for prompt in given]
    size = service.vocabulary.size
    if all(isinstance(prompt, list) for prompt in given):
        return [fields.token_ids("prompt", prompt, size) for prompt in given]
    if any(isinstance(prompt, str | list) for prompt in given):
        raise fields.wrong("prompt", "must not mix texts, token ids and lists", given)
    return [fields.token_ids("prompt", given, size)]


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
