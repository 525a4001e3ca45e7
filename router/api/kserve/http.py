"""The open inference protocol v2 over HTTP, under /v2.

Tensors may come in the binary form that Triton's clients use; answers are JSON, which they take as
well.
"""

from typing import Any

from starlette.types import Scope

from common.errors import InvalidRequest, NotReady, TandemError
from router.api.kserve.tensors import (
    INPUTS,
    MAX_TEXTS,
    OUTPUTS,
    VERSION,
    Answer,
    Tensor,
    check_parts,
    check_served,
    model_config,
    read_infer,
    repository_index,
    start_infer,
    tensor_of,
    unpacked,
    wanted_outputs,
)
from router.api.openai.generate import count_request, timeout_of
from router.generation.generation import TextService
from router.reading.fields import Fields
from router.reading.json_body import shortened
from router.server.exchange import Endpoint, Exchange, to_json

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
                "name": self._service.model_name,
                "versions": [VERSION],
                "platform": "tandem",
                "inputs": [{"name": n, "datatype": d, "shape": s} for n, d, s in INPUTS],
                "outputs": [{"name": n, "datatype": d, "shape": s} for n, d, s in OUTPUTS],
            },
        )


class ModelConfig(_View):
    async def answer(self, exchange: Exchange, scope: Scope) -> None:
        self.check_model(scope)
        await exchange.reply_json(200, model_config(self._service.model_name))


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


class ModelInfer(Endpoint):
    path = "/v2/models/infer"

    def __init__(self, service: TextService, max_body_bytes: int) -> None:
        super().__init__(self.path, service.new_request_id)
        self._service = service
        self._max_body_bytes = max_body_bytes

    def ended(self, error: TandemError | None) -> None:
        count_request(self._service, self.path, error)

    def error_body(self, error: TandemError) -> bytes:
        return kserve_error(error)

    async def answer(self, exchange: Exchange, scope: Scope) -> None:
        arrived_at = self._service.clock.now()
        check_served(self._service, *named(scope))
        body, binary = await self._body(exchange)
        await exchange.unless_gone(lambda: self._infer(exchange, body, binary, arrived_at))

    async def _body(self, exchange: Exchange) -> tuple[dict[str, Any], bytes]:
        """The JSON part, and the raw tensors after it."""
        length = exchange.header(HEADER_LENGTH)
        if length is None:
            return await exchange.json_object(self._max_body_bytes), b""
        data = await exchange.body(self._max_body_bytes)
        is_number = length.isascii() and length.isdigit() and len(length) < 20
        if not is_number or int(length) > len(data):
            raise InvalidRequest(f"{HEADER_LENGTH} {shortened(length)} is not within the body")
        return await exchange.parse(data[: int(length)]), data[int(length) :]

    async def _infer(
        self, exchange: Exchange, body: dict[str, Any], binary: bytes, arrived_at: float
    ) -> None:
        fields = Fields(body)
        request_id = fields.text("id")
        parameters = fields.object("parameters") or {}
        tensors = _tensors(fields.take("inputs"), binary)
        wanted = _wanted(fields.take("outputs"))
        fields.finish()
        call = await read_infer(self._service, tensors, parameters, exchange.key, exchange.peer)
        if call.options.stream:
            raise InvalidRequest("ModelInfer over HTTP does not stream", param="stream")
        generation = start_infer(
            self._service,
            call,
            arrived_at=arrived_at,
            timeout_s=timeout_of(exchange),
            key=exchange.key,
        )
        try:
            pieces = await generation.whole()
        finally:
            generation.close()
        outputs = [
            {"name": name, "datatype": datatype, "shape": [len(pieces)], "data": column}
            for name, datatype, column in Answer.of(pieces).columns(wanted)
        ]
        about = {} if request_id is None else {"id": request_id}
        await exchange.reply_json(
            200,
            {
                "model_name": self._service.model_name,
                "model_version": VERSION,
                **about,
                "outputs": outputs,
            },
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
