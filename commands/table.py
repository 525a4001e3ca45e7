"""The commands: what each takes. `tandem.py` starts them."""

import functools
from collections.abc import Sequence
from typing import Final

from commands.config import (
    CalibrateConfig,
    CertsConfig,
    DemoModelConfig,
    PlanConfig,
    QualityConfig,
    ServeConfig,
)
from common import options
from common.options import Command, CommandSpec
from router.config import RouterConfig
from worker.config import ColocatedSwitch, WorkerConfig, decode_config


def _spec(config: type, summary: str) -> CommandSpec:
    return CommandSpec(summary=summary, options=(config,), make=config)


COMMANDS: Final = {
    "serve": _spec(ServeConfig, "start a router and workers on this machine"),
    "router": _spec(RouterConfig, "start the router: HTTP and gRPC in front, workers behind"),
    "prefill": CommandSpec(
        summary="start a prefill worker",
        options=(WorkerConfig,),
        make=functools.partial(WorkerConfig, role="prefill"),
    ),
    "decode": CommandSpec(
        summary="start a decode worker, or with --colocated one that does both",
        options=(WorkerConfig, ColocatedSwitch),
        make=decode_config,
    ),
    "certs": _spec(
        CertsConfig, "make a development CA and a certificate for mTLS between processes"
    ),
    "demo-model": _spec(DemoModelConfig, "prepare the demo model and print its directory"),
    "calibrate": _spec(
        CalibrateConfig, "measure what compressed KV subtracts, and store it beside the model"
    ),
    "quality": _spec(QualityConfig, "measure what each KV codec costs, and fail beyond a bound"),
    "plan": _spec(PlanConfig, "simulate deployments of a model on GPUs and recommend one"),
}


def parse(argv: Sequence[str] | None = None) -> Command:
    """Reads `argv` (the process's own when None) and the file it names. Raises ConfigError."""
    return options.parse(COMMANDS, argv)
