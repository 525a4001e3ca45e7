"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API for text and tools."""

from starlette.types import Scope

from common.errors import InvalidRequest, TandemError
from router.api.answering import Answering, Format
from router.api.anthropic.messages_format import (
    MessagesFormat,
    anthropic_error,
    anthropic_error_event,
)
from router.api.anthropic.reader import read_message
from router.api.calls import Body, CallEndpoint, GenerateEndpoint
from router.generation.ask import Ask
from router.generation.options import INT64, Vocabulary
from router.reading.fields import Fields
from router.server.exchange import Exchange


class MessagesEndpoint(GenerateEndpoint):
    path = "/v1/messages"

    def read(self, body: Body, vocabulary: Vocabulary) -> Ask:
        if body.fields.integer("max_tokens", 1, INT64) is None:
            raise InvalidRequest("max_tokens is required", param="max_tokens")
        return read_message(body.fields, vocabulary)

    def format(self, answering: Answering, fields: Fields) -> Format:
        return MessagesFormat(answering)

    def error_body(self, error: TandemError) -> bytes:
        return anthropic_error(error)

    def error_event(self, error: TandemError) -> bytes:
        return anthropic_error_event(error)


class CountTokens(CallEndpoint):
    path = "/v1/messages/count_tokens"

    async def answer(self, exchange: Exchange, scope: Scope) -> None:
        ask = await self.ask(await self.body(exchange))
        (prompt,) = await self._service.model.encode(ask, self._service.max_model_len)
        await exchange.reply_json(200, {"input_tokens": len(prompt)})

    def read(self, body: Body, vocabulary: Vocabulary) -> Ask:
        return read_message(body.fields, vocabulary)

    def error_body(self, error: TandemError) -> bytes:
        return anthropic_error(error)
