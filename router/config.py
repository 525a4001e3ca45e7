"""The router's options."""

from dataclasses import dataclass
from typing import Literal

from common import shared_options as shared
from common.errors import ConfigError
from common.options import (
    check_address,
    check_at_least,
    check_directory,
    check_distinct,
    check_not_empty,
    check_plaintext,
    check_positive,
    option,
)
from common.shared_options import LogLevel, PrefillWhere
from router.text.parsers import REASONING_PARSERS, TOOL_PARSERS


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    model: str = option(
        "model directory; the router reads tokenizer, chat template and config only", metavar="DIR"
    )
    served_model_name: str | None = shared.served_model_name()
    chat_template: str | None = option(
        "file with a Jinja chat template",
        default=None,
        metavar="FILE",
        shown="the model's own",
    )
    tool_parser: str | None = option(
        "how the model writes tool calls",
        default=None,
        shown="as its chat template suggests",
        choices=TOOL_PARSERS,
    )
    tool_objects: Literal["closed", "open"] = option(
        "whether forced calls may have arguments that the tool's schema neither names nor forbids",
        default="closed",
    )
    generation_config: Literal["auto", "off"] = option(
        "auto: the sampling defaults are those of the model's generation_config.json; off: a "
        "temperature of 1 and no filters",
        default="auto",
    )
    reasoning_parser: str | None = option(
        "separate the model's <think> block from its answer",
        default=None,
        shown="none",
        choices=REASONING_PARSERS,
    )
    http: str = shared.http()
    grpc: str | None = option(
        "where the gRPC API listens", default=None, metavar="HOST:PORT", shown="no gRPC API"
    )
    metrics: str = option("where /metrics listens", default="127.0.0.1:8001", metavar="HOST:PORT")
    api_keys: str | None = option(
        "file of API keys, one per line; $TANDEM_API_KEYS may hold more, separated by commas",
        default=None,
        metavar="FILE",
        shown="no key is needed",
    )
    priorities: str = option(
        "priorities that a request may ask for, lower is sooner; an API key's own range wins",
        default="0:100",
        metavar="LOW:HIGH",
    )
    prefix_sharing: Literal["key", "all"] = option(
        "who shares cached prefixes; key: requests under one API key only, so nobody can tell from "
        "cached tokens what others asked; all: all requests",
        default="key",
    )
    tls_cert: str | None = option(
        "certificate chain (PEM) for HTTP and gRPC", default=None, metavar="FILE", shown="no TLS"
    )
    tls_key: str | None = option(
        "its private key (PEM); goes with --tls-cert", default=None, metavar="FILE", shown="none"
    )
    prefill: tuple[str, ...] = option(
        "prefill workers, separated by commas; a name with many addresses stands for all of them",
        default=(),
        metavar="HOST:PORT,...",
        shown="none",
    )
    decode: tuple[str, ...] = option(
        "decode and colocated workers, in the same form",
        metavar="HOST:PORT,...",
    )
    prefill_where: PrefillWhere = option(
        "auto: where the first token is predicted to come soonest, at a prefill worker or on the "
        "decode worker; remote: always at a prefill worker, and without one requests are refused",
        default="auto",
    )
    max_waiting: int = option(
        "requests that may wait for a worker before new ones are refused with 429",
        default=1024,
        metavar="N",
    )
    itl_target: float | None = shared.itl_target()
    request_timeout_s: float = option(
        "a request that takes longer is ended", default=600.0, metavar="SECONDS"
    )
    keep_alive_s: float = option(
        "how long an HTTP connection may be idle between two requests; should be longer than in a "
        "proxy in front",
        default=120.0,
        metavar="SECONDS",
    )
    drain_s: float = shared.drain_s()
    internal_tls: str | None = shared.internal_tls()
    insecure_internal: bool = option(
        "talk to workers beyond this machine in plain text", default=False
    )
    log_level: LogLevel = shared.log_level()

    def __post_init__(self) -> None:
        check_directory("model", self.model)
        check_not_empty("served_model_name", self.served_model_name)
        for name, address in (("http", self.http), ("grpc", self.grpc), ("metrics", self.metrics)):
            check_address(name, address)
        check_distinct({"http": self.http, "grpc": self.grpc, "metrics": self.metrics})
        if not self.decode:
            raise ConfigError(
                "--decode names no worker; the router needs at least one decode or colocated worker"
            )
        for name, addresses in (("prefill", self.prefill), ("decode", self.decode)):
            for address in addresses:
                check_address(name, address)
                check_plaintext(name, address, self.insecure_internal, self.internal_tls)
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("--tls-cert and --tls-key go together")
        check_at_least("max_waiting", self.max_waiting, 1)
        check_positive("itl_target", self.itl_target)
        check_positive("request_timeout_s", self.request_timeout_s)
        check_positive("keep_alive_s", self.keep_alive_s)
        check_positive("drain_s", self.drain_s)
