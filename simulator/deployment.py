"""A deployment: so many workers of each role, alike but for that; and what each is made of.

site = GpuSite(model, gpu, tp, ...)          what there is to deploy on
site.workers(deployment) -> [WorkerSetup]    raises ConfigError when the model does not fit
"""

from collections import Counter
from dataclasses import dataclass
from typing import Final, Protocol

from common.codecs import DEFAULT_KV_CODEC, codec_named
from common.errors import ConfigError
from common.model_config import ModelConfig
from common.pages import PageKind, PageLayout
from common.scheduling.kv_cache import KvCache
from common.scheduling.step_time import StepTimes
from common.types import Role
from engine.pool_size import ACTIVATION_SHARE, PoolSize, landing_of, pool_of, pool_within
from simulator.costs import CostModel, FittedCosts, Roofline
from simulator.fit import linear_of
from simulator.hardware import Gpu
from simulator.host import WorkerSetup
from worker.config import MAX_AUTO_CHUNK

BLOCK_SIZE: Final = 16
MIN_BLOCKS: Final = 64
AUTO: Final = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    prefill: int = 0
    decode: int = 0
    colocated: int = 0
    chunk: str = AUTO
    """Tokens, or `auto`: as --chunk-tokens has it."""
    codec: str = DEFAULT_KV_CODEC

    @property
    def shape(self) -> str:
        parts = ((self.prefill, "P"), (self.decode, "D"), (self.colocated, "C"))
        return " + ".join(f"{count}{role}" for count, role in parts if count)

    @property
    def num_workers(self) -> int:
        return self.prefill + self.decode + self.colocated

    @property
    def chunk_tokens(self) -> int:
        return MAX_AUTO_CHUNK if self.chunk == AUTO else int(self.chunk)


class Site(Protocol):
    @property
    def model(self) -> ModelConfig: ...

    @property
    def gpus_per_worker(self) -> int: ...

    def workers(self, deployment: Deployment) -> list[WorkerSetup]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSite:
    """GPUs of one kind, `tp` of them for each worker."""

    model: ModelConfig
    gpu: Gpu
    tp: int
    memory_utilization: float
    max_num_seqs: int
    compute_efficiency: float
    bandwidth_efficiency: float

    @property
    def gpus_per_worker(self) -> int:
        return self.tp

    def workers(self, deployment: Deployment) -> list[WorkerSetup]:
        layout = page_layout(self.model, deployment.codec)
        costs = Roofline(
            gpu=self.gpu,
            model=self.model,
            layout=layout,
            tp=self.tp,
            compute_efficiency=self.compute_efficiency,
            bandwidth_efficiency=self.bandwidth_efficiency,
        )
        total = self.gpu.memory_bytes * self.tp
        budget = total * (self.memory_utilization - ACTIVATION_SHARE) - costs.model_bytes
        pool = pool_within(int(budget), layout, self.max_num_seqs)
        if pool is None or pool.num_packed < MIN_BLOCKS:
            raise ConfigError(
                f"the model's {costs.model_bytes / 1e9:.0f} GB of weights leave no room for KV on"
                f" {self.tp} x {self.gpu.name} ({total / 1e9:.0f} GB); raise --tp"
            )
        return worker_setups(
            deployment,
            model=self.model,
            costs=costs,
            step_times=linear_of(costs),
            layout=layout,
            pool=pool,
            max_num_seqs=self.max_num_seqs,
            gpus_per_worker=self.tp,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSite:
    """A machine whose step times were measured (simulator/fit.py); `num_blocks` for each worker."""

    model: ModelConfig
    costs: FittedCosts
    num_blocks: int
    max_num_seqs: int

    @property
    def gpus_per_worker(self) -> int:
        return 1

    def workers(self, deployment: Deployment) -> list[WorkerSetup]:
        return worker_setups(
            deployment,
            model=self.model,
            costs=self.costs,
            step_times=self.costs.times,
            layout=page_layout(self.model, deployment.codec),
            pool=pool_of(self.num_blocks, self.max_num_seqs),
            max_num_seqs=self.max_num_seqs,
            gpus_per_worker=1,
        )


def page_layout(model: ModelConfig, codec: str) -> PageLayout:
    return PageLayout.of(model, BLOCK_SIZE, codec_named(codec))


def worker_setups(
    deployment: Deployment,
    *,
    model: ModelConfig,
    costs: CostModel,
    step_times: StepTimes,
    layout: PageLayout,
    pool: PoolSize,
    max_num_seqs: int,
    gpus_per_worker: int,
) -> list[WorkerSetup]:
    landing = landing_of(deployment.chunk_tokens, layout.block_size)
    roles = (
        [Role.PREFILL] * deployment.prefill
        + [Role.DECODE] * deployment.decode
        + [Role.COLOCATED] * deployment.colocated
    )
    return [
        WorkerSetup(
            role=role,
            costs=costs,
            step_times=step_times,
            layout=layout,
            num_packed=pool.num_packed,
            num_exact=pool.num_exact,
            chunk_tokens=deployment.chunk_tokens,
            is_chunk_auto=deployment.chunk == AUTO,
            max_num_seqs=max_num_seqs,
            max_model_len=model.max_position_embeddings,
            num_gpus=gpus_per_worker,
            num_landing_packed=landing.num_packed,
            num_landing_exact=landing.num_exact,
        )
        for role in roles
    ]


def kv_concurrency(workers: list[WorkerSetup], num_tokens: int) -> int:
    """Requests of that length whose KV the workers that decode can hold at the same time."""
    total = 0
    for worker in workers:
        if worker.role is Role.PREFILL:
            continue
        cache = KvCache(num_packed=1, num_exact=1, block_size=worker.layout.block_size)
        pages: Counter[PageKind] = cache.pages_for(max(1, num_tokens))
        rooms = {PageKind.PACKED: worker.num_packed, PageKind.EXACT: worker.num_exact}
        most = min(rooms[kind] // count for kind, count in pages.items() if count)
        total += min(most, worker.max_num_seqs)
    return total
