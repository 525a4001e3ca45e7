"""The command line and TOML files, read once into frozen values; no other file touches the two.

    parse(commands, argv) -> Command(name, config)    defaults < the command's table < flags

Every option is one dataclass field, made with `option`; flags, TOML keys, --help and the checks
come from it. Each room has its own config; commands/table.py names them all.
"""

import argparse
import difflib
import functools
import operator
import tomllib
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

from common.addresses import split_address
from common.environment import tandem_version
from common.errors import ConfigError

LOOPBACK = {"127.0.0.1", "::1", "localhost"}


def option(
    help: str,
    *,
    default: Any = MISSING,
    metavar: str = "",
    shown: str = "",
    choices: Iterable[str] = (),
) -> Any:
    """A flag and a TOML key; --help shows `shown` for a default that is worked out later. Choices
    come from the field's Literal, or as `choices` from the table that knows them.
    """
    about = {"help": help, "metavar": metavar, "shown": shown, "choices": tuple(choices)}
    return field(default=default, metadata=about)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandSpec:
    """What a command takes, and how its config is made of what was given."""

    summary: str
    options: tuple[type, ...]
    """Dataclasses whose fields are its options."""
    make: Callable[..., Any]

    def fields(self) -> dict[str, Field[Any]]:
        return {
            entry.name: entry
            for kind in self.options
            for entry in fields(kind)
            if "help" in entry.metadata
        }

    def type_of(self, name: str) -> Any:
        """Of an option, without the None that stands for one not given."""
        [kind] = [k for k in self.options if name in {entry.name for entry in fields(k)}]
        return without_none(get_type_hints(kind)[name])

    def choices_of(self, name: str) -> tuple[Any, ...]:
        kind = self.type_of(name)
        named: tuple[str, ...] = self.fields()[name].metadata["choices"]
        return get_args(kind) if get_origin(kind) is Literal else named


Commands = Mapping[str, CommandSpec]


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    name: str
    config: Any
    config_file: Path | None
    """`serve` hands it on, so that the other tables reach the processes they name."""


def parse(commands: Commands, argv: Sequence[str] | None = None) -> Command:
    """Reads `argv` (the process's own when None) and the file it names. Raises ConfigError."""
    options, unknown = command_line_parser(commands).parse_known_args(argv)
    if options.command is None:
        raise ConfigError(
            f"no command given; choose one of {', '.join(commands)}, or see tandem --help"
        )
    name: str = options.command
    known = commands[name].fields()
    if unknown:
        raise ConfigError(
            unknown_name(unknown[0].split("=")[0], [flag(key) for key in known] + ["--config"])
        )
    given: dict[str, Any] = {}
    config_file = Path(options.config) if options.config is not None else None
    if config_file is not None:
        given.update(read_table(commands, config_file, name))
    given.update({key: value for key, value in vars(options).items() if key in known})
    return Command(name=name, config=build(commands, name, given), config_file=config_file)


def build(commands: Commands, name: str, given: Mapping[str, Any]) -> Any:
    for entry in commands[name].fields().values():
        if entry.default is MISSING and entry.name not in given:
            raise ConfigError(
                f"{flag(entry.name)} is required by tandem {name};"
                " give the flag or set it in the TOML file"
            )
    return commands[name].make(**given)


