"""What changes in a worker's prefix cache, for everybody who follows it.

    pools --stored, removed--> CacheJournal --CacheFeed, one per reader--> KvEvents messages

The journal keeps the last changes, a bounded number of them; a reader remembers how far it has
read. One that is too far behind, or new, gets a snapshot of all hashes instead. A hash that came
and went between two readings is not mentioned. Recording costs one append per named or reclaimed
block and nothing per token, however many readers there are. `BlockPool` records, `WatchService`
reads.
"""

from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice

from common.messages import KvEvents

MAX_CHANGES = 65_536
HASHES_PER_MESSAGE = 32_768
"""Half a megabyte: well below the bound of a message."""


class CacheJournal:
    def __init__(self, max_changes: int = MAX_CHANGES) -> None:
        self._changes: deque[tuple[bytes, bool]] = deque(maxlen=max_changes)
        self.position = 0
        """Changes recorded since the beginning."""

    def stored(self, content_hash: bytes) -> None:
        self._changes.append((content_hash, True))
        self.position += 1

    def removed(self, content_hash: bytes) -> None:
        self._changes.append((content_hash, False))
        self.position += 1

    def since(self, position: int) -> tuple[list[bytes], list[bytes]] | None:
        """Hashes that are there now and were not at `position`, and the opposite. None when changes
        in between are forgotten already.
        """
        count = self.position - position
        if count > len(self._changes):
            return None
        first: dict[bytes, bool] = {}
        last: dict[bytes, bool] = {}
        for content_hash, is_stored in reversed(list(islice(reversed(self._changes), count))):
            first.setdefault(content_hash, is_stored)
            last[content_hash] = is_stored
        # what was stored first had not been there before, what was removed first had
        net = [h for h, is_stored in last.items() if first[h] is is_stored]
        return [h for h in net if last[h]], [h for h in net if not last[h]]


class CacheFeed:
    """One reader's view: messages that, applied in order, give the hashes that `snapshot` lists."""

    def __init__(self, journal: CacheJournal, snapshot: Callable[[], Iterable[bytes]]) -> None:
        self._journal = journal
        self._snapshot = snapshot
        self._position: int | None = None
        self._sequence = 0

    def take(self) -> list[KvEvents]:
        """What is new since the last call; at first, and after too many changes, everything."""
        changes = None if self._position is None else self._journal.since(self._position)
        self._position = self._journal.position
        if changes is None:
            return self._messages(list(self._snapshot()), [], is_snapshot=True)
        stored, removed = changes
        return self._messages(stored, removed, is_snapshot=False)

    def _messages(
        self, stored: list[bytes], removed: list[bytes], *, is_snapshot: bool
    ) -> list[KvEvents]:
        parts = [(b"", part) for part in _parts(removed)] + [(part, b"") for part in _parts(stored)]
        if is_snapshot and not parts:
            parts = [(b"", b"")]
        messages = [
            KvEvents(
                sequence=self._sequence + index,
                stored=new,
                removed=gone,
                is_snapshot=is_snapshot and index == 0,
            )
            for index, (new, gone) in enumerate(parts)
        ]
        self._sequence += len(messages)
        return messages


def _parts(hashes: list[bytes]) -> list[bytes]:
    starts = range(0, len(hashes), HASHES_PER_MESSAGE)
    return [b"".join(hashes[start : start + HASHES_PER_MESSAGE]) for start in starts]
