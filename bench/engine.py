"""How fast the engine is alone: prefill of 512-token prompts, decode at several batch sizes.

    .venv/bin/python -m bench.engine --model DIR [--codec fp8_e3m4 fp8_e4m3]
        [--weight-dtype auto int8] [--threads 1 2] [--repeats 5] [--json FILE]

Plans are made here, without schedulers, so the numbers are the engine's own. Each is the best of a
few runs, since other processes share the machine; several codecs and kinds of weights take turns.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np

from commands.demo_model import NAME
from common.codecs import CODECS, DEFAULT_KV_CODEC
from common.environment import home
from common.scheduling.plan import OutputStart, PrefillChunk, StepPlan
from common.types import SamplingParams
from engine.config import EngineConfig
from engine.load import load_runner
from engine.pool_size import PoolSize
from engine.runner import ModelRunner

PROMPT_TOKENS = 512
BATCHES = (1, 4, 16)
NUM_STEPS = 8
REPEATS = 5


@dataclass(frozen=True)
class Row:
    what: str
    codec: str
    weights: str
    threads: int
    batch: int
    step_ms: float
    tokens_per_s: float


class Bench:
    """One runner, and requests that hold pages in a fixed pattern."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._block_size = runner.layout.block_size
        self._rng = np.random.default_rng(0)

    def prefill(self) -> float:
        """Seconds of one chunk of 512 tokens that samples its first token."""
        self._start("p", PROMPT_TOKENS, ())
        chunk = PrefillChunk(
            key="p",
            start=0,
            num_tokens=PROMPT_TOKENS,
            block_ids=self._table(0, PROMPT_TOKENS),
            num_outputs=1,
        )
        seconds = self._timed(StepPlan(step=0, chunks=(chunk,)))
        self._runner.execute(StepPlan(step=0, drops=("p",)))
        return seconds

    def decode(self, batch: int) -> float:
        """Seconds of a step of `batch` decodes after 512 tokens each."""
        keys = tuple(f"d{i}" for i in range(batch))
        for i, key in enumerate(keys):
            self._start(
                key, PROMPT_TOKENS + 1, self._table(i, PROMPT_TOKENS + NUM_STEPS), tail=2 * i + 1
            )
        plan = StepPlan(step=0, decodes=keys)
        seconds = min(self._timed(plan) for _ in range(NUM_STEPS))
        self._runner.execute(StepPlan(step=0, drops=keys))
        return seconds

    def _table(self, request: int, num_tokens: int) -> tuple[int, ...]:
        num_blocks = -(-num_tokens // self._block_size)
        return (2 * request, *(request * num_blocks + b for b in range(num_blocks - 1)))

    def _start(
        self, key: str, num_tokens: int, table: tuple[int, ...], tail: int | None = None
    ) -> None:
        tokens = self._rng.integers(0, self._runner.config.vocab_size, num_tokens).astype(np.int32)
        start = OutputStart(
            key=key,
            token_ids=tokens,
            num_prompt_tokens=PROMPT_TOKENS,
            sampling=SamplingParams(max_tokens=64, temperature=0.0),
            block_ids=table,
            tail=tail,
        )
        self._runner.execute(StepPlan(step=0, starts=(start,)))

    def _timed(self, plan: StepPlan) -> float:
        began = time.perf_counter()
        self._runner.execute(plan)
        return time.perf_counter() - began


def engine_bench(model: Path, codec: str, threads: int, weight_dtype: str = "auto") -> Bench:
    num_blocks = max(BATCHES) * (-(-PROMPT_TOKENS // 16) + 2)
    return Bench(
        load_runner(
            EngineConfig(
                model=model,
                kv_codec=codec,
                weight_dtype=weight_dtype,
                pool=PoolSize(num_packed=num_blocks, num_exact=2 * max(BATCHES)),
                num_threads=threads,
            )
        )
    )


def measure(
    model: Path, codecs: Sequence[str], weights: Sequence[str], threads: int, repeats: int
) -> list[Row]:
    """Codecs and kinds of weights take turns, so that what else the machine does meets all."""
    kinds = list(product(codecs, weights))
    benches = {kind: engine_bench(model, kind[0], threads, kind[1]) for kind in kinds}
    for bench in benches.values():
        bench.decode(1)
    jobs: list[tuple[str, int, int, Callable[[Bench], float]]] = [
        ("prefill 512", 1, PROMPT_TOKENS, Bench.prefill)
    ]
    jobs += [("decode at 512", n, n, partial(Bench.decode, batch=n)) for n in BATCHES]
    rows = []
    for what, batch, tokens, run in jobs:
        found = [[run(bench) for bench in benches.values()] for _ in range(repeats)]
        for kind, seconds in zip(benches, map(min, zip(*found, strict=True)), strict=True):
            rows.append(Row(what, *kind, threads, batch, seconds * 1e3, tokens / seconds))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed of the engine alone")
    parser.add_argument("--model", type=Path, default=home() / "models" / NAME)
    parser.add_argument("--codec", nargs="+", default=[DEFAULT_KV_CODEC], choices=list(CODECS))
    parser.add_argument("--weight-dtype", nargs="+", default=["auto"], choices=["auto", "int8"])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = [
        row
        for threads in args.threads
        for row in measure(args.model, args.codec, args.weight_dtype, threads, args.repeats)
    ]
    print(
        f"{'what':16}{'codec':>10}{'weights':>8}{'threads':>8}{'batch':>7}{'ms/step':>10}{'tokens/s':>10}"
    )
    for row in rows:
        print(
            f"{row.what:16}{row.codec:>10}{row.weights:>8}{row.threads:>8}{row.batch:>7}{row.step_ms:>10.1f}"
            f"{row.tokens_per_s:>10.1f}"
        )
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=2))


if __name__ == "__main__":
    main()
