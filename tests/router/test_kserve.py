"""The open inference protocol v2, over gRPC and HTTP."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from router.api.kserve.tensors import packed_texts, unpacked
from router.proto import open_inference_pb2 as pb
from tests.router.fake_worker import FakeWorker
from tests.router.stack import DEADLINE_S, Stack

SERVICE = "/inference.GRPCInferenceService/"
INPUT = pb.ModelInferRequest.InferInputTensor


@pytest.fixture(scope="module")
def stack(model_dir: Path) -> Iterator[Stack]:
    with Stack(model_dir, FakeWorker(), grpc="127.0.0.1:0") as running:
        yield running


@pytest.fixture(scope="module")
def channel(stack: Stack) -> Iterator[grpc.Channel]:
    front = stack.router.grpc_front
    assert front is not None
    with grpc.insecure_channel(f"127.0.0.1:{front.port}") as found:
        yield found


def call(channel: grpc.Channel, name: str, request: Any) -> Any:
    kind = getattr(pb, f"{name}Response")
    method: Callable[..., Any] = channel.unary_unary(
        SERVICE + name,
        request_serializer=lambda m: m if isinstance(m, bytes) else m.SerializeToString(),
        response_deserializer=kind.FromString,
    )
    return method(request, timeout=DEADLINE_S)


def request_for(stack: Stack, *texts: str, stream: bool = False, **parameters: Any) -> Any:
    request = pb.ModelInferRequest(model_name=stack.router.service.model.name, id="mine")
    request.inputs.append(INPUT(name="text_input", datatype="BYTES", shape=[len(texts)]))
    request.inputs.append(INPUT(name="stream", datatype="BOOL", shape=[1]))
    sampling = json.dumps(parameters)
    request.inputs.append(INPUT(name="sampling_parameters", datatype="BYTES", shape=[1]))
    raw = [packed_texts(texts), b"\1" if stream else b"\0", packed_texts([sampling])]
    request.raw_input_contents.extend(raw)
    return request


def texts_of(response: Any) -> list[str]:
    index = [output.name for output in response.outputs].index("text_output")
    return [t.decode() for t in unpacked("", "BYTES", response.raw_output_contents[index])]


def status_of(found: Any) -> str:
    return str(found.value.code().name)


def test_health_and_metadata(stack: Stack, channel: grpc.Channel) -> None:
    name = stack.router.service.model.name
    assert call(channel, "ServerLive", pb.ServerLiveRequest()).live
    assert call(channel, "ServerReady", pb.ServerReadyRequest()).ready
    assert call(channel, "ModelReady", pb.ModelReadyRequest(name=name)).ready
    assert not call(channel, "ModelReady", pb.ModelReadyRequest(name="other")).ready
    assert call(channel, "ServerMetadata", pb.ServerMetadataRequest()).name == "tandem"
    about = call(channel, "ModelMetadata", pb.ModelMetadataRequest(name=name))
    assert [tensor.name for tensor in about.inputs] == [
        "text_input",
        "stream",
        "sampling_parameters",
    ]
    with pytest.raises(grpc.RpcError) as found:
        call(channel, "ModelMetadata", pb.ModelMetadataRequest(name="other"))
    assert status_of(found) == "NOT_FOUND"


def test_texts_in_and_out(stack: Stack, channel: grpc.Channel) -> None:
    response = call(channel, "ModelInfer", request_for(stack, "a b c", "d e f", max_tokens=3))
    assert texts_of(response) == ["a b c", "d e f"]
    assert response.id == "mine"
    reasons = unpacked("", "BYTES", response.raw_output_contents[1])
    assert reasons == [b"length", b"length"]
    assert unpacked("", "INT32", response.raw_output_contents[2]) == [3, 3]


def test_numbers_as_texts_and_parameters_of_the_request(
    stack: Stack, channel: grpc.Channel
) -> None:
    response = call(channel, "ModelInfer", request_for(stack, "a b c", max_tokens="2", n="2"))
    assert texts_of(response) == ["a b", "a b"]
    request = request_for(stack, "a b c")
    request.parameters["max_tokens"].int64_param = 1
    assert texts_of(call(channel, "ModelInfer", request)) == ["a"]
    request = pb.ModelInferRequest(model_name=stack.router.service.model.name)
    tensor = request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    tensor.contents.bytes_contents.append(b"a b c")
    tensor = request.inputs.add(name="max_tokens", datatype="INT32", shape=[1])
    tensor.contents.int_contents.append(2)
    assert texts_of(call(channel, "ModelInfer", request)) == ["a b"]


def test_a_stream_carries_several_requests(stack: Stack, channel: grpc.Channel) -> None:
    method: Callable[..., Any] = channel.stream_stream(
        f"{SERVICE}ModelStreamInfer",
        request_serializer=lambda m: m if isinstance(m, bytes) else m.SerializeToString(),
        response_deserializer=pb.ModelStreamInferResponse.FromString,
    )
    wrong = request_for(stack, "x", max_tokens=0)
    wrong.id = "wrong"
    other = request_for(stack, "d e f", max_tokens=3)
    other.id = "whole"
    requests = [request_for(stack, "a b c", stream=True, max_tokens=3), wrong, other, b"\xff"]
    texts: dict[str, list[str]] = {}
    errors = []
    final = []
    for message in method(iter(requests), timeout=DEADLINE_S):
        response = message.infer_response
        if message.error_message:
            errors.append((response.id, message.error_message.partition(":")[0]))
            continue
        texts.setdefault(response.id, []).extend(texts_of(response))
        if response.parameters["triton_final_response"].bool_param:
            final.append(response.id)
    assert texts == {"mine": ["a", " b", " c"], "whole": ["d e f"]}
    assert sorted(final) == ["mine", "whole"]
    assert sorted(errors) == [("", "invalid_request"), ("wrong", "invalid_request")]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda request: request.inputs.pop(0),
        lambda request: request.raw_input_contents.__setitem__(0, b"\xff\xff\xff\xff"),
        lambda request: request.raw_input_contents.__setitem__(2, packed_texts(["{"])),
        lambda request: request.raw_input_contents.__setitem__(2, packed_texts(['{"tempo": 1}'])),
        lambda request: setattr(request.inputs[0], "datatype", "FP16"),
        lambda request: request.parameters["nonsense"].__setattr__("bool_param", True),
    ],
)
def test_wrong_requests_are_refused(
    stack: Stack, channel: grpc.Channel, spoil: Callable[[Any], Any]
) -> None:
    request = request_for(stack, "a")
    spoil(request)
    with pytest.raises(grpc.RpcError) as found:
        call(channel, "ModelInfer", request)
    assert status_of(found) == "INVALID_ARGUMENT"
    assert stack.canary()


def test_over_http(stack: Stack) -> None:
    name = stack.router.service.model.name
    assert stack.http.get("/v2").json()["name"] == "tandem"
    assert stack.http.get("/v2/health/live").json() == {"live": True}
    assert stack.http.get("/v2/health/ready").status_code == 200
    assert stack.http.get(f"/v2/models/{name}/ready").status_code == 200
    assert stack.http.get("/v2/models/other/ready").status_code == 404
    assert stack.http.get(f"/v2/models/{name}").json()["outputs"][0]["name"] == "text_output"
    path = f"/v2/models/{name}/infer"
    text: dict[str, Any] = {"name": "text_input", "datatype": "BYTES", "shape": [1, 2]}
    text["data"] = [["a b", "c d"]]
    body = {"id": "7", "inputs": [text], "parameters": {"max_tokens": 2}}
    answer = stack.http.post(path, json=body).json()
    assert (answer["id"], answer["outputs"][0]["data"]) == ("7", ["a b", "c d"])
    raw = packed_texts(["a b"])
    text = {
        "name": "text_input",
        "datatype": "BYTES",
        "shape": [1],
        "parameters": {"binary_data_size": len(raw)},
    }
    head = json.dumps({"inputs": [text], "parameters": {"max_tokens": 2}}).encode()
    headers = {"inference-header-content-length": str(len(head))}
    answer = stack.http.post(path, content=head + raw, headers=headers).json()
    assert answer["outputs"][0]["data"] == ["a b"]
    wrongs: list[Any] = [{}, {"inputs": 5}, {"inputs": [{}]}, {"inputs": [text]}]
    for wrong in wrongs:
        assert stack.http.post(path, json=wrong).status_code == 400


def text_of_error(response: Any) -> str:
    """T24: in this protocol an error is a text, and nothing else."""
    body = response.json()
    assert body.keys() == {"error"}
    assert isinstance(body["error"], str)
    return str(body["error"])


def infer(stack: Stack, *inputs: dict[str, Any], **body: Any) -> Any:
    path = f"/v2/models/{stack.router.service.model.name}/infer"
    return stack.http.post(path, json={"inputs": list(inputs), **body})


def tensor(name: str, datatype: str, *data: Any, shape: Any = None) -> dict[str, Any]:
    shape = [len(data)] if shape is None else shape
    return {"name": name, "datatype": datatype, "shape": shape, "data": list(data)}


TEXT = tensor("text_input", "BYTES", "a b c")


@pytest.mark.parametrize(
    ("inputs", "param"),
    [
        ([tensor("text_input", "BYTES", 600_000_000)], "text_input"),
        ([tensor("text_input", "BYTES", 10**18)], "text_input"),
        ([tensor("text_input", "BYTES", 5)], "text_input"),
        ([tensor("text_input", "BYTES", True)], "text_input"),
        ([TEXT, tensor("max_tokens", "BYTES", 50_000)], "max_tokens"),
        ([TEXT, tensor("sampling_parameters", "BYTES", 7)], "sampling_parameters"),
        ([TEXT, tensor("sampling_parameters", "INT32", 7)], "sampling_parameters"),
        ([TEXT, tensor("max_tokens", "INT8", 128)], "max_tokens"),
        ([TEXT, tensor("max_tokens", "INT32", 2.5)], "max_tokens"),
        ([TEXT, tensor("max_tokens", "INT32", "2")], "max_tokens"),
        ([TEXT, tensor("max_tokens", "UINT64", 10**20)], "max_tokens"),
        ([TEXT, tensor("temperature", "FP32", 1e39)], "temperature"),
        ([TEXT, tensor("ignore_eos", "BOOL", 1)], "ignore_eos"),
        ([TEXT, tensor("max_tokens", "INT32", True)], "max_tokens"),
        ([TEXT, tensor("max_tokens", "INT4", 1)], "max_tokens"),
        ([tensor("text_input", "BYTES", "a", shape=[2])], "text_input"),
        ([tensor("text_input", "BYTES", "a", shape=[-1])], "text_input"),
        ([tensor("text_input", "BYTES", "a", shape=[1] * 100)], "text_input"),
        ([tensor("text_input", "BYTES", "a", shape="1")], "text_input"),
        ([tensor("text_input", "BYTES", *["a"] * 1025)], "text_input"),
        ([TEXT, TEXT], "text_input"),
        ([{**TEXT, "format": 1}], "inputs.format"),
        (
            [{**TEXT, "parameters": {"shared_memory_size": 1}}],
            "inputs.parameters.shared_memory_size",
        ),
        ([TEXT, tensor("logprobs", "INT32", 2)], "logprobs"),
    ],
)
def test_tensors_that_are_not_what_they_say(
    stack: Stack, inputs: list[dict[str, Any]], param: str
) -> None:
    response = infer(stack, *inputs)
    assert response.status_code == 400
    assert param in text_of_error(response)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tempo": 1}, "tempo"),
        ({"id": 5}, "id"),
        ({"parameters": {"logprobs": 1}}, "logprobs"),
        ({"parameters": {"return_token_ids": True}}, "return_token_ids"),
        ({"parameters": {"max_tokens": 1, "stream_options": {}}}, "stream_options"),
        ({"outputs": [{"name": "logits"}]}, "logits"),
        ({"outputs": ["text_output"]}, "outputs"),
        ({"outputs": [{"name": "text_output"}] * 2}, "text_output"),
        ({"outputs": [{"name": "text_output", "parameters": {"classification": 3}}]}, None),
    ],
)
def test_nothing_in_a_call_is_ignored(
    stack: Stack, body: dict[str, Any], param: str | None
) -> None:
    response = infer(stack, TEXT, **body)
    assert response.status_code == 400
    assert (param or "classification") in text_of_error(response)


def test_the_outputs_that_are_asked_for(stack: Stack, channel: grpc.Channel) -> None:
    asked = [{"name": "text_output", "parameters": {"binary_data": True}}]
    answer = infer(stack, TEXT, parameters={"max_tokens": 2}, outputs=asked).json()
    assert [(o["name"], o["data"]) for o in answer["outputs"]] == [("text_output", ["a b"])]
    request = request_for(stack, "a b c", max_tokens=2)
    request.outputs.add(name="num_output_tokens")
    response = call(channel, "ModelInfer", request)
    assert [o.name for o in response.outputs] == ["num_output_tokens"]
    assert unpacked("", "INT32", response.raw_output_contents[0]) == [2]
    request.outputs.add(name="logits")
    with pytest.raises(grpc.RpcError) as found:
        call(channel, "ModelInfer", request)
    assert status_of(found) == "INVALID_ARGUMENT"


def test_texts_that_look_like_numbers_stay_texts(stack: Stack) -> None:
    parameters = {"max_tokens": "2", "stop": "1", "cache_salt": "5", "user": "true"}
    answer = infer(stack, TEXT, parameters=parameters)
    assert answer.status_code == 200, answer.text
    assert answer.json()["outputs"][0]["data"] == ["a b"]


# --- generate -------------------------------------------------------------------------------------


def generate(stack: Stack, path: str = "generate", **body: Any) -> Any:
    return stack.http.post(f"/v2/models/{stack.router.service.model.name}/{path}", json=body)


def test_generate_answers_one_text(stack: Stack) -> None:
    parameters = {"max_tokens": 3, "temperature": 0}
    answer = generate(stack, id="mine", text_input="x y z", parameters=parameters).json()
    assert answer == {
        "model_name": stack.router.service.model.name,
        "model_version": "1",
        "id": "mine",
        "text_output": stack.complete("x y z", max_tokens=3).json()["choices"][0]["text"],
        "finish_reason": "length",
        "num_output_tokens": 3,
    }
    assert generate(stack, text_input="x y z", max_tokens=3).json()["num_output_tokens"] == 3


@pytest.mark.parametrize("n", [1, 2])
def test_generate_stream_joins_to_the_whole_text(stack: Stack, n: int) -> None:
    body: dict[str, Any] = {"text_input": "x y z", "max_tokens": 4, "n": n, "seed": 1}
    response = generate(stack, "generate_stream", **body, stream=True)
    assert response.headers["content-type"] == "text/event-stream"
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line]
    whole = generate(stack, **body).json()["text_output"]
    for index in range(n):
        own = [event for event in events if event.get("index", 0) == index]
        text = "".join(event["text_output"] for event in own)
        assert text == (whole if n == 1 else whole[index])
        assert [e["finish_reason"] for e in own if e["finish_reason"]] == ["length"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text_input"),
        ({"text_input": ["x"]}, "text_input"),
        ({"text_input": "x", "stream": True}, "stream"),
        ({"text_input": "x", "parameters": [1]}, "parameters"),
        ({"text_input": "x", "max_tokens": 1, "parameters": {"max_tokens": 2}}, "max_tokens"),
        ({"text_input": "x", "no_such_field": 1}, "no_such_field"),
        ({"text_input": ""}, "prompt"),
        ({"text_input": "x", "logprobs": 1}, "logprobs"),
    ],
)
def test_generate_refuses_by_name(stack: Stack, body: dict[str, Any], param: str) -> None:
    response = generate(stack, **body)
    assert response.status_code == 400
    assert param in text_of_error(response)
    assert stack.http.post("/v2/models/nobody/generate", json={}).status_code == 404
    name = stack.router.service.model.name
    assert stack.http.get(f"/v2/models/{name}/generate").status_code == 405


def test_t24_every_error_has_the_protocol_s_own_form(stack: Stack) -> None:
    name = stack.router.service.model.name
    for method, path, status in (
        ("GET", "/v2/models/other", 404),
        ("GET", "/v2/models/other/config", 404),
        ("GET", f"/v2/models/{name}/versions/2", 404),
        ("GET", "/v2/nothing", 404),
        ("GET", "/v2/models", 404),
        ("POST", "/v2/models", 404),
        ("DELETE", "/v2", 405),
        ("GET", f"/v2/models/{name}/infer", 405),
        ("POST", "/v2/models/other/infer", 404),
        ("POST", f"/v2/models/{name}/infer", 400),
        ("POST", f"/v2/models/{name}/generate", 400),
        ("POST", f"/v2/models/{name}/generate_stream", 400),
        ("POST", "/v2/repository/index", 400),
    ):
        response = stack.http.request(method, path, content=b"{" if method == "POST" else None)
        assert response.status_code == status, path
        assert text_of_error(response)


def test_t24_configuration_and_index(stack: Stack, channel: grpc.Channel) -> None:
    name = stack.router.service.model.name
    shown = stack.http.get(f"/v2/models/{name}/config").json()
    assert shown["input"][0] == {
        "name": "text_input",
        "data_type": "TYPE_STRING",
        "dims": [-1],
        "optional": False,
    }
    assert shown["model_transaction_policy"] == {"decoupled": True}
    config = call(channel, "ModelConfig", pb.ModelConfigRequest(name=name)).config
    assert (config.name, config.input[1].data_type) == (name, pb.TYPE_BOOL)
    assert [output.name for output in config.output] == [o["name"] for o in shown["output"]]
    ready = {"name": name, "version": "1", "state": "READY", "reason": ""}
    assert stack.http.post("/v2/repository/index").json() == [ready]
    assert stack.http.post("/v2/repository/index", json={"ready": True}).json() == [ready]
    (model,) = call(channel, "RepositoryIndex", pb.RepositoryIndexRequest(ready=True)).models
    assert (model.name, model.state) == (name, "READY")
    with pytest.raises(grpc.RpcError) as found:
        call(channel, "ModelConfig", pb.ModelConfigRequest(name=name, version="2"))
    assert status_of(found) == "NOT_FOUND"


def test_t24_a_version_in_the_path(stack: Stack) -> None:
    name = stack.router.service.model.name
    for tail in ("", "/ready", "/config"):
        assert stack.http.get(f"/v2/models/{name}/versions/1{tail}").status_code == 200
    path = f"/v2/models/{name}/versions/1/infer"
    answer = stack.http.post(path, json={"inputs": [TEXT], "parameters": {"max_tokens": 2}})
    assert answer.json()["outputs"][0]["data"] == ["a b"]


def test_t24_inputs_have_shapes(stack: Stack) -> None:
    for shape in ({}, {"shape": None}):
        without = {name: value for name, value in TEXT.items() if name != "shape"}
        response = infer(stack, without | shape)
        assert response.status_code == 400
        assert "needs a shape" in text_of_error(response)
    nested = {**TEXT, "data": [[[]] * 1000] * 5}
    assert "elements" in text_of_error(infer(stack, nested))