class Parser(argparse.ArgumentParser):
    """Raises instead of exiting, and takes no abbreviations."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{**settings, "allow_abbrev": False})

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message.removeprefix("argument "))


def command_line_parser(commands: Commands) -> argparse.ArgumentParser:
    parser = Parser(
        prog="tandem",
        description="Serves a language model with prefill and decode on separate workers.",
    )
    parser.add_argument("--version", action="version", version=f"tandem {tandem_version()}")
    parsers = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for name, spec in commands.items():
        command = parsers.add_parser(
            name, help=spec.summary, description=f"{spec.summary[0].upper()}{spec.summary[1:]}."
        )
        command.add_argument(
            "--config",
            metavar="FILE.toml",
            help=f"read the table [{name}] of this file; flags win over it",
        )
        for entry in spec.fields().values():
            add_flag(command, spec, entry)
    return parser


def add_flag(parser: argparse.ArgumentParser, spec: CommandSpec, entry: Field[Any]) -> None:
    kind, choices = spec.type_of(entry.name), spec.choices_of(entry.name)
    text = entry.metadata["help"].replace("%", "%%") + f" ({default_text(entry)})"
    settings: dict[str, Any] = {"dest": entry.name, "default": argparse.SUPPRESS, "help": text}
    if kind is bool:
        settings |= {"action": argparse.BooleanOptionalAction}
    elif choices:
        settings |= {"type": type(choices[0]), "choices": choices}
    else:
        reads = kind
        if _is_number_or_auto(kind):
            reads = number_or_auto
        elif get_origin(kind) is tuple:
            reads = comma_separated
        settings |= {"type": reads, "metavar": entry.metadata["metavar"]}
    parser.add_argument(flag(entry.name), **settings)


def default_text(entry: Field[Any]) -> str:
    if entry.default is MISSING:
        return "required"
    default = entry.default
    if isinstance(default, bool):
        default = "on" if default else "off"
    elif isinstance(default, tuple):
        default = ",".join(map(str, default)) or "none"
    return f"default: {entry.metadata['shown'] or default}"


def number_or_auto(text: str) -> int | str:
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor auto") from None


def _is_number_or_auto(kind: Any) -> bool:
    return set(get_args(kind)) == {int, Literal["auto"]}


def comma_separated(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def read_table(commands: Commands, path: Path, name: str) -> dict[str, Any]:
    """The command's table, checked; the other tables' keys are checked too: no typo hides."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"--config {path}: {error}") from error
    for table, content in document.items():
        if table not in commands:
            known = [f"[{command}]" for command in commands]
            raise ConfigError(f"{path}: {unknown_name(f'[{table}]', known)}")
        if not isinstance(content, dict):
            raise ConfigError(f"{path}: {table} must be a table, written [{table}]")
        known = [flag(option_name)[2:] for option_name in commands[table].fields()]
        for key in content:
            if key not in known:
                raise ConfigError(f"{path}: [{table}]: {unknown_name(key, known)}")
    chosen = {key.replace("-", "_"): value for key, value in document.get(name, {}).items()}
    spec = commands[name]
    return {
        key: toml_value(spec, key, value, f"{path}: [{name}] {flag(key)[2:]}")
        for key, value in chosen.items()
    }


def toml_value(spec: CommandSpec, name: str, value: Any, where: str) -> Any:
    kind, choices = spec.type_of(name), spec.choices_of(name)
    if choices:
        if value not in choices or type(value) is not type(choices[0]):
            raise ConfigError(f"{where} is {value!r}; choose one of {', '.join(map(str, choices))}")
        return value
    if get_origin(kind) is tuple:
        if isinstance(value, str):
            return comma_separated(value)
        if isinstance(value, list) and all(isinstance(part, str) for part in value):
            return tuple(value)
        raise ConfigError(f"{where} is {value!r}; it must be a list of strings")
    if _is_number_or_auto(kind):
        if value != "auto" and type(value) is not int:
            raise ConfigError(f"{where} is {value!r}; it must be a number or auto")
        return value
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise ConfigError(f"{where} is {value!r}; it must be of type {kind.__name__}")
    return value


def without_none(kind: Any) -> Any:
    if get_origin(kind) in (Union, types.UnionType):
        parts = [part for part in get_args(kind) if part is not type(None)]
        return functools.reduce(operator.or_, parts)
    return kind


def unknown_name(name: str, known: list[str]) -> str:
    nearest = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    return (
        f"unknown option {name}; did you mean {' or '.join(nearest)}?"
        if nearest
        else f"unknown option {name}"
    )


def check_address(name: str, address: str | None) -> None:
    if address is None:
        return
    try:
        split_address(address)
    except ConfigError as error:
        raise ConfigError(f"{flag(name)}: {error.message}") from error


def check_distinct(addresses: dict[str, str | None]) -> None:
    seen: dict[str, str] = {}
    for name, address in addresses.items():
        if address is None or split_address(address)[1] == 0:
            continue
        if address in seen:
            raise ConfigError(f"{flag(seen[address])} and {flag(name)} are both {address}")
        seen[address] = name


def check_plaintext(name: str, address: str, is_insecure: bool, internal_tls: str | None) -> None:
    is_allowed = is_insecure or internal_tls is not None
    if not is_allowed and split_address(address)[0] not in LOOPBACK:
        raise ConfigError(
            f"{flag(name)} {address} is beyond this machine and would be plain text;"
            " use --internal-tls, or permit it with --insecure-internal"
        )


def check_not_empty(name: str, text: str | None) -> None:
    if text is not None and not text.strip():
        raise ConfigError(f"{flag(name)} is empty")


def check_folder_of(name: str, path: str | None) -> None:
    """Of a file that is written at the end of long work."""
    folder = None if path is None else Path(path).absolute().parent
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"{flag(name)} {path}: there is no directory {folder}")


def check_directory(name: str, directory: str) -> None:
    if not (Path(directory) / "config.json").is_file():
        raise ConfigError(f"{flag(name)}: {directory} is no model directory, it has no config.json")


def check_at_least(name: str, value: int | None, least: int) -> None:
    if value is not None and value < least:
        raise ConfigError(f"{flag(name)} is {value}; it must be at least {least}")


def check_positive(name: str, value: float | None) -> None:
    if value is not None and not 0 < value < float("inf"):
        raise ConfigError(f"{flag(name)} is {value}; it must be above 0")
