"""Official clients against a live server: a prefill and a decode worker with the demo model.

The clients have an environment of their own, `.venv-clients` (`make setup-clients`): their pins are
not ours (tritonclient, for one, wants an older protobuf).
"""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.serving import Launched, serving
from common.config import home
from common.demo_model import prepare
from tests.router.fake_worker import FakeWorker
from tests.router.stack import Stack

ROOT = Path(__file__).resolve().parent.parent.parent
PYTHON = ROOT / ".venv-clients" / "bin" / "python"
CLIENTS = ("openai", "anthropic", "tritonclient", "litellm", "langchain", "instructor")
CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,"
    "response_schema_conformance,negative_data_rejection,unsupported_method"
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        not (ROOT / ".venv-clients" / "complete").exists(),
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


def run(*arguments: str) -> str:
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], "NO_PROXY": "*"}
    environment |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "DO_NOT_TRACK": "1"}
    done = subprocess.run(
        [str(PYTHON), *arguments],
        capture_output=True,
        text=True,
        timeout=280,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return done.stdout


@pytest.mark.parametrize("client", CLIENTS)
def test_a_tour_with(client: str, served: Launched) -> None:
    tour = Path(__file__).parent / "tour.py"
    run(str(tour), client, served.url, served.grpc, served.model)


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
