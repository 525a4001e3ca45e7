"""Searching long texts for short tokens, a slice at a time: one search over megabytes would hold
the interpreter, and the event loop with it, for a tenth of a second.
"""

import re
from collections.abc import Iterator

SLICE = 64 * 1024


def matches(pattern: re.Pattern[str], text: str, longest: int) -> Iterator[re.Match[str]]:
    """As `pattern.finditer(text)`, of a pattern whose matches have at most `longest` characters."""
    at = 0
    while at < len(text):
        end = min(at + SLICE, len(text))
        found = pattern.search(text, at, min(end + longest, len(text)))
        if found is None or found.start() >= end:
            at = end
            continue
        yield found
        at = max(found.end(), found.start() + 1)
