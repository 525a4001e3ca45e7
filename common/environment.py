"""What a process finds around it: variables, cores and the installed version. No other file reads
the environment.
"""

import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

MAX_GPUS = 16
"""Of one machine."""


def home() -> Path:
    """Where Tandem keeps what it prepares: $TANDEM_HOME, or ~/.cache/tandem."""
    named = os.environ.get("TANDEM_HOME")
    return Path(named).expanduser() if named else Path.home() / ".cache" / "tandem"


def keys_of_environment() -> str:
    return os.environ.get("TANDEM_API_KEYS", "")


def available_cores() -> int:
    return len(os.sched_getaffinity(0))


def visible_gpus() -> list[str]:
    """What CUDA_VISIBLE_DEVICES would be for each GPU that this process sees; where it is not set,
    for as many as a machine can have.
    """
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [str(number) for number in range(MAX_GPUS)] if named is None else named.split(",")


def child_environment(threads: int) -> dict[str, str]:
    """This process's environment, with every library's thread pool held to `threads`."""
    pools = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")
    return {**os.environ, **dict.fromkeys(pools, str(threads))}


def tandem_version() -> str:
    """Of the installed distribution; 0 where the sources run without one."""
    try:
        return version("tandem-serve")
    except PackageNotFoundError:
        return "0"
