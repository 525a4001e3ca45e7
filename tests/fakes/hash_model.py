"""A model without a matrix: it answers by hashing the KV that it finds in its pages.

The KV of a token is eight bytes made from the token and its position. The next token is a hash of
all KV bytes that the block table leads to, so a missing, stale, foreign or torn page gives other
tokens than `expected_tokens`, as surely as a real model would, and for free. Pages carry the real
tags (common/pages.py).
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from common.pages import TAG_BYTES, PageKind, PageTag, checksum, tag_mismatch
from common.scheduling.plan import (
    LandingMove,
    LandingResult,
    OutputStart,
    PrefillChunk,
    Refused,
    StepPlan,
    StepResult,
    TagOrder,
)
from common.types import OutputKey, SamplingParams, output_seed
from decode_worker.finish import finish_reason

VOCAB_SIZE = 1000
LAYOUT_FINGERPRINT = b"hash-model------"
KV_BYTES = 8


def kv_of(token_id: int, position: int) -> bytes:
    return hashlib.blake2b(f"{token_id}:{position}".encode(), digest_size=KV_BYTES).digest()


def next_token(kv: bytes, sampling: SamplingParams, output_index: int) -> int:
    seed = output_seed(sampling.seed, output_index) if sampling.temperature > 0 else 0
    digest = hashlib.blake2b(kv + seed.to_bytes(8, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little") % VOCAB_SIZE


def expected_tokens(
    prompt: Sequence[int], sampling: SamplingParams, output_index: int = 0
) -> list[int]:
    """What an undisturbed run gives."""
    kv = b"".join(kv_of(token, position) for position, token in enumerate(prompt))
    found: list[int] = []
    while True:
        token = next_token(kv, sampling, output_index)
        found.append(token)
        if finish_reason(sampling, token, len(found)) is not None:
            return found
        kv += kv_of(token, len(prompt) + len(found) - 1)


class HashArena:
    """Pages as rows of numpy arrays; both kinds have the same size here."""

    def __init__(self, num_packed: int, num_exact: int, block_size: int) -> None:
        self.page_bytes = -(-block_size * KV_BYTES // 64) * 64 + TAG_BYTES
        rng = np.random.default_rng(7)  # poison: what nobody wrote must not be read
        self.packed = rng.integers(1, 255, (num_packed, self.page_bytes), dtype=np.uint8)
        self.exact = rng.integers(1, 255, (num_exact, self.page_bytes), dtype=np.uint8)

    def rows(self, kind: PageKind) -> NDArray[np.uint8]:
        return self.packed if kind is PageKind.PACKED else self.exact


@dataclass(slots=True)
class _Output:
    token_ids: list[int]
    sampling: SamplingParams
    output_index: int
    block_ids: list[int] = field(default_factory=list)
    tail: int | None = None


class HashRunner:
    """Executes plans as the engine does (engine/runner.py)."""

    def __init__(
        self,
        *,
        num_packed: int,
        num_exact: int,
        num_landing: int,
        block_size: int,
        incarnation: int,
    ) -> None:
        self.pool = HashArena(num_packed, num_exact, block_size)
        self.landing = HashArena(num_landing, num_landing, block_size)
        self._block_size = block_size
        self._incarnation = incarnation
        self._outputs: dict[OutputKey, _Output] = {}

    @property
    def num_outputs(self) -> int:
        return len(self._outputs)

    def execute(self, plan: StepPlan) -> StepResult:
        for key in plan.drops:
            self._outputs.pop(key, None)
        for kind, block_id in plan.clears:
            self.pool.rows(kind)[block_id, -TAG_BYTES:] = 0
        for source, destination in plan.copies:
            self.pool.exact[destination] = self.pool.exact[source]
        for start in plan.starts:
            self._start(start)
        for key, block_id in plan.grown:
            self._outputs[key].block_ids.append(block_id)
        for key, tail in plan.tails:
            self._outputs[key].tail = tail
        keys: list[OutputKey] = []
        tokens: list[int] = []
        for chunk in plan.chunks:
            for token in self._chunk(chunk):
                keys.append(chunk.key)
                tokens.append(token)
        for key in plan.decodes:
            keys.append(key)
            tokens.append(self._decode(self._outputs[key]))
        for order in plan.tags:
            self._tag(order)
        return StepResult(
            step=plan.step,
            keys=tuple(keys),
            token_ids=tuple(tokens),
            logprobs=(None,) * len(tokens),
            duration_s=0.001,
        )

    def land(self, moves: Sequence[LandingMove]) -> LandingResult:
        return LandingResult(refusals=tuple(self._land(move) for move in moves))

    def _start(self, start: OutputStart) -> None:
        assert start.key not in self._outputs, f"{start.key} is known already"
        self._outputs[start.key] = _Output(
            token_ids=start.token_ids.tolist(),
            sampling=start.sampling,
            output_index=start.output_index,
            block_ids=list(start.block_ids),
            tail=start.tail,
        )

    def _chunk(self, chunk: PrefillChunk) -> list[int]:
        output = self._outputs[chunk.key]
        assert chunk.start % self._block_size == 0
        output.block_ids, output.tail = list(chunk.block_ids), chunk.tail
        end = chunk.start + chunk.num_tokens
        for position in range(chunk.start, end):
            block = position // self._block_size
            is_completed = (block + 1) * self._block_size <= end
            self._store(self._page(output, block, is_sealed=is_completed), output, position)
        kv = self._read(output, end)
        tokens = [
            next_token(kv, output.sampling, output.output_index + index)
            for index in range(chunk.num_outputs)
        ]
        output.token_ids += tokens[:1]
        return tokens

    def _decode(self, output: _Output) -> int:
        position = len(output.token_ids) - 1
        block, offset = divmod(position, self._block_size)
        open_page = self._page(output, block, is_sealed=False)
        self._store(open_page, output, position)
        if block > 0 and offset == self._block_size - 1:
            self.pool.packed[output.block_ids[block], :-TAG_BYTES] = open_page[:-TAG_BYTES]
        token = next_token(self._read(output, position + 1), output.sampling, output.output_index)
        output.token_ids.append(token)
        return token

    def _page(self, output: _Output, block: int, *, is_sealed: bool) -> NDArray[np.uint8]:
        if block > 0 and is_sealed:
            packed: NDArray[np.uint8] = self.pool.packed[output.block_ids[block]]
            return packed
        block_id = output.tail if block > 0 else output.block_ids[0]
        assert block_id is not None, "no tail"
        exact: NDArray[np.uint8] = self.pool.exact[block_id]
        return exact

    def _store(self, page: NDArray[np.uint8], output: _Output, position: int) -> None:
        offset = position % self._block_size
        if offset == 0:
            page[:-TAG_BYTES] = 0
        kv = kv_of(output.token_ids[position], position)
        page[offset * KV_BYTES : (offset + 1) * KV_BYTES] = np.frombuffer(kv, dtype=np.uint8)

    def _read(self, output: _Output, end: int) -> bytes:
        kv = b""
        for block in range(-(-end // self._block_size)):
            num_tokens = min(self._block_size, end - block * self._block_size)
            page = self._page(output, block, is_sealed=num_tokens == self._block_size)
            kv += page[: num_tokens * KV_BYTES].tobytes()
        return kv

    def _tag(self, order: TagOrder) -> None:
        page = self.pool.rows(order.kind)[order.block_id]
        tag = PageTag(
            content_hash=order.content_hash,
            fingerprint=LAYOUT_FINGERPRINT,
            num_tokens=order.num_tokens,
            head=0,
            incarnation=self._incarnation,
            generation=order.generation,
        )
        page[-TAG_BYTES:] = np.frombuffer(tag.pack(), dtype=np.uint8)
        signed = tag.with_checksum(checksum(page))
        page[-TAG_BYTES:] = np.frombuffer(signed.pack(), dtype=np.uint8)

    def _land(self, move: LandingMove) -> Refused | None:
        page = self.landing.rows(move.kind)[move.slot]
        wanted = PageTag(
            content_hash=move.content_hash,
            fingerprint=LAYOUT_FINGERPRINT,
            num_tokens=move.num_tokens,
            head=0,
            incarnation=move.incarnation,
            generation=move.generation,
            checksum=checksum(page),
        )
        refusal = tag_mismatch(PageTag.unpack(page[-TAG_BYTES:].tobytes()), wanted)
        if refusal is not None:
            return Refused(heads=(0,), reason=refusal)
        target = self.pool.rows(move.kind)[move.block_id]
        target[:] = page
        target[-TAG_BYTES:] = 0
        return None
