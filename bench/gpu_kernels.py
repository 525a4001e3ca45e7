"""The kernels of `bench.gpu`: for each its check against the plain reference, its job, its bytes.

To add one: a function from `Setting` to `Case`, and its entry in `CASES`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bench.gpu_steps import (
    BLOCK_SIZE,
    Shape,
    blocks_of,
    decode_batch,
    filled_pool,
    layout_of,
    mixed_batch,
    offsets_of,
)
from common.codecs import DEFAULT_KV_CODEC
from common.pages import TAG_BYTES, PageLayout
from engine.batch import MAX_RUN_TOKENS, StepBatch
from engine.device_inputs import DeviceStep, InputBuffer, columns_of
from engine.kernels import reference
from engine.kernels.gpu.attention import attention
from engine.kernels.gpu.checksum import checksums
from engine.kernels.gpu.decode import Partials, decode_attention
from engine.kernels.gpu.landing import land
from engine.kernels.gpu.matmul import matmul
from engine.kernels.gpu.norm import rms_norm
from engine.kernels.gpu.quantise import quantise_rows
from engine.kernels.gpu.sampling import sample_rows
from engine.kernels.gpu.store import rotate_and_store
from engine.kernels.gpu.swiglu import swiglu
from engine.kernels.offsets import Offsets
from engine.pools import PageArena
from engine.sampler import SamplingRows, draw, uniform

Outcome = Sequence[Tensor]
Pages = tuple[Tensor, Tensor, PageLayout, Offsets, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A job. `run` gives what it has computed, or lets `outcome` tell."""

    run: Callable[[], object]
    outcome: Callable[[], Outcome]
    reference: Callable[[], Outcome]
    num_bytes: float
    num_flops: float = 0.0
    peer: Callable[[], object] | None = None
    """The same job by torch, where it has one."""
    bound: float = 0.02
    """Of the largest error, as `error_of` counts it."""
    is_captured: bool = True
    """Timed in a graph, without the host's part. False: it waits for the device."""


