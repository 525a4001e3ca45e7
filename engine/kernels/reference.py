"""Plain torch twins of every kernel: slow, obvious, and what the others are tested against.

Shapes and meanings are those of the wrappers in `engine/kernels/gpu`. `items` and `runs` are the
columns of `engine.batch`.
"""

import numpy as np
import torch
from torch import Tensor

from common.codecs import ElementKind
from common.pages import PageLayout, checksum
from engine.kernels.offsets import Offsets

NEUTRAL_SCALE = 127
MAX_SCALE = 237
SMALLEST = 2.0**-126
INT4_LIMIT = 1e38
DTYPES = {ElementKind.BF16: torch.bfloat16, ElementKind.FP32: torch.float32}


def e3m4_values() -> Tensor:
    """What each of the 256 bytes stands for, which is what defines the format."""
    sizes = [
        mantissa / 64 if exponent == 0 else 2.0 ** (exponent - 3) * (1 + mantissa / 16)
        for exponent in range(8)
        for mantissa in range(16)
    ]
    sizes[0x7F] = torch.nan
    positive = torch.tensor(sizes)
    return torch.cat([positive, -positive])


_BYTES = torch.arange(256).to(torch.uint8)
FP8 = {
    ElementKind.E3M4: e3m4_values(),
    ElementKind.E4M3: _BYTES.view(torch.float8_e4m3fn).float(),
    ElementKind.E5M2: _BYTES.view(torch.float8_e5m2).float(),
}
"""What each byte of an fp8 element stands for."""


def quantise(block: Tensor, kind: ElementKind, is_k: bool) -> tuple[Tensor, Tensor]:
    """Bytes of a block [block_size, head_dim] fp32 in a packed page, and of its scales."""
    if kind in FP8:
        return quantise_fp8(block, FP8[kind])
    return quantise_int4(block, is_k) if kind is ElementKind.INT4 else quantise_int8(block)


def dequantise(data: Tensor, scales: Tensor, kind: ElementKind, is_k: bool) -> Tensor:
    """fp32 of what `quantise` gave; leading dimensions are kept."""
    if kind in FP8:
        factor = torch.exp2(scales.double() - 127).float()
        return FP8[kind][data.long()] * factor[..., None]
    if kind is ElementKind.INT4:
        low, high = (data & 0xF).float(), (data >> 4).float()
        whole = torch.stack([low, high], dim=-1).flatten(-2)
        factor, minimum = scales.contiguous().view(torch.bfloat16).float().chunk(2, dim=-1)
        if is_k:
            return whole * factor[..., None, :] + minimum[..., None, :]
        return whole * factor[..., None] + minimum[..., None]
    whole = data.view(torch.int8).float()
    factor = scales.contiguous().view(torch.float32)
    return torch.where(whole == -128, torch.nan, whole) * factor[..., None]


def largest_finite(block: Tensor) -> Tensor:
    return torch.where(block.isfinite(), block, 0.0).abs().amax()


