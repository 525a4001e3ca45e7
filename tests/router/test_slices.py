"""Searches in slices find what one search finds, wherever slices begin."""

import random
import re

import pytest

from router.text import slices
from router.text.slices import matches


def test_slices_find_what_one_search_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    tokens = ["<a>", "<ab>", "<|x|>", "<", "aa"]
    pattern = re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))))
    for size in (1, 2, 3, 5, 8, 64):
        monkeypatch.setattr(slices, "SLICE", size)
        for _ in range(200):
            text = "".join(rng.choice("<a>b|x ") for _ in range(rng.randrange(60)))
            found = [(m.start(), m[0]) for m in matches(pattern, text, 5)]
            expected = [(m.start(), m[0]) for m in pattern.finditer(text)]
            assert found == expected, f"seed {seed}: {text!r}"
