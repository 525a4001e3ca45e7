"""The router's process. `tandem router` calls `run`."""

import logging
import sys

import anyio

from common.config import RouterConfig
from common.errors import TandemError, UnsupportedModel
from common.worker import until_signal
from router.wiring import open_router

log = logging.getLogger(__name__)


def run(config: RouterConfig) -> int:
    """The process's exit code: 0 after a drain, 1 after a crash, 2 for what the operator must change."""
    logging.basicConfig(
        level=config.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    try:
        anyio.run(_run, config, backend_options={"use_uvloop": True})
    except TandemError as error:
        log.error("%s", error)
        return 2 if error.code in ("config_error", UnsupportedModel.code) else 1
    except BaseExceptionGroup as group:
        log.error("stopped by a crash", exc_info=group)
        return 1
    return 0


async def _run(config: RouterConfig) -> None:
    router = await open_router(config)
    stop = anyio.Event()
    async with anyio.create_task_group() as group:
        group.start_soon(until_signal, stop.set)
        await router.run(stop)
        group.cancel_scope.cancel()
