"""A prefill worker's wiring."""

from common.scheduling.block_hash import HashRoots
from prefill_worker.core import PrefillCore
from prefill_worker.service import PrefillService
from worker.config import WorkerConfig
from worker.main import Assembly, Parts, context_of, run_worker
from worker.transport import open_transport


def run(config: WorkerConfig) -> int:
    return run_worker(config, assemble)


async def assemble(parts: Parts) -> Assembly:
    transport = await open_transport(parts)
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
