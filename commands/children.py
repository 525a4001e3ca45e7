"""Which processes `tandem serve` starts, with their flags and ports. Nothing is started here."""

import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from commands.config import ServeConfig
from common.addresses import split_address
from common.errors import ConfigError
from common.options import flag


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildPlan:
    name: str
    role: str
    arguments: tuple[str, ...]
    threads: int

    @property
    def generates(self) -> bool:
        return self.role in ("decode", "colocated")


def plan_children(
    config: ServeConfig,
    config_file: Path | None,
    model: str,
    ports: Sequence[int],
    cores: int,
) -> list[ChildPlan]:
    """The router and every worker with their flags; `ports` holds two for each worker."""
    roles = ["prefill"] * config.prefill + ["decode"] * config.decode
    roles += ["colocated"] * config.colocated
    threads = config.threads or max(1, cores // len(roles))
    from_file = () if config_file is None else ("--config", str(config_file))
    common = (*from_file, "--model", model, "--log-level", config.log_level)
    common += ("--drain-s", str(config.drain_s))
    addresses: dict[str, list[str]] = {"prefill": [], "decode": [], "colocated": []}
    workers = []
    for i, role in enumerate(roles):
        listen, metrics = (f"127.0.0.1:{port}" for port in ports[2 * i : 2 * i + 2])
        command = ("prefill",) if role == "prefill" else ("decode", flag_for_role(role))
        own = ("--listen", listen, "--metrics", metrics, "--threads", str(threads))
        arguments = (*command, *common, *own, *shared_options(config))
        name = f"{role}-{len(addresses[role])}"
        workers.append(ChildPlan(name=name, role=role, arguments=arguments, threads=threads))
        addresses[role].append(listen)
    return [router_plan(config, common, addresses), *workers]


def worker_ports(config: ServeConfig, count: int) -> list[int]:
    """Raises ConfigError when one of the ports asked for is taken."""
    if config.worker_ports is None:
        return free_ports(count)
    ports = list(range(config.worker_ports, config.worker_ports + count))
    for port in ports:
        check_free("worker_ports", f"127.0.0.1:{port}")
    return ports


def flag_for_role(role: str) -> str:
    return "--colocated" if role == "colocated" else "--no-colocated"


def router_plan(
    config: ServeConfig, common: tuple[str, ...], addresses: Mapping[str, list[str]]
) -> ChildPlan:
    arguments = ("router", *common, "--http", config.http, "--grpc", config.grpc)
    arguments += ("--metrics", config.metrics)
    arguments += ("--prefill", ",".join(addresses["prefill"]))
    arguments += ("--decode", ",".join(addresses["decode"] + addresses["colocated"]))
    if config.served_model_name is not None:
        arguments += ("--served-model-name", config.served_model_name)
    if config.itl_target is not None:
        arguments += ("--itl-target", str(config.itl_target))
    if config.prefill_where is not None:
        arguments += ("--prefill-where", config.prefill_where)
    return ChildPlan(name="router", role="router", arguments=arguments, threads=1)


def shared_options(config: ServeConfig) -> tuple[str, ...]:
    """What was given explicitly; anything else is left to the workers' file tables and defaults."""
    names = (
        "kv_codec",
        "weight_dtype",
        "block_size",
        "kv_blocks",
        "chunk_tokens",
        "tensor_parallel",
    )
    given = [(flag(name), getattr(config, name)) for name in names]
    words = [part for name, value in given if value is not None for part in (name, str(value))]
    return (*words, "--batch-invariant") if config.batch_invariant else tuple(words)


def check_free(name: str, address: str) -> None:
    """Finds a taken address before anything is started, and names the option to change."""
    host, port = split_address(address)
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[
            0
        ]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(target)
            probe.listen()
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"{flag(name)} {address} cannot be used: {reason}") from error


def free_ports(count: int) -> list[int]:
    """Ports nobody listens on. Held all at once while choosing, so that they differ."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