def quantise_fp8(block: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """One power of two for the block, and the nearest of a format's `values`."""
    steps = values[:128][values[:128].isfinite()].double()
    amax, most = float(largest_finite(block)), float(steps[-1])
    code = NEUTRAL_SCALE
    if amax > 0:
        mantissa, exponent = np.frexp(np.float32(amax) / np.float64(most))
        code = min(max(int(exponent) + 127 - int(mantissa == 0.5), 1), MAX_SCALE)
    scaled = (block.double() * 2.0 ** (127 - code)).clamp(-most, most)
    edges = (steps[1:] + steps[:-1]) / 2
    data = torch.bucketize(scaled.abs(), edges)
    is_tie = scaled.abs() == edges[data.clamp(max=len(edges) - 1)]
    data = data + (is_tie & (data % 2 == 1)) + scaled.signbit() * 128
    data = torch.where(block.isfinite(), data, 0x7F).to(torch.uint8)
    return data, torch.tensor([code], dtype=torch.uint8)


def quantise_int8(block: Tensor) -> tuple[Tensor, Tensor]:
    """One fp32 factor for the block."""
    factor = largest_finite(block) / 127.0
    factor = torch.where(factor < SMALLEST, 1.0, factor)
    whole = torch.where(block.isfinite(), (block / factor).round(), -128).to(torch.int8)
    return whole.view(torch.uint8), factor.reshape(1).view(torch.uint8)


def quantise_int4(block: Tensor, is_k: bool) -> tuple[Tensor, Tensor]:
    """A bf16 factor and minimum for each channel (K) or token (V)."""
    axis = 0 if is_k else 1
    finite = torch.where(block.isfinite(), block, 0.0)
    low = (finite.amin(axis).clamp(min=-INT4_LIMIT) + 0.0).bfloat16()
    high = finite.amax(axis).clamp(max=INT4_LIMIT)
    factor = ((high - low.float()) / 15.0).bfloat16()
    factor = torch.where(factor < SMALLEST, 1.0, factor)
    factor = torch.where(block.isfinite().all(axis), factor, torch.nan)
    steps = (block - low.float().unsqueeze(axis)) / factor.float().unsqueeze(axis)
    whole = steps.nan_to_num(15.0).clamp(0, 15).round().to(torch.uint8)
    data = whole[:, ::2] | whole[:, 1::2] << 4
    return data, torch.cat([factor, low]).view(torch.uint8)


def exact_slices(exact: Tensor, layout: PageLayout) -> Tensor:
    """Exact pages as [num_pages, num_layers, 2, kv_heads, block_size, head_dim], a view."""
    return _by_layer(_payload(exact, layout, layout.codec.exact))


def packed_slices(packed: Tensor, layout: PageLayout) -> Tensor:
    """The same of packed pages; uint8 when they are quantised."""
    return _by_layer(_payload(packed, layout, layout.codec.packed))


def packed_scales(packed: Tensor, layout: PageLayout) -> tuple[Tensor, Tensor]:
    """Scales of K and of V, each [num_pages, num_layers, kv_heads, bytes], views."""
    records = packed.unflatten(1, (layout.num_kv_heads, -1))
    scales = records[:, :, layout.scales_offset : layout.scales_offset + layout.scales_bytes]
    by_layer = scales.unflatten(2, (layout.num_layers, -1)).transpose(1, 2)
    k, v = by_layer.split(list(layout.scale_bytes), dim=3)
    return k, v


def _payload(pages: Tensor, layout: PageLayout, kind: ElementKind) -> Tensor:
    """View [num_pages, kv_heads, num_layers, 2, block_size, head_dim (or bytes)] of records."""
    records = pages.unflatten(1, (layout.num_kv_heads, -1))
    row_bytes = layout.head_dim * kind.num_bits // 8
    payload = records[:, :, : layout.num_layers * 2 * layout.block_size * row_bytes]
    shape = (layout.num_layers, 2, layout.block_size, row_bytes)
    elements = payload.unflatten(2, shape)
    return elements.view(DTYPES[kind]) if kind in DTYPES else elements


def _by_layer(elements: Tensor) -> Tensor:
    return elements.permute(0, 2, 3, 1, 4, 5)


def store(
    k: Tensor,
    v: Tensor,
    items: Tensor,
    packed: Tensor,
    exact: Tensor,
    layout: PageLayout,
    offsets: Offsets,
    layer: int,
) -> None:
    """Write k, v [num_rows, kv_heads, head_dim] fp32, rounded to the exact form, into pages.

    `items` [num_items, 6] int64; `packed` and `exact` are a pool's tensors.
    """
    opens, sealed = exact_slices(exact, layout), packed_slices(packed, layout)
    for row, count, position, exact_page, packed_page, from_page in items.tolist():
        offset = position % layout.block_size
        for which, rows in enumerate((k, v)):
            given = rows[row : row + count].transpose(0, 1)  # [kv_heads, count, head_dim]
            if exact_page >= 0:
                page = opens[exact_page, layer, which]
                if offset == 0:
                    page.zero_()
                page[:, offset : offset + count] = given.to(page.dtype)
            if packed_page < 0:
                continue
            block = opens[exact_page, layer, which].to(k.dtype) if from_page else given
            if not layout.codec.is_quantised:
                sealed[packed_page, layer, which] = block.to(sealed.dtype)
                continue
            scales = packed_scales(packed, layout)[which]
            means = offsets.of_block(layer, position // layout.block_size)[which]
            for head in range(layout.num_kv_heads):
                left = block[head].float() - means[head]
                data, scale = quantise(left, layout.codec.packed, which == 0)
                sealed[packed_page, layer, which, head] = data
                scales[packed_page, layer, head] = scale


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """As `engine.kernels.gpu.norm.rms_norm`, over the last of any dimensions."""
    total = x if residual is None else x + residual
    wide = total.float()
    factor = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * factor).to(x.dtype) * weight, total


def swiglu(gate_up: Tensor) -> Tensor:
    """As `engine.kernels.gpu.swiglu.swiglu`."""
    gate, up = gate_up.chunk(2, dim=1)
    return torch.nn.functional.silu(gate) * up


def rotate_and_store(
    heads: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    items: Tensor,
    packed: Tensor,
    exact: Tensor,
    layout: PageLayout,
    offsets: Offsets,
    layer: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `engine.kernels.gpu.store.rotate_and_store`; k and v of all rows, in fp32."""
    kv_heads = layout.num_kv_heads
    q, k, v = heads.split([heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
    if norms is not None:
        q, k = rms_norm(q, norms[0], eps)[0], rms_norm(k, norms[1], eps)[0]
    positions = torch.zeros(len(heads), dtype=torch.long)
    for row, count, position, *_ in items.tolist():
        positions[row : row + count] = torch.arange(position, position + count)
    q, k = (_rotate(x.float(), cos[positions], sin[positions]) for x in (q, k))
    q = (q * heads.shape[2] ** -0.5).to(heads.dtype)
    kv = [x.float().to(DTYPES[layout.codec.exact]).float() for x in (k, v)]
    store(*kv, items, packed, exact, layout, offsets, layer)
    return q, kv[0], kv[1]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [rows, heads, head_dim] by the angles of cos, sin [rows, head_dim / 2]."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    runs: Tensor,
    tables: Tensor,
    packed: Tensor,
    exact: Tensor,
    layout: PageLayout,
    offsets: Offsets,
    layer: int,
) -> Tensor:
    """As `attention` and `decode_attention` of `engine.kernels.gpu`, one query at a time, with a
    plain softmax.
    """
    out = torch.zeros_like(q)
    opens, block_size = exact_slices(exact, layout), layout.block_size
    group = q.shape[1] // layout.num_kv_heads
    for row, count, position, table, own_page, _ in runs.tolist():
        for t in range(count):
            at, block = position + t, (position + t) // block_size
            pieces = []
            for b in range(block):
                pieces.append(
                    opens[int(tables[table, 0]), layer]
                    if b == 0
                    else _dequantised(packed, layout, offsets, int(tables[table, b]), layer, b)
                )
            if own_page >= 0 or block == 0:
                pieces.append(opens[own_page if own_page >= 0 else int(tables[table, 0]), layer])
            else:
                first = row + block * block_size - position
                own = torch.stack([k[first : row + t + 1], v[first : row + t + 1]])
                pieces.append(own.transpose(1, 2))
            keys, values = torch.cat([p.to(q.dtype) for p in pieces], dim=2)[:, :, : at + 1]
            heads = q[row + t].view(layout.num_kv_heads, group, -1)
            weights = torch.softmax(heads @ keys.transpose(1, 2), dim=-1)
            out[row + t] = (weights @ values).view_as(out[row + t])
    return out


def _dequantised(
    packed: Tensor, layout: PageLayout, offsets: Offsets, block_id: int, layer: int, block: int
) -> Tensor:
    """[2, kv_heads, block_size, head_dim] of a sealed block, number `block` of its request."""
    data = packed_slices(packed, layout)[block_id, layer]
    if not layout.codec.is_quantised:
        return data.float()
    both = packed_scales(packed, layout)
    left = [
        dequantise(data[which], both[which][block_id, layer], layout.codec.packed, which == 0)
        for which in (0, 1)
    ]
    return torch.stack(left) + offsets.of_block(layer, block)[:, :, None]


def read_block(
    packed: Tensor, exact: Tensor, layout: PageLayout, offsets: Offsets, page: int, block: int,
    is_exact: bool,
) -> Tensor:  # fmt: skip
    """[num_layers, 2, kv_heads, block_size, head_dim] fp32 of block number `block` in a page."""
    if is_exact:
        return exact_slices(exact, layout)[page].float()
    layers = range(layout.num_layers)
    return torch.stack([_dequantised(packed, layout, offsets, page, i, block) for i in layers])


def checksums(pages: Tensor) -> list[int]:
    """One checksum per page [num_pages, page_bytes]."""
    return [checksum(page.cpu().numpy()) for page in pages]


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Finite rows [num_rows, width] as e4m3, and their scales [num_rows, 1]."""
    scales = (x.float().abs().amax(1, keepdim=True) / 448).clamp(min=1e-30)
    return (x.float() / scales).clamp(-448, 448).to(torch.float8_e4m3fn), scales
