"""The gRPC API: `tandem.v1.Inference/Generate`, with the standard health and reflection services.

Messages are parsed here and not by gRPC, so that bytes that are no message get INVALID_ARGUMENT.
The parameters go through the same readers as JSON fields do.
"""

import contextlib
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from common.addresses import listen
from common.environment import tandem_version
from common.errors import ConfigError, InvalidRequest, TandemError
from common.limits import LARGE_BODY_BYTES
from router.api.calls import grpc_caller
from router.api.kserve.grpc import SERVICE as KSERVE
from router.api.kserve.grpc import kserve_handler
from router.generation.ask import DEFAULT_COMPLETION_TOKENS, Ask, Chat, Prompt, Texts, TokenIds
from router.generation.generation import Generation, Usage
from router.generation.options import Vocabulary, read_completion_options
from router.generation.served_model import ServedModel
from router.generation.service import TextService
from router.proto import inference_pb2 as pb
from router.reading.fields import Fields
from router.reading.protobuf_bounds import parsed
from router.reading.protocols import Names
from router.server.grpc_calls import abort, counted, told
from router.text.chat_messages import check_count, normalized_messages
from router.text.text_output import Piece

SERVICE = "tandem.v1.Inference"
ENDPOINT = f"{SERVICE}/Generate"
_STOP_GRACE_S = 1.0
_WITHOUT_KEY = (
    "/grpc.health.v1.Health/",
    f"/{KSERVE}/ServerLive",
    f"/{KSERVE}/ServerReady",
)


class GrpcFront:
    def __init__(self, server: grpc.aio.Server, port: int, servicer: "HealthOfFleet") -> None:
        self._server = server
        self._health = servicer
        self.port = port

    async def start(self) -> None:
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(_STOP_GRACE_S)


def open_grpc(
    address: str,
    service: TextService,
    max_message_bytes: int,
    tls: tuple[bytes, bytes] | None = None,
) -> GrpcFront:
    """Raises ConfigError when the address cannot be had. `tls` is a private key and its chain."""
    listen(address, "--grpc").close()  # gRPC would tell standard error why, but not us
    server = grpc.aio.server(
        interceptors=[_KeyCheck(service)],
        options=[
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.max_send_message_length", -1),
            ("grpc.so_reuseport", 0),
        ],
    )
    generate = grpc.unary_stream_rpc_method_handler(
        _Generate(service).serve, response_serializer=pb.GenerateResponse.SerializeToString
    )
    handler = grpc.method_handlers_generic_handler(SERVICE, {"Generate": generate})
    server.add_generic_rpc_handlers((handler, kserve_handler(service, tandem_version())))
    servicer = HealthOfFleet(service)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    reflection.enable_server_reflection(
        (SERVICE, KSERVE, health.SERVICE_NAME, reflection.SERVICE_NAME), server
    )
    try:
        if tls is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, grpc.ssl_server_credentials([tls]))
    except RuntimeError:
        port = 0
    if port == 0:
        raise ConfigError(f"--grpc {address}: cannot listen: is the port taken?")
    return GrpcFront(server, port, servicer)


class _KeyCheck(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """No call without a key, but for health."""

    def __init__(self, service: TextService) -> None:
        self._service = service

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler = await continuation(details)
        if handler is None or details.method.startswith(_WITHOUT_KEY):
            return handler
        try:
            self._service.access.keys.check(dict(details.invocation_metadata))
        except TandemError as error:
            return _refusing(handler, error)
        return handler


def _refusing(handler: Any, error: TandemError) -> Any:
    """A handler of the same kind that only says no."""

    async def refuse(request: Any, context: Any) -> None:
        await abort(context, error)

    kinds = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }
    return kinds[handler.request_streaming, handler.response_streaming](refuse)


