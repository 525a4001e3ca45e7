"""A decode worker's wiring; `colocated` is one that prefills everything itself and needs no
transport.
"""

import logging

from anyio.abc import TaskGroup

from common.device import Device
from common.internal_tls import InternalTls
from common.rpc import connect
from common.scheduling.plan import PageKind
from decode_worker.links import Links
from decode_worker.peers import AllowedPeers
from decode_worker.pull import Puller
from decode_worker.scheduler import BatchScheduler
from decode_worker.service import DecodeService
from kvtransfer.landing import LandingZone
from worker.config import WorkerConfig
from worker.main import Assembly, Parts, run_worker, watched

log = logging.getLogger(__name__)


def run(config: WorkerConfig) -> int:
    return run_worker(config, assemble)


async def assemble(parts: Parts, group: TaskGroup) -> Assembly:
    config = parts.config
    is_colocated = config.role == "colocated"
    scheduler = BatchScheduler(
        parts.cache,
        chunk_tokens=config.max_chunk_tokens,
        is_chunk_auto=config.is_chunk_auto,
        max_num_seqs=config.max_num_seqs,
        max_waiting=config.max_waiting,
        max_model_len=parts.sizes.max_model_len,
        is_colocated=is_colocated,
    )
    device = watched(parts, scheduler)
    service = DecodeService(
        identity=parts.identity,
        scheduler=scheduler,
        cache=parts.cache,
        device=device,
        clock=parts.clock,
        metrics=parts.metrics,
        events=parts.events,
        unfit=parts.unfit,
        overlaps_steps=parts.device.overlaps_steps,
    )
    if is_colocated:
        return Assembly(service=service, close=_nothing)
    return await _with_puller(parts, group, device, scheduler, service)


async def _with_puller(
    parts: Parts,
    group: TaskGroup,
    device: Device,
    scheduler: BatchScheduler,
    service: DecodeService,
) -> Assembly:
    from kvtransfer.nixl_transport import NixlTransport

    transport = NixlTransport(parts.identity.incarnation, parts.runner.pool, parts.runner.landing)
    await transport.open()
    zone = LandingZone(
        num_packed=parts.sizes.num_landing_packed, num_exact=parts.sizes.num_landing_exact
    )
    layout = parts.runner.layout
    page_bytes = {
        PageKind.PACKED: layout.packed_page_bytes,
        PageKind.EXACT: layout.exact_page_bytes,
    }
    tls = InternalTls.of(parts.config.internal_tls)
    allowed = AllowedPeers.of(parts.config)
    if allowed.is_everybody and tls is None:
        log.warning(
            "whoever reaches %s can make this worker connect to any address: name the prefill "
            "workers with --prefill-peers, or use --internal-tls",
            parts.config.listen,
        )
    links = Links(
        allowed=allowed,
        identity=parts.identity,
        transport=transport,
        zone=zone,
        connect=connect if tls is None else tls.connect,
        metrics=parts.metrics,
        page_bytes=page_bytes[PageKind.PACKED],
    )
    puller = Puller(
        scheduler=scheduler,
        device=device,
        transport=transport,
        zone=zone,
        links=links,
        page_bytes=page_bytes,
        block_size=parts.identity.block_size,
        clock=parts.clock,
        metrics=parts.metrics,
        events=parts.events,
        group=group,
        wake=service.wake,
        give_up=parts.give_up,
        handoff_stall_s=parts.config.handoff_stall_s,
    )
    service.use(puller)

    async def close() -> None:
        await links.close()
        await transport.close()

    return Assembly(service=service, close=close)


async def _nothing() -> None:
    return None
