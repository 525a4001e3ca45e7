"""`inference.GRPCInferenceService`: the open inference protocol v2 over gRPC (Triton's clients).

Requests are parsed here and not by gRPC, so that bytes that are no message get INVALID_ARGUMENT. In
`ModelStreamInfer` every request runs at once and its pieces come as they are made, the last one
marked by the parameter `triton_final_response`, if its input `stream` is true; an error is a
message, and the stream goes on.
"""

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any

import anyio
import grpc
import grpc.aio
from google.protobuf.json_format import ParseDict

from common.errors import InvalidRequest, TandemError
from common.limits import LARGE_BODY_BYTES
from router.api.calls import grpc_caller
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
from router.api.kserve.tensors import Tensor, packed_texts, tensor_of, unpacked
from router.generation.ask import Ask
from router.generation.generation import Generation
from router.generation.options import Vocabulary
from router.generation.service import TextService
from router.proto import open_inference_pb2 as pb
from router.reading.protobuf_bounds import parsed
from router.server.grpc_calls import counted, told
from router.text.text_output import Piece

SERVICE = "inference.GRPCInferenceService"
_MAX_RUNNING = 1024
"""Requests of one stream that run at the same time; further ones are read when one ends."""


def kserve_handler(service: TextService, version: str) -> Any:
    calls = _Calls(service, version)
    unary: dict[str, Callable[..., Any]] = {
        "ServerLive": calls.server_live,
        "ServerReady": calls.server_ready,
        "ModelReady": calls.model_ready,
        "ServerMetadata": calls.server_metadata,
        "ModelMetadata": calls.model_metadata,
        "ModelConfig": calls.model_config,
        "RepositoryIndex": calls.repository_index,
        "ModelInfer": calls.model_infer,
    }
    handlers = {
        name: grpc.unary_unary_rpc_method_handler(
            call, response_serializer=lambda message: message.SerializeToString()
        )
        for name, call in unary.items()
    }
    handlers["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(
        calls.model_stream_infer,
        response_serializer=lambda message: message.SerializeToString(),
    )
    return grpc.method_handlers_generic_handler(SERVICE, handlers)


