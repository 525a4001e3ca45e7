"""A deployment: so many workers of each role, alike but for that and their ranks; and what each is
made of.

site = GpuSite(model, gpu, ...)              what there is to deploy on
site.workers(deployment) -> [WorkerSetup]    raises ConfigError when the model does not fit
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from common.codecs import DEFAULT_KV_CODEC, codec_named
from common.errors import ConfigError
from common.model_config import ModelConfig
from common.pages import PageKind, PageLayout
from common.ranks import Ownership, ownership, shares
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
class RoleRanks:
    """How many ranks a prefill worker has, and one that decodes (colocated ones do)."""

    prefill: int = 1
    decode: int = 1

    def of(self, role: Role) -> int:
        return self.prefill if role is Role.PREFILL else self.decode


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    prefill: int = 0
    decode: int = 0
    colocated: int = 0
    ranks: RoleRanks = RoleRanks()
    chunk: str = AUTO
    """Tokens, or `auto`: as --chunk-tokens has it."""
    codec: str = DEFAULT_KV_CODEC

    @property
    def counts(self) -> dict[Role, int]:
        """Of the roles that there are."""
        counts = {
            Role.PREFILL: self.prefill,
            Role.DECODE: self.decode,
            Role.COLOCATED: self.colocated,
        }
        return {role: count for role, count in counts.items() if count}

    @property
    def shape(self) -> str:
        """2P + 1D; with ranks: 2 x P2 + 1 x D4."""
        if self.ranks == RoleRanks():
            parts = [f"{count}{_LETTERS[role]}" for role, count in self.counts.items()]
        else:
            parts = [
                f"{count} x {_LETTERS[role]}{self.ranks.of(role)}"
                for role, count in self.counts.items()
            ]
        return " + ".join(parts)

    @property
    def num_gpus(self) -> int:
        return sum(count * self.ranks.of(role) for role, count in self.counts.items())

    @property
    def chunk_tokens(self) -> int:
        return MAX_AUTO_CHUNK if self.chunk == AUTO else int(self.chunk)


_LETTERS: Final = {Role.PREFILL: "P", Role.DECODE: "D", Role.COLOCATED: "C"}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerKind:
    """What workers of one role have in common."""

    costs: CostModel
    step_times: StepTimes
    pool: PoolSize
    ownership: Ownership


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes of the rank that holds most."""

    weights: float
    pages: float


class Site(Protocol):
    @property
    def model(self) -> ModelConfig: ...

    def workers(self, deployment: Deployment) -> list[WorkerSetup]: ...

    def memory(self, deployment: Deployment) -> dict[Role, RankMemory]:
        """Of each role that the deployment has; none where weights are not known."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSite:
    """GPUs of one kind, each of which is one rank of a worker."""

    model: ModelConfig
    gpu: Gpu
    memory_utilization: float
    max_num_seqs: int
    compute_efficiency: float
    bandwidth_efficiency: float

    def workers(self, deployment: Deployment) -> list[WorkerSetup]:
        layout = page_layout(self.model, deployment.codec)
        return worker_setups(
            deployment,
            model=self.model,
            layout=layout,
            max_num_seqs=self.max_num_seqs,
            kinds={role: self._kind(role, deployment, layout) for role in deployment.counts},
        )

    def memory(self, deployment: Deployment) -> dict[Role, RankMemory]:
        layout = page_layout(self.model, deployment.codec)
        found = {}
        for role in deployment.counts:
            costs = self._costs(deployment.ranks.of(role), layout)
            pool = self._pool(role, costs)
            found[role] = RankMemory(
                weights=costs.weight_bytes, pages=pool.num_bytes(costs.rank_layout)
            )
        return found

    def _kind(self, role: Role, deployment: Deployment, layout: PageLayout) -> WorkerKind:
        costs = self._costs(deployment.ranks.of(role), layout)
        return WorkerKind(
            costs=costs,
            step_times=linear_of(costs),
            pool=self._pool(role, costs),
            ownership=ownership_of(self.model, costs.num_ranks),
        )

    def _costs(self, num_ranks: int, layout: PageLayout) -> Roofline:
        return Roofline(
            gpu=self.gpu,
            model=self.model,
            layout=layout,
            num_ranks=num_ranks,
            compute_efficiency=self.compute_efficiency,
            bandwidth_efficiency=self.bandwidth_efficiency,
        )

    def _pool(self, role: Role, costs: Roofline) -> PoolSize:
        """All ranks have as many pages, so what fits the rank that holds most decides."""
        total = self.gpu.memory_bytes
        budget = total * (self.memory_utilization - ACTIVATION_SHARE) - costs.weight_bytes
        pool = pool_within(int(budget), costs.rank_layout, self.max_num_seqs)
        if pool is None or pool.num_packed < MIN_BLOCKS:
            raise ConfigError(
                f"{costs.weight_bytes / 1e9:.0f} GB of weights leave no room for KV on each of the"
                f" {costs.num_ranks} x {self.gpu.name} ({total / 1e9:.0f} GB) of a {role} worker;"
                " give it more ranks (--tensor-parallel)"
            )
        return pool


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSite:
    """A machine whose step times were measured (simulator/fit.py); `num_blocks` for each worker,
    which has one rank.
    """

    model: ModelConfig
    costs: FittedCosts
    num_blocks: int
    max_num_seqs: int

    def workers(self, deployment: Deployment) -> list[WorkerSetup]:
        assert deployment.ranks == RoleRanks()
        kind = WorkerKind(
            costs=self.costs,
            step_times=self.costs.times,
            pool=pool_of(self.num_blocks, self.max_num_seqs),
            ownership=ownership_of(self.model, 1),
        )
        return worker_setups(
            deployment,
            model=self.model,
            layout=page_layout(self.model, deployment.codec),
            max_num_seqs=self.max_num_seqs,
            kinds=dict.fromkeys(deployment.counts, kind),
        )

    def memory(self, deployment: Deployment) -> dict[Role, RankMemory]:
        return {}


def page_layout(model: ModelConfig, codec: str) -> PageLayout:
    return PageLayout.of(model, BLOCK_SIZE, codec_named(codec))


def ownership_of(model: ModelConfig, num_ranks: int) -> Ownership:
    return ownership(shares(num_ranks, model.num_heads, model.num_kv_heads))


def worker_setups(
    deployment: Deployment,
    *,
    model: ModelConfig,
    layout: PageLayout,
    max_num_seqs: int,
    kinds: Mapping[Role, WorkerKind],
) -> list[WorkerSetup]:
    landing = landing_of(deployment.chunk_tokens, layout.block_size)
    return [
        WorkerSetup(
            role=role,
            costs=kinds[role].costs,
            step_times=kinds[role].step_times,
            layout=layout,
            ownership=kinds[role].ownership,
            num_packed=kinds[role].pool.num_packed,
            num_exact=kinds[role].pool.num_exact,
            chunk_tokens=deployment.chunk_tokens,
            is_chunk_auto=deployment.chunk == AUTO,
            max_num_seqs=max_num_seqs,
            max_model_len=model.max_position_embeddings,
            num_landing_packed=landing.num_packed,
            num_landing_exact=landing.num_exact,
        )
        for role, count in deployment.counts.items()
        for _ in range(count)
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
