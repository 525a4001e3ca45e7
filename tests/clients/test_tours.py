"""Official clients against a live server: a prefill and a decode worker with the demo model.

The clients have environments of their own (`make setup-clients`): their pins are not ours
(tritonclient, for one, wants an older protobuf).
"""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.serving import Launched, free_port, serving
from commands.demo_model import prepare
from common.environment import home
from tests.router.fake_worker import FakeWorker
from tests.router.stack import Stack

ROOT = Path(__file__).resolve().parent.parent.parent
PYTHON = ROOT / ".venv-clients" / "bin" / "python"
GATEWAY = ROOT / ".venv-gateway" / "bin"
GUIDELLM = ROOT / ".venv-guidellm" / "bin" / "guidellm"
CLIENTS = ("openai", "anthropic", "tritonclient", "litellm", "langchain", "instructor")
CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,"
    "response_schema_conformance,negative_data_rejection,unsupported_method"
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        not all(
            (ROOT / name / "complete").exists()
            for name in (".venv-clients", ".venv-gateway", ".venv-guidellm")
        ),
        reason="the clients are not installed: make setup-clients",
    ),
]


@pytest.fixture(scope="module")
def model_dir() -> Path:
    return prepare(home(), lambda text: None)


@pytest.fixture(scope="module")
def served() -> Iterator[Launched]:
    with serving("--kv-blocks", "640", "--kv-codec", "bf16") as running:
        yield running


ENVIRONMENT = {
    "PATH": os.environ["PATH"],
    "HOME": os.environ["HOME"],
    "NO_PROXY": "*",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
}


def run(*arguments: str | Path) -> str:
    return execute(PYTHON, *arguments)


def execute(*command: str | Path) -> str:
    done = subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        timeout=280,
        env=ENVIRONMENT,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return done.stdout


@pytest.mark.parametrize("client", CLIENTS)
def test_a_tour_with(client: str, served: Launched) -> None:
    tour = Path(__file__).parent / "tour.py"
    run(str(tour), client, served.url, served.grpc, served.model)


def test_a_stock_java_client(served: Launched) -> None:
    """T21, as people meet it. A JDK runs a source file as it is."""
    execute("java", Path(__file__).parent / "StockClient.java", served.url, served.model)


def test_guidellm_measures(served: Launched, model_dir: Path, tmp_path: Path) -> None:
    """T22: it asks for the usage in every chunk, and counts tokens by it."""
    report = tmp_path / "report.json"
    execute(
        *(GUIDELLM, "run", "--disable-progress", "--profile", "kind=synchronous"),
        *("--backend", f"kind=openai_http,target={served.url},model={served.model}"),
        *("--constraint", "kind=max_requests,count=6"),
        *("--tokenizer", f"kind=hf_auto,model={model_dir}"),
        *("--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=16"),
        *("--output", f"kind=json,path={report}"),
    )
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"], totals["incomplete"]) == (6, 0, 0)


GATEWAY_CONFIG = """\
model_list:
  - model_name: tandem
    litellm_params:
      model: openai/{model}
      api_base: {url}/v1
      api_key: none
"""


def test_an_anthropic_client_behind_a_gateway(served: Launched, tmp_path: Path) -> None:
    """T23: litellm's proxy takes Anthropic's messages and asks us by /v1/responses."""
    config = tmp_path / "gateway.yaml"
    config.write_text(GATEWAY_CONFIG.format(model=served.model, url=served.url))
    port = free_port()
    log = (tmp_path / "gateway.log").open("w")
    command = [GATEWAY / "litellm", "--config", config, "--host", "127.0.0.1", "--port", str(port)]
    gateway = subprocess.Popen(
        [str(word) for word in command], env=ENVIRONMENT, stdout=log, stderr=log
    )
    try:
        tour = Path(__file__).parent / "tour.py"
        url = f"http://127.0.0.1:{port}"
        execute(GATEWAY / "python", tour, "gateway", url, served.grpc, "tandem")
    finally:
        gateway.terminate()
        gateway.wait(30)
        log.close()


def test_schemathesis_finds_nothing(model_dir: Path) -> None:
    """Every body that the OpenAPI document allows or forbids, over a fake worker.

    Left out is only the check that every allowed body is taken: what one field must be because of
    another (`min_tokens` and `max_tokens`) cannot be said in the document.
    """
    with Stack(model_dir, FakeWorker()) as stack:
        run(
            *("-m", "schemathesis.cli", "run", f"{stack.url}/openapi.json"),
            *("--checks", CHECKS, "--max-examples", "20", "--seed", "1"),
            *("--phases", "coverage,fuzzing", "--request-timeout", "20"),
            *("--suppress-health-check", "all"),
        )
        assert stack.canary()