class _Calls:
    def __init__(self, service: TextService, version: str) -> None:
        self._service = service
        self._version = version

    async def server_live(self, data: bytes, context: Any) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=True)

    async def server_ready(self, data: bytes, context: Any) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=self._service.is_ready)

    async def model_ready(self, data: bytes, context: Any) -> pb.ModelReadyResponse:
        async with told(context):
            request = parsed(pb.ModelReadyRequest, data)
            is_known = request.name == self._service.model.name
            is_known = is_known and request.version in ("", VERSION)
            return pb.ModelReadyResponse(ready=is_known and self._service.is_ready)

    async def server_metadata(self, data: bytes, context: Any) -> pb.ServerMetadataResponse:
        return pb.ServerMetadataResponse(name="tandem", version=self._version)

    async def model_metadata(self, data: bytes, context: Any) -> pb.ModelMetadataResponse:
        async with told(context):
            request = parsed(pb.ModelMetadataRequest, data)
            check_served(self._service, request.name, request.version)
            tensor = pb.ModelMetadataResponse.TensorMetadata
            return pb.ModelMetadataResponse(
                name=self._service.model.name,
                versions=[VERSION],
                platform="tandem",
                inputs=[tensor(name=n, datatype=d, shape=s) for n, d, s in INPUTS],
                outputs=[tensor(name=n, datatype=d, shape=s) for n, d, s in OUTPUTS],
            )

    async def model_config(self, data: bytes, context: Any) -> pb.ModelConfigResponse:
        async with told(context):
            request = parsed(pb.ModelConfigRequest, data)
            check_served(self._service, request.name, request.version)
            config = ParseDict(model_config(self._service.model.name), pb.ModelConfig())
            return pb.ModelConfigResponse(config=config)

    async def repository_index(self, data: bytes, context: Any) -> pb.RepositoryIndexResponse:
        async with told(context):
            request = parsed(pb.RepositoryIndexRequest, data)
            models = repository_index(self._service)
            if request.ready:
                models = [model for model in models if model["state"] == "READY"]
            return ParseDict({"models": models}, pb.RepositoryIndexResponse())

    async def model_infer(self, data: bytes, context: Any) -> pb.ModelInferResponse:
        async with told(context), self._counted("ModelInfer"):
            arrived_at = self._service.clock.now()
            request = await self._parsed(data)
            with contextlib.closing(await self._begin(request, context, arrived_at)) as generation:
                return await self._whole(request, generation)

    async def model_stream_infer(self, requests: AsyncIterator[bytes], context: Any) -> None:
        turn = anyio.Lock()
        room = anyio.Semaphore(_MAX_RUNNING)
        async with anyio.create_task_group() as group:
            async for data in requests:
                await room.acquire()
                group.start_soon(self._stream_one, data, context, turn, room)

    async def _stream_one(
        self, data: bytes, context: Any, turn: anyio.Lock, room: anyio.Semaphore
    ) -> None:
        """One request of a stream; responses are written by turns."""

        async def write(response: pb.ModelStreamInferResponse) -> None:
            async with turn:
                await context.write(response)

        request = pb.ModelInferRequest()
        try:
            async with self._counted("ModelStreamInfer"):
                arrived_at = self._service.clock.now()
                request = await self._parsed(data)
                async for response in self._pieces(request, context, arrived_at):
                    await write(pb.ModelStreamInferResponse(infer_response=response))
        except TandemError as error:
            await write(
                pb.ModelStreamInferResponse(
                    error_message=f"{error.code}: {error.message}",
                    infer_response=pb.ModelInferResponse(id=request.id),
                )
            )
        finally:
            room.release()

    async def _parsed(self, data: bytes) -> pb.ModelInferRequest:
        parse = partial(parsed, pb.ModelInferRequest, data)
        return await self._service.threads.run_if(len(data) >= LARGE_BODY_BYTES, parse)

    async def _begin(
        self, request: pb.ModelInferRequest, context: Any, arrived_at: float
    ) -> Generation:
        service = self._service
        check_served(service, request.model_name, request.model_version)
        caller = grpc_caller(service, context, arrived_at)
        read = partial(_read, request, service.model.vocabulary)
        is_large = request.ByteSize() >= LARGE_BODY_BYTES
        return await service.begin(await service.threads.run_if(is_large, read), caller)

    async def _pieces(
        self, request: pb.ModelInferRequest, context: Any, arrived_at: float
    ) -> AsyncIterator[pb.ModelInferResponse]:
        with contextlib.closing(await self._begin(request, context, arrived_at)) as generation:
            if not generation.call.options.stream:
                yield await self._whole(request, generation)
                return
            while not generation.is_done:
                pieces = await generation.pieces()
                for piece in pieces:
                    response = self._response(request, [piece])
                    is_last = generation.is_done and piece is pieces[-1]
                    response.parameters["triton_final_response"].bool_param = is_last
                    response.parameters["index"].int64_param = piece.choice
                    yield response

    async def _whole(
        self, request: pb.ModelInferRequest, generation: Generation
    ) -> pb.ModelInferResponse:
        response = self._response(request, await generation.whole())
        response.parameters["triton_final_response"].bool_param = True
        return response

    def _counted(self, method: str) -> contextlib.AbstractAsyncContextManager[None]:
        return counted(f"{SERVICE}/{method}", self._service.metrics.ended)

    def _response(
        self, request: pb.ModelInferRequest, pieces: Sequence[Piece]
    ) -> pb.ModelInferResponse:
        wanted = wanted_outputs([output.name for output in request.outputs])
        response = pb.ModelInferResponse(
            model_name=self._service.model.name, model_version=VERSION, id=request.id
        )
        for name, datatype, column in Answer.of(pieces).columns(wanted):
            response.outputs.add(name=name, datatype=datatype, shape=[len(column)])
            is_text = datatype == "BYTES"
            response.raw_output_contents.append(
                packed_texts(column)
                if is_text
                else b"".join(number.to_bytes(4, "little") for number in column)
            )
        return response


def _read(request: pb.ModelInferRequest, vocabulary: Vocabulary) -> Ask:
    for given, what in (
        (request.inputs, "inputs"),
        (request.raw_input_contents, "raw contents"),
        (request.outputs, "outputs"),
        (request.parameters, "parameters"),
    ):
        check_parts(len(given), what)
    wanted_outputs([output.name for output in request.outputs])
    return read_infer(_tensors(request), _parameters(request), vocabulary)


def _tensors(request: pb.ModelInferRequest) -> list[Tensor]:
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise InvalidRequest(f"{len(raw)} raw contents for {len(request.inputs)} inputs")
    found = []
    for index, tensor in enumerate(request.inputs):
        if raw:
            values = unpacked(tensor.name, tensor.datatype, raw[index])
        else:
            values = [v for _, column in tensor.contents.ListFields() for v in column]
        found.append(tensor_of(tensor.name, tensor.datatype, list(tensor.shape) or None, values))
    return found


def _parameters(request: pb.ModelInferRequest) -> dict[str, Any]:
    found = {}
    for name, parameter in request.parameters.items():
        which = parameter.WhichOneof("parameter_choice")
        if which is not None:
            found[name] = getattr(parameter, which)
    return found
