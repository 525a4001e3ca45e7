"""Fixtures of the router's tests: the demo model without weights, and a router over one fake
worker.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer as HfTokenizer

from router.text.tokenizer import Tokenizer, load_tokenizer
from tests.router.fake_worker import FakeWorker
from tests.router.stack import Stack

FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)


@pytest.fixture(scope="session")
def model_dir(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the router reads of the demo model; a copy, named like it."""
    directory = tmp_path_factory.mktemp("model") / demo_model.name
    directory.mkdir()
    for name in FILES:
        shutil.copy(demo_model / name, directory / name)
    return directory


@pytest.fixture(scope="session")
def tokenizer(model_dir: Path) -> Tokenizer:
    return load_tokenizer(model_dir)


@pytest.fixture(scope="session")
def reference(model_dir: Path) -> HfTokenizer:
    """The library's own tokenizer, to compare with."""
    return HfTokenizer.from_file(str(model_dir / "tokenizer.json"))


@pytest.fixture(scope="module")
def stack(model_dir: Path) -> Iterator[Stack]:
    """One router over one colocated worker, shared by the tests of a file that break nothing."""
    with Stack(model_dir, FakeWorker()) as running:
        yield running
