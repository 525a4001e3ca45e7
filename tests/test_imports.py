"""The import table of the design: which folder may import which, and where torch lives."""

import ast
import functools
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

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
    "worker": {"common", "engine", "worker"},
    "prefill_worker": {"common", "kvtransfer", "worker", "prefill_worker"},
    "decode_worker": {"common", "kvtransfer", "worker", "decode_worker"},
    "router": {"common", "router"},
    "simulator": {*PRODUCT, "simulator"} - {"commands"},
    "commands": {*PRODUCT, "simulator"},
}
"""Folders that are not named may import everything."""

LIVES_IN = {
    "torch": ("engine/", "kvtransfer/nixl_transport.py"),
    "triton": ("engine/kernels/",),
    "nixl": ("kvtransfer/nixl_transport.py",),
    "nixl_cu12": ("kvtransfer/nixl_transport.py",),
    "nixl_cu13": ("kvtransfer/nixl_transport.py",),
    "transformers": (),
    "pickle": (),
}


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


@functools.cache
def imported(path: Path) -> tuple[str, ...]:
    """Every module that the file names in an import, wherever the import stands."""
    return tuple(_imported(path))


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Import(names=names):
                yield from (name.name for name in names)
            case ast.ImportFrom(module=str(module), names=names, level=0):
                yield module
                yield from (f"{module}.{name.name}" for name in names)
            case ast.ImportFrom(level=level) if level > 0:
                raise AssertionError(f"{path.relative_to(ROOT)} has a relative import")


@pytest.mark.parametrize("folder", list(MAY_IMPORT))
def test_a_folder_imports_only_what_the_table_permits(folder: str) -> None:
    found = {
        (str(path.relative_to(ROOT)), name)
        for path in sources(folder)
        for name in (module.split(".")[0] for module in imported(path))
        if name in OURS - MAY_IMPORT[folder]
    }
    assert found == set()


@pytest.mark.parametrize("library", list(LIVES_IN))
def test_a_library_is_imported_only_where_it_lives(library: str) -> None:
    importers = {
        str(path.relative_to(ROOT))
        for path in [*sources(*PRODUCT), ROOT / "tandem.py"]
        if library in {module.split(".")[0] for module in imported(path)}
    }
    assert {path for path in importers if not path.startswith(LIVES_IN[library])} == set()


def reached(*folders: str) -> dict[Path, str]:
    """Every file of ours that the folders import, at any depth, with the chain that leads there."""
    seen = {path: str(path.relative_to(ROOT)) for path in sources(*folders)}
    waiting = list(seen)
    while waiting:
        path = waiting.pop()
        for module in imported(path):
            target = source_of(module)
            if target is not None and target not in seen:
                seen[target] = f"{seen[path]} -> {target.relative_to(ROOT)}"
                waiting.append(target)
    return seen


def test_the_router_reaches_only_what_its_image_installs() -> None:
    """Neither torch nor anything else that is not in locks/router.in."""
    lines = (ROOT / "locks" / "router.in").read_text(encoding="utf-8").splitlines()
    installed = {line.split(">")[0] for line in lines}
    needed = {
        (DISTRIBUTIONS.get(top, top.replace("_", "-")), chain)
        for path, chain in reached("router").items()
        for top in (module.split(".")[0] for module in imported(path))
        if top not in OURS and top not in sys.stdlib_module_names
    }
    assert {(name, chain) for name, chain in needed if name not in installed} == set()


def source_of(module: str) -> Path | None:
    if module.split(".")[0] not in OURS:
        return None
    path = ROOT.joinpath(*module.split("."))
    candidates = (path.with_suffix(".py"), path / "__init__.py")
    return next((candidate for candidate in candidates if candidate.is_file()), None)


def test_package_files_are_empty() -> None:
    filled = [path for path in sources(*PRODUCT) if path.name == "__init__.py" and path.read_text()]
    assert filled == []


def test_every_option_is_read_somewhere() -> None:
    """A knob that does nothing does not exist."""
    read = {
        node.attr
        for path in [*sources(*PRODUCT, "simulator"), ROOT / "tandem.py"]
        if path.name != "config.py"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
    }
    options = {name for spec in COMMANDS.values() for name in spec.fields()}
    # `insecure_internal` permits what the checks in config.py otherwise refuse
    assert options - read == {"insecure_internal"}
