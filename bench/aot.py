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
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"  # before Triton is imported: an interpreter compiles nothing

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from common.codecs import CODECS, ElementKind
from common.pages import TAG_BYTES, PageLayout
from engine.kernels.gpu import checksum, landing, matmul, norm, quantise, sampling, swiglu
from engine.kernels.gpu.attention import attention_kernel, rows_of, step_of
from engine.kernels.gpu.codec import page_constants
from engine.kernels.gpu.convert import convert_kernel
from engine.kernels.gpu.decode import constants_of, decode_kernel, merge_kernel
from engine.kernels.gpu.store import store_kernel
from engine.kernels.gpu.tiles import WIDE_OUTPUTS, matmul_tile_of, sample_tile_of, tiles_of

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
HEAD_DIMS = (64, 128)
GROUP, KV_HEADS, BLOCK_SIZE, HIDDEN = 4, 8, 16, 4096
RUN_TOKENS = 64
"""Of a chunk's runs."""

POINTERS = {
    **dict.fromkeys(("packed_ptr", "exact_ptr"), "*u8"),
    **dict.fromkeys(("source_packed_ptr", "source_exact_ptr"), "*u8"),
    **dict.fromkeys(("target_packed_ptr", "target_exact_ptr"), "*u8"),
    **dict.fromkeys(("items_ptr", "runs_ptr", "moves_ptr"), "*i64"),
    **dict.fromkeys(("q_ptr", "out_ptr", "heads_ptr", "q_norm_ptr", "k_norm_ptr"), "*bf16"),
    "tables_ptr": "*i32",
}
"""What arguments point to; others to fp32."""
WIDE = ("_stride", "_bytes")
FLOATS = ("eps", "q_scale")


@dataclass(frozen=True)
class Case:
    """A kernel with all that decides about its machine code."""

    name: str
    kernel: str
    """A key of `KERNELS`: functions do not travel between processes."""
    target: str
    constants: dict[str, int]
    codec: str = ""
    head_dim: int = 0
    num_warps: int = 4
    num_stages: int | None = None
    pointers: dict[str, str] = field(default_factory=dict)
    divisible: tuple[str, ...] = ()
    """Arguments that are known to be multiples of 16, as they are when serving."""


@dataclass(frozen=True)
class Row:
    case: Case
    registers: int
    spilled: int
    """Bytes of stack that a thread needs (NVIDIA), registers spilled (AMD)."""
    shared: int


