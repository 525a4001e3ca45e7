"""Pages pulled from another process's pool on the same GPU, for `bench.gpu`.

    python -m bench.gpu_handoff DEVICE PROFILE    the source: prints how it is reached, serves reads
                                                  until its stdin is closed

The reader pulls a prompt's pages chunk by chunk, as a decode worker does while the prefill worker
computes the next chunk, and lands each chunk (check, copy). Only the last chunk cannot hide behind
computing: its read and landing are the exposed part.
"""

import asyncio
import sys
import time
from dataclasses import dataclass

import numpy as np
import torch

from bench.gpu_steps import BLOCK_SIZE, LLAMA_8B, SMOKE, Shape, blocks_of, filled_pool, layout_of
from common.codecs import DEFAULT_KV_CODEC
from common.handoff_messages import LinkReply
from common.pages import TAG_BYTES, PageKind, PageLayout, PageTag
from common.wire import decode, encode
from engine.kernels.gpu.checksum import checksums
from engine.pools import PageArena
from kvtransfer.nixl_transport import NixlTransport
from kvtransfer.transport import PageRead, ReadEnd

FINGERPRINT = b"bench gpu handof"


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    shape: Shape
    num_layers: int
    num_tokens: tuple[int, ...]
    chunk_tokens: int

    @property
    def layout(self) -> PageLayout:
        return layout_of(self.shape, DEFAULT_KV_CODEC, self.num_layers)

    @property
    def num_pages(self) -> int:
        return blocks_of(max(self.num_tokens))

    @property
    def chunk_pages(self) -> int:
        return blocks_of(self.chunk_tokens)


PROFILES = {
    "full": Profile(shape=LLAMA_8B, num_layers=32, num_tokens=(4096, 32_768), chunk_tokens=512),
    "smoke": Profile(shape=SMOKE, num_layers=1, num_tokens=(64, 128), chunk_tokens=32),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulled:
    num_tokens: int
    num_bytes: int
    seconds: float
    """Of all reads and landings, one chunk after the other."""
    exposed_s: float
    """Read and landing of the last chunk."""


def tag_of(page: int, head: int) -> PageTag:
    return PageTag(
        content_hash=page.to_bytes(16, "little"),
        fingerprint=FINGERPRINT,
        num_tokens=BLOCK_SIZE,
        head=head,
        incarnation=1,
        generation=1,
    )


def tags_of(pages: range, heads: int) -> "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]":
    """[pages * heads, TAG_BYTES]: of each record."""
    packed = b"".join(tag_of(page, head).pack() for page in pages for head in range(heads))
    return np.frombuffer(packed, dtype=np.uint8).reshape(-1, TAG_BYTES)


def source_pool(profile: Profile, device: str) -> PageArena:
    """Random pages with right tags and checksums."""
    pool = filled_pool(profile.layout, profile.num_pages, 1, device)
    tags = torch.from_numpy(tags_of(range(profile.num_pages), profile.layout.num_kv_heads).copy())
    records = pool.records(PageKind.PACKED).flatten(0, 1)
    records[:, -TAG_BYTES:] = tags.to(records.device)
    records.view(torch.int64)[:, -1] = checksums(records)
    if pool.packed.is_cuda:
        torch.cuda.synchronize()
    return pool


async def serve(device: str, profile: Profile) -> None:
    nothing = PageArena(profile.layout, 0, 0, device)
    transport = NixlTransport("bench-source", source_pool(profile, device), nothing)
    await transport.open()
    [pool_address] = transport.describe()
    reply = LinkReply(
        incarnation="bench-source",
        numeric_incarnation=1,
        layout="",
        layout_fingerprint=b"",
        agent_name=pool_address.agent_name,
        agent_metadata=pool_address.agent_metadata,
        pages=pool_address.pages,
        ranks=(pool_address,),
    )
    print(encode(reply).hex(), flush=True)
    await asyncio.to_thread(sys.stdin.buffer.read)
    await transport.close()


async def pull(device: str, name: str) -> list[Pulled]:
    """Raises RuntimeError when a read fails or a page is refused."""
    profile = PROFILES[name]
    command = [sys.executable, "-m", "bench.gpu_handoff", device, name]
    pipe = asyncio.subprocess.PIPE
    source = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, limit=1 << 24)
    assert source.stdin is not None
    assert source.stdout is not None
    pool = PageArena(profile.layout, profile.num_pages, 1, device)
    landing = PageArena(profile.layout, profile.chunk_pages, 1, device)
    transport = NixlTransport("bench-reader", pool, landing)
    try:
        line = await source.stdout.readline()
        if not line:
            raise RuntimeError("the source ended before it could be reached; see its output")
        reply = decode(bytes.fromhex(line.decode()))
        assert isinstance(reply, LinkReply)
        await transport.open()
        await transport.link(reply)
        await _pull_chunks(transport, profile, pool, landing, profile.chunk_tokens)  # connects
        return [
            await _pull_chunks(transport, profile, pool, landing, num_tokens)
            for num_tokens in profile.num_tokens
        ]
    finally:
        source.stdin.close()
        await transport.close()
        await source.wait()


async def _pull_chunks(
    transport: NixlTransport,
    profile: Profile,
    pool: PageArena,
    landing: PageArena,
    num_tokens: int,
) -> Pulled:
    from engine.kernels.gpu.landing import land

    pages, times = range(blocks_of(num_tokens)), []
    for first in range(0, len(pages), profile.chunk_pages):
        chunk = pages[first : first + profile.chunk_pages]
        began = time.perf_counter()
        read = transport.read(
            "bench-source",
            [
                PageRead(kind=PageKind.PACKED, block_id=page, slot=(PageKind.PACKED, slot))
                for slot, page in enumerate(chunk)
            ],
        )
        if await read.wait() is not ReadEnd.DONE:
            raise RuntimeError("a read of pages failed")
        heads = profile.layout.num_kv_heads
        slots = np.arange(len(chunk) * heads, dtype=np.int64)
        targets = slots + chunk[0] * heads
        source, target = (a.records(PageKind.PACKED).flatten(0, 1) for a in (landing, pool))
        accepted, _ = land(source, target, slots, targets, tags_of(chunk, heads))
        if not accepted.all():
            raise RuntimeError(f"{int((~accepted).sum())} pages were refused on landing")
        times.append(time.perf_counter() - began)
    return Pulled(
        num_tokens=num_tokens,
        num_bytes=len(pages) * profile.layout.packed_page_bytes,
        seconds=sum(times),
        exposed_s=times[-1],
    )


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], PROFILES[sys.argv[2]]))
