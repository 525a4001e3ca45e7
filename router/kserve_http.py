"""The open inference protocol v2 over HTTP, under /v2.

Tensors may come in the binary form that Triton's clients use; answers are JSON, which they take as
well.
"""

from typing import Any

from starlette.types import Scope

from common.errors import InvalidRequest, ModelNotFound, NotReady, TandemError
from router.generation import TextService
from router.http_exchange import Endpoint, Exchange
from router.http_generate import count_request, timeout_of
from router.json_body import parse_json_object, shortened
from router.kserve import INPUTS, OUTPUTS, Answer, Tensor, read_infer, start_infer, unpacked

HEADER_LENGTH = "inference-header-content-length"


class Live(Endpoint):
    async def answer(self, exchange: Exchange, scope: Scope) -> None:
        await exchange.reply_json(200, {"live": True})


class ServerMetadata(Endpoint):
    def __init__(self, service: TextService, version: str) -> None:
        super().__init__("/v2", service.new_request_id)
        self._version = version

    async def answer(self, exchange: Exchange, scope: Scope) -> None:
        about = {"name": "tandem", "version": self._version, "extensions": []}
        await exchange.reply_json(200, about)


class ServerReady(Endpoint):
    """Also of a model, where the path names one."""

    def __init__(self, service: TextService) -> None:
        super().__init__("/v2/health/ready", service.new_request_id)
        self._service = service

    async def answer(self, exchange: Exchange, scope: Scope) -> None:
        service = self._service
        service.check_model(scope["path_params"].get("model"))
        if not service.fleet.is_ready() or service.admission.is_draining:
            raise NotReady("; ".join(service.fleet.reasons()) or "the router is shutting down")
        await exchange.reply_json(200, {"ready": True})


class ModelMetadata(Endpoint):
    def __init__(self, service: TextService) -> None:
        super().__init__("/v2/models", service.new_request_id)
        self._service = service

    async def answer(self, exchange: Exchange, scope: Scope) -> None:
        self._service.check_model(scope["path_params"]["model"])
        await exchange.reply_json(
            200,
            {
                "name": self._service.model_name,
                "versions": ["1"],
                "platform": "tandem",
                "inputs": [{"name": n, "datatype": d, "shape": s} for n, d, s in INPUTS],
                "outputs": [{"name": n, "datatype": d, "shape": s} for n, d, s in OUTPUTS],
            },
        )


class ModelInfer(Endpoint):
    path = "/v2/models/infer"

    def __init__(self, service: TextService, max_body_bytes: int) -> None:
        super().__init__(self.path, service.new_request_id)
        self._service = service
        self._max_body_bytes = max_body_bytes

    def ended(self, error: TandemError | None) -> None:
        count_request(self._service, self.path, error)

    async def answer(self, exchange: Exchange, scope: Scope) -> None:
        arrived_at = self._service.clock.now()
        name = scope["path_params"]["model"]
        if name != self._service.model_name:
            raise ModelNotFound(f"the model {shortened(name)} does not exist", param="model")
        body, binary = await self._body(exchange)
        await exchange.unless_gone(lambda: self._infer(exchange, body, binary, arrived_at))

    async def _body(self, exchange: Exchange) -> tuple[dict[str, Any], bytes]:
        """The JSON part, and the raw tensors after it."""
        length = exchange.header(HEADER_LENGTH)
        if length is None:
            return await exchange.json_object(self._max_body_bytes), b""
        data = await exchange.body(self._max_body_bytes)
        if not (length.isascii() and length.isdigit()) or int(length) > len(data):
            raise InvalidRequest(f"{HEADER_LENGTH} {shortened(length)} is not within the body")
        return parse_json_object(data[: int(length)]), data[int(length) :]

    async def _infer(
        self, exchange: Exchange, body: dict[str, Any], binary: bytes, arrived_at: float
    ) -> None:
        parameters = body.get("parameters") or {}
        if not isinstance(parameters, dict):
            raise InvalidRequest("parameters must be an object", param="parameters")
        call = await read_infer(self._service, _tensors(body.get("inputs"), binary), parameters)
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
        answer = Answer.of(pieces)
        columns = (answer.texts, answer.finish_reasons, answer.num_tokens)
        outputs = [
            {"name": name, "datatype": datatype, "shape": [len(pieces)], "data": column}
            for (name, datatype, _), column in zip(OUTPUTS, columns, strict=True)
        ]
        request_id = body.get("id")
        about = {"id": request_id} if isinstance(request_id, str) else {}
        await exchange.reply_json(
            200,
            {
                "model_name": self._service.model_name,
                "model_version": "1",
                **about,
                "outputs": outputs,
            },
        )


def _tensors(given: Any, binary: bytes) -> list[Tensor]:
    if not isinstance(given, list) or not all(isinstance(item, dict) for item in given):
        raise InvalidRequest("inputs must be a list of tensors", param="inputs")
    found = []
    for item in given:
        name, datatype = item.get("name"), item.get("datatype")
        if not isinstance(name, str) or not isinstance(datatype, str):
            raise InvalidRequest("an input needs a name and a datatype", param="inputs")
        parameters = item.get("parameters")
        size = parameters.get("binary_data_size") if isinstance(parameters, dict) else None
        if isinstance(size, int):
            if not 0 <= size <= len(binary):
                raise InvalidRequest(f"the data of {shortened(name)} is cut off", param="inputs")
            values = unpacked(name, datatype, binary[:size])
            binary = binary[size:]
        else:
            values = _flat(item.get("data"))
        found.append(Tensor(name=name, datatype=datatype, shape=[], values=values))
    return found


def _flat(data: Any) -> list[Any]:
    """Values of nested lists in order."""
    if not isinstance(data, list):
        raise InvalidRequest("the data of an input must be a list", param="inputs")
    found: list[Any] = []
    waiting = data[::-1]
    while waiting:
        value = waiting.pop()
        if isinstance(value, list):
            waiting.extend(value[::-1])
        elif isinstance(value, str | int | float | bool):
            found.append(value)
        else:
            raise InvalidRequest("an input holds something that is no value", param="inputs")
    return found
