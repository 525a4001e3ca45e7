"""`make bench-peers`: Tandem and whichever peers are installed. First the engines alone
(`bench/peer_engines.py`), then the job of `bench serve` through the servers.

All servers are started first; then each gets the whole job in turn, round after round, from the
same client, so that what else the machine does hits all alike. bench/README.md says how to install
the peers and how they are found. Transformers has no server: its row is the same work in this
process, in static batches, without any HTTP.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import httpx
from rich.console import Console
from rich.table import Table

from bench import peer_engines
from bench.load import percentile, random_prompt, run_load
from bench.serve import CONCURRENCY, FLEETS, NUM_REQUESTS, OUTPUT_TOKENS, PROMPT_TOKENS
from bench.serving import free_port, serving, wait_for
from commands.demo_model import prepare
from common.environment import home

COLOCATED = ("1 colocated", "1 colocated, chunks of 512")
"""Of `bench serve`'s fleets: peers compute on all cores, too."""
NUM_ROUNDS = 3
START_TIMEOUT_S = 600.0
CONTEXT = 1024
"""Of each of a peer's slots: prompt, output and some room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    wall_s: float
    ttft_s: tuple[float, ...] = ()
    gaps_s: tuple[float, ...] = ()


@dataclass(slots=True)
class Contender:
    name: str
    run: Callable[[], Result]
    results: list[Result] = field(default_factory=list)

    @property
    def wall_s(self) -> float:
        return median(result.wall_s for result in self.results)


PROMPTS = [random_prompt(PROMPT_TOKENS, seed) for seed in range(NUM_REQUESTS)]


def through(url: str, model: str) -> Callable[[], Result]:
    """The job through a server. Prompts differ from round to round, for the prefix caches."""
    rounds = iter(range(1_000))

    def run() -> Result:
        salt = 1000 * (1 + next(rounds))
        prompts = [random_prompt(PROMPT_TOKENS, salt + seed) for seed in range(NUM_REQUESTS)]
        seen, wall_s = run_load(url, model, prompts, OUTPUT_TOKENS, CONCURRENCY)
        return Result(
            wall_s=wall_s,
            ttft_s=tuple(request.ttft_s for request in seen),
            gaps_s=tuple(gap for request in seen for gap in request.gaps_s),
        )

    run_load(url, model, [random_prompt(32, 999)], 4, 1)
    return run


@contextlib.contextmanager
def server(*command: str, environment: dict[str, str] | None = None) -> Iterator[str]:
    """A peer's server on a port of its own (`PORT` in the command); its address once it answers."""
    port = str(free_port())
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [port if part == "PORT" else part for part in command],
            stdout=log,
            stderr=log,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
        url = f"http://127.0.0.1:{port}"
        try:
            if not wait_for(lambda: process.poll() is not None or answers(url), START_TIMEOUT_S):
                raise RuntimeError(f"{command[0]} did not start in time")
            if process.poll() is not None:
                log.seek(0)
                tail = log.read()[-2000:].decode(errors="replace")
                raise RuntimeError(f"{command[0]} ended:\n{tail}")
            yield url
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


def model_of(url: str) -> str:
    name: str = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
    return name


def vllm(executable: str, model: Path, threads: int) -> tuple[list[str], dict[str, str]]:
    command = [executable, "serve", str(model), "--host", "127.0.0.1", "--port", "PORT"]
    command += ["--dtype", "float32", "--max-model-len", str(CONTEXT)]
    command += ["--max-num-seqs", str(CONCURRENCY)]
    cores = f"0-{threads - 1}" if threads > 1 else "0"
    return command, {"VLLM_CPU_OMP_THREADS_BIND": cores, "VLLM_CPU_KVCACHE_SPACE": "2"}


def llama_cpp(executable: str, gguf: str, threads: int) -> list[str]:
    command = [executable, "-m", gguf, "--host", "127.0.0.1", "--port", "PORT"]
    command += ["-t", str(threads), "-tb", str(threads), "-np", str(CONCURRENCY)]
    return [*command, "-c", str(CONTEXT * CONCURRENCY), "-b", "2048", "-ub", "512"]


