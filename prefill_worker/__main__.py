"""A prefill worker's wiring."""

from common.ranks import alone
from common.scheduling.block_hash import HashRoots
from kvtransfer.nixl_transport import NixlTransport
from prefill_worker.core import PrefillCore
from prefill_worker.service import PrefillService
from worker.config import WorkerConfig
from worker.main import Assembly, Parts, context_of, run_worker


def run(config: WorkerConfig) -> int:
    return run_worker(config, assemble)


async def assemble(parts: Parts) -> Assembly:
    transport = NixlTransport(
        parts.identity.incarnation,
        parts.runner.pool,
        parts.runner.landing,
        alone(parts.runner.layout.num_kv_heads),
    )
    await transport.open()
    core = PrefillCore(
        parts.cache,
        roots=HashRoots(parts.identity.model_fingerprint, parts.identity.block_size),
        chunk_tokens=parts.config.max_chunk_tokens,
        max_model_len=parts.sizes.max_model_len,
        handoff_stall_s=parts.config.handoff_stall_s,
    )
    service = PrefillService(
        context_of(parts, core.scheduler),
        core,
        transport,
        handoff_stall_s=parts.config.handoff_stall_s,
    )
    return Assembly(service=service, close=transport.close)
