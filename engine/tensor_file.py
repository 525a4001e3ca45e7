"""One safetensors file: where each of its tensors lies.

The library's own reader decides whether a header is right (offsets in order, without holes or
overlaps, bytes that fit shape and dtype, a file that is neither longer nor shorter). Where it says
no, the header is looked through again for the tensor that is to blame, so that the error names it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeGuard

from safetensors import SafetensorError, safe_open

from common.errors import UnsupportedModel

MAX_HEADER_BYTES = 100_000_000
ELEMENT_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2"), 1),
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies: bytes [start, end) of a file."""

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def tensors_of(path: Path) -> dict[str, TensorEntry]:
    """Raises UnsupportedModel, which names file and tensor."""
    try:
        with safe_open(path, framework="numpy"):
            pass
    except SafetensorError as error:
        raise UnsupportedModel(
            f"{path} is not a safetensors file: {_reason(path, error)}"
        ) from error
    except OSError as error:
        raise UnsupportedModel(f"cannot read {path}: {error.strerror or error}") from error
    header, data_start = _header(path)
    return {
        name: TensorEntry(
            name,
            path,
            fields["dtype"],
            tuple(fields["shape"]),
            *(data_start + offset for offset in fields["data_offsets"]),
        )
        for name, fields in header.items()
        if name != "__metadata__"
    }


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """Raises ValueError for one that is not even JSON."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        size = path.stat().st_size
        if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
            raise ValueError(f"its header should have {length} bytes, the file has {size}")
        try:
            header = json.loads(file.read(length))
        except RecursionError:
            raise ValueError("its header is nested too deeply") from None
    if not isinstance(header, dict):
        raise ValueError("its header is not a JSON object")
    return header, 8 + length


def _reason(path: Path, error: SafetensorError) -> str:
    try:
        header, data_start = _header(path)
    except (ValueError, OSError) as reason:
        return str(reason)
    tensors = {name: fields for name, fields in header.items() if name != "__metadata__"}
    for name, fields in tensors.items():
        wrong = _wrong_alone(fields)
        if wrong is not None:
            return f"{name}: {wrong}"
    end = 0
    for name, fields in sorted(tensors.items(), key=lambda item: item[1]["data_offsets"]):
        begin, next_end = fields["data_offsets"]
        if begin != end:
            how = "overlaps what is before it" if begin < end else "leaves a hole before it"
            return f"{name} (bytes {begin} to {next_end}) {how}"
        end = next_end
    size = path.stat().st_size - data_start
    last = max(tensors, key=lambda name: tensors[name]["data_offsets"][1], default="no tensor")
    if size < end:
        cut = min(
            (name for name in tensors if tensors[name]["data_offsets"][1] > size),
            key=lambda name: tensors[name]["data_offsets"],
        )
        return f"it is shorter than its header says, from {cut} on; was the download interrupted?"
    if size > end:
        return f"{size - end} bytes follow its last tensor, {last}"
    return str(error)


def _wrong_alone(fields: Any) -> str | None:
    """What is wrong with one tensor's entry, whatever the others say."""
    if not isinstance(fields, Mapping):
        return "its entry is not an object"
    shape, offsets, dtype = (fields.get(key) for key in ("shape", "data_offsets", "dtype"))
    if not _are_counts(shape):
        return f"its shape is {shape!r}"
    if not _are_counts(offsets) or len(offsets) != 2:
        return f"its data_offsets are {offsets!r}"
    if offsets[1] < offsets[0]:
        return f"it ends at byte {offsets[1]}, before it begins ({offsets[0]})"
    if not isinstance(dtype, str):
        return f"its dtype is {dtype!r}"
    size = prod(shape) * ELEMENT_BYTES[dtype] if dtype in ELEMENT_BYTES else None
    if size is not None and size != offsets[1] - offsets[0]:
        return f"{dtype} of shape {shape} takes {size} bytes, not {offsets[1] - offsets[0]}"
    return None


def _are_counts(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(
        isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in value
    )
