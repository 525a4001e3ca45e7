"""The table of limits: what docs/api.md says is what the code reads, and where it says so."""

from pathlib import Path

import pytest

from common.limits import LIMITS, Limit, table

ROOT = Path(__file__).parent.parent


def test_the_docs_hold_the_table() -> None:
    assert table() in (ROOT / "docs" / "api.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("limit", [m for _, ms in LIMITS for m in ms], ids=lambda m: m.what)
def test_each_limit_is_enforced_where_the_table_says(limit: Limit) -> None:
    source = (ROOT / limit.where).read_text(encoding="utf-8")
    assert "from common.limits import" in source, limit.where
