"""The gRPC API: the same rules as over HTTP, health and reflection, deadlines and cancellation."""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from common.errors import DecodeFull, InternalError
from router.proto import inference_pb2 as pb
from router.proto import open_inference_pb2 as kserve
from tests.router.fake_worker import FakeWorker
from tests.router.stack import DEADLINE_S, Stack

METHOD = "/tandem.v1.Inference/Generate"


class Client:
    def __init__(self, stack: Stack) -> None:
        front = stack.router.grpc_front
        assert front is not None
        self.channel = grpc.insecure_channel(f"127.0.0.1:{front.port}")
        self._generate = self.channel.unary_stream(
            METHOD,
            request_serializer=lambda m: m if isinstance(m, bytes) else m.SerializeToString(),
            response_deserializer=pb.GenerateResponse.FromString,
        )

    def stream(self, request: pb.GenerateRequest | bytes, timeout: float = DEADLINE_S) -> Any:
        return self._generate(request, timeout=timeout)

    def ask(self, **fields: Any) -> list[pb.GenerateResponse]:
        return list(self.stream(pb.GenerateRequest(**fields)))

    def refused(self, request: pb.GenerateRequest | bytes) -> tuple[str, str]:
        """Status and code."""
        with pytest.raises(grpc.RpcError) as found:
            list(self.stream(request))
        call: Any = found.value
        trailing = dict(call.trailing_metadata())
        return call.code().name, str(trailing.get("tandem-code"))


@pytest.fixture(scope="module")
def shared(model_dir: Path) -> Iterator[tuple[Stack, Client]]:
    with Stack(model_dir, FakeWorker(), grpc="127.0.0.1:0") as stack:
        client = Client(stack)
        yield stack, client
        client.channel.close()


@pytest.fixture
def stack(shared: tuple[Stack, Client]) -> Iterator[Stack]:
    """One for all tests; a worker that a test stopped is started again."""
    stack = shared[0]
    worker = stack.workers[0]
    yield stack
    stack.until(lambda: worker.num_running == 0)
    stack.do(worker.reset)
    if not stack.router.service.fleet.is_ready():
        stack.call(worker.start, worker.address)
        stack.until(lambda: stack.router.service.fleet.is_ready())


@pytest.fixture
def client(stack: Stack, shared: tuple[Stack, Client]) -> Client:
    return shared[1]


def text_of(responses: list[pb.GenerateResponse], index: int = 0) -> str:
    return "".join(r.text for r in responses if r.index == index)


def test_the_answer_equals_that_over_http(stack: Stack, client: Client) -> None:
    whole = stack.complete("one two three", max_tokens=5, n=2).json()
    responses = client.ask(text="one two three", max_tokens=5, n=2)
    for index in (0, 1):
        assert text_of(responses, index) == whole["choices"][index]["text"]
        reasons = [r.finish_reason for r in responses if r.index == index]
        assert reasons[-1] == "length"
        assert not any(reasons[:-1])
    usage = responses[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (3, 10)
    assert not any(r.HasField("usage") for r in responses[:-1])
    assert text_of(client.ask(token_ids=pb.TokenIds(ids=[500, 501]), max_tokens=2))


def test_chat(stack: Stack, client: Client) -> None:
    messages = [pb.ChatMessage(role="user", content="Hi")]
    responses = client.ask(chat=pb.Chat(messages=messages), max_tokens=4)
    whole = stack.chat("Hi", max_tokens=4).json()
    assert text_of(responses) == whole["choices"][0]["message"]["content"]


def test_logprobs(client: Client) -> None:
    (response,) = client.ask(text="x", max_tokens=1, logprobs=2)
    assert response.tokens[0].logprob == -0.5
    assert len(response.tokens[0].alternatives) == 2


@pytest.mark.parametrize("ids", [[-1], [49152], [2**31], [2**63 - 1], []])
def test_b23_b26_bad_ids(client: Client, ids: list[int]) -> None:
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids))
    assert client.refused(request) == ("INVALID_ARGUMENT", "invalid_request")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"text": ""},
        {"text": "x", "temperature": 3},
        {"text": "x", "temperature": float("nan")},
        {"text": "x", "top_p": float("inf")},
        {"text": "x", "max_tokens": 0},
        {"text": "x", "n": 129},
        {"text": "x", "repetition_penalty": 0},
        {"text": "x", "logit_bias": {-1: 1.0}},
        {"text": "x", "stop": [""]},
        {"chat": pb.Chat()},
        {"chat": pb.Chat(messages=[pb.ChatMessage(role="robot")])},
    ],
    ids=str,
)
def test_bad_parameters(client: Client, fields: dict[str, Any]) -> None:
    status, _ = client.refused(pb.GenerateRequest(**fields))
    assert status == "INVALID_ARGUMENT"


