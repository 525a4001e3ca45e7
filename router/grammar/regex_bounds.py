"""Numbers of repetitions in a regular expression or a grammar, bounded before it is compiled."""

import re

from common.errors import InvalidRequest
from common.limits import MAX_REGEX_REPEAT

_REPEAT = re.compile(r"\{\s*+(\d*+)\s*+,?+\s*+(\d*+)\s*+\}|~\s*+(\d++)\s*+(?:\.\.\s*+(\d++))?")
"""Possessive throughout: a text that fails is read once, not tried in every way."""


def check_repeats(text: str, param: str) -> None:
    """Raises InvalidRequest."""
    for match in _REPEAT.finditer(text):
        for number in match.groups():
            if number and (len(number) > 9 or int(number) > MAX_REGEX_REPEAT):
                raise InvalidRequest(
                    f"{param} repeats something {number[:20]} times; the limit is "
                    f"{MAX_REGEX_REPEAT}",
                    param=param,
                )
