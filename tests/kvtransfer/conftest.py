"""Pools in processes of their own."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from common.handoff_messages import LinkReply
from common.wire import decode

Start = Callable[..., tuple["subprocess.Popen[bytes]", LinkReply]]


@pytest.fixture
def source_process() -> Iterator[Start]:
    """Starts one, with the arguments of `tests.kvtransfer.source_process`."""
    started: list[subprocess.Popen[bytes]] = []

    def start(
        *arguments: object, **environment: str
    ) -> tuple["subprocess.Popen[bytes]", LinkReply]:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.kvtransfer.source_process", *map(str, arguments)],
            stdout=subprocess.PIPE,
            env={**os.environ, **environment},
        )
        started.append(process)
        assert process.stdout is not None
        reply = decode(bytes.fromhex(process.stdout.readline().decode()))
        assert isinstance(reply, LinkReply)
        return process, reply

    yield start
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
