"""Where the pages of an arena lie, for a transport: as regions, and row by row.

A region is (base address, bytes of a row, number of rows). Rows are pages, packed ones first, or
the records of these pages, one for each KV head.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtransfer.transport import PageRead

Region = tuple[int, int, int]


def regions_of(arena: Any) -> tuple[Region, ...]:
    return tuple((t.data_ptr(), t.shape[1], t.shape[0]) for t in (arena.packed, arena.exact))


def records_of(regions: Sequence[Region], num_heads: int) -> list[Region]:
    """The same memory, row by row of records."""
    return [(base, size // num_heads, num * num_heads) for base, size, num in regions]


def record_numbers(
    page_numbers: Sequence[int], pages: Sequence[PageRead], num_heads: int
) -> list[int]:
    """Of the records that are wanted of these pages."""
    return [
        number * num_heads + head
        for number, page in zip(page_numbers, pages, strict=True)
        for head in page.heads or range(num_heads)
    ]


def rows_of(regions: Sequence[Region], device: int) -> NDArray[np.uint64]:
    """[rows, 3]: address, size and device of each row."""
    return np.concatenate(
        [
            np.stack(
                [
                    base + size * np.arange(num, dtype=np.uint64),
                    np.full(num, size, dtype=np.uint64),
                    np.full(num, device, dtype=np.uint64),
                ],
                axis=1,
            )
            for base, size, num in regions
        ]
    )
