"""What a step's decisions cost: `plan` and `apply` of a decode worker's scheduler with 256 running
outputs and `plan` of a prefill worker's, for several numbers of waiting requests and pool sizes,
and one allocation of a block.

Nothing runs but the scheduler; the model is a constant. Medians of many steps, in time of the
processor, so that other processes disturb little.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from common.messages import GenerateRequest, pack_tokens
from common.scheduling.block_hash import HashChain, root_hash
from common.scheduling.block_pool import BlockPool
from common.scheduling.kv_cache import KvCache
from common.scheduling.plan import StepPlan, StepResult
from common.scheduling.prompt_pages import PromptNames
from common.scheduling.prompt_queue import Prompt
from common.types import SamplingParams
from decode_worker.scheduler import BatchScheduler
from prefill_worker.scheduler import ChunkComputed, PrefillScheduler

NUM_RUNNING = 256
PROMPT_TOKENS = 24
BLOCK_SIZE = 16
NUM_STEPS = 400
WARM_UP_STEPS = 32
MAX_PLAN_S = 200e-6
MAX_PLAN_RATIO = 1.5
"""Of 10,000 waiting requests to none."""
MAX_ALLOCATE_RATIO = 3.0
"""Of the largest pool to the smallest. The work is the same, but the larger one is not in the
processor's cache.
"""

WAITING = (0, 100, 10_000)
POOLS = (1_000, 100_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    num_waiting: int
    num_blocks: int
    admit_s: float
    plan_s: float
    worst_plan_s: float
    """99th percentile."""
    apply_s: float
    prefill_plan_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    rows: list[Row]
    allocate_s: dict[int, float]
    """By pool size; all blocks cached, so that each allocation reclaims one."""

    @property
    def plan_ratio(self) -> float:
        """10,000 waiting against none, in the large pool."""
        by_waiting = {row.num_waiting: row.plan_s for row in self.rows if row.num_blocks > 1_000}
        return by_waiting[WAITING[-1]] / by_waiting[WAITING[0]]

    @property
    def allocate_ratio(self) -> float:
        return self.allocate_s[POOLS[-1]] / self.allocate_s[POOLS[0]]

    @property
    def holds(self) -> bool:
        return (
            all(row.plan_s <= MAX_PLAN_S for row in self.rows)
            and self.plan_ratio <= MAX_PLAN_RATIO
            and self.allocate_ratio <= MAX_ALLOCATE_RATIO
        )


def run() -> Report:
    return Report(
        rows=[row for pool in POOLS for row in measure(WAITING, pool)],
        allocate_s={pool: allocation_s(pool) for pool in POOLS},
    )


def measure(
    numbers_waiting: Sequence[int], num_blocks: int, num_steps: int = NUM_STEPS
) -> list[Row]:
    """Schedulers that differ in how many requests wait take turns, step by step: what else the
    machine does then falls on all of them.
    """
    num_steps = num_steps if num_blocks > 1_000 else 2 * BLOCK_SIZE
    schedulers = [_busy(num_waiting, num_blocks, num_steps) for num_waiting in numbers_waiting]
    times: list[list[tuple[float, float, float]]] = [[] for _ in schedulers]
    for _ in range(num_steps):
        for scheduler, own in zip(schedulers, times, strict=True):
            own.append(_step(scheduler))
    return [
        _row(num_waiting, num_blocks, own)
        for num_waiting, own in zip(numbers_waiting, times, strict=True)
    ]


def _busy(num_waiting: int, num_blocks: int, num_steps: int) -> BatchScheduler:
    """With 1,000 blocks the outputs of 256 requests do not fit for long: 128 run then."""
    num_running = NUM_RUNNING if num_blocks > 1_000 else NUM_RUNNING // 2
    scheduler = BatchScheduler(
        KvCache(num_packed=num_blocks, num_exact=4 * NUM_RUNNING, block_size=BLOCK_SIZE),
        chunk_tokens=2048,
        max_num_seqs=num_running,
        max_waiting=100_000,
        max_model_len=8192,
        is_colocated=True,
    )
    max_tokens = num_steps + 128 if num_blocks > 1_000 else 5 * BLOCK_SIZE + WARM_UP_STEPS
    for number in range(num_running):
        _add(scheduler, number, max_tokens)
    while scheduler.num_decodes < num_running:
        _step(scheduler)
    for number in range(num_waiting):
        _add(scheduler, num_running + number, max_tokens)
    # the fit of step times is new at first, and busier; outputs open new blocks at different steps,
    # as they do in life
    for _ in range(WARM_UP_STEPS):
        _step(scheduler)
    return scheduler


def _row(num_waiting: int, num_blocks: int, times: list[tuple[float, float, float]]) -> Row:
    admits, plans, applies = zip(*times, strict=True)
    return Row(
        num_waiting=num_waiting,
        num_blocks=num_blocks,
        admit_s=statistics.median(admits),
        plan_s=statistics.median(plans),
        worst_plan_s=sorted(plans)[len(plans) * 99 // 100],
        apply_s=statistics.median(applies),
        prefill_plan_s=prefill_plan_s(num_waiting, num_blocks),
    )


def prefill_plan_s(num_waiting: int, num_blocks: int) -> float:
    """A step of a prefill worker with one long prompt under way, which the others let pass."""
    cache = KvCache(num_packed=num_blocks, num_exact=num_blocks, block_size=BLOCK_SIZE)
    scheduler = PrefillScheduler(cache, chunk_tokens=64, max_model_len=100_000)
    for number, num_tokens in enumerate([15_000, *[PROMPT_TOKENS] * num_waiting]):
        tokens = np.full(num_tokens, number % 1000, dtype=np.int32)
        prompt = Prompt(
            key=f"p{number}",
            token_ids=tokens,
            num_prompt_tokens=num_tokens,
            sampling=SamplingParams(max_tokens=1),
            hashes=[],
            client=f"client {number % 7}",
            priority=1 if number == 0 else 0,
        )
        full = [number.to_bytes(16, "little")] * (num_tokens // BLOCK_SIZE)
        names = PromptNames(
            num_tokens=num_tokens,
            block_size=BLOCK_SIZE,
            full=full,
            open=b"open" * 4 if num_tokens % BLOCK_SIZE else None,
        )
        scheduler.add(prompt, names, 0, 0.0)
    times = []
    for _ in range(200):
        began = time.thread_time()
        plan = scheduler.plan(0.0)
        times.append(time.thread_time() - began)
        assert plan is not None
        for fact in scheduler.apply(plan, _result(plan), 0.0):
            if isinstance(fact, ChunkComputed):
                scheduler.release((page.kind, page.block_id) for page in fact.pages)
    return statistics.median(times)


def allocation_s(num_blocks: int) -> float:
    pool = BlockPool(num_blocks)
    taken = [pool.allocate() for _ in range(num_blocks)]
    for block_id in taken:
        assert block_id is not None
        pool.name(block_id, block_id.to_bytes(16, "little"))
        pool.release(block_id)

    def some() -> None:
        for _ in range(50):
            pool.allocate()

    return statistics.median(_seconds(some) for _ in range(18)) / 50


def _step(scheduler: BatchScheduler) -> tuple[float, float, float]:
    admit_s = _seconds(lambda: scheduler.admit(0.0))
    began = time.thread_time()
    plan, _ = scheduler.plan(0.0)
    plan_s = time.thread_time() - began
    assert plan is not None
    result = _result(plan)
    return admit_s, plan_s, _seconds(lambda: scheduler.apply(plan, result, 0.0))


def _result(plan: StepPlan) -> StepResult:
    keys = [chunk.key for chunk in plan.chunks for _ in range(chunk.num_outputs)]
    keys += plan.decodes
    return StepResult(
        step=plan.step,
        keys=tuple(keys),
        token_ids=(7,) * len(keys),
        logprobs=(None,) * len(keys),
        duration_s=0.02,
    )


def _add(scheduler: BatchScheduler, number: int, max_tokens: int) -> None:
    num_tokens = PROMPT_TOKENS + number % BLOCK_SIZE
    tokens = np.full(num_tokens, number % 1000, dtype=np.int32)
    chain = HashChain(root_hash(b"bench", BLOCK_SIZE, str(number)), BLOCK_SIZE)
    chain.extend(tokens)
    request = GenerateRequest(
        request_id=f"r{number}",
        token_ids=pack_tokens(tokens),
        num_prompt_tokens=num_tokens,
        sampling=SamplingParams(max_tokens=max_tokens),
        client=f"client {number % 7}",
    )
    scheduler.add(request, tokens, chain, 0.0)


def _seconds(action: Callable[[], object]) -> float:
    began = time.thread_time()
    action()
    return time.thread_time() - began