@pytest.mark.parametrize("data", [b"\xff", b"\x12\x02\xff\xfe", b"\x0a\x01\xe9", b"\x12\xff"])
def test_b32_bytes_that_are_no_message(client: Client, data: bytes) -> None:
    assert client.refused(data) == ("INVALID_ARGUMENT", "invalid_request")


def test_b34_b41_too_long(client: Client) -> None:
    over = pb.GenerateRequest(text="x " * 2_500_000)
    assert client.refused(over) == ("INVALID_ARGUMENT", "context_length_exceeded")
    ids = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5] * 1_200_000))
    assert client.refused(ids) == ("INVALID_ARGUMENT", "context_length_exceeded")
    ids = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5] * 2_000_000))
    assert client.refused(ids) == ("INVALID_ARGUMENT", "invalid_request"), "as in JSON"
    huge = pb.GenerateRequest(text="x" * 9_000_000)
    assert client.refused(huge)[0] == "RESOURCE_EXHAUSTED"


def test_b115_errors_have_their_status(stack: Stack, client: Client) -> None:
    worker = stack.workers[0]
    request = pb.GenerateRequest(text="x")
    assert client.refused(pb.GenerateRequest(text="x", model="gpt-x"))[0] == "NOT_FOUND"
    worker.refuses = lambda request: DecodeFull("full")
    assert client.refused(request) == ("RESOURCE_EXHAUSTED", "decode_full")
    worker.refuses = lambda request: InternalError("a defect")
    assert client.refused(request) == ("INTERNAL", "internal_error")
    worker.refuses = lambda request: None
    stack.call(worker.stop)
    stack.until(lambda: not stack.router.service.fleet.is_ready())
    assert client.refused(request) == ("UNAVAILABLE", "not_ready")


def test_a_deadline_reaches_the_worker(stack: Stack, client: Client) -> None:
    worker = stack.workers[0]
    worker.steps_allowed = 0
    with pytest.raises(grpc.RpcError) as found:
        list(client.stream(pb.GenerateRequest(text="x"), timeout=0.3))
    call: Any = found.value
    assert call.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    stack.until(lambda: len(worker.cancelled) == 1)
    deadline_s = worker.submitted[0].deadline_s
    assert deadline_s is not None
    assert deadline_s <= 0.31  # clocks are rounded on the way


def test_b43_cancelling_reaches_the_worker(stack: Stack, client: Client) -> None:
    worker = stack.workers[0]
    worker.steps_allowed = 2
    labels = {"endpoint": "tandem.v1.Inference/Generate", "outcome": "abort"}
    # Other tests' clients also end calls early; the router is theirs too.
    before = stack.metric("tandem_router_requests_total", **labels)
    call = client.stream(pb.GenerateRequest(text="x", max_tokens=50))
    next(call)
    call.cancel()
    stack.until(lambda: len(worker.cancelled) == 1 and worker.num_running == 0)
    stack.until(lambda: stack.metric("tandem_router_requests_total", **labels) == before + 1)


