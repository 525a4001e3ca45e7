"""Page arenas: the memory that pages live in. One is the pool of a worker, another its landing
zone.

Index i of a tensor is page i, so a descriptor for the transport is a base address and an index.
"""

import mmap
import threading
from dataclasses import replace

import torch
from torch import Tensor

from common.codecs import codec_named
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


class LandingArenas:
    """A landing zone: pages like the worker's own, and, made when they are wanted first, such of
    other codecs. A slot has the same number in all of them, and is used in one at a time.
    """

    def __init__(self, own: PageArena) -> None:
        self._own = own
        self._lock = threading.Lock()
        self._foreign: dict[str, PageArena] = {}

    def of(self, codec: str) -> PageArena:
        """May be called from any thread."""
        own = self._own
        if codec == own.layout.codec.name:
            return own
        with self._lock:
            if codec not in self._foreign:
                layout = replace(own.layout, codec=codec_named(codec))
                sizes = len(own.packed), len(own.exact)
                device = str(own.packed.device)
                self._foreign[codec] = PageArena(layout, *sizes, device)
            return self._foreign[codec]


def _zeroed(num_pages: int, page_bytes: int, device: str) -> Tensor:
    """uint8 [num_pages, page_bytes], its start on a page boundary of the operating system."""
    if device != "cpu" or num_pages == 0:
        return torch.zeros((num_pages, page_bytes), dtype=torch.uint8, device=device)
    memory = mmap.mmap(-1, num_pages * page_bytes)
    return torch.frombuffer(memory, dtype=torch.uint8).view(num_pages, page_bytes)
