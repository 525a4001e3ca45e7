"""Who may ask, for how much, and over what: API keys, limits per key, TLS."""

import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from common.errors import ConfigError, InvalidRequest, Overloaded, Unauthorized
from router.admission.keys import KeyRing
from router.proto import inference_pb2 as pb
from router.proto import open_inference_pb2 as kserve
from tests.router.fake_worker import FakeWorker
from tests.router.stack import DEADLINE_S, Stack

TLS = Path(__file__).parent / "tls"
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(
        "# who may ask\nalpha name=ann\nbeta max_outputs=2  # careful with this one\n\n"
    )
    return path


@pytest.fixture
def stack(model_dir: Path, key_file: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stack]:
    monkeypatch.setenv("TANDEM_API_KEYS", "gamma, delta")
    with Stack(model_dir, FakeWorker(), api_keys=str(key_file), grpc="127.0.0.1:0") as running:
        yield running


def test_no_key_no_answer_but_for_health(stack: Stack) -> None:
    http = stack.http
    for path in ("/health", "/ready", "/v2/health/live", "/v2/health/ready"):
        assert http.get(path).status_code == 200
    for path in ("/v1/models", "/v1/fleet", "/version", "/openapi.json", "/nothing", "/v2"):
        assert http.get(path).status_code == 401, path
    for path in ("/v1/chat/completions", "/v1/responses", "/tokenize", "/v2/models/x/infer"):
        response = http.post(path, json=CHAT)
        assert response.status_code == 401
        error = response.json()["error"]
        assert error == "a valid API key is required" or error["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"
    response = http.post("/v1/messages", json=CHAT)
    assert response.json()["error"]["type"] == "authentication_error"
    assert response.json()["type"] == "error"


def test_any_of_the_keys_opens(stack: Stack) -> None:
    for key in ("alpha", "beta", "gamma", "delta"):
        for headers in (bearer(key), {"x-api-key": key}):
            assert stack.http.post("/v1/chat/completions", json=CHAT, headers=headers).is_success
    for wrong in ("alph", "alphaa", "Alpha", "# who", "é"):
        headers = {"authorization": f"Bearer {wrong}".encode()}  # type: ignore[dict-item]
        assert stack.http.get("/v1/models", headers=headers).status_code == 401


def test_the_file_is_read_again_when_it_changes(stack: Stack, key_file: Path) -> None:
    assert stack.http.get("/v1/models", headers=bearer("epsilon")).status_code == 401
    replacement = key_file.with_suffix(".new")
    replacement.write_text("epsilon\n")
    replacement.replace(key_file)
    assert stack.http.get("/v1/models", headers=bearer("epsilon")).status_code == 200
    assert stack.http.get("/v1/models", headers=bearer("alpha")).status_code == 401
    assert stack.http.get("/v1/models", headers=bearer("gamma")).status_code == 200
    key_file.write_text("epsilon nonsense=1\n")  # a mistake changes nothing
    assert stack.http.get("/v1/models", headers=bearer("epsilon")).status_code == 200


def test_a_key_has_its_own_limit(stack: Stack) -> None:
    worker = stack.workers[0]
    stack.do(lambda: worker.allow(2))
    body = CHAT | {"max_tokens": 5, "n": 2, "stream": True}
    path = "/v1/chat/completions"
    with stack.http.stream("POST", path, json=body, headers=bearer("beta")) as response:
        assert response.status_code == 200
        refused = stack.http.post(path, json=CHAT, headers=bearer("beta"))
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
        assert "retry-after" in refused.headers
        stack.do(lambda: worker.allow(None))
        assert stack.http.post(path, json=CHAT, headers=bearer("alpha")).status_code == 200
        response.read()
    assert stack.http.post(path, json=CHAT, headers=bearer("beta")).status_code == 200


def test_limits_count_what_is_under_way(key_file: Path) -> None:
    ring = KeyRing.open(key_file, "")
    key = ring.check(bearer("beta"))
    assert key is not None
    key.take(2)
    with pytest.raises(Overloaded):
        key.take(1)
    key.give_back(1)
    key.take(1)
    key.give_back(2)
    with pytest.raises(InvalidRequest):
        key.take(3)  # more than it may ever have (T08)
    assert key.num_outputs == 0
    key.take(2)
    free = ring.check(bearer("alpha"))
    assert free is not None
    assert free.name == "ann"
    free.take(10_000)


def test_a_new_key_file_keeps_count_of_what_is_under_way(key_file: Path) -> None:
    ring = KeyRing.open(key_file, "")
    before = ring.check(bearer("beta"))
    assert before is not None
    before.take(2)
    key_file.write_text("beta max_outputs=3 name=bob\nomega\n")
    key = ring.check(bearer("beta"))
    assert key is not None
    assert (key.name, key.num_outputs) == ("bob", 2)
    key.take(1)  # the new limit holds
    with pytest.raises(Overloaded):
        key.take(1)
    before.give_back(2)
    key.give_back(1)
    assert key.num_outputs == 0
    key.take(3)


def test_key_files_that_are_wrong(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        KeyRing.open(tmp_path / "missing", "")
    path = tmp_path / "keys"
    path.write_text("# none\n")
    with pytest.raises(ConfigError):
        KeyRing.open(path, "")
    path.write_text("secret max_outputs=0\n")
    with pytest.raises(ConfigError) as found:
        KeyRing.open(path, "")
    assert "secret" not in str(found.value)
    assert KeyRing.open(None, "").check({}) is None
    with pytest.raises(Unauthorized):
        KeyRing.open(None, "a").check({})


def test_grpc_asks_for_keys_too(stack: Stack) -> None:
    front = stack.router.grpc_front
    assert front is not None
    with grpc.insecure_channel(f"127.0.0.1:{front.port}") as channel:
        generate: Any = channel.unary_stream(
            "/tandem.v1.Inference/Generate",
            request_serializer=pb.GenerateRequest.SerializeToString,
            response_deserializer=pb.GenerateResponse.FromString,
        )
        request = pb.GenerateRequest(text="a b", max_tokens=1)
        with pytest.raises(grpc.RpcError) as found:
            list(generate(request, timeout=DEADLINE_S))
        assert found.value.code() is grpc.StatusCode.UNAUTHENTICATED
        metadata = (("authorization", "Bearer alpha"),)
        assert next(iter(generate(request, timeout=DEADLINE_S, metadata=metadata))).text == "a"
        for name, is_open in (("ServerLive", True), ("ServerReady", True), ("ModelReady", False)):
            method: Any = channel.unary_unary(
                f"/inference.GRPCInferenceService/{name}",
                request_serializer=getattr(kserve, f"{name}Request").SerializeToString,
                response_deserializer=getattr(kserve, f"{name}Response").FromString,
            )
            message = getattr(kserve, f"{name}Request")()
            if is_open:
                method(message, timeout=DEADLINE_S)
            else:
                with pytest.raises(grpc.RpcError):
                    method(message, timeout=DEADLINE_S)


def test_tls_for_http_and_grpc(model_dir: Path) -> None:
    files = {"tls_cert": str(TLS / "cert.pem"), "tls_key": str(TLS / "key.pem")}
    with Stack(model_dir, FakeWorker(), grpc="127.0.0.1:0", **files) as stack:
        context = ssl.create_default_context(cafile=TLS / "cert.pem")
        with httpx.Client(verify=context, trust_env=False, timeout=DEADLINE_S) as client:
            url = stack.url.replace("http://", "https://")
            response = client.post(f"{url}/v1/chat/completions", json=CHAT)
            assert response.status_code == 200
            events = client.post(f"{url}/v1/chat/completions", json=CHAT | {"stream": True})
            assert events.text.endswith("data: [DONE]\n\n")
        front = stack.router.grpc_front
        assert front is not None
        trust = grpc.ssl_channel_credentials((TLS / "cert.pem").read_bytes())
        with grpc.secure_channel(f"localhost:{front.port}", trust) as channel:
            generate: Any = channel.unary_stream(
                "/tandem.v1.Inference/Generate",
                request_serializer=pb.GenerateRequest.SerializeToString,
                response_deserializer=pb.GenerateResponse.FromString,
            )
            found = list(generate(pb.GenerateRequest(text="a", max_tokens=1), timeout=DEADLINE_S))
            assert found[0].text == "a"


def test_tls_files_that_are_wrong(model_dir: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty.pem"
    empty.write_text("")
    for cert, key in ((empty, empty), (TLS / "cert.pem", tmp_path / "missing")):
        with pytest.raises(ConfigError):
            Stack(model_dir, tls_cert=str(cert), tls_key=str(key)).open_and_close()
    with pytest.raises(ConfigError):
        Stack(model_dir, tls_cert=str(TLS / "cert.pem")).open_and_close()