KERNELS: dict[str, Any] = {
    "attention": attention_kernel,
    "checksum": checksum.checksum_kernel,
    "convert": convert_kernel,
    "copy": landing.copy_kernel,
    "decode": decode_kernel,
    "matmul": matmul.matmul_kernel,
    "merge": merge_kernel,
    "norm": norm.rms_norm_kernel,
    "quantise": quantise.quantise_rows_kernel,
    "sample": sampling.sample_kernel,
    "store": store_kernel,
    "swiglu": swiglu.swiglu_kernel,
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Kernels compiled ahead of time")
    parser.add_argument("--quick", action="store_true", help="one head size, three codecs")
    parser.add_argument("--only", metavar="NAME", help="only kernels whose names hold this")
    parser.add_argument("--jobs", type=int, default=2, help="kernels compiled at once (2)")
    parser.add_argument("--write", type=Path, metavar="FILE", help="keep the table here")
    options = parser.parse_args()
    head_dims = HEAD_DIMS[1:] if options.quick else HEAD_DIMS
    codecs = ("fp8_e3m4", "int4", "bf16") if options.quick else tuple(CODECS)
    cases = [c for c in all_cases(head_dims, codecs) if (options.only or "") in c.name]
    rows = []
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        for row in pool.map(build, cases):
            rows.append(row)
            print(line_of(row), flush=True)
    if options.write:
        options.write.write_text(table_of(rows), encoding="utf-8")
    spilling = [row for row in rows if row.spilled]
    for row in spilling:
        print(f"SPILLS: {line_of(row)}", file=sys.stderr)
    return 1 if spilling else 0


def all_cases(head_dims: tuple[int, ...], codecs: tuple[str, ...]) -> Iterator[Case]:
    for target in TARGETS:
        yield from plain_cases(target)
        yield from matmul_cases(target)
        for head_dim in head_dims:
            yield merge_case(target, head_dim)
    for codec, head_dim, target in product(codecs, head_dims, TARGETS):
        yield from page_cases(target, codec, head_dim)


def plain_cases(target: str) -> Iterator[Case]:
    """Kernels that know neither codec nor head size."""
    words = dict.fromkeys(
        (
            *("pages_ptr", "which_ptr", "shares_ptr", "source_ptr", "target_ptr", "slots_ptr"),
            *("blocks_ptr", "tags_ptr", "outcome_ptr"),
        ),
        "*i64",
    )
    rows = {"x_ptr": "*bf16", "residual_ptr": "*bf16", "weight_ptr": "*bf16"}
    rows |= {"normed_ptr": "*bf16", "sum_ptr": "*bf16", "gate_up_ptr": "*bf16", "out_ptr": "*bf16"}
    sums = {"WORDS": checksum.WORDS_AT_ONCE}
    copy = sums | {"SHARES": checksum.SHARES, "TAG_WORDS": TAG_BYTES // 8}
    yield Case("checksum", "checksum", target, sums, pointers=words)
    yield Case("land, copy", "copy", target, copy, pointers=words)
    columns = dict.fromkeys(("temperature_ptr", "min_p_ptr", "top_p_ptr", "chance_ptr"), "*fp64")
    columns |= {"top_k_ptr": "*i64", "tokens_ptr": "*i64"}
    tile = sample_tile_of(target)
    yield Case(
        "sample", "sample", target, {"TILE": tile.tokens, "SIDES": sampling.SIDES},
        num_warps=tile.num_warps, pointers=columns,
    )  # fmt: skip
    yield Case(
        "RMSNorm", "norm", target, {"HAS_RESIDUAL": 1, "WIDTH": HIDDEN}, pointers=rows,
        num_warps=norm.warps_of(HIDDEN),
    )  # fmt: skip
    yield Case("SwiGLU", "swiglu", target, {"COLUMNS": swiglu.COLUMNS}, pointers=rows)
    yield Case(
        "quantise rows", "quantise", target, {"SPAN": quantise.SPAN},
        pointers=rows | {"out_ptr": "*u8", "scales_ptr": "*fp32"},
    )  # fmt: skip


def matmul_cases(target: str) -> Iterator[Case]:
    """Of narrow and wide weights; the codec column tells the operands."""
    for outputs, operand in product((WIDE_OUTPUTS // 2, WIDE_OUTPUTS), ("bf16", "fp32", "fp8")):
        tile = matmul_tile_of(target, outputs)
        element, num_bytes = {"bf16": ("*bf16", 2), "fp32": ("*fp32", 4), "fp8": ("*u8", 2)}[
            operand
        ]
        constants = {"HAS_BIAS": 1, "HAS_SCALES": int(operand == "fp8"), "ROWS": tile.rows}
        constants |= {"COLUMNS": tile.columns, "DEPTH": tile.depth_bytes // num_bytes}
        yield Case(
            f"matmul to {outputs}", "matmul", target, constants, operand,
            num_warps=tile.num_warps, num_stages=tile.num_stages,
            pointers={"x_ptr": element, "weight_ptr": element, "bias_ptr": "*bf16"},
            divisible=("x_ptr", "x_stride", "weight_ptr", "out_ptr", "num_inputs", "num_outputs"),
        )  # fmt: skip


def merge_case(target: str, head_dim: int) -> Case:
    tile = tiles_of(target, head_dim).decode
    constants = {"BLOCK": BLOCK_SIZE, "HEAD_DIM": head_dim, "WIDTH": width_of(head_dim)}
    constants |= {"PARTS": tile.parts, "STRETCH": tile.stretch_tokens // BLOCK_SIZE}
    constants |= {"BY_ROW": 0}
    pointers = {"sums_ptr": "*fp32", "stats_ptr": "*fp32"}
    return Case("decode, merge", "merge", target, constants, "", head_dim, pointers=pointers)


def page_cases(target: str, codec: str, head_dim: int) -> Iterator[Case]:
    shape, tiles = shape_of(codec, head_dim), tiles_of(target, head_dim)
    exact = "*fp32" if CODECS[codec].exact is ElementKind.FP32 else "*bf16"
    pointers = {"k_ptr": exact, "v_ptr": exact}
    store = shape | {"HAS_NORM": 1}
    yield Case(
        "rotate, store", "store", target, store, codec, head_dim, tiles.store.num_warps,
        pointers=pointers,
    )  # fmt: skip
    rows = rows_of(tiles.chunk, RUN_TOKENS, GROUP)
    step = step_of(tiles.chunk.step_tokens, BLOCK_SIZE)
    chunk = shape | {"ROWS": rows, "STEP": step}
    yield Case(
        "attention", "attention", target, chunk, codec, head_dim, tiles.chunk.num_warps,
        pointers=pointers,
    )  # fmt: skip
    layout = PageLayout(1, KV_HEADS, BLOCK_SIZE, head_dim, CODECS[codec])
    for name, is_invariant in (("decode", False), ("all rows", True)):
        decode, num_warps = constants_of(layout, GROUP, tiles, is_invariant=is_invariant)
        yield Case(name, "decode", target, decode, codec, head_dim, num_warps, pointers=pointers)
    yield Case("convert", "convert", target, convert_shape(codec, head_dim), codec, head_dim)


def convert_shape(codec: str, head_dim: int) -> dict[str, int]:
    """K's pages of 16 tokens joined into pages of 32 of the same codec."""
    found = {"HEAD_DIM": head_dim, "WIDTH": width_of(head_dim), "IS_K": True}
    for side, block_size in (("SOURCE", 16), ("TARGET", 32)):
        layout = PageLayout(1, KV_HEADS, block_size, head_dim, CODECS[codec])
        k_scale, v_scale = layout.scale_bytes
        found |= {f"{side}_HEADS": KV_HEADS, f"{side}_BLOCK": block_size}
        found |= {f"{side}_EXACT": int(layout.codec.exact)}
        found |= {f"{side}_PACKED": int(layout.codec.packed)}
        found |= {f"{side}_K_SCALE": k_scale, f"{side}_V_SCALE": v_scale}
    return found


def shape_of(codec: str, head_dim: int) -> dict[str, int]:
    layout = PageLayout(1, KV_HEADS, BLOCK_SIZE, head_dim, CODECS[codec])
    return {**page_constants(layout), "GROUP": GROUP}


def width_of(head_dim: int) -> int:
    return int(triton.next_power_of_2(head_dim))


def build(case: Case) -> Row:
    kernel = KERNELS[case.kernel]
    types = {n: type_of(n, case.pointers) for n in kernel.arg_names if n not in case.constants}
    types |= dict.fromkeys(case.constants, "constexpr")
    places = [kernel.arg_names.index(name) for name in case.divisible]
    attributes = {(place,): [["tt.divisibility", 16]] for place in places}
    source = ASTSource(fn=kernel, signature=types, constexprs=case.constants, attrs=attributes)
    options = {"num_warps": case.num_warps}
    if case.num_stages is not None:
        options["num_stages"] = case.num_stages
    found = triton.compile(source, target=TARGETS[case.target], options=options)
    if "cubin" in found.asm:
        registers, spilled = of_cubin(found.asm["cubin"])
    else:
        registers, spilled = of_amdgcn(found.asm["amdgcn"])
    return Row(case, registers, spilled, found.metadata.shared)


def type_of(name: str, pointers: dict[str, str]) -> str:
    if name.endswith("_ptr"):
        return (POINTERS | pointers).get(name, "*fp32")
    if name in FLOATS:
        return "fp32"
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
    case = row.case
    return (
        f"{case.target:8}{case.name:16}{case.codec:10}{case.head_dim or '':>5}"
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
    for row in rows:
        case = row.case
        cells = (
            case.target, case.name, case.codec, case.head_dim or "", row.registers, row.spilled,
            row.shared,
        )  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
