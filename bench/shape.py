"""The shape of the code: sizes of files, classes and functions, what reaches into what.

    python -m bench.shape              the product: all packages but tests, bench and setup
    python -m bench.shape DIR...       the same figures of other trees, for orientation

Lines are counted as they stand, comments and docstrings included. Kernels and generated code are
bound by no limit. No test enforces the figures.
"""

import ast
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.source_tree import FUNCTIONS, Source, circles, imports, private_accesses, sources

ROOT = Path(__file__).resolve().parent.parent
ROOMS = (
    "commands",
    "common",
    "engine",
    "kvtransfer",
    "worker",
    "prefill_worker",
    "decode_worker",
    "router",
    "simulator",
)
MAX_FILE, MAX_CLASS, MAX_FUNCTION, MAX_PARAMETERS = 400, 250, 60, 8
NOT_PRODUCT = {"test", "tests", "bench", "benchmark", "benchmarks", "example", "examples", "docs"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    name: str
    rooms: dict[str, int]
    """Lines."""
    files: list[int]
    functions: list[int]
    too_large: list[str]
    private: list[str]
    private_in_tests: list[str]
    circles: list[list[str]]

    def lines(self) -> Iterator[str]:
        total = sum(self.files)
        yield f"## {self.name}\n"
        yield "| room | lines | share |\n|---|---|---|"
        for room, count in sorted(self.rooms.items(), key=lambda item: -item[1]):
            yield f"| {room or '(root)'} | {count:,} | {count / total:.0%} |"
        yield f"| all | {total:,} | |\n"
        yield "| figure | |\n|---|---|"
        yield f"| files | {len(self.files)}, median {np.median(self.files):.0f} lines |"
        if self.functions:
            half, most = np.percentile(self.functions, [50, 95])
            lines = f"median {half:.0f} lines, 95th percentile {most:.0f}"
            yield f"| functions | {len(self.functions)}, {lines} |"
        yield f"| above the limits (kernels apart) | {len(self.too_large)} |"
        yield f"| private attributes of other modules, in the product | {len(self.private)} |"
        yield f"| the same, in tests | {len(self.private_in_tests)} |"
        yield f"| import circles between files | {len(self.circles)} |"
        yield ""

    def details(self) -> Iterator[str]:
        yield from _listed("Above the limits", self.too_large)
        yield from _listed("Private attributes of other modules", self.private)
        yield from _listed("Import circles", [", ".join(circle) for circle in self.circles])


def _listed(title: str, found: Sequence[str]) -> Iterator[str]:
    if found:
        yield f"{title}:\n"
        yield from (f"- {line}" for line in found)
        yield ""


def shape_of(name: str, product: Sequence[Source], tests: Sequence[Source]) -> Shape:
    rooms: dict[str, int] = {}
    for source in product:
        rooms[source.room] = rooms.get(source.room, 0) + source.num_lines
    return Shape(
        name=name,
        rooms=rooms,
        files=[source.num_lines for source in product if source.num_lines],
        functions=[_length(node) for source in product for node in _functions(source)],
        too_large=[line for source in product for line in _too_large(source)],
        private=_private(product),
        private_in_tests=_private(tests),
        circles=circles(imports(product)),
    )


def _private(files: Iterable[Source]) -> list[str]:
    return [f"{source.path}:{found}" for source in files for found in private_accesses(source)]


def _too_large(source: Source) -> Iterator[str]:
    if {"kernel", "kernels"} & set(source.path.parts):
        return
    if source.num_lines > MAX_FILE:
        yield f"{source.path}: {source.num_lines} lines"
    for node in ast.walk(source.tree()):
        if isinstance(node, ast.ClassDef) and _length(node) > MAX_CLASS:
            yield f"{source.path}:{node.lineno}: class {node.name} has {_length(node)} lines"
        if isinstance(node, FUNCTIONS):
            if _length(node) > MAX_FUNCTION:
                yield f"{source.path}:{node.lineno}: {node.name} has {_length(node)} lines"
            if (count := _num_parameters(node)) > MAX_PARAMETERS:
                yield f"{source.path}:{node.lineno}: {node.name} has {count} parameters"


def _functions(source: Source) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    yield from (node for node in ast.walk(source.tree()) if isinstance(node, FUNCTIONS))


def _length(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def _num_parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Without `self` and `cls`."""
    given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return sum(argument.arg not in ("self", "cls") for argument in given)


def product_shape() -> Shape:
    product = [*sources(ROOT, *ROOMS), Source(Path("tandem.py"), (ROOT / "tandem.py").read_text())]
    return shape_of("Tandem", product, sources(ROOT, "tests"))


def other_shape(directory: Path) -> Shape:
    """Of a tree that may be a repository, or one package of it."""
    found = sources(directory)
    apart = {source for source in found if NOT_PRODUCT & set(source.path.parts)}
    tests = [source for source in apart if {"test", "tests"} & set(source.path.parts)]
    product = [source for source in found if source not in apart]
    return shape_of(directory.resolve().name, product, tests)


def main(directories: Sequence[str]) -> None:
    shapes = [other_shape(Path(each)) for each in directories] or [product_shape()]
    for shape in shapes:
        print("\n".join([*shape.lines(), *shape.details()]))


if __name__ == "__main__":
    main(sys.argv[1:])
