"""A tree of Python sources as data: what stands in each file, and which file imports which.

Used by bench/shape.py, by the picture of the rooms (setup/rooms_picture.py) and by
tests/test_imports.py.
"""

import ast
import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
GENERATED = ("_pb2.py", "_pb2_grpc.py")
PUBLIC_ANYWAY = {"_replace", "_asdict", "_fields", "_make", "_exit"}
"""Of named tuples, and `os._exit`: underscores that mean nothing."""


@dataclass(frozen=True, slots=True)
class Source:
    path: Path
    """Relative to the tree's root."""
    text: str
    package: str = ""
    """The name of the root, where it is a package itself."""

    @property
    def room(self) -> str:
        return self.path.parts[0] if len(self.path.parts) > 1 else ""

    @property
    def module(self) -> str:
        parts = (self.package, *self.path.with_suffix("").parts)
        return ".".join(filter(None, parts)).removesuffix(".__init__")

    @property
    def parent(self) -> str:
        """What a relative import counts from."""
        return self.module if self.path.name == "__init__.py" else self.module.rpartition(".")[0]

    @property
    def num_lines(self) -> int:
        return len(self.text.splitlines())

    def tree(self) -> ast.Module:
        return _parsed(self.text)

    def imported(self, *, at_start: bool = False) -> Iterator[str]:
        """Every module that the file names in an import, and every name that could be one.

        `at_start` leaves out what is imported in functions, or for type checkers only.
        """
        nodes = _at_start(self.tree()) if at_start else ast.walk(self.tree())
        yield from _imported(nodes, self.parent)


def sources(root: Path, *folders: str) -> list[Source]:
    """Of the folders, or of the whole tree; generated code left out."""
    package = "" if (root / "pyproject.toml").exists() else root.resolve().name
    found = [path for folder in folders or (".",) for path in (root / folder).rglob("*.py")]
    return [
        Source(path.relative_to(root), path.read_text(encoding="utf-8"), package)
        for path in sorted(set(found))
        if not path.name.endswith(GENERATED)
        and not any(part.startswith(".") for part in path.relative_to(root).parts)
    ]


def imports(files: Iterable[Source], *, at_start: bool = False) -> dict[str, set[str]]:
    """By module: which modules of these files it imports."""
    files = list(files)
    known = {source.module for source in files}
    return {
        source.module: (set(source.imported(at_start=at_start)) & known) - {source.module}
        for source in files
    }


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Groups of modules that each reach all others of their group."""
    reached = {module: _reached(graph, module) for module in graph}
    groups = {
        tuple(sorted(other for other in reached[module] if module in reached[other]))
        for module in graph
        if module in reached[module]
    }
    return [list(group) for group in sorted(groups)]


def private_accesses(source: Source) -> Iterator[str]:
    """`LINE: expression` for each underscored attribute or name that another module owns."""
    own = _own_names(source.tree())
    for node in ast.walk(source.tree()):
        match node:
            case ast.Attribute(attr=name, value=value) if _is_private(name) and name not in own:
                if not (isinstance(value, ast.Name) and value.id in ("self", "cls")):
                    yield f"{node.lineno}: {ast.unparse(node)}"
            case ast.ImportFrom(module=str(module), names=names):
                yield from (
                    f"{node.lineno}: {module}.{name.name}"
                    for name in names
                    if _is_private(name.name)
                )


@functools.cache
def _parsed(text: str) -> ast.Module:
    return ast.parse(text)


def _imported(nodes: Iterable[ast.AST], parent: str) -> Iterator[str]:
    for node in nodes:
        match node:
            case ast.Import(names=names):
                yield from (name.name for name in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                base = parent.split(".")[: len(parent.split(".")) + 1 - level] if level else []
                origin = ".".join([*base, *([module] if module else [])])
                yield origin
                yield from (f"{origin}.{name.name}" for name in names)


def _at_start(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, FUNCTIONS) or (
            isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        ):
            continue
        yield node
        yield from _at_start(node)


def _reached(graph: Mapping[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    waiting = list(graph[start])
    while waiting:
        module = waiting.pop()
        if module not in seen:
            seen.add(module)
            waiting.extend(graph[module])
    return seen


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in PUBLIC_ANYWAY


def _own_names(tree: ast.Module) -> set[str]:
    """Underscored names that the file itself gives to something."""
    own: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                own.add(name)
            case ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                own.add(name)
            case ast.Attribute(attr=name, value=ast.Name(id="self" | "cls"), ctx=ast.Store()):
                own.add(name)
    return own
