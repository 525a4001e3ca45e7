"""What the scheduler hands out for a prompt that is computed elsewhere: what is to be pulled."""

from dataclasses import dataclass

from common.messages import GenerateRequest
from common.scheduling.prompt_pages import PromptNames, PromptPage, prompt_pages
from common.types import RequestId
from decode_worker.entries import Entry


@dataclass(frozen=True, slots=True, kw_only=True)
class PullOrder:
    request: GenerateRequest
    first_block: int
    """The first one that is not held already."""
    pages: tuple[PromptPage, ...]
    """Of consecutive blocks from there on; none when nothing is to be decoded."""

    @property
    def request_id(self) -> RequestId:
        return self.request.request_id

    @staticmethod
    def of(entry: Entry, block_size: int) -> "PullOrder":
        request = entry.request
        first_block = entry.num_cached_tokens // block_size
        pages: list[PromptPage] = []
        # else the first token is the last one
        if entry.num_tokens + 1 < entry.most_tokens:
            assert entry.table is not None
            names = PromptNames.of(entry.chain, entry.num_tokens, block_size)
            pages = prompt_pages(entry.table, names, first_block, names.num_blocks)
        return PullOrder(request=request, first_block=first_block, pages=tuple(pages))