@dataclass(slots=True)
class Setting:
    """A shape, a device, a codec, and the pages of one layer."""

    shape: Shape
    device: str
    codec: str
    _kept: list[object] = field(default_factory=list)

    def randn(self, *size: int) -> Tensor:
        return torch.randn(size, device=self.device).to(self.shape.dtype)

    def step(self, batch: StepBatch) -> DeviceStep:
        buffer = InputBuffer(torch.device(self.device))
        self._kept.append(buffer)
        return buffer.send(columns_of(batch, BLOCK_SIZE))

    def angles(self, num_positions: int) -> tuple[Tensor, Tensor]:
        angles = torch.rand((num_positions, self.shape.head_dim // 2), device=self.device) * 6
        return angles.cos(), angles.sin()


def error_of(found: Outcome, wanted: Outcome) -> float:
    """The largest of: difference by the largest value, of numbers; share that differs, of bytes."""
    errors = []
    for one, other in zip(found, wanted, strict=True):
        a, b = one.cpu(), other.cpu()
        assert a.shape == b.shape
        if a.dtype in (torch.uint8, torch.int64):
            errors.append(float((a != b).float().mean()))
        else:
            size = max(float(b.double().abs().max()), 1e-30)
            errors.append(float((a.double() - b.double()).abs().max()) / size)
    return max(errors)


def norm_case(at: Setting) -> Case:
    rows, width = at.shape.rows, at.shape.hidden_size
    x, residual, weight = at.randn(rows, width), at.randn(rows, width), at.randn(width)
    return Case(
        run=lambda: rms_norm(x, weight, 1e-5, residual),
        outcome=lambda: rms_norm(x, weight, 1e-5, residual),
        reference=lambda: reference.rms_norm(x.cpu(), weight.cpu(), 1e-5, residual.cpu()),
        num_bytes=4.0 * rows * width * x.element_size(),
    )


def swiglu_case(at: Setting) -> Case:
    rows, width = at.shape.rows, at.shape.intermediate_size
    x = at.randn(rows, 2 * width)
    return Case(
        run=lambda: swiglu(x),
        outcome=lambda: [swiglu(x)],
        reference=lambda: [reference.swiglu(x.cpu())],
        num_bytes=3.0 * rows * width * x.element_size(),
    )


def quantise_case(at: Setting) -> Case:
    rows, width = at.shape.rows, at.shape.intermediate_size
    x = at.randn(rows, width)

    def told(found: tuple[Tensor, Tensor]) -> Outcome:
        return [found[0].view(torch.uint8), found[1]]

    return Case(
        run=lambda: quantise_rows(x),
        outcome=lambda: told(quantise_rows(x)),
        reference=lambda: told(reference.quantise_rows(x.cpu())),
        num_bytes=rows * width * (2.0 * x.element_size() + 1),  # it reads a row twice
    )


def matmul_case(at: Setting) -> Case:
    """Of a decode batch with the widest weight of a layer, in fixed tiles."""
    rows, width, outputs = at.shape.batch, at.shape.hidden_size, 2 * at.shape.intermediate_size
    x, weight = at.randn(rows, width), at.randn(outputs, width)
    return Case(
        run=lambda: matmul(x, weight),
        outcome=lambda: [matmul(x, weight)],
        reference=lambda: [x.cpu().double() @ weight.cpu().double().T],
        num_bytes=float(weight.numel() * weight.element_size()),
        peer=lambda: F.linear(x, weight),
    )


def _stored(at: Setting, batch: StepBatch, num_requests: int, num_blocks: int) -> Case:
    shape, layout = at.shape, layout_of(at.shape, at.codec)
    arena = filled_pool(layout, num_requests * num_blocks, 2 * num_requests, at.device)
    before = [arena.packed.cpu(), arena.exact.cpu()]
    offsets = offsets_of(layout, num_blocks, at.device)
    cos, sin = at.angles(num_blocks * BLOCK_SIZE)
    rows = len(batch.token_ids)
    heads = at.randn(rows, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim)
    step = at.step(batch)

    def run() -> tuple[Tensor, Tensor, Tensor]:
        pages: Pages = arena.packed, arena.exact, layout, offsets, 0
        return rotate_and_store(heads, None, 1e-5, cos, sin, step.items, *pages)

    def wanted() -> Outcome:
        pages: Pages = before[0], before[1], layout, offsets.to(torch.device("cpu")), 0
        q, _, _ = reference.rotate_and_store(
            heads.cpu(), None, 1e-5, cos.cpu(), sin.cpu(), step.items.cpu(), *pages
        )
        return [q, *before]

    num_values = rows * shape.num_kv_heads * shape.head_dim * 2
    sealed = num_values * layout.codec.packed.num_bits / 8 if rows > num_requests else 0.0
    return Case(
        run=run,
        outcome=lambda: [run()[0], arena.packed, arena.exact],
        reference=wanted,
        num_bytes=heads.numel() * 2.0 * heads.element_size() + 2.0 * num_values + sealed,
    )


def chunk_store_case(at: Setting) -> Case:
    num_blocks = blocks_of(at.shape.chunk)
    return _stored(at, mixed_batch(at.shape.chunk, 0, 0, num_blocks), 1, num_blocks)


def decode_store_case(at: Setting) -> Case:
    batch, num_blocks = at.shape.batch, blocks_of(at.shape.context + 1)
    return _stored(at, decode_batch(batch, at.shape.context, num_blocks), batch, num_blocks)


@dataclass(frozen=True, slots=True)
class _Attention:
    """What both attention kernels read."""

    step: DeviceStep
    arena: PageArena
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    pages: Pages

    @classmethod
    def of(cls, at: Setting, batch: StepBatch, num_requests: int, num_blocks: int) -> "_Attention":
        shape, layout = at.shape, layout_of(at.shape, at.codec)
        arena = filled_pool(layout, num_requests * num_blocks, 2 * num_requests, at.device)
        offsets = offsets_of(layout, num_blocks, at.device)
        rows = len(batch.token_ids)
        q = at.randn(rows, shape.num_heads, shape.head_dim) * shape.head_dim**-0.5
        kv = torch.randn((2, rows, shape.num_kv_heads, shape.head_dim), device=at.device)
        k, v = kv.bfloat16()
        pages = arena.packed, arena.exact, layout, offsets, 0
        return cls(at.step(batch), arena, q, k, v, torch.empty_like(q), pages)

    def wanted(self, runs: Tensor) -> Outcome:
        packed, exact, layout, offsets, layer = self.pages
        return [
            reference.attention(
                self.q.cpu().float(), self.k.cpu(), self.v.cpu(), runs.cpu(),
                self.step.tables.cpu(), packed.cpu(), exact.cpu(), layout,
                offsets.to(torch.device("cpu")), layer,
            )
        ]  # fmt: skip


def chunk_attention_case(at: Setting) -> Case:
    shape = at.shape
    keys, values = at.randn(2, 1, shape.num_kv_heads, shape.chunk, shape.head_dim)
    queries = at.randn(1, shape.num_heads, shape.chunk, shape.head_dim)

    def attend(job: _Attention) -> None:
        attention(
            job.q, job.k, job.v, job.step.chunk_runs, job.step.tables, *job.pages,
            MAX_RUN_TOKENS, job.out,
        )  # fmt: skip

    return _chunk_case(
        at,
        attend,
        lambda: F.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, enable_gqa=True
        ),
    )


def invariant_attention_case(at: Setting) -> Case:
    """The same chunk by the kernel that serves all rows."""
    shape, device = at.shape, torch.device(at.device)
    partials = Partials.allocate(shape.chunk, shape.num_heads, shape.head_dim, device)

    def attend(job: _Attention) -> None:
        decode_attention(
            job.q, job.k, job.v, job.step.chunk_runs, job.step.tables, *job.pages,
            partials, job.out, max_run_tokens=MAX_RUN_TOKENS, is_invariant=True,
        )  # fmt: skip

    return _chunk_case(at, attend, None)


def _chunk_case(
    at: Setting, attend: Callable[[_Attention], None], peer: Callable[[], Tensor] | None
) -> Case:
    """A chunk from position 0 on; `attend` fills the job's `out`."""
    shape, num_blocks = at.shape, blocks_of(at.shape.chunk)
    job = _Attention.of(at, mixed_batch(shape.chunk, 0, 0, num_blocks), 1, num_blocks)

    def run() -> Tensor:
        attend(job)
        return job.out

    return Case(
        run=run,
        outcome=lambda: [run()],
        reference=lambda: job.wanted(job.step.chunk_runs),
        num_bytes=0.0,
        num_flops=4.0 * shape.num_heads * shape.head_dim * shape.chunk * (shape.chunk + 1) / 2,
        peer=peer,
    )


def decode_attention_case(at: Setting) -> Case:
    shape, num_blocks = at.shape, blocks_of(at.shape.context + 1)
    batch = decode_batch(shape.batch, shape.context, num_blocks)
    job = _Attention.of(at, batch, shape.batch, num_blocks)
    device = torch.device(at.device)
    partials = Partials.allocate(shape.batch, shape.num_heads, shape.head_dim, device)
    keys, values = at.randn(2, shape.batch, shape.num_kv_heads, shape.context, shape.head_dim)
    queries = at.randn(shape.batch, shape.num_heads, 1, shape.head_dim)

    def run() -> Tensor:
        decode_attention(
            job.q, job.k, job.v, job.step.decode_runs, job.step.tables, *job.pages,
            partials, job.out,
        )  # fmt: skip
        return job.out

    return Case(
        run=run,
        outcome=lambda: [run()],
        reference=lambda: job.wanted(job.step.decode_runs),
        num_bytes=float(shape.batch * num_blocks * layout_of(shape, at.codec).packed_page_bytes),
        peer=lambda: F.scaled_dot_product_attention(queries, keys, values, enable_gqa=True),
    )


def checksum_case(at: Setting) -> Case:
    arena = filled_pool(layout_of(at.shape, at.codec), at.shape.num_pages, 1, at.device)

    def wanted() -> Outcome:
        sums = np.array(reference.checksums(arena.packed.cpu()), dtype=np.uint64)
        return [torch.from_numpy(sums.view(np.int64))]

    return Case(
        run=lambda: checksums(arena.packed),
        outcome=lambda: [checksums(arena.packed)],
        reference=wanted,
        num_bytes=float(arena.packed.numel()),
        bound=0.0,
    )


def landing_case(at: Setting) -> Case:
    count, layout = at.shape.num_pages, layout_of(at.shape, at.codec)
    source = filled_pool(layout, count, 1, at.device).packed
    target = torch.zeros_like(source)
    pages = np.arange(count, dtype=np.int64)
    tags = np.random.default_rng(0).integers(0, 255, (count, TAG_BYTES), dtype=np.uint8)
    source[:, -TAG_BYTES:] = torch.from_numpy(tags).to(source.device)
    source.view(torch.int64)[:, -1] = checksums(source)

    def run() -> torch.Tensor:
        accepted, _ = land(source, target, pages, pages[::-1].copy(), tags)
        return torch.from_numpy(accepted.astype(np.int64))

    def wanted() -> Outcome:
        copied = source.cpu().flip(0)
        copied[:, -TAG_BYTES:] = 0
        return [torch.ones(count, dtype=torch.int64), copied]

    return Case(
        run=run,
        outcome=lambda: [run(), target],
        reference=wanted,
        num_bytes=3.0 * source.numel(),  # read for its checksum, read and written for the copy
        bound=0.0,
        is_captured=False,
    )


def sampling_case(at: Setting) -> Case:
    """By temperature, top_k and top_p, as most requests that sample do."""
    count = at.shape.batch
    logits = torch.randn((count, at.shape.vocab_size), device=at.device) * 4
    rows = SamplingRows.filtered(count)
    chance = uniform(rows.seed, rows.position)
    arrays = (rows.temperature, rows.min_p, rows.top_k, rows.top_p, chance)
    columns = [torch.from_numpy(array).to(at.device) for array in arrays]
    return Case(
        run=lambda: sample_rows(logits, *columns),
        outcome=lambda: [sample_rows(logits, *columns)],
        reference=lambda: [torch.from_numpy(draw(logits.cpu(), np.arange(count), rows))],
        num_bytes=4.0 * logits.numel(),  # one reading; the kernel reads rows several times
        bound=0.0,
    )


FP8, BF16 = DEFAULT_KV_CODEC, "bf16"
CASES: list[tuple[str, str, Callable[[Setting], Case]]] = [
    ("rms_norm with residual", FP8, norm_case),
    ("swiglu", FP8, swiglu_case),
    ("quantise_rows", FP8, quantise_case),
    ("matmul, batch-invariant", FP8, matmul_case),
    ("rotate and store, chunk", FP8, chunk_store_case),
    ("rotate and store, decodes", FP8, decode_store_case),
    ("attention, chunk", FP8, chunk_attention_case),
    ("attention, chunk", BF16, chunk_attention_case),
    ("attention, decodes", FP8, decode_attention_case),
    ("attention, decodes", BF16, decode_attention_case),
    ("attention, chunk, batch-invariant", FP8, invariant_attention_case),
    ("checksums", FP8, checksum_case),
    ("landing", FP8, landing_case),
    ("sampling", FP8, sampling_case),
]
