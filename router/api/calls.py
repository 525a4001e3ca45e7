"""A call that generates, from the body to the answer: the same steps for every protocol.

    body -> read (the protocol's words to an Ask) -> service.begin -> format (the protocol's form)

Endpoints differ in `read` and `format`, and in how they tell errors.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.types import Scope

from common.errors import InvalidRequest, TandemError
from common.limits import LARGE_BODY_BYTES
from router.api.answering import Answering, Format
from router.generation.ask import Ask, Caller
from router.generation.generation import Generation
from router.generation.options import Vocabulary
from router.generation.service import TextService
from router.reading.fields import Fields
from router.reading.json_body import shortened
from router.server.exchange import Endpoint, Exchange
from router.server.grpc_calls import peer_of
from router.text.text_output import Piece

TIMEOUT_HEADER = "x-request-timeout"
LEAST_TIMEOUT_S = 0.001
MOST_TIMEOUT_S = 1e9


@dataclass(frozen=True, slots=True)
class Body:
    """What a client sent: the fields of a JSON object, and what followed them."""

    fields: Fields
    binary: bytes = b""

    @property
    def is_large(self) -> bool:
        return len(self.binary) >= LARGE_BODY_BYTES or not self.fields.are_small


class CallEndpoint(Endpoint):
    """A POST whose body is read within bounds, and that is over when the client is gone."""

    path = ""

    def __init__(self, service: TextService, max_body_bytes: int) -> None:
        super().__init__(self.path, service.new_request_id)
        self._service = service
        self._max_body_bytes = max_body_bytes

    async def body(self, exchange: Exchange) -> Body:
        return Body(Fields(await exchange.json_object(self._max_body_bytes)))

    def check_model(self, fields: Fields) -> None:
        self._service.model.check_name(fields.text("model"))

    def read(self, body: Body, vocabulary: Vocabulary) -> Ask:
        """Everything in the body must be read. Raises InvalidRequest, in the client's words."""
        raise NotImplementedError

    async def ask(self, body: Body) -> Ask:
        """A large body is read in a thread."""
        self.check_model(body.fields)
        read = partial(self.read, body, self._service.model.vocabulary)
        return await self._service.threads.run_if(body.is_large, read)


class GenerateEndpoint(CallEndpoint):
    async def answer(self, exchange: Exchange, scope: Scope) -> None:
        arrived_at = self._service.clock.now()
        body = await self.body(exchange)
        await exchange.unless_gone(lambda: self._generate(exchange, body, arrived_at))

    def ended(self, error: TandemError | None) -> None:
        self._service.metrics.ended(self.path, error)

    def format(self, answering: Answering, fields: Fields) -> Format:
        raise NotImplementedError

    def endpoint_of(self, body: Body) -> "GenerateEndpoint":
        """Whose words the body is in."""
        return self

    async def _generate(self, exchange: Exchange, body: Body, arrived_at: float) -> None:
        caller = Caller(
            arrived_at=arrived_at,
            key=exchange.key,
            peer=exchange.peer,
            timeout_s=timeout_of(exchange),
        )
        endpoint = self.endpoint_of(body)
        generation = await self._service.begin(await endpoint.ask(body), caller)
        try:
            form = endpoint.format(answering(self._service, generation), body.fields)
            if generation.call.options.stream:
                await _stream(exchange, generation, form)
            else:
                pieces = await generation.whole()
                write = partial(form.whole, pieces, generation.usage())
                await exchange.reply(200, await generation.written(pieces, write))
        finally:
            generation.close()


def answering(service: TextService, generation: Generation) -> Answering:
    call, model = generation.call, service.model
    return Answering(
        call_id=call.request_id,
        model=model.name,
        created=service.wall_clock(),
        texts=model.tokenizer.texts,
        options=call.options,
        generation=generation,
        splitter=model.splitter(call.options, generation.prompt_ids(0)),
        new_call_id=service.new_call_id,
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
    if not LEAST_TIMEOUT_S <= seconds <= MOST_TIMEOUT_S:
        raise InvalidRequest(
            f"{TIMEOUT_HEADER} must be seconds from {LEAST_TIMEOUT_S:g} to {MOST_TIMEOUT_S:g}, got "
            f"{shortened(given)}"
        )
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


def grpc_caller(service: TextService, context: Any, arrived_at: float) -> Caller:
    """Raises Unauthorized."""
    return Caller(
        arrived_at=arrived_at,
        key=service.access.keys.check(dict(context.invocation_metadata())),
        peer=peer_of(context),
        timeout_s=context.time_remaining(),
    )
