"""Writes the parts of docs/ that are made from the code; tests/test_docs.py compares.

    .venv/bin/python -m setup.write_docs      (or: make docs)

docs/options.md and docs/architecture.svg are made whole; tables between marks in docs/api.md and docs/metrics.md.
"""

import re
from collections.abc import Iterator
from dataclasses import Field
from pathlib import Path
from typing import Any

from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

from commands.table import COMMANDS
from common import limits
from common.options import CommandSpec, flag
from router.admission.admission import Admission
from router.fleet.fleet import Fleet
from router.fleet.metrics import RouterMetrics
from router.reading import protocols
from setup.rooms_picture import picture
from worker.metrics import WorkerMetrics

DOCS = Path(__file__).resolve().parent.parent / "docs"
MADE = "<!-- made by `make docs`; do not edit -->"


def options() -> str:
    lines = [
        "# Options",
        "",
        MADE,
        "",
        "Every option can stand in a TOML file under its flag's name (`--config FILE`), in a table named like the command.",
        "Flags win over the file, the file over the defaults. An unknown key is an error.",
        "",
    ]
    for command, spec in COMMANDS.items():
        text = spec.summary
        lines += [f"## tandem {command}", "", f"{text[:1].upper()}{text[1:]}.", ""]
        lines += ["| option | default | |", "|---|---|---|"]
        lines += [_row(spec, entry) for entry in spec.fields().values()]
        lines.append("")
    return "\n".join(lines)


def _row(spec: CommandSpec, entry: Field[Any]) -> str:
    about = entry.metadata
    value = about.get("metavar") or "|".join(map(str, spec.choices_of(entry.name)))
    name = f"`{flag(entry.name)} {value}`" if value else f"`{flag(entry.name)}`"
    default = about.get("shown") or _shown(entry.default)
    return f"| {_cell(name)} | {_cell(str(default))} | {_cell(about['help'])} |"


def _shown(default: Any) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, tuple):
        return ",".join(map(str, default))
    if isinstance(default, str | int | float):
        return f"{default:g}" if isinstance(default, float) else str(default)
    return "required"


def metrics() -> str:
    lines = ["| metric | type | labels | what |", "|---|---|---|---|"]
    for title, found in (
        ("The router", RouterMetrics(Fleet(), Admission(1))),
        ("Each worker", WorkerMetrics()),
    ):
        lines.append(f"| **{title}** | | | |")
        lines += sorted(_rows(found))
    return "\n".join(lines)


def _rows(found: RouterMetrics | WorkerMetrics) -> Iterator[str]:
    # each collector once, those with labels that nothing has been counted for included
    for collector in found.registry._collector_to_names:
        for name, kind, labels, text in _families(collector):
            shown = f"{name}_total" if kind == "counter" else name
            names = ", ".join(f"`{label}`" for label in labels)
            yield f"| `{shown}` | {kind} | {names} | {_cell(text)} |"


def _families(collector: Collector) -> Iterator[tuple[str, str, tuple[str, ...], str]]:
    if isinstance(collector, MetricWrapperBase):
        kind = str(collector._type)
        yield collector._name, kind, tuple(collector._labelnames), collector._documentation
        return
    for family in collector.collect():
        labels = tuple(getattr(family, "_labelnames", ()))
        yield family.name, family.type, labels, family.documentation


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def filled(page: Path, **tables: str) -> str:
    """The page, with its tables made anew."""
    written = page.read_text()
    for mark, made in tables.items():
        pattern = re.compile(rf"(<!-- {mark}: [^\n]*-->\n).*?(\n<!-- end -->)", re.S)
        place = pattern.search(written)
        if place is None:
            raise SystemExit(f"{page} has no place for {mark}")
        written = written[: place.end(1)] + made.strip() + written[place.start(2) :]
    return written


def pages() -> dict[Path, str]:
    """What each page should be."""
    return {
        DOCS / "options.md": options(),
        DOCS / "architecture.svg": picture(),
        DOCS / "metrics.md": filled(DOCS / "metrics.md", metrics=metrics()),
        DOCS / "api.md": filled(
            DOCS / "api.md", limits=limits.table(), protocols=protocols.table()
        ),
    }


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