class HealthOfFleet(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """SERVING while a request would succeed. Asked, it looks; `Watch` is not offered."""

    def __init__(self, service: TextService) -> None:
        self._service = service

    async def Check(self, request: Any, context: Any) -> Any:
        if request.service not in ("", SERVICE, KSERVE):
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        states = health_pb2.HealthCheckResponse
        is_ready = self._service.is_ready
        return states(status=states.SERVING if is_ready else states.NOT_SERVING)

    async def Watch(self, request: Any, context: Any) -> Any:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "use Check; Watch is not offered")


class _Generate:
    def __init__(self, service: TextService) -> None:
        self._service = service

    async def serve(self, data: bytes, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        async with told(context), counted(ENDPOINT, self._service.metrics.ended):
            with contextlib.closing(await self._begin(data, context)) as generation:
                async for response in _responses(generation):
                    yield response

    async def _begin(self, data: bytes, context: Any) -> Generation:
        service = self._service
        caller = grpc_caller(service, context, service.clock.now())
        read = partial(_read, data, service.model)
        ask = await service.threads.run_if(len(data) >= LARGE_BODY_BYTES, read)
        return await service.begin(ask, caller)


def _read(data: bytes, model: ServedModel) -> Ask:
    """Raises InvalidRequest or ModelNotFound."""
    request = parsed(pb.GenerateRequest, data)
    model.check_name(request.model or None)
    fields = Fields(_parameters(request))
    kind = request.WhichOneof("prompt")
    names = Names() if kind is None else Names(prompt=kind)
    options = read_completion_options(fields, model.vocabulary, names)
    return Ask(
        prompt=_prompt(request, fields, model.vocabulary),
        options=options,
        default_max_tokens=None if kind == "chat" else DEFAULT_COMPLETION_TOKENS,
    )


async def _responses(generation: Generation) -> AsyncIterator[pb.GenerateResponse]:
    request_id = generation.call.request_id
    while not generation.is_done:
        pieces = await generation.pieces()
        for piece in pieces[:-1]:
            yield _response(request_id, piece)
        last = _response(request_id, pieces[-1])
        if generation.is_done:
            last.usage.CopyFrom(_usage(generation.usage()))
        yield last


def _parameters(request: pb.GenerateRequest) -> dict[str, Any]:
    """The fields that were set, as JSON would hold them."""
    found: dict[str, Any] = {}
    for field, value in request.ListFields():
        if field.name in ("model", "text", "token_ids", "chat"):
            continue
        if field.name == "logit_bias":
            found[field.name] = {str(key): bias for key, bias in value.items()}
        elif field.name in ("stop", "stop_token_ids"):
            found[field.name] = list(value)
        else:
            found[field.name] = value
    return found


def _prompt(request: pb.GenerateRequest, fields: Fields, vocabulary: Vocabulary) -> Prompt:
    match request.WhichOneof("prompt"):
        case "text":
            return Texts([request.text])
        case "token_ids":
            ids = list(request.token_ids.ids)
            return TokenIds([fields.token_ids("token_ids", ids, vocabulary.size)])
        case "chat":
            check_count(request.chat.messages)
            messages = [
                {"role": m.role, "content": m.content, "name": m.name or None}
                for m in request.chat.messages
            ]
            chat = normalized_messages(messages, takes_parts=vocabulary.takes_parts)
            return Chat(messages=chat, variables={})
        case _:
            raise InvalidRequest("a prompt is required: text, token_ids or chat", param="prompt")


def _response(request_id: str, piece: Piece) -> pb.GenerateResponse:
    response = pb.GenerateResponse(
        request_id=request_id,
        index=piece.choice,
        text=piece.text,
        finish_reason="" if piece.finish_reason is None else piece.finish_reason.value,
    )
    for token_id, entry in piece.entries:
        assert entry is not None
        token = response.tokens.add(id=token_id, logprob=entry.logprob)
        for top_id, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True):
            token.alternatives.add(id=top_id, logprob=logprob)
    return response


def _usage(usage: Usage) -> pb.Usage:
    return pb.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
    )
