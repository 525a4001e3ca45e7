"""Runners for tests: of the demo model, and of tiny random models made on the spot."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.config import EngineConfig
from engine.load import load_runner
from engine.pool_size import PoolSize
from engine.runner import ModelRunner
from tests.engine.tiny_models import TinyModel, make_tiny_model

MakeRunner = Callable[..., ModelRunner]


@pytest.fixture(autouse=True, scope="session")
def _one_torch_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """A small random Llama."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), "llama")


@pytest.fixture(scope="package")
def reference(demo_model: Path) -> Any:
    """The demo model in transformers, fp32."""
    return transformers.AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32)


@pytest.fixture
def tiny_runner(tiny: TinyModel) -> MakeRunner:
    def make(**options: Any) -> ModelRunner:
        return make_runner(tiny.path, **options)

    return make


def make_runner(
    path: Path,
    *,
    num_blocks: int = 512,
    num_exact: int = 128,
    num_landing_packed: int = 0,
    num_landing_exact: int = 0,
    **settings: Any,
) -> ModelRunner:
    return load_runner(
        EngineConfig(
            model=path,
            pool=PoolSize(num_packed=num_blocks, num_exact=num_exact),
            landing=PoolSize(num_packed=num_landing_packed, num_exact=num_landing_exact),
            **settings,
        )
    )
