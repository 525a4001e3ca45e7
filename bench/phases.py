"""Where the time of a step goes on CPU, on one thread, against its bytes and operations.

    .venv/bin/python -m bench.phases [--model DIR] [--codec fp8_e3m4]

Times are CPU time of the computing thread, the least of several runs, so that other processes
disturb little. Parts come from differences: no layers, a long context against none, a step against
its forward pass. The floor is what this machine's own ceilings allow, measured in the same run.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from bench.engine import PROMPT_TOKENS, Bench
from commands.demo_model import NAME
from common.codecs import DEFAULT_KV_CODEC
from common.environment import home
from common.pages import PageKind
from common.scheduling.plan import LandingMove, OutputStart, PrefillChunk, StepPlan, TagOrder
from common.types import SamplingParams
from engine.batch import make_batch
from engine.config import EngineConfig
from engine.load import load_runner
from engine.pool_size import PoolSize
from engine.runner import ModelRunner

REPEATS = 3
BATCH = 16
LANDED = 32
"""Pages: a chunk of 512 tokens."""


def least(action: Callable[[], object], repeats: int = REPEATS) -> float:
    """Milliseconds."""
    best = float("inf")
    for _ in range(repeats):
        began = time.thread_time()
        action()
        best = min(best, time.thread_time() - began)
    return best * 1e3


def ceilings() -> tuple[float, float]:
    """GFLOP/s of a matrix product of 512 rows, GB/s of a sum over 400 MB; one thread."""
    torch.set_num_threads(1)
    a, b = torch.randn(512, 1536), torch.randn(1536, 1536)
    product = least(lambda: a @ b, 20)
    block = torch.ones(100_000_000, dtype=torch.float32)
    read = least(block.sum, 3)
    return 2 * 512 * 1536 * 1536 / product / 1e6, 400 / read


class Phases:
    def __init__(self, model: Path, codec: str) -> None:
        self.runner: ModelRunner = load_runner(
            EngineConfig(
                model=model,
                kv_codec=codec,
                pool=PoolSize(num_packed=BATCH * 36, num_exact=2 * BATCH + 2),
                landing=PoolSize(num_packed=LANDED, num_exact=1),
            )
        )
        self.bench = Bench(self.runner)

    def start(self, key: str, num_tokens: int, table: tuple[int, ...], tail: int | None) -> None:
        tokens = np.random.default_rng(0).integers(0, 1000, num_tokens).astype(np.int32)
        start = OutputStart(
            key=key,
            token_ids=tokens,
            num_prompt_tokens=num_tokens,
            sampling=SamplingParams(max_tokens=64, temperature=0.0),
            block_ids=table,
            tail=tail,
        )
        self.runner.execute(StepPlan(step=0, starts=(start,)))

    def forward(self, plan: StepPlan, num_layers: int | None = None) -> float:
        batch = make_batch(plan, self.runner.outputs, 16)
        if not plan.decodes:
            batch = replace(batch, wanted=np.array([len(batch.token_ids) - 1], dtype=np.int64))
        backend = self.runner.backend

        def run() -> None:
            backend.forward(batch, num_layers)
            backend.logits(batch.wanted)

        return least(run)

    def prefill(self) -> dict[str, float]:
        table = (0, *range(PROMPT_TOKENS // 16 - 1))
        self.start("p", PROMPT_TOKENS, (), None)
        plans = [
            StepPlan(
                step=0, chunks=(PrefillChunk(key="p", start=0, num_tokens=n, block_ids=table),)
            )
            for n in (PROMPT_TOKENS, 16)
        ]
        whole = least(lambda: self.runner.execute(plans[0]))
        found = {"step": whole, "head": self.forward(plans[0], 0)}
        self.runner.execute(StepPlan(step=0, drops=("p",)))
        return found

    def decode(self, context: int) -> dict[str, float]:
        num_blocks = -(-(context + 8) // 16)
        keys = tuple(f"d{i}" for i in range(BATCH))
        for i, key in enumerate(keys):
            table = (2 * i, *(i * num_blocks + b for b in range(num_blocks - 1)))
            self.start(key, context + 1, table, 2 * i + 1)
        plan = StepPlan(step=0, decodes=keys)
        found = {"forward": self.forward(plan), "head": self.forward(plan, 0)}
        found["step"] = least(lambda: self.runner.execute(plan), 2)
        self.runner.execute(StepPlan(step=0, drops=keys))
        return found

    def landing(self) -> dict[str, float]:
        """Microseconds a page: as the runner does it, and a plain copy of the same bytes."""
        runner, moves = self.runner, []
        for page in range(LANDED):
            order = TagOrder(
                kind=PageKind.PACKED,
                block_id=page,
                content_hash=bytes(16),
                num_tokens=16,
                generation=1,
            )
            runner.execute(StepPlan(step=0, tags=(order,)))
            moves.append(
                LandingMove(
                    kind=PageKind.PACKED,
                    slot=page,
                    block_id=LANDED + page,
                    content_hash=bytes(16),
                    num_tokens=16,
                    incarnation=0,
                    generation=1,
                )
            )
        runner.landing.packed[:] = runner.pool.packed[:LANDED]
        assert set(runner.land(moves).refusals) == {None}
        target = runner.pool.packed[LANDED : 2 * LANDED]
        return {
            "land": least(lambda: runner.land(moves), 10) * 1e3 / LANDED,
            "copy": least(lambda: target.copy_(runner.landing.packed), 10) * 1e3 / LANDED,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description="Where a step's time goes, on one thread")
    parser.add_argument("--model", type=Path, default=home() / "models" / NAME)
    parser.add_argument("--codec", default=DEFAULT_KV_CODEC)
    args = parser.parse_args()
    gflops, gbytes = ceilings()
    print(f"ceilings: {gflops:.0f} GFLOP/s, {gbytes:.1f} GB/s on one thread")
    phases = Phases(args.model, args.codec)
    print("landing, us a page:", {k: round(v, 1) for k, v in phases.landing().items()})
    print("prefill of 512, ms:", {k: round(v, 1) for k, v in phases.prefill().items()})
    for context in (16, 512):
        found = phases.decode(context)
        print(f"decode of 16 at {context}, ms:", {k: round(v, 2) for k, v in found.items()})


if __name__ == "__main__":
    main()
