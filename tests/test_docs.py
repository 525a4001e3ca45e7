"""The pages that are made from the code are what the code says today; links lead somewhere."""

import re
from pathlib import Path

import pytest

from setup.write_docs import DOCS, pages

ROOT = DOCS.parent


@pytest.mark.parametrize("path", sorted(pages()), ids=lambda path: str(path.name))
def test_made_pages_are_what_the_code_says(path: Path) -> None:
    assert path.read_text() == pages()[path], "run: make docs"


def anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    words = (re.sub(r"[^\w\s-]", "", heading.lower()) for heading in headings)
    return {word.strip().replace(" ", "-") for word in words}


@pytest.mark.parametrize(
    "page", sorted([ROOT / "README.md", *DOCS.glob("*.md")]), ids=lambda p: p.name
)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        found = page if not name else (page.parent / name)
        assert found.exists(), target
        if anchor:
            assert anchor in anchors(found.read_text()), target
