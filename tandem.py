"""The command line, `tandem COMMAND`. Parses, starts, nothing else.

Imports are lazy, so that the router's process never loads torch and --help is quick.
"""

import importlib
import sys

from commands.config import (
    CalibrateConfig,
    CertsConfig,
    DemoModelConfig,
    PlanConfig,
    QualityConfig,
    ServeConfig,
)
from commands.table import parse
from common.errors import ConfigError, UnsupportedModel
from common.options import Command

PACKAGES = {"router": "router", "prefill": "prefill_worker", "decode": "decode_worker"}


def main() -> int:
    try:
        return run(parse())
    except (ConfigError, UnsupportedModel) as error:
        print(f"tandem: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("tandem: interrupted", file=sys.stderr)
        return 130


def run(command: Command) -> int:
    match command.config:
        case ServeConfig() as config:
            from commands import serve

            return serve.run(config, command.config_file)
        case CertsConfig() as config:
            from commands import certificates

            return certificates.run(config)
        case DemoModelConfig() as config:
            from commands import demo_model

            return demo_model.run(config, say)
        case CalibrateConfig() as config:
            from commands import calibrate

            return calibrate.run(config, say)
        case QualityConfig() as config:
            from commands import quality

            return quality.run(config, print)
        case PlanConfig() as config:
            from commands import plan

            return plan.run(config, say)
        case config:
            module = importlib.import_module(f"{PACKAGES[command.name]}.__main__")
            exit_code: int = module.run(config)
            return exit_code


def say(text: str) -> None:
    print(f"tandem: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
