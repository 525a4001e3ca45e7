"""Compiles every Triton kernel to machine code for GPUs that are not here. Run by test_compile.py.

A process of its own, since in the tests' process Triton interprets.
"""

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from common.kernels.gpu.attention import attention_kernel
from common.kernels.gpu.checksum import checksum_kernel
from common.kernels.gpu.store import store_kernel

TARGETS = (
    GPUTarget("cuda", 80, 32),
    GPUTarget("cuda", 90, 32),
    GPUTarget("cuda", 100, 32),
    GPUTarget("hip", "gfx942", 64),
)
CODEC_KINDS = ((1, 2), (1, 1), (0, 0))  # exact and packed element kinds: fp8_e4m3, bf16, fp32
SHAPE = {"KV_HEADS": 8, "BLOCK": 16, "HEAD_DIM": 128, "WIDTH": 128}
POOLS = {
    "packed_ptr": "*u8",
    "packed_bytes": "i64",
    "exact_ptr": "*u8",
    "exact_bytes": "i64",
    "first_slice": "i32",
    "scales_offset": "i32",
    "means_ptr": "*fp32",
    "cos_ptr": "*fp32",
    "sin_ptr": "*fp32",
}
STORE = {"k_ptr": "*fp32", "v_ptr": "*fp32", "row_stride": "i64", "items_ptr": "*i64"} | POOLS
ATTENTION = {
    "q_ptr": "*bf16",
    "q_stride": "i64",
    "k_ptr": "*fp32",
    "v_ptr": "*fp32",
    "kv_stride": "i64",
    "out_ptr": "*bf16",
    "out_stride": "i64",
    "runs_ptr": "*i64",
    "tables_ptr": "*i32",
    "tables_stride": "i64",
} | POOLS
CHECKSUM = {"pages_ptr": "*i64", "page_words": "i32", "sums_ptr": "*i64"}


def compile_for(
    target: GPUTarget, kernel: Any, signature: dict[str, str], constants: dict[str, int]
) -> None:
    types = signature | dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn=kernel, signature=types, constexprs=constants)
    compiled = triton.compile(source, target=target)
    assert "cubin" in compiled.asm or "hsaco" in compiled.asm


def main() -> None:
    for target in TARGETS:
        compile_for(target, checksum_kernel, CHECKSUM, {"WORDS": 1024})
        for exact, packed in CODEC_KINDS:
            kinds = SHAPE | {"EXACT_KIND": exact, "PACKED_KIND": packed}
            compile_for(target, store_kernel, STORE, kinds)
            for rows in (16, 256):
                compile_for(target, attention_kernel, ATTENTION, kinds | {"GROUP": 4, "ROWS": rows})


if __name__ == "__main__":
    main()
