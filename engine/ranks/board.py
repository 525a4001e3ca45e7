"""The board of a worker on CPUs: memory that all its ranks see. What they add up lies here, and
what rank 0 reads of all: logits.

    board = Board.create(BoardSizes.of(...))     # rank 0
    board = Board(sizes, descriptor)             # a follower, with rank 0's descriptor

Pages of it that nobody touches take no memory.
"""

import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from common.environment import available_cores
from engine.kernels.cpu.sync import BOARD_WORDS, LOST, SLEEP, SLEEP_NS, SPINS

SPINS_WITH_CORES = 20_000
"""Some 20 us, when every thread has a core of its own."""
SPINS_WITHOUT = 100
WORDS_BYTES = BOARD_WORDS * 8


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardSizes:
    num_ranks: int
    num_rows: int
    """Of the largest step."""
    hidden: int
    vocab: int
    """Padded."""

    @property
    def part_bytes(self) -> int:
        """Of one rank's part of a sum."""
        return self.num_rows * self.hidden * 4

    @property
    def places(self) -> tuple[int, int, int, int]:
        """Where embedded rows, both sums and logits begin."""
        sums = self.num_ranks * self.part_bytes
        starts = np.cumsum([WORDS_BYTES, self.part_bytes, sums, sums])
        return tuple(int(start) for start in starts)  # type: ignore[return-value]

    @property
    def num_bytes(self) -> int:
        return self.places[-1] + self.num_rows * self.vocab * 4


class Board:
    """`lose` also stands for ranks on GPUs, which use nothing else of it."""

    def __init__(self, sizes: BoardSizes, descriptor: int) -> None:
        """Takes the descriptor over."""
        self.sizes = sizes
        self.descriptor = descriptor
        self._memory = mmap.mmap(descriptor, sizes.num_bytes)
        self._words: NDArray[np.int64] = np.frombuffer(
            self._memory, dtype=np.int64, count=BOARD_WORDS
        )

    @classmethod
    def create(cls, sizes: BoardSizes, *, num_threads: int) -> Self:
        """`num_threads` of each rank."""
        descriptor = os.memfd_create("tandem-board", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, sizes.num_bytes)
        board = cls(sizes, descriptor)
        has_cores = sizes.num_ranks * num_threads <= available_cores()
        board._words[SPINS // 8] = SPINS_WITH_CORES if has_cores else SPINS_WITHOUT
        board._words[SLEEP // 8 : SLEEP // 8 + 2] = 0, SLEEP_NS
        return board

    @property
    def address(self) -> int:
        return int(self._words.ctypes.data)

    @property
    def is_lost(self) -> bool:
        """A rank has failed, or is gone."""
        return bool(self._words[LOST // 8])

    def lose(self) -> None:
        """From now on nobody waits for a rank, and nothing that is computed means anything."""
        self._words[LOST // 8] = 1

    def floats(self, place: int, rows: int, columns: int) -> NDArray[np.float32]:
        """[rows, columns] at byte `place`."""
        count = rows * columns
        array = np.frombuffer(self._memory, dtype=np.float32, count=count, offset=place)
        return array.reshape(rows, columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """What all ranks of one worker see."""

    board: Board
    store: Path
    """A file by which ranks on GPUs find each other."""
