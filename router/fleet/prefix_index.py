"""Which worker holds which blocks: from a block's hash to the set of workers, and from a prompt to
the longest prefix that each worker has.

A set of workers is an integer with one bit per worker. `match` walks a prompt's chain of hashes and
keeps the workers that had every block so far, until none is left: its time depends on the length of
the match, not on the number of hashes known nor, but for naming those that hold something, on the
number of workers. Since hashes cover model, block size and salt, one index serves all of them.

Pure bookkeeping; `fleet` tells it what workers report and when they go. Workers are named by small
integers (`Worker.order`).
"""

from collections.abc import Iterable

from common.errors import MalformedMessage
from common.scheduling.block_hash import HASH_BYTES


class PrefixIndex:
    def __init__(self) -> None:
        self._holders: dict[bytes, int] = {}
        self._bits: dict[int, int] = {}
        self._workers: dict[int, int] = {}
        """The inverse of `_bits`."""
        self._held: dict[int, set[bytes]] = {}

    def __len__(self) -> int:
        """Different hashes, whoever holds them."""
        return len(self._holders)

    def num_held(self, worker: int) -> int:
        return len(self._held.get(worker, ()))

    def held(self, worker: int) -> set[bytes]:
        return set(self._held.get(worker, ()))

    def knows(self, worker: int) -> bool:
        """Whether the worker reports what it holds."""
        return worker in self._bits

    @property
    def workers(self) -> frozenset[int]:
        """Those that report what they hold."""
        return frozenset(self._bits)

    def reset(self, worker: int) -> None:
        """The worker holds nothing, as far as is known; what it holds is about to be told."""
        self.drop(worker)
        taken = self._workers
        bit = next(b for b in (1 << n for n in range(len(taken) + 1)) if b not in taken)
        self._bits[worker] = bit
        self._workers[bit] = worker
        self._held[worker] = set()

    def drop(self, worker: int) -> None:
        """The worker is gone. Harmless when it is not known."""
        bit = self._bits.pop(worker, None)
        if bit is None:
            return
        del self._workers[bit]
        for content_hash in self._held.pop(worker):
            self._remove(content_hash, bit)

    def change(self, worker: int, stored: bytes, removed: bytes) -> None:
        """Hashes one after another; repeats do no harm. Raises MalformedMessage, and then nothing
        has changed. The worker must have been `reset` before.
        """
        if len(stored) % HASH_BYTES or len(removed) % HASH_BYTES:
            raise MalformedMessage("block hashes of the wrong length")
        bit, held, holders = self._bits[worker], self._held[worker], self._holders
        for content_hash in _split(removed):
            if content_hash in held:
                held.remove(content_hash)
                self._remove(content_hash, bit)
        for content_hash in _split(stored):
            held.add(content_hash)
            holders[content_hash] = holders.get(content_hash, 0) | bit

    def match(self, hashes: Iterable[bytes]) -> dict[int, int]:
        """Workers that hold at least the first of `hashes`, with the number of leading ones they
        hold. No more of `hashes` is taken than any worker has, and one.
        """
        found: dict[int, int] = {}
        alive = -1
        count = 0
        for content_hash in hashes:
            left = alive & self._holders.get(content_hash, 0)
            if count and left != alive:
                self._name(alive & ~left, count, found)
            alive = left
            if not alive:
                return found
            count += 1
        if count:
            self._name(alive, count, found)
        return found

    def longest(self, hashes: Iterable[bytes]) -> int:
        """How many leading ones some worker holds. May be called on any thread."""
        alive = -1
        count = 0
        for content_hash in hashes:
            alive &= self._holders.get(content_hash, 0)
            if not alive:
                break
            count += 1
        return count

    def _name(self, bits: int, count: int, found: dict[int, int]) -> None:
        while bits:
            bit = bits & -bits
            found[self._workers[bit]] = count
            bits ^= bit

    def _remove(self, content_hash: bytes, bit: int) -> None:
        left = self._holders[content_hash] & ~bit
        if left:
            self._holders[content_hash] = left
        else:
            del self._holders[content_hash]

    def check_invariants(self) -> None:
        expected: dict[bytes, int] = {}
        for worker, held in self._held.items():
            for content_hash in held:
                expected[content_hash] = expected.get(content_hash, 0) | self._bits[worker]
        assert self._holders == expected
        assert {bit: worker for worker, bit in self._bits.items()} == self._workers
        assert set(self._bits) == set(self._held)
        assert all(bit.bit_count() == 1 for bit in self._workers)


def _split(hashes: bytes) -> Iterable[bytes]:
    return (hashes[i : i + HASH_BYTES] for i in range(0, len(hashes), HASH_BYTES))
