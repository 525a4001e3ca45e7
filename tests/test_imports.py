"""The import tables of the design: which room may import which, and where torch lives."""

import ast
import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.source_tree import Source, circles, imports
from bench.source_tree import sources as sources_of
from commands.table import COMMANDS

ROOT = Path(__file__).resolve().parent.parent

DISTRIBUTIONS = {
    "google": "protobuf",
    "grpc": "grpcio",
    "grpc_health": "grpcio-health-checking",
    "grpc_reflection": "grpcio-reflection",
}
"""Where an import is named unlike its distribution."""

PRODUCT = (
    "commands",
    "common",
    "engine",
    "kvtransfer",
    "worker",
    "prefill_worker",
    "decode_worker",
    "router",
)
OURS = {*PRODUCT, "simulator", "bench", "tandem"}
MAY_IMPORT = {
    "common": {"common"},
    "engine": {"common", "engine"},
    "kvtransfer": {"common", "kvtransfer"},
    "worker": {"common", "engine", "kvtransfer", "worker"},
    "prefill_worker": {"common", "kvtransfer", "worker", "prefill_worker"},
    "decode_worker": {"common", "kvtransfer", "worker", "decode_worker"},
    "router": {"common", "router"},
    "simulator": {*PRODUCT, "simulator"} - {"commands"},
    "commands": {*PRODUCT, "simulator"},
}
"""Folders that are not named may import everything."""

ROUTER_MAY_IMPORT = {
    "reading": set(),
    "grammar": {"reading"},
    "text": {"reading", "grammar"},
    "admission": set(),
    "fleet": {"admission"},
    "generation": {"reading", "grammar", "text", "admission", "fleet"},
    "server": {"reading", "admission"},
    "api": {"reading", "grammar", "text", "admission", "fleet", "generation", "server", "proto"},
}
"""Rooms of the router; what stands at its root puts them together."""


LIVES_IN = {
    "torch": ("engine/", "kvtransfer/nixl_agent.py"),
    "triton": ("engine/kernels/",),
    "nixl": ("kvtransfer/nixl_agent.py",),
    "nixl_cu12": ("kvtransfer/nixl_agent.py",),
    "nixl_cu13": ("kvtransfer/nixl_agent.py",),
    "transformers": (),
    "pickle": (),
}


@functools.cache
def sources(*folders: str) -> tuple[Source, ...]:
    return tuple(sources_of(ROOT, *folders))


@functools.cache
def every_source() -> dict[str, Source]:
    found = {source.module: source for source in sources(*PRODUCT, "simulator", "bench")}
    return found | {"tandem": Source(Path("tandem.py"), (ROOT / "tandem.py").read_text())}


@functools.cache
def graph(*, at_start: bool = False) -> dict[str, set[str]]:
    return imports(every_source().values(), at_start=at_start)


@functools.cache
def tops(source: Source) -> set[str]:
    return {module.split(".")[0] for module in source.imported()}


@pytest.mark.parametrize("folder", list(MAY_IMPORT))
def test_a_folder_imports_only_what_the_table_permits(folder: str) -> None:
    found = {
        (str(source.path), name)
        for source in sources(folder)
        for name in tops(source) & (OURS - MAY_IMPORT[folder])
    }
    assert found == set()


def test_the_router_s_rooms_are_the_table_s() -> None:
    rooms = {path.parent.name for path in (ROOT / "router").glob("*/__init__.py")}
    assert rooms == ROUTER_MAY_IMPORT.keys() | {"proto"}


@pytest.mark.parametrize("room", list(ROUTER_MAY_IMPORT))
def test_a_room_of_the_router_imports_only_what_the_table_permits(room: str) -> None:
    found = {
        (str(source.path), module)
        for source in sources(f"router/{room}")
        for module in source.imported()
        if module in every_source() and module.startswith("router.")
        if module.split(".")[1] not in ROUTER_MAY_IMPORT[room] | {room}
    }
    assert found == set()


def test_no_file_imports_itself_through_others() -> None:
    """Wherever the imports stand: in functions and for type checkers, too."""
    assert circles(graph()) == []


def test_imports_are_absolute() -> None:
    relative = {
        str(source.path)
        for source in every_source().values()
        for node in ast.walk(source.tree())
        if isinstance(node, ast.ImportFrom) and node.level
    }
    assert relative == set()


@pytest.mark.parametrize("library", list(LIVES_IN))
def test_a_library_is_imported_only_where_it_lives(library: str) -> None:
    importers = {
        str(source.path)
        for source in every_source().values()
        if source.room not in ("simulator", "bench") and library in tops(source)
    }
    assert {path for path in importers if not path.startswith(LIVES_IN[library])} == set()


def reached(start: set[str], *, at_start: bool = False) -> dict[str, str]:
    """Every module of ours that these import, at any depth, with the chain that leads there."""
    seen = {module: module for module in start}
    waiting = sorted(start)
    while waiting:
        module = waiting.pop()
        for target in sorted(graph(at_start=at_start)[module] - seen.keys()):
            seen[target] = f"{seen[module]} -> {target}"
            waiting.append(target)
    return seen


def test_the_router_reaches_only_what_its_image_installs() -> None:
    """Neither torch nor anything else that is not in locks/router.in."""
    lines = (ROOT / "locks" / "router.in").read_text(encoding="utf-8").splitlines()
    installed = {line.split(">")[0] for line in lines}
    router = {module for module in every_source() if module.split(".")[0] == "router"}
    chains = reached(router) | reached({"tandem"}, at_start=True)
    needed = {
        (DISTRIBUTIONS.get(top, top.replace("_", "-")), chain)
        for module, chain in chains.items()
        for top in _foreign(every_source()[module])
    }
    assert {(name, chain) for name, chain in needed if name not in installed} == set()


def _foreign(source: Source) -> Iterator[str]:
    at_start = {module.split(".")[0] for module in source.imported(at_start=True)}
    found = tops(source) if source.room == "router" else at_start
    yield from (top for top in found if top not in OURS and top not in sys.stdlib_module_names)


@pytest.mark.parametrize(
    ("image", "starts"),
    [
        ("router", {"router.__main__"}),
        ("worker", {"prefill_worker.__main__", "decode_worker.__main__"}),
    ],
)
def test_an_image_holds_what_its_commands_import(image: str, starts: set[str]) -> None:
    text = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
    [stage] = re.findall(rf"^FROM base AS {image}\n(.*?)(?=^FROM |\Z)", text, re.M | re.S)
    copied = set(re.findall(r"^COPY (\S+) \1$", stage, re.M)) | {"tandem"}
    # `tandem` imports a command when it is called for: others need all of Tandem
    chains = reached({"tandem"}, at_start=True) | reached(starts)
    missing = {chain for module, chain in chains.items() if module.split(".")[0] not in copied}
    assert missing == set()


def test_package_files_are_empty() -> None:
    filled = [s.path for s in sources(*PRODUCT) if s.path.name == "__init__.py" and s.text]
    assert filled == []


def test_every_option_is_read_somewhere() -> None:
    """A knob that does nothing does not exist."""
    read = {
        node.attr
        for source in every_source().values()
        if source.path.name != "config.py" and source.room != "bench"
        for node in ast.walk(source.tree())
        if isinstance(node, ast.Attribute)
    }
    options = {name for spec in COMMANDS.values() for name in spec.fields()}
    # `insecure_internal` permits what the checks in config.py otherwise refuse
    assert options - read == {"insecure_internal"}
