"""Plain torch twins of every kernel: slow, obvious, and what the others are tested against.

Shapes and meanings are those of the wrappers in `common/kernels/gpu`. `items` and `runs` are the
columns of `common.engine.batch`.
"""

import numpy as np
import torch
from torch import Tensor

from common.kernels.offsets import Offsets
from common.pages import ElementKind, PageLayout, checksum

NEUTRAL_SCALE = 127
MAX_SCALE = 237
E4M3_MAX = 448.0
DTYPES = {ElementKind.BF16: torch.bfloat16, ElementKind.FP32: torch.float32}


def quantise_e4m3(block: Tensor) -> tuple[Tensor, int]:
    """Bytes [block_size, head_dim] uint8 of a block, and the E8M0 code of its power of two."""
    finite = torch.where(torch.isfinite(block), block, 0.0).abs()
    amax = float(finite.amax())
    code = NEUTRAL_SCALE
    if amax > 0:
        mantissa, exponent = np.frexp(np.float32(amax / E4M3_MAX))
        code = min(max(int(exponent) + 127 - int(mantissa == 0.5), 1), MAX_SCALE)
    scaled = (block.double() * 2.0 ** (127 - code)).clamp(-E4M3_MAX, E4M3_MAX)
    scaled = torch.where(torch.isfinite(block), scaled, torch.nan).float()
    code_bytes = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(torch.isnan(scaled), 0x7F, code_bytes), code


def dequantise_e4m3(data: Tensor, code: int) -> Tensor:
    return data.view(torch.float8_e4m3fn).float() * 2.0 ** (code - 127)


def exact_slices(exact: Tensor, layout: PageLayout) -> Tensor:
    """Exact pages as [num_pages, num_layers, 2, kv_heads, block_size, head_dim], a view."""
    kind = layout.codec.exact
    return _payload(exact, layout, kind).view(DTYPES[kind])


def packed_slices(packed: Tensor, layout: PageLayout) -> Tensor:
    """The same of packed pages; uint8 when they are quantised."""
    kind = layout.codec.packed
    payload = _payload(packed, layout, kind)
    return payload.view(DTYPES[kind]) if kind in DTYPES else payload


def packed_scales(packed: Tensor, layout: PageLayout) -> Tensor:
    """E8M0 codes [num_pages, num_layers, 2, kv_heads], a view."""
    scales = packed[:, layout.scales_offset : layout.scales_offset + layout.scales_bytes]
    return scales.unflatten(1, (layout.num_layers, 2, layout.num_kv_heads))


def _payload(pages: Tensor, layout: PageLayout, kind: ElementKind) -> Tensor:
    shape = (layout.num_layers, 2, layout.num_kv_heads, layout.block_size)
    payload = pages[:, : layout.num_elements * kind.num_bits // 8]
    return payload.unflatten(1, (*shape, layout.head_dim * kind.num_bits // 8))


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
    """As `common.kernels.gpu.store.store`."""
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
            scales = packed_scales(packed, layout)
            means = offsets.of_block(layer, position // layout.block_size)[which]
            for head in range(layout.num_kv_heads):
                data, code = quantise_e4m3(block[head].float() - means[head])
                sealed[packed_page, layer, which, head] = data
                scales[packed_page, layer, which, head] = code


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
    """As `common.kernels.gpu.attention.attention`, one query at a time, with a plain softmax."""
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
    codes = packed_scales(packed, layout)[block_id, layer]
    scale = torch.exp2(codes.double() - 127).float()[:, :, None, None]
    left = data.view(torch.float8_e4m3fn).float() * scale
    return left + offsets.of_block(layer, block)[:, :, None]


def checksums(pages: Tensor) -> list[int]:
    """One checksum per page [num_pages, page_bytes]."""
    return [checksum(page.cpu().numpy()) for page in pages]