def transformers_eager(model: Path, threads: int) -> Callable[[], Result]:
    """Static batches as large as the others' concurrency, greedy, no stop."""
    import torch
    import transformers

    torch.set_num_threads(threads)
    reference = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)

    def run() -> Result:
        began = time.monotonic()
        with torch.inference_mode():
            for first in range(0, NUM_REQUESTS, CONCURRENCY):
                batch = torch.tensor(PROMPTS[first : first + CONCURRENCY])
                found = reference.generate(
                    batch,
                    attention_mask=torch.ones_like(batch),
                    do_sample=False,
                    min_new_tokens=OUTPUT_TOKENS,
                    max_new_tokens=OUTPUT_TOKENS,
                    pad_token_id=0,
                )
                assert found.shape == (len(batch), PROMPT_TOKENS + OUTPUT_TOKENS)
        return Result(wall_s=time.monotonic() - began)

    return run


def main() -> int:
    model = prepare(home(), lambda _: None)
    threads = os.cpu_count() or 1
    console = Console(width=120)
    console.print(table_of_engines(peer_engines.compare(model, threads)))
    missing: list[str] = []
    with contextlib.ExitStack() as stack:
        contenders = []
        for name in COLOCATED:
            arguments = FLEETS[name]
            served = stack.enter_context(serving(*arguments))
            contenders.append(Contender(f"tandem, {name}", through(served.url, served.model)))
        executable = os.environ.get("VLLM") or shutil.which("vllm")
        if executable:
            command, environment = vllm(executable, model, threads)
            url = stack.enter_context(server(*command, environment=environment))
            contenders.append(Contender("vllm, fp32", through(url, model_of(url))))
        else:
            missing.append("vllm")
        executable, gguf = os.environ.get("LLAMA_SERVER"), os.environ.get("LLAMA_GGUF")
        if executable and gguf:
            url = stack.enter_context(server(*llama_cpp(executable, gguf, threads)))
            contenders.append(Contender("llama-server", through(url, model_of(url))))
        else:
            missing.append("llama-server")
        contenders.append(Contender("transformers, eager", transformers_eager(model, threads)))
        for _ in range(NUM_ROUNDS):
            for contender in contenders:
                contender.results.append(contender.run())
    console.print(table_of(contenders))
    console.print("pairs are median / p99 over all rounds")
    if missing:
        console.print(f"not installed: {', '.join(missing)} (see bench/README.md)")
    return 0


def table_of(contenders: list[Contender]) -> Table:
    base = next(c for c in contenders if c.name == f"tandem, {COLOCATED[0]}")
    table = Table(
        title=f"{NUM_REQUESTS} requests, {PROMPT_TOKENS} tokens in, {OUTPUT_TOKENS} out, "
        f"{CONCURRENCY} at a time; median of {NUM_ROUNDS} interleaved rounds"
    )
    for name in ("", "wall s", "time / tandem's", "output tokens/s", "TTFT s", "ITL ms"):
        table.add_column(name, justify="right" if name else "left")
    for contender in contenders:
        table.add_row(
            contender.name,
            f"{contender.wall_s:.1f}",
            f"{contender.wall_s / base.wall_s:.2f}",
            f"{NUM_REQUESTS * OUTPUT_TOKENS / contender.wall_s:.1f}",
            pair([t for result in contender.results for t in result.ttft_s], 1),
            pair([g for result in contender.results for g in result.gaps_s], 1000),
        )
    return table


def table_of_engines(found: dict[str, peer_engines.Rates]) -> Table:
    base = found["tandem"]
    table = Table(
        title=f"Engines alone, tokens/s: prefill of {PROMPT_TOKENS}, decode of "
        f"{peer_engines.BATCH} after {PROMPT_TOKENS}; median of {peer_engines.NUM_ROUNDS} rounds"
    )
    for name in ("", "prefill", "tandem / it", "decode", "tandem / it"):
        table.add_column(name, justify="right" if name else "left")
    for name, rates in found.items():
        table.add_row(
            name,
            f"{rates.prefill:.0f}",
            f"{base.prefill / rates.prefill:.2f}",
            f"{rates.decode:.0f}",
            f"{base.decode / rates.decode:.2f}",
        )
    return table


def pair(values: list[float], scale: float) -> str:
    if not values:
        return "-"
    return f"{median(values) * scale:.3g} / {percentile(values, 0.99) * scale:.3g}"


if __name__ == "__main__":
    sys.exit(main())
