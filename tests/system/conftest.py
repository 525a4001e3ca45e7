from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.serving import Launched, serving
from bench.shrunk_model import shrunk_model


@pytest.fixture(scope="session")
def shrunk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model's first two layers, for tests that do not mind what the text says."""
    return shrunk_model(tmp_path_factory.mktemp("model") / "two-layers")


@pytest.fixture(scope="session")
def served() -> Iterator[Launched]:
    """One prefill and one decode worker, shared by the tests that leave it as they found it. Every
    prompt is handed over.
    """
    with serving("--kv-blocks", "640", "--prefill-where", "remote") as running:
        yield running
