"""docs/architecture.svg: the rooms as boxes, and arrows for what really imports what.

How far down a room stands follows from the imports: below everything that imports it. An arrow that
follows from others (a imports c, where a imports b and b imports c) is left out. Arrows that point
up would be circles, which there are none of: `tests/test_imports.py`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.shape import ROOMS
from bench.source_tree import Source, circles, imports, sources

ROOT = Path(__file__).resolve().parent.parent
WIDTH, ROW, HEIGHT, MARGIN = 1000, 84, 46, 30
INNER: Final = "router/"
"""Rooms within a room: drawn in a box of their own."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a room's middle is, from left to right, and what lives in it."""

    x: int
    width: int
    words: str


PLACES: Final = {
    "commands": Place(400, 180, "one file a command"),
    "simulator": Place(400, 180, "the cores, on virtual time"),
    "prefill_worker": Place(115, 180, "core and service"),
    "decode_worker": Place(310, 170, "core and service"),
    "kvtransfer": Place(115, 180, "hand-offs, landing, NIXL"),
    "worker": Place(360, 170, "what both workers share"),
    "engine": Place(360, 170, "a model on a device"),
    "common": Place(500, 960, "what processes agree on: types, errors, clock, messages, pages"),
    "router/": Place(760, 170, "put together; options"),
    "router/api": Place(760, 170, "OpenAI, Anthropic, KServe"),
    "router/generation": Place(675, 160, "requests and answers"),
    "router/text": Place(765, 160, "tokenizer, template, tools"),
    "router/fleet": Place(600, 150, "workers, routes, journeys"),
    "router/grammar": Place(757, 130, "structured output"),
    "router/server": Place(905, 130, "HTTP and gRPC calls"),
    "router/admission": Place(600, 150, "the line, API keys"),
    "router/reading": Place(780, 160, "JSON and fields, bounded"),
}


def room_of(source: Source) -> str:
    """Files at the router's own root are its wiring. Generated code is nobody's room."""
    top, *inner = source.path.parts
    if f"{top}/" != INNER:
        return top
    return INNER + inner[0] if len(inner) > 1 else INNER


def room_imports() -> dict[str, set[str]]:
    """By room: which others its files import."""
    files = [source for source in sources(ROOT, *ROOMS) if "proto" not in source.path.parts]
    rooms = {source.module: room_of(source) for source in files}
    graph: dict[str, set[str]] = {room: set() for room in rooms.values()}
    for module, targets in imports(files).items():
        graph[rooms[module]] |= {rooms[target] for target in targets} - {rooms[module]}
    return graph


def direct(graph: Mapping[str, set[str]]) -> Iterator[tuple[str, str]]:
    """Arrows that do not follow from others."""
    below = {room: _below(graph, room) for room in graph}
    for room in sorted(graph):
        for target in sorted(graph[room]):
            if not any(target in below[other] for other in graph[room] - {target}):
                yield room, target


def heights(graph: Mapping[str, set[str]]) -> dict[str, int]:
    """How many rooms stand below, one on top of the other."""
    found: dict[str, int] = {}

    def height(room: str) -> int:
        if room not in found:
            found[room] = 1 + max((height(target) for target in graph[room]), default=-1)
        return found[room]

    for room in graph:
        height(room)
    return found


def picture() -> str:
    graph = room_imports()
    assert not circles(graph), f"rooms import each other: {circles(graph)}"
    assert graph.keys() == PLACES.keys(), f"place these rooms: {graph.keys() ^ PLACES.keys()}"
    height = heights(graph)
    top = max(height.values())
    middle = {room: MARGIN + HEIGHT // 2 + ROW * (top - height[room]) for room in graph}
    lines = [*_head(MARGIN * 2 + HEIGHT + ROW * top), *_frame(middle)]
    lines += [_arrow(a, b, middle) for a, b in direct(graph)]
    lines += [line for room in PLACES for line in _box(room, middle[room])]
    return "\n".join([*lines, "</svg>", ""])


def _below(graph: Mapping[str, set[str]], room: str) -> set[str]:
    return graph[room].union(*(_below(graph, target) for target in graph[room]))


def _head(height: int) -> Iterator[str]:
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" font-family="sans-serif" text-anchor="middle">'
    )
    yield "<!-- made by `make docs`; do not edit -->"
    yield "<title>Packages of the code, and what imports what</title>"
    yield (
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" '
        'markerHeight="8" orient="auto"><path d="M0 0L8 4L0 8z" fill="#57606a"/></marker></defs>'
    )
    yield '<rect width="100%" height="100%" fill="#ffffff"/>'


def _frame(middle: Mapping[str, int]) -> Iterator[str]:
    inside = [room for room in PLACES if room.startswith(INNER)]
    left = min(PLACES[room].x - PLACES[room].width // 2 for room in inside) - 10
    right = max(PLACES[room].x + PLACES[room].width // 2 for room in inside) + 10
    first, last = (pick(middle[room] for room in inside) for pick in (min, max))
    upper, lower = first - HEIGHT // 2 - 14, last + HEIGHT // 2 + 12
    yield (
        f'<rect x="{left}" y="{upper}" width="{right - left}" height="{lower - upper}" rx="8" '
        'fill="#f6f8fa" stroke="#8c959f" stroke-dasharray="4 3"/>'
    )
    yield (
        f'<text x="{left + 12}" y="{upper + 22}" font-size="15" font-weight="bold" '
        'text-anchor="start" fill="#1f2328">router</text>'
    )


def _arrow(source: str, target: str, middle: Mapping[str, int]) -> str:
    """From a room's lower edge to another's upper one; into a wide box straight down."""
    start, place = PLACES[source].x, PLACES[target]
    half = place.width // 2 - 20
    end = min(max(start, place.x - half), place.x + half) if half > 200 else place.x
    y, to = middle[source] + HEIGHT // 2, middle[target] - HEIGHT // 2
    bend = (to - y) // 2
    return (
        f'<path d="M{start} {y}C{start} {y + bend} {end} {to - bend} {end} {to}" fill="none" '
        'stroke="#57606a" stroke-width="1.4" marker-end="url(#tip)"/>'
    )


def _box(room: str, y: int) -> Iterator[str]:
    place = PLACES[room]
    name = room.removeprefix(INNER) or "wiring"
    yield (
        f'<rect x="{place.x - place.width // 2}" y="{y - HEIGHT // 2}" width="{place.width}" '
        f'height="{HEIGHT}" rx="6" fill="#ddf4ff" stroke="#0969da"/>'
    )
    yield (
        f'<text x="{place.x}" y="{y - 3}" font-size="14" font-weight="bold" fill="#1f2328">'
        f"{name}</text>"
    )
    yield f'<text x="{place.x}" y="{y + 14}" font-size="11" fill="#1f2328">{place.words}</text>'
