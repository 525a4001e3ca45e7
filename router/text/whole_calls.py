"""Answers that a grammar made calls and nothing else."""

from collections.abc import Sequence

from router.text.calls import CallForm, CallsSplitter
from router.text.parts import CallArguments, CallBegun, Content, Part

_LIST = CallForm(opening=None)


class ListSplitter:
    """An answer that the grammar made a list of calls (`tool_choice` required).

    None of it is content: what is no call was cut off before it became one.
    """

    def __init__(self) -> None:
        self._inner = CallsSplitter(_LIST, is_inside=True)

    def push(self, text: str) -> list[Part]:
        return [part for part in self._inner.push(text) if not isinstance(part, Content)]

    def flush(self) -> list[Part]:
        return [part for part in self._inner.flush() if not isinstance(part, Content)]


class NamedSplitter:
    """An answer that the grammar made the arguments of one call (a named `tool_choice`)."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._has_begun = False

    def push(self, text: str) -> list[Part]:
        if not text:
            return []
        begun: Sequence[Part] = () if self._has_begun else (CallBegun(0, self._name),)
        self._has_begun = True
        return [*begun, CallArguments(0, text)]

    def flush(self) -> list[Part]:
        return []
