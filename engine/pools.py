"""Page arenas: the memory that pages live in. One is the pool of a worker, another its landing
zone.

Index i of a tensor is page i, so a descriptor for the transport is a base address and an index.
"""

import mmap

import torch
from torch import Tensor

from common.pages import PageKind, PageLayout


class PageArena:
    """Zeroed pages of both kinds: `packed` [num_packed, packed_page_bytes] and `exact` [num_exact,
    exact_page_bytes].
    """

    def __init__(
        self, layout: PageLayout, num_packed: int, num_exact: int, device: str = "cpu"
    ) -> None:
        self.layout = layout
        self.packed = _zeroed(num_packed, layout.packed_page_bytes, device)
        self.exact = _zeroed(num_exact, layout.exact_page_bytes, device)

    def records(self, kind: PageKind) -> Tensor:
        """View [num_pages, kv_heads, record_bytes]: what is tagged and checked by itself."""
        pages = self.packed if kind is PageKind.PACKED else self.exact
        return pages.view(len(pages), self.layout.num_kv_heads, -1)

    @property
    def num_bytes(self) -> int:
        return self.packed.numel() + self.exact.numel()


def _zeroed(num_pages: int, page_bytes: int, device: str) -> Tensor:
    """uint8 [num_pages, page_bytes], its start on a page boundary of the operating system."""
    if device != "cpu" or num_pages == 0:
        return torch.zeros((num_pages, page_bytes), dtype=torch.uint8, device=device)
    memory = mmap.mmap(-1, num_pages * page_bytes)
    return torch.frombuffer(memory, dtype=torch.uint8).view(num_pages, page_bytes)
