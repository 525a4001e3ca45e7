"""Where the pages of an arena lie, for a transport: as regions, and row by row.

A region is (base address, bytes of a page, number of pages). Rows are pages, packed ones first, or
what a `Cut` takes of each of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Region = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Cut:
    """A page in `num` parts of the same size, of which those at `places` are rows."""

    num: int
    places: tuple[int, ...]


WHOLE: Final = Cut(1, (0,))


def regions_of(arena: Any) -> tuple[Region, ...]:
    return tuple((t.data_ptr(), t.shape[1], t.shape[0]) for t in (arena.packed, arena.exact))


def rows_of(regions: Sequence[Region], cut: Cut, device: int) -> NDArray[np.uint64]:
    """[rows, 3]: address, size and device of each row, page by page."""
    return np.concatenate([_rows(region, cut, device) for region in regions])


def _rows(region: Region, cut: Cut, device: int) -> NDArray[np.uint64]:
    base, page_bytes, num = region
    part = page_bytes // cut.num
    pages = base + page_bytes * np.arange(num, dtype=np.uint64)
    places = np.array([part * place for place in cut.places], dtype=np.uint64)
    rows = np.empty((num * len(places), 3), dtype=np.uint64)
    rows[:, 0] = (pages[:, None] + places).reshape(-1)
    rows[:, 1:] = part, device
    return rows
