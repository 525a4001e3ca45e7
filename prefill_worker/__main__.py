"""A prefill worker's wiring."""

from anyio.abc import TaskGroup

from common.config import WorkerConfig
from kvtransfer.nixl_transport import NixlTransport
from prefill_worker.scheduler import PrefillScheduler
from prefill_worker.service import PrefillService
from worker.main import Assembly, Parts, run_worker, watched


def run(config: WorkerConfig) -> int:
    return run_worker(config, assemble)


async def assemble(parts: Parts, group: TaskGroup) -> Assembly:
    transport = NixlTransport(parts.identity.incarnation, parts.runner.pool, parts.runner.landing)
    await transport.open()
    scheduler = PrefillScheduler(
        parts.cache,
        chunk_tokens=parts.config.max_chunk_tokens,
        max_model_len=parts.sizes.max_model_len,
    )
    service = PrefillService(
        identity=parts.identity,
        scheduler=scheduler,
        cache=parts.cache,
        device=watched(parts, scheduler),
        transport=transport,
        clock=parts.clock,
        metrics=parts.metrics,
        events=parts.events,
        unfit=parts.unfit,
        handoff_stall_s=parts.config.handoff_stall_s,
    )
    return Assembly(service=service, close=transport.close)
