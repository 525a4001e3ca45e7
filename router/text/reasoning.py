"""Reasoning at the start of an answer, told from what follows it."""

from router.text.parts import Part, Reasoning, Splitter


class Until:
    """Text up to a marker that may come in pieces."""

    def __init__(self, marker: str) -> None:
        self._marker = marker
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """What is certainly before the marker, and what follows it once it has come."""
        seen = self._held + text
        at = seen.find(self._marker)
        if at >= 0:
            self._held = ""
            return seen[:at], seen[at + len(self._marker) :]
        num_held = min(len(seen), len(self._marker) - 1)
        while not self._marker.startswith(seen[len(seen) - num_held :]):
            num_held -= 1
        self._held = seen[len(seen) - num_held :]
        return seen[: len(seen) - num_held], None

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


class ReasoningSplitter:
    """`<think>...</think>` at the start of an answer; the rest goes to `inner`.

    `begins_inside`: the prompt has opened the block already, or the model always thinks first.
    """

    def __init__(self, inner: Splitter, *, begins_inside: bool) -> None:
        self._inner = inner
        self._is_inside = begins_inside
        self._is_over = False
        self._opening = Until("<think>")
        self._closing = Until("</think>")
        self._before = ""
        self._has_looked = False
        self._skips_newlines = False

    def push(self, text: str) -> list[Part]:
        if self._is_over:
            return self._skip(text)
        if not self._is_inside:
            before, after = self._opening.push(text)
            self._before += before
            if self._before.strip():
                return self._skip(self._before + self._opening.flush() + (after or ""))
            if after is None:
                return []
            self._is_inside, self._has_looked, text = True, True, after
        elif not self._has_looked:
            # a model may open the block although the prompt has done so
            self._before += text
            start = self._before.lstrip()
            if "<think>".startswith(start) and start != "<think>":
                return []
            self._has_looked = True
            text = start.removeprefix("<think>")
        thought, after = self._closing.push(text)
        found: list[Part] = [Reasoning(thought)] if thought else []
        if after is None:
            return found
        self._skips_newlines = True
        return found + self._skip(after)

    def flush(self) -> list[Part]:
        if self._is_over:
            return self._inner.flush()
        if self._is_inside:
            rest = self._closing.flush() if self._has_looked else self._before
            return [Reasoning(rest)] if rest else []
        return self._skip(self._before + self._opening.flush()) + self._inner.flush()

    def _skip(self, text: str) -> list[Part]:
        self._is_over = True
        if self._skips_newlines:
            text = text.lstrip("\n")
            self._skips_newlines = not text
        return self._inner.push(text) if text else []
