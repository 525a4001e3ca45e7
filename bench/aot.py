"""Compiles every Triton kernel to machine code for GPUs that need not be here, and prints what each
takes of a processor: registers, spilled bytes, shared memory.

    TRITON_INTERPRET=0 .venv/bin/python -m bench.aot [--quick] [--write bench/results/aot.md]

Exit code 1 when a kernel spills. NVIDIA's numbers are read from the binary with the cuobjdump that
Triton bundles, AMD's from the metadata of the assembly.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"  # before Triton is imported: an interpreter compiles nothing

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from common.kernels.gpu.attention import attention_kernel, rows_of, warps_of
from common.kernels.gpu.checksum import WORDS_AT_ONCE, checksum_kernel
from common.kernels.gpu.store import store_kernel
from common.pages import CODECS, PageLayout

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
HEAD_DIMS = (64, 128)
GROUP, KV_HEADS, BLOCK_SIZE = 4, 8, 16
RUNS = {"decode": 1, "chunk": 64}
"""Query tokens of a program."""

POINTERS = {"packed_ptr": "*u8", "exact_ptr": "*u8", "items_ptr": "*i64", "runs_ptr": "*i64"}
POINTERS |= {"q_ptr": "*bf16", "out_ptr": "*bf16", "tables_ptr": "*i32", "sums_ptr": "*i64"}
POINTERS |= {"pages_ptr": "*i64"}
WIDE = ("_stride", "_bytes")


@dataclass(frozen=True)
class Row:
    kernel: str
    codec: str
    head_dim: int
    target: str
    registers: int
    spilled: int
    """Bytes of stack that a thread needs (NVIDIA), registers spilled (AMD)."""
    shared: int


def main() -> int:
    parser = argparse.ArgumentParser(description="Kernels compiled ahead of time")
    parser.add_argument("--quick", action="store_true", help="one head size, three codecs")
    parser.add_argument("--write", type=Path, metavar="FILE", help="keep the table here")
    options = parser.parse_args()
    head_dims = HEAD_DIMS[1:] if options.quick else HEAD_DIMS
    codecs = ("fp8_e4m3", "int4", "bf16") if options.quick else tuple(CODECS)
    rows = []
    for row in compiled(head_dims, codecs):
        rows.append(row)
        print(line_of(row), flush=True)
    if options.write:
        options.write.write_text(table_of(rows), encoding="utf-8")
    spilling = [row for row in rows if row.spilled]
    for row in spilling:
        print(f"SPILLS: {line_of(row)}", file=sys.stderr)
    return 1 if spilling else 0


def compiled(head_dims: tuple[int, ...], codecs: tuple[str, ...]) -> Iterator[Row]:
    for target in TARGETS:
        yield Row("checksum", "", 0, target, *build(target, checksum_kernel, WORDS, 4))
    for codec, head_dim, target in product(codecs, head_dims, TARGETS):
        shape = shape_of(codec, head_dim)
        yield Row("store", codec, head_dim, target, *build(target, store_kernel, shape, 4))
        for name, tokens in RUNS.items():
            rows = rows_of(tokens, GROUP, head_dim, target == "sm_80")
            attention = shape | {"GROUP": GROUP, "ROWS": rows}
            numbers = build(target, attention_kernel, attention, warps_of(rows))
            yield Row(f"attention, {name}", codec, head_dim, target, *numbers)


WORDS = {"WORDS": WORDS_AT_ONCE}


def shape_of(codec: str, head_dim: int) -> dict[str, int]:
    layout = PageLayout(1, KV_HEADS, BLOCK_SIZE, head_dim, CODECS[codec])
    k_scale, v_scale = layout.scale_bytes
    return {
        "KV_HEADS": KV_HEADS,
        "BLOCK": BLOCK_SIZE,
        "HEAD_DIM": head_dim,
        "WIDTH": triton.next_power_of_2(head_dim),
        "EXACT_KIND": int(layout.codec.exact),
        "PACKED_KIND": int(layout.codec.packed),
        "K_SCALE": k_scale,
        "V_SCALE": v_scale,
    }


def build(
    target: str, kernel: Any, constants: dict[str, int], num_warps: int
) -> tuple[int, int, int]:
    """Registers, spilled, shared bytes of a kernel with these constants."""
    types = {name: type_of(name) for name in kernel.arg_names if name not in constants}
    types |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn=kernel, signature=types, constexprs=constants)
    found = triton.compile(source, target=TARGETS[target], options={"num_warps": num_warps})
    if "cubin" in found.asm:
        registers, spilled = of_cubin(found.asm["cubin"])
    else:
        registers, spilled = of_amdgcn(found.asm["amdgcn"])
    return registers, spilled, found.metadata.shared


def type_of(name: str) -> str:
    if name.endswith("_ptr"):
        return POINTERS.get(name, "*fp32")
    return "i64" if name.endswith(WIDE) else "i32"


def of_cubin(cubin: bytes) -> tuple[int, int]:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return number(r"REG:(\d+)", text), number(r"STACK:(\d+)", text)


def of_amdgcn(text: str) -> tuple[int, int]:
    spilled = number(r"\.vgpr_spill_count:\s*(\d+)", text)
    spilled += number(r"\.sgpr_spill_count:\s*(\d+)", text)
    return number(r"\.vgpr_count:\s*(\d+)", text), spilled


def number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        sys.exit(f"no {pattern} in what the tool says:\n{text[:1000]}")
    return int(found.group(1))


def line_of(row: Row) -> str:
    return (
        f"{row.target:8}{row.kernel:20}{row.codec:10}{row.head_dim or '':>5}"
        f"{row.registers:>5} registers{row.spilled:>5} spilled{row.shared:>8} shared"
    )


def table_of(rows: list[Row]) -> str:
    lines = [
        "# Kernels compiled ahead of time",
        "",
        f"By `python -m bench.aot`, Triton {triton.__version__}; blocks of {BLOCK_SIZE}, {GROUP} "
        "query heads to a KV head. Spilled: bytes of stack (sm), registers (gfx).",
        "",
        "| target | kernel | codec | head size | registers | spilled | shared bytes |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        cells = (r.target, r.kernel, r.codec, r.head_dim or "", r.registers, r.spilled, r.shared)
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
