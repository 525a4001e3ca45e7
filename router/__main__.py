"""The router's process. `tandem router` calls `run`."""

import gc
import logging
import sys

import anyio
import anyio.lowlevel

from common.errors import ConfigError, UnsupportedModel
from common.internal_tls import InternalTls
from common.process import until_signal
from common.rpc import connect
from router.config import RouterConfig
from router.wiring import open_router

log = logging.getLogger(__name__)

SWITCH_S = 0.001


def run(config: RouterConfig) -> int:
    """The process's exit code: 0 after a drain, 1 after a crash, 2 for what the operator must
    change.
    """
    logging.basicConfig(
        level=config.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    exit_code = 0
    try:
        anyio.run(_run, config, backend_options={"use_uvloop": True})
    except* (ConfigError, UnsupportedModel) as group:
        exit_code = 2
        for error in group.exceptions:
            log.error("%s", error)
    except* Exception as group:
        exit_code = 1
        log.error("stopped by a crash", exc_info=group)
    return exit_code


async def _run(config: RouterConfig) -> None:
    stop = anyio.Event()
    async with anyio.create_task_group() as group:
        group.start_soon(until_signal, stop.set)
        await anyio.lowlevel.checkpoint()  # signals are heard before anybody can think we run
        tls = InternalTls.of(config.internal_tls)
        router = open_router(config, connect=connect if tls is None else tls.connect)
        router.service.compiler.warm()
        _yield_often()
        await router.run(stop)
        group.cancel_scope.cancel()


def _yield_often() -> None:
    """What is loaded stays, so collections need not look at it; and threads that read large
    requests hand the interpreter back to the event loop soon.
    """
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(SWITCH_S)