def test_health_follows_readiness(stack: Stack, client: Client) -> None:
    health = health_pb2_grpc.HealthStub(client.channel)
    for service in ("", "tandem.v1.Inference"):
        answer = health.Check(health_pb2.HealthCheckRequest(service=service))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    stack.call(stack.workers[0].stop)
    stack.until(lambda: not stack.router.service.fleet.is_ready())
    answer = health.Check(health_pb2.HealthCheckRequest())
    assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING


def test_reflection_describes_the_service(client: Client) -> None:
    database = ProtoReflectionDescriptorDatabase(client.channel)
    assert "tandem.v1.Inference" in database.get_services()
    service = DescriptorPool(database).FindServiceByName("tandem.v1.Inference")
    assert service.methods_by_name["Generate"].server_streaming


def many(message: Any, field: str, inner: bytes, count: int) -> bytes:
    """A message whose `field` holds `inner` so many times, without building it."""
    number = message.DESCRIPTOR.fields_by_name[field].number
    return (bytes([number << 3 | 2, len(inner)]) + inner) * count


def test_messages_that_hold_too_much_are_refused_before_they_are_built(stack: Stack) -> None:
    front = stack.router.grpc_front
    assert front is not None
    chat = pb.GenerateRequest.DESCRIPTOR.fields_by_name["chat"].number
    inner = many(pb.Chat, "messages", b"", 1_000_000)
    chats = bytes([chat << 3 | 2]) + varint(len(inner)) + inner
    ids = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * 2_000_000)).SerializeToString()
    infers = [
        many(kserve.ModelInferRequest, "inputs", b"\x12\x04BOOL", 800_000),
        many(kserve.ModelInferRequest, "inputs", b"", 300),
        many(kserve.ModelInferRequest, "outputs", b"", 300),
        many(kserve.ModelInferRequest, "raw_input_contents", b"", 300),
        many(kserve.ModelInferRequest, "raw_input_contents", b"", 4_000_000),
        b"\x0b" * 1_000_000,
        b"\x0a\xff\xff\xff\xff\x0f",
    ]
    with grpc.insecure_channel(
        f"127.0.0.1:{front.port}", options=[("grpc.max_send_message_length", -1)]
    ) as channel:
        generate: Any = channel.unary_stream("/tandem.v1.Inference/Generate")
        infer: Any = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        for data in (chats, ids):
            with pytest.raises(grpc.RpcError) as found:
                list(generate(data, timeout=DEADLINE_S))
            assert found.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "more than" in found.value.details()
        name = stack.router.service.model.name.encode()
        head = b"\x0a" + varint(len(name)) + name
        for data in infers:
            with pytest.raises(grpc.RpcError) as found:
                infer(head + data, timeout=DEADLINE_S)
            assert found.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert stack.canary()


def varint(value: int) -> bytes:
    found = b""
    while value > 127:
        found += bytes([value & 127 | 128])
        value >>= 7
    return found + bytes([value])


def test_refused_messages_are_let_go(stack: Stack) -> None:
    """Without a full collection: what was refused is not kept by its own traceback. A message like
    this one takes 35 MB.
    """
    front = stack.router.grpc_front
    assert front is not None
    chat = pb.GenerateRequest.DESCRIPTOR.fields_by_name["chat"].number
    inner = many(pb.Chat, "messages", b"", 190_000)
    data = bytes([chat << 3 | 2]) + varint(len(inner)) + inner
    with grpc.insecure_channel(f"127.0.0.1:{front.port}") as channel:
        generate: Any = channel.unary_stream("/tandem.v1.Inference/Generate")
        gc.disable()
        try:
            sizes = []
            for _ in range(12):
                with pytest.raises(grpc.RpcError, match="more than 4096 messages"):
                    list(generate(data, timeout=DEADLINE_S))
                sizes.append(int(Path("/proc/self/statm").read_text().split()[1]) * 4096)
        finally:
            gc.enable()
    assert sizes[-1] - sizes[3] < 100e6, sizes
