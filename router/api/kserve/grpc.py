"""`inference.GRPCInferenceService`: the open inference protocol v2 over gRPC (Triton's clients).

Requests are parsed here and not by gRPC, so that bytes that are no message get INVALID_ARGUMENT. In
`ModelStreamInfer` every request runs at once and its pieces come as they are made, the last one
marked by the parameter `triton_final_response`, if its input `stream` is true; an error is a
message, and the stream goes on.
"""

import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any

import anyio
import grpc
import grpc.aio
from google.protobuf.json_format import ParseDict

from common.errors import Cancelled, InternalError, InvalidRequest, TandemError
from router.api.kserve.tensors import (
    INPUTS,
    OUTPUTS,
    VERSION,
    Answer,
    Tensor,
    check_parts,
    check_served,
    model_config,
    packed_texts,
    read_infer,
    repository_index,
    start_infer,
    tensor_of,
    unpacked,
    wanted_outputs,
)
from router.api.openai.generate import count_request
from router.generation.generation import TextService
from router.proto import open_inference_pb2 as pb
from router.reading.protobuf_bounds import parsed
from router.server.grpc_peer import grpc_peer

log = logging.getLogger(__name__)

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
        async with _told(context):
            request = parsed(pb.ModelReadyRequest, data)
            is_known = request.name == self._service.model_name
            is_known = is_known and request.version in ("", VERSION)
            return pb.ModelReadyResponse(ready=is_known and self._service.is_ready)

    async def server_metadata(self, data: bytes, context: Any) -> pb.ServerMetadataResponse:
        return pb.ServerMetadataResponse(name="tandem", version=self._version)

    async def model_metadata(self, data: bytes, context: Any) -> pb.ModelMetadataResponse:
        async with _told(context):
            request = parsed(pb.ModelMetadataRequest, data)
            check_served(self._service, request.name, request.version)
            tensor = pb.ModelMetadataResponse.TensorMetadata
            return pb.ModelMetadataResponse(
                name=self._service.model_name,
                versions=[VERSION],
                platform="tandem",
                inputs=[tensor(name=n, datatype=d, shape=s) for n, d, s in INPUTS],
                outputs=[tensor(name=n, datatype=d, shape=s) for n, d, s in OUTPUTS],
            )

    async def model_config(self, data: bytes, context: Any) -> pb.ModelConfigResponse:
        async with _told(context):
            request = parsed(pb.ModelConfigRequest, data)
            check_served(self._service, request.name, request.version)
            config = ParseDict(model_config(self._service.model_name), pb.ModelConfig())
            return pb.ModelConfigResponse(config=config)

    async def repository_index(self, data: bytes, context: Any) -> pb.RepositoryIndexResponse:
        async with _told(context):
            request = parsed(pb.RepositoryIndexRequest, data)
            models = repository_index(self._service)
            if request.ready:
                models = [model for model in models if model["state"] == "READY"]
            return ParseDict({"models": models}, pb.RepositoryIndexResponse())

    async def model_infer(self, data: bytes, context: Any) -> pb.ModelInferResponse:
        async with _told(context), self._counted("ModelInfer"):
            arrived_at = self._service.clock.now()
            request = await self._service.message(pb.ModelInferRequest, data)
            found: list[pb.ModelInferResponse] = []
            async for response in self._answers(request, context, arrived_at, streams=False):
                found.append(response)
            return found[0]

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
        request_id = ""
        try:
            async with self._counted("ModelStreamInfer"):
                arrived_at = self._service.clock.now()
                request = await self._service.message(pb.ModelInferRequest, data)
                request_id = request.id
                async for response in self._answers(request, context, arrived_at, streams=True):
                    async with turn:
                        await context.write(pb.ModelStreamInferResponse(infer_response=response))
        except TandemError as error:
            about = pb.ModelInferResponse(id=request_id)
            async with turn:
                await context.write(
                    pb.ModelStreamInferResponse(
                        error_message=f"{error.code}: {error.message}", infer_response=about
                    )
                )
        finally:
            room.release()

    async def _answers(
        self, request: pb.ModelInferRequest, context: Any, arrived_at: float, *, streams: bool
    ) -> AsyncIterator[pb.ModelInferResponse]:
        service = self._service
        check_served(service, request.model_name, request.model_version)
        for given, what in (
            (request.inputs, "inputs"),
            (request.raw_input_contents, "raw contents"),
            (request.outputs, "outputs"),
            (request.parameters, "parameters"),
        ):
            check_parts(len(given), what)
        wanted = wanted_outputs([output.name for output in request.outputs])
        key = service.keys.check(dict(context.invocation_metadata()))
        tensors = await service.in_thread(partial(_tensors, request))
        call = await read_infer(service, tensors, _parameters(request), key, grpc_peer(context))
        generation = start_infer(
            service,
            call,
            arrived_at=arrived_at,
            timeout_s=context.time_remaining(),
            key=key,
        )
        with contextlib.closing(generation):
            if not (streams and call.options.stream):
                response = self._response(request, Answer.of(await generation.whole()), wanted)
                response.parameters["triton_final_response"].bool_param = True
                yield response
                return
            while not generation.is_done:
                pieces = await generation.pieces()
                for piece in pieces:
                    response = self._response(request, Answer.of([piece]), wanted)
                    is_last = generation.is_done and piece is pieces[-1]
                    response.parameters["triton_final_response"].bool_param = is_last
                    response.parameters["index"].int64_param = piece.choice
                    yield response

    def _response(
        self, request: pb.ModelInferRequest, answer: Answer, wanted: Sequence[str]
    ) -> pb.ModelInferResponse:
        response = pb.ModelInferResponse(
            model_name=self._service.model_name, model_version=VERSION, id=request.id
        )
        for name, datatype, column in answer.columns(wanted):
            response.outputs.add(name=name, datatype=datatype, shape=[len(column)])
            is_text = datatype == "BYTES"
            response.raw_output_contents.append(
                packed_texts(column)
                if is_text
                else b"".join(number.to_bytes(4, "little") for number in column)
            )
        return response

    @contextlib.asynccontextmanager
    async def _counted(self, method: str) -> AsyncIterator[None]:
        error: TandemError | None = Cancelled("the client went away")
        try:
            yield
            error = None
        except TandemError as found:
            error = found
            raise
        except Exception:
            log.exception("%s failed", method)
            error = InternalError("internal error; see the router's log")
            raise error from None
        finally:
            count_request(self._service, f"{SERVICE}/{method}", error)
            error = None  # its traceback holds this frame, and the message with it


@contextlib.asynccontextmanager
async def _told(context: Any) -> AsyncIterator[None]:
    """Errors become the call's status."""
    try:
        yield
    except TandemError as error:
        error.__traceback__ = None  # it would hold the message until the next full collection
        await context.abort(
            getattr(grpc.StatusCode, error.grpc_status),
            error.message,
            trailing_metadata=(("tandem-code", error.code),),
        )


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
