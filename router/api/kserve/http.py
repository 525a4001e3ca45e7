"""The open inference protocol v2 over HTTP, under /v2.

Tensors may come in the binary form that Triton's clients use; answers are JSON, which they take as
well.
"""

from collections.abc import Sequence
from typing import Any

from starlette.types import Scope

from common.errors import InvalidRequest, NotReady, TandemError
from router.api.answering import Answering, Format, Unstreamed
from router.api.calls import Body, GenerateEndpoint
from router.api.kserve.infer import check_parts, read_infer
from router.api.kserve.model import (
    INPUTS,
    OUTPUTS,
    VERSION,
    Answer,
    check_served,
    model_config,
    repository_index,
    wanted_outputs,
)
from router.api.kserve.tensors import MAX_TEXTS, Tensor, tensor_of, unpacked
from router.generation.ask import Ask
from router.generation.generation import Usage
from router.generation.options import Vocabulary
from router.generation.service import TextService
from router.reading.fields import Fields
from router.reading.json_body import shortened
from router.server.exchange import Endpoint, Exchange, to_json
from router.text.text_output import Piece

_MAX_INDEX_BYTES = 4096
HEADER_LENGTH = "inference-header-content-length"


def kserve_error(error: TandemError) -> bytes:
    """As the protocol has it: the text alone."""
    return to_json({"error": error.message})


class _View(Endpoint):
    """A GET (or a POST that asks for nothing) that shows something of the service."""

    def __init__(self, service: TextService) -> None:
        super().__init__(type(self).__name__, service.new_request_id)
        self._service = service

    def error_body(self, error: TandemError) -> bytes:
        return kserve_error(error)

    def check_model(self, scope: Scope) -> None:
        check_served(self._service, *named(scope))


def named(scope: Scope) -> tuple[str, str]:
    """The model and the version that a path names."""
    name, versions, version = scope["path_params"]["model"].rpartition("/versions/")
    return (name, version) if versions else (version, "")


class Live(_View):
    async def answer(self, exchange: Exchange, scope: Scope) -> None:
        await exchange.reply_json(200, {"live": True})


class ServerMetadata(_View):
    def __init__(self, service: TextService, version: str) -> None:
        super().__init__(service)
        self._version = version

    async def answer(self, exchange: Exchange, scope: Scope) -> None:
        about = {
            "name": "tandem",
            "version": self._version,
            "extensions": [
                "binary_tensor_data",
                "generate",
                "model_configuration",
                "model_repository",
            ],
        }
        await exchange.reply_json(200, about)


class ServerReady(_View):
    async def answer(self, exchange: Exchange, scope: Scope) -> None:
        if not self._service.is_ready:
            raise NotReady("; ".join(self._service.reasons(exchange.key)))
        await exchange.reply_json(200, {"ready": True})


class ModelReady(ServerReady):
    async def answer(self, exchange: Exchange, scope: Scope) -> None:
        self.check_model(scope)
        await super().answer(exchange, scope)


class ModelMetadata(_View):
    async def answer(self, exchange: Exchange, scope: Scope) -> None:
        self.check_model(scope)
        await exchange.reply_json(
            200,
            {
                "name": self._service.model.name,
                "versions": [VERSION],
                "platform": "tandem",
                "inputs": [{"name": n, "datatype": d, "shape": s} for n, d, s in INPUTS],
                "outputs": [{"name": n, "datatype": d, "shape": s} for n, d, s in OUTPUTS],
            },
        )


class ModelConfig(_View):
    async def answer(self, exchange: Exchange, scope: Scope) -> None:
        self.check_model(scope)
        await exchange.reply_json(200, model_config(self._service.model.name))


class RepositoryIndex(_View):
    async def answer(self, exchange: Exchange, scope: Scope) -> None:
        only_ready = False
        if exchange.has_body():
            fields = Fields(await exchange.json_object(_MAX_INDEX_BYTES))
            only_ready = fields.boolean("ready", False)
            fields.finish()
        index = repository_index(self._service)
        await exchange.reply_json(
            200, [model for model in index if model["state"] == "READY" or not only_ready]
        )


