from collections.abc import Iterator

import pytest

from bench.serving import Launched, serving


@pytest.fixture(scope="session")
def served() -> Iterator[Launched]:
    """One prefill and one decode worker, shared by the tests that leave it as they found it. Every
    prompt is handed over.
    """
    with serving("--kv-blocks", "640", "--prefill-where", "remote") as running:
        yield running
