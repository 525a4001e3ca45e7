"""Starting, stopping and dying, as an operator sees it."""

import os
import signal
from pathlib import Path

from bench.serving import Launched, serving, wait_for
from tests.system.test_serve import PARIS, client


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def answer(running: Launched) -> str:
    body = {"model": running.model, "messages": PARIS, "max_tokens": 60, "temperature": 0}
    whole = running.http.post("/v1/chat/completions", json=body | {"ignore_eos": True}).json()
    text: str = whole["choices"][0]["message"]["content"]
    return text


def test_ctrl_c_drains_and_leaves_no_process(shrunk: Path) -> None:
    with serving("--model", str(shrunk), "--kv-blocks", "128") as running:
        pids = [worker["pid"] for worker in running.fleet()]
        expected = answer(running)
        stream = client(running).chat.completions.create(
            model=running.model,
            messages=PARIS,
            temperature=0,
            max_tokens=60,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        first = next(iter(stream))
        running.process.send_signal(signal.SIGINT)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
        assert first.choices[0].delta.role == "assistant"
        assert text == expected, "what runs is finished first"
        assert running.process.wait(timeout=30) == 0
        assert not any(is_alive(pid) for pid in pids)


def test_a_worker_that_dies_is_reported_with_its_exit_code_and_the_others_go_on(
    shrunk: Path,
) -> None:
    workers = ("--prefill", "1", "--decode", "1", "--colocated", "1")
    with serving("--model", str(shrunk), "--kv-blocks", "128", *workers) as running:
        expected = answer(running)
        os.kill(running.worker("decode")["pid"], signal.SIGKILL)
        assert wait_for(
            lambda: any("decode-0 was ended by SIGKILL" in line for line in running.log), 10
        ), running.log
        assert answer(running) == expected
