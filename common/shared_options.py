"""Options that several commands have, each defined once: configs call these for their fields."""

from collections.abc import Iterable
from typing import Any, Literal

from common.codecs import CODECS
from common.errors import ConfigError
from common.options import option

LogLevel = Literal["debug", "info", "warning", "error"]
BlockSize = Literal[16, 32]
PrefillWhere = Literal["auto", "remote"]
WeightDtype = Literal["auto", "fp8", "int8"]

MAX_GPU_MEMORY_UTILIZATION = 0.92


def log_level() -> Any:
    return option("least important line to log", default="info")


def drain_s() -> Any:
    return option(
        "at shutdown, how long running requests may still take", default=30.0, metavar="SECONDS"
    )


def internal_tls() -> Any:
    return option(
        "talk to other processes over mTLS, with ca.pem, node.pem and node-key.pem of this folder",
        default=None,
        metavar="DIR",
        shown="plain text",
    )


def served_model_name() -> Any:
    return option(
        "model name in the API", default=None, metavar="NAME", shown="the directory's name"
    )


def itl_target() -> Any:
    return option(
        "target for the seconds between two tokens of a stream while prompts are computed",
        default=None,
        metavar="SECONDS",
        shown="0.05, or two to five steps without prompts if that is longer",
    )


def http() -> Any:
    return option("where the OpenAI API listens", default="127.0.0.1:8000", metavar="HOST:PORT")


def model() -> Any:
    return option("model directory in Hugging Face format", metavar="DIR")


def text() -> Any:
    return option("file with text like what the model will be given", metavar="FILE")


def tensor_parallel() -> Any:
    return option(
        "processes (ranks) of one worker, each with a part of every layer; a GPU for each",
        default=1,
        metavar="N",
    )


def threads() -> Any:
    return option(
        "CPU threads for computing, of all ranks together",
        default=None,
        metavar="N",
        shown="all cores",
    )


def block_size() -> Any:
    return option("tokens per KV block", default=16)


def max_num_seqs() -> Any:
    return option("outputs that decode at the same time", default=256, metavar="N")


def json() -> Any:
    return option("also write the numbers here", default=None, metavar="FILE", shown="no file")


def check_codecs(names: Iterable[str]) -> None:
    for name in names:
        if name not in CODECS:
            raise ConfigError(f"--codecs: there is no {name}; choose among {', '.join(CODECS)}")