class ModelInfer(GenerateEndpoint):
    path = "/v2/models/infer"

    async def answer(self, exchange: Exchange, scope: Scope) -> None:
        check_served(self._service, *named(scope))
        await super().answer(exchange, scope)

    def check_model(self, fields: Fields) -> None:
        """The path has said it."""

    async def body(self, exchange: Exchange) -> Body:
        """The JSON part, and the raw tensors after it."""
        length = exchange.header(HEADER_LENGTH)
        if length is None:
            return await super().body(exchange)
        data = await exchange.body(self._max_body_bytes)
        is_number = length.isascii() and length.isdigit() and len(length) < 20
        if not is_number or int(length) > len(data):
            raise InvalidRequest(f"{HEADER_LENGTH} {shortened(length)} is not within the body")
        fields = Fields(await exchange.parse(data[: int(length)]))
        return Body(fields, data[int(length) :])

    def read(self, body: Body, vocabulary: Vocabulary) -> Ask:
        return read_body(body, vocabulary)

    def format(self, answering: Answering, fields: Fields) -> Format:
        return InferFormat(answering, fields.text("id"), _wanted(fields.take("outputs")))

    def error_body(self, error: TandemError) -> bytes:
        return kserve_error(error)


def read_body(body: Body, vocabulary: Vocabulary) -> Ask:
    fields = body.fields
    fields.text("id")
    parameters = fields.object("parameters") or {}
    tensors = _tensors(fields.take("inputs"), body.binary)
    _wanted(fields.take("outputs"))
    fields.finish()
    ask = read_infer(tensors, parameters, vocabulary)
    if ask.options.stream:
        raise InvalidRequest("ModelInfer over HTTP does not stream", param="stream")
    return ask


class InferFormat(Unstreamed):
    def __init__(self, answering: Answering, request_id: str | None, wanted: Sequence[str]) -> None:
        self._model = answering.model
        self._about = {} if request_id is None else {"id": request_id}
        self._wanted = wanted

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> bytes:
        outputs = [
            {"name": name, "datatype": datatype, "shape": [len(pieces)], "data": column}
            for name, datatype, column in Answer.of(pieces).columns(self._wanted)
        ]
        return to_json(
            {
                "model_name": self._model,
                "model_version": VERSION,
                **self._about,
                "outputs": outputs,
            }
        )


def _tensors(given: Any, binary: bytes) -> list[Tensor]:
    if not isinstance(given, list) or not all(isinstance(item, dict) for item in given):
        raise InvalidRequest("inputs must be a list of tensors", param="inputs")
    check_parts(len(given), "inputs")
    found = []
    for item in given:
        fields = Fields(item, "inputs.")
        name, datatype = fields.text("name"), fields.text("datatype")
        if name is None or datatype is None:
            raise InvalidRequest("an input needs a name and a datatype", param="inputs")
        shape, data = fields.take("shape"), fields.take("data")
        if shape is None:
            raise InvalidRequest(f"the input {shortened(name)} needs a shape", param=name[:64])
        about = Fields(fields.object("parameters") or {}, "inputs.parameters.")
        size = about.integer("binary_data_size", 0, 2**53 - 1)
        about.finish()
        fields.finish()
        if size is None:
            values = _flat(name, data)
        elif size > len(binary) or data is not None:
            what = "cut off" if data is None else "given twice"
            raise InvalidRequest(f"the data of {shortened(name)} is {what}", param="inputs")
        else:
            values = unpacked(name, datatype, binary[:size])
            binary = binary[size:]
        found.append(tensor_of(name, datatype, shape, values))
    if binary:
        raise InvalidRequest(f"{len(binary)} bytes belong to no input", param="inputs")
    return found


def _wanted(given: Any) -> tuple[str, ...]:
    """Whether they are wanted in the binary form does not matter: JSON is always taken."""
    given = [] if given is None else given
    if not isinstance(given, list) or not all(isinstance(item, dict) for item in given):
        raise InvalidRequest("outputs must be a list of outputs", param="outputs")
    check_parts(len(given), "outputs")
    names = []
    for item in given:
        fields = Fields(item, "outputs.")
        names.append(fields.text("name") or "")
        about = Fields(fields.object("parameters") or {}, "outputs.parameters.")
        about.boolean("binary_data", False)
        about.finish()
        fields.finish()
    return wanted_outputs(names)


def _flat(name: str, data: Any) -> list[Any]:
    """Values of nested lists in order."""
    if not isinstance(data, list):
        raise _wrong(name, "must be a list")
    found: list[Any] = []
    waiting = [data]
    num_lists = 0
    while waiting:
        value = waiting.pop()
        if isinstance(value, list):
            num_lists += 1
            if len(found) + len(waiting) + len(value) > MAX_TEXTS or num_lists > 2 * MAX_TEXTS:
                raise _wrong(name, f"has more than {MAX_TEXTS} elements")
            waiting.extend(reversed(value))
        elif isinstance(value, str | int | float | bool):
            found.append(value)
        else:
            raise _wrong(name, "holds something that is no value")
    return found


def _wrong(name: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"the data of the input {shortened(name)} {what}", param=name[:64])
