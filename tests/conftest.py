"""Fixtures that every folder of tests may use."""

import os
from pathlib import Path

import pytest

from commands import demo_model as demo
from common.environment import home

os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is first imported


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The demo model's directory, prepared on first use."""
    return demo.prepare_calibrated(home(), report=lambda text: None)
