"""The generate extension of the open inference protocol: one text in, one text (or its pieces) out.

`POST /v2/models/{model}/generate` answers whole, `.../generate_stream` as events, one per piece of
text and without a `[DONE]` after the last. Sampling parameters stand in `parameters` or beside
`text_input`; they are those of a completion.
"""

import dataclasses
from collections.abc import Sequence
from json.encoder import encode_basestring_ascii
from typing import Any, ClassVar

from starlette.types import Scope

from common.errors import InvalidRequest, TandemError
from router.api.answering import Answering, Format
from router.api.calls import Body, GenerateEndpoint
from router.api.kserve.http import kserve_error, named
from router.api.kserve.infer import NAMES, refuse_unanswered
from router.api.kserve.model import VERSION, check_served
from router.generation.ask import DEFAULT_COMPLETION_TOKENS, Ask, Texts
from router.generation.generation import Usage
from router.generation.options import Vocabulary, read_completion_options
from router.reading.fields import Fields
from router.server.exchange import Exchange, to_json
from router.text.text_output import Piece


class Generate(GenerateEndpoint):
    path = "/v2/models/generate"
    streams: ClassVar[bool] = False

    async def answer(self, exchange: Exchange, scope: Scope) -> None:
        check_served(self._service, *named(scope))
        await super().answer(exchange, scope)

    def read(self, body: Body, vocabulary: Vocabulary) -> Ask:
        return read_generate(body.fields, vocabulary, streams=self.streams)

    def error_body(self, error: TandemError) -> bytes:
        return kserve_error(error)

    def error_event(self, error: TandemError) -> bytes:
        return b"data: " + kserve_error(error) + b"\n\n"

    def format(self, answering: Answering, fields: Fields) -> Format:
        return GenerateFormat(answering, fields.text("id"))


class GenerateStream(Generate):
    path = "/v2/models/generate_stream"
    streams = True


def read_generate(fields: Fields, vocabulary: Vocabulary, *, streams: bool = False) -> Ask:
    text = fields.text("text_input")
    if text is None:
        raise InvalidRequest("text_input is required", param="text_input")
    fields.text("id")
    parameters = fields.object("parameters") or {}
    given = fields.rest()
    twice = sorted(given.keys() & parameters.keys())
    if twice:
        raise InvalidRequest(f"{twice[0]} is given twice", param=twice[0])
    sampling = Fields(given | parameters)
    stream = sampling.boolean("stream", streams)
    if stream and not streams:
        raise InvalidRequest("use generate_stream for a stream", param="stream")
    refuse_unanswered(sampling)
    options = read_completion_options(sampling, vocabulary, NAMES)
    sampling.finish()
    return Ask(
        prompt=Texts([text]),
        options=dataclasses.replace(options, stream=stream),
        default_max_tokens=DEFAULT_COMPLETION_TOKENS,
    )


class GenerateFormat:
    def __init__(self, answering: Answering, request_id: str | None) -> None:
        about: dict[str, Any] = {"model_name": answering.model, "model_version": VERSION}
        if request_id is not None:
            about["id"] = request_id
        self._about = about
        self._head = b"data: " + to_json(about)[:-1]
        self._has_many = answering.generation.num_choices > 1

    def first_events(self, num_choices: int) -> bytes:
        return b""

    def events(self, piece: Piece) -> bytes:
        reason = b"null" if piece.finish_reason is None else b'"%s"' % piece.finish_reason.encode()
        index = b',"index":%d' % piece.choice if self._has_many else b""
        text = encode_basestring_ascii(piece.text).encode()
        return b'%s%s,"text_output":%s,"finish_reason":%s}\n\n' % (self._head, index, text, reason)

    def last_events(self, usage: Usage) -> bytes:
        return b""

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> bytes:
        """With n > 1 texts and reasons are lists."""
        texts = [piece.text for piece in pieces]
        reasons = [piece.finish_reason for piece in pieces]
        return to_json(
            {
                **self._about,
                "text_output": texts if self._has_many else texts[0],
                "finish_reason": reasons if self._has_many else reasons[0],
                "num_output_tokens": usage.completion_tokens,
            }
        )
