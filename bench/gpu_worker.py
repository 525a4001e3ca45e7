"""A runner's decode steps for `bench.gpu`: one after another, and each launched before the tokens
of the one before are read. The plans are the same, so the tokens must be.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from bench.gpu_model import Loaded
from common.messages import GenerateRequest, pack_tokens
from common.scheduling.block_hash import HashChain
from common.scheduling.kv_cache import KvCache
from common.scheduling.plan import StepPlan, StepResult
from common.types import SamplingParams
from decode_worker.scheduler import BatchScheduler
from engine.backend import Backend
from engine.grammar import GrammarTable
from engine.launched import LaunchedStep
from engine.pools import PageArena
from engine.rank_pages import RankPages
from engine.runner import ModelRunner
from engine.worker_pages import Origin, WorkerPages

ROOT = bytes(16)


@dataclass(frozen=True, slots=True)
class Timed:
    step_s: float
    """Median of the decode steps, from result to result on the host's clock."""
    tokens: list[tuple[int, ...]]
    """Of each step."""


def plans_of(loaded: Loaded, num_requests: int, num_tokens: int, num_steps: int) -> list[StepPlan]:
    """Prompts in chunks, then `num_steps` tokens for each request, then all are dropped."""
    layout = loaded.pool.layout
    scheduler = BatchScheduler(
        KvCache(
            num_packed=len(loaded.pool.packed),
            num_exact=len(loaded.pool.exact),
            block_size=layout.block_size,
        ),
        chunk_tokens=8 * layout.block_size,
        max_num_seqs=num_requests,
        max_waiting=num_requests,
        max_model_len=loaded.config.max_position_embeddings,
        is_colocated=True,
    )
    rng = np.random.default_rng(0)
    for number in range(num_requests):
        tokens = rng.integers(1, loaded.config.vocab_size, num_tokens, dtype=np.int32)
        request = GenerateRequest(
            request_id=f"r{number}",
            token_ids=pack_tokens(tokens),
            num_prompt_tokens=num_tokens,
            sampling=SamplingParams(max_tokens=num_steps + 1, temperature=0.0),
        )
        chain = HashChain(ROOT, layout.block_size)
        chain.extend(tokens.tolist())
        scheduler.add(request, tokens, chain, 0.0)
    plans: list[StepPlan] = []
    while True:
        scheduler.admit(0.0)
        plan, _ = scheduler.plan(0.0)
        if plan is None:
            return plans
        plans.append(plan)
        keys = tuple(chunk.key for chunk in plan.chunks if chunk.num_outputs) + plan.decodes
        ones, none = (1,) * len(keys), (None,) * len(keys)
        result = StepResult(step=plan.step, keys=keys, token_ids=ones, logprobs=none)
        scheduler.apply(plan, result, 0.0)


def timed(loaded: Loaded, backend: Backend, plans: list[StepPlan], *, overlaps: bool) -> Timed:
    runner = ModelRunner(
        config=loaded.config,
        backend=backend,
        pages=WorkerPages(
            RankPages(
                loaded.pool,
                PageArena(loaded.pool.layout, 0, 0, loaded.model.device.type),
                range(loaded.pool.layout.num_kv_heads),
            ),
            Origin(fingerprint=ROOT, offsets_hash=ROOT, incarnation=1),
        ),
        grammars=GrammarTable(
            Path("no tokenizer"), vocab_size=loaded.config.vocab_size, eos_token_ids=()
        ),
        reads_late=True,
    )
    results = _overlapped(runner, plans) if overlaps else map(runner.execute, plans)
    times, tokens = [], []
    last = time.perf_counter()
    for plan, result in zip(plans, results, strict=True):
        now = time.perf_counter()
        if plan.decodes and not plan.chunks:
            times.append(now - last)
        tokens.append(result.token_ids)
        last = now
    return Timed(median(times), tokens)


def _overlapped(runner: ModelRunner, plans: list[StepPlan]) -> Iterator[StepResult]:
    before: LaunchedStep | None = None
    for plan in plans:
        launched = runner.launch(plan)
        if before is not None:
            yield before.result()
        before = launched
    if before is not None:
        yield before.result()
