"""The engine beside its peers' engines: prefill of 512 tokens, and decode of 16 after 512 each.

Tandem's engine and transformers run in this process; llama.cpp by its own `llama-batched-bench`
(LLAMA_BATCHED_BENCH and LLAMA_GGUF in the environment). All cores, fp32 weights, round after round,
so that what else the machine does hits all alike; medians. Tandem's KV is fp8, llama.cpp's fp16.
"""

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch

from bench.engine import PROMPT_TOKENS, engine_bench
from common.codecs import DEFAULT_KV_CODEC

BATCH, NUM_STEPS, NUM_ROUNDS = 16, 8, 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Tokens per second."""

    prefill: float
    decode: float


Engine = Callable[[], Rates]


def compare(model: Path, threads: int) -> dict[str, Rates]:
    engines = dict(installed(model, threads))
    rounds = [{name: run() for name, run in engines.items()} for _ in range(NUM_ROUNDS)]
    return {
        name: Rates(
            prefill=median(found[name].prefill for found in rounds),
            decode=median(found[name].decode for found in rounds),
        )
        for name in engines
    }


def installed(model: Path, threads: int) -> Iterator[tuple[str, Engine]]:
    yield "tandem", tandem(model, threads)
    yield "transformers, eager", transformers_eager(model, threads)
    executable, gguf = os.environ.get("LLAMA_BATCHED_BENCH"), os.environ.get("LLAMA_GGUF")
    if executable and gguf:
        yield "llama.cpp", llama_cpp(executable, gguf, threads)


def tandem(model: Path, threads: int) -> Engine:
    bench = engine_bench(model, DEFAULT_KV_CODEC, threads)

    def run() -> Rates:
        return Rates(prefill=PROMPT_TOKENS / bench.prefill(), decode=BATCH / bench.decode(BATCH))

    run()
    return run


def transformers_eager(model: Path, threads: int) -> Engine:
    import transformers

    torch.set_num_threads(threads)
    reference = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    rng = np.random.default_rng(0)
    prompts = torch.from_numpy(rng.integers(0, reference.config.vocab_size, (BATCH, PROMPT_TOKENS)))

    @torch.inference_mode()
    def run() -> Rates:
        prefill_s = timed(lambda: reference(prompts[:1], logits_to_keep=1))
        cache = reference(prompts, logits_to_keep=1).past_key_values
        step_s = min(
            timed(lambda: reference(prompts[:, :1], past_key_values=cache))
            for _ in range(NUM_STEPS)
        )
        return Rates(prefill=PROMPT_TOKENS / prefill_s, decode=BATCH / step_s)

    run()
    return run


def llama_cpp(executable: str, gguf: str, threads: int) -> Engine:
    command = [executable, "-m", gguf, "-t", str(threads), "-tb", str(threads)]
    command += ["-c", str(BATCH * 2 * PROMPT_TOKENS), "-b", "2048", "-ub", "512"]
    command += ["-npp", str(PROMPT_TOKENS), "-ntg", "32", "-npl", f"1,{BATCH}"]
    command += ["--output-format", "jsonl"]

    def run() -> Rates:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        by_batch = {row["pl"]: row for row in rows}
        return Rates(prefill=by_batch[1]["speed_pp"], decode=by_batch[BATCH]["speed_tg"])

    return run


def timed(job: Callable[[], object]) -> float:
    began = time.perf_counter()
    job()
    return time.perf_counter() - began
