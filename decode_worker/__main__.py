"""A decode worker's wiring; `colocated` is one that prefills everything itself and needs no
transport.
"""

import logging

from common.internal_tls import InternalTls
from common.rpc import connect
from common.scheduling.block_hash import HashRoots
from decode_worker.core import DecodeCore
from decode_worker.handoffs import Wire
from decode_worker.links import Links
from decode_worker.peers import AllowedPeers
from decode_worker.pulls import Pulls
from decode_worker.scheduler import BatchScheduler
from decode_worker.service import DecodeService
from kvtransfer.landing import LandingZone
from worker.config import WorkerConfig
from worker.main import Assembly, Parts, context_of, run_worker

log = logging.getLogger(__name__)


def run(config: WorkerConfig) -> int:
    return run_worker(config, assemble)


async def assemble(parts: Parts) -> Assembly:
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
    wire = None if is_colocated else await _open_wire(parts)
    pulls = None
    if wire is not None:
        pulls = Pulls(
            scheduler.remote,
            wire.zone,
            incarnation=parts.identity.incarnation,
            stall_s=config.handoff_stall_s,
        )
    roots = HashRoots(parts.identity.model_fingerprint, parts.identity.block_size)
    service = DecodeService(
        context_of(parts, scheduler),
        DecodeCore(parts.cache, scheduler, roots=roots, pulls=pulls),
        wire,
        overlaps_steps=parts.device.overlaps_steps,
    )
    return Assembly(service=service, close=_nothing if wire is None else wire.close)


async def _open_wire(parts: Parts) -> Wire:
    from worker.transport import open_transport  # there may be no NIXL beside a colocated worker

    transport = await open_transport(parts)
    zone = LandingZone(
        num_packed=parts.sizes.num_landing_packed, num_exact=parts.sizes.num_landing_exact
    )
    layout = parts.layout
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
        clock=parts.clock,
        metrics=parts.metrics,
    )
    return Wire(
        transport=transport,
        zone=zone,
        links=links,
        num_heads=layout.num_kv_heads,
        give_up=parts.give_up,
    )


async def _nothing() -> None:
    return None
