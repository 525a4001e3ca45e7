"""Everything about one CUDA GPU in one run of a few minutes: is it right, and how fast is it?

    .venv/bin/python -m bench.gpu [--json FILE] [SECTION ...]
    .venv/bin/python -m bench.gpu --smoke      # on a CPU, kernels interpreted, tiny shapes

Sections, each with a budget of seconds after which it starts nothing new: the ceilings (copies,
matrix products), every kernel against its reference and its ceiling, ITL against context for fp8
and bf16 KV, a random model of Llama 3 8B's shape with and without graphs and with FP8 weights,
steps one by one and overlapped, a chunk beside decodes, what `--batch-invariant` costs, pages
pulled from another process. One that fails is reported, and the rest runs. Exit code 1 when a
section failed or was cut short, or a check did not hold; 2 without a GPU.
"""

import argparse
import asyncio
import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

if "--smoke" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from bench import gpu_handoff, gpu_model, gpu_worker
from bench.gpu_kernels import CASES, Case, Setting, error_of
from bench.gpu_steps import BLOCK_SIZE, CHECKED, LLAMA_8B, SMOKE, Shape, layout_of
from common.codecs import DEFAULT_KV_CODEC
from common.model_config import ModelConfig
from engine.backend import FP8_CAPABILITY
from engine.cuda_graphs import CudaCapture
from engine.graphed_model import GraphedModel

ANCHOR, AIM = 0.54, 0.52
"""Of ITL's slope over context, FP8 against bf16 KV: published, and ours to reach."""
BATCHES = (1, 16, 64)
CHUNKS = (512, 1024)
NUM_DECODES = 16
CONTEXTS = (1024, 4096, 8192, 16_384, 32_768)
ITL_BATCH = 8
SPARE_BYTES = 6 << 30
"""Of the GPU, beside weights and pages."""
GRAPH_BOUND = 0.02
SMOKE_S = 1.0
"""Stands for a kernel's time where running it twice would tell nothing."""
TIMED_S, MAX_REPEATS = 0.05, 50
"""Device time that a kernel is repeated for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    what: str
    ms: float | None = None
    rate: str = ""
    share: float | None = None
    """Of the ceiling: copies for what moves bytes, products for what multiplies."""
    peer_ms: float | None = None
    note: str = ""
    holds: bool = True


@dataclass(slots=True)
class Bench:
    is_smoke: bool
    console: Console
    copy_rate: float = float("nan")
    """Bytes a second, read and written."""
    matrix_rate: float = float("nan")
    """Floating point operations a second, bf16."""
    deadline: float = 0.0
    was_cut: bool = False
    numbers: dict[str, object] = field(default_factory=dict)

    @property
    def device(self) -> str:
        return "cpu" if self.is_smoke else "cuda"

    @property
    def shape(self) -> Shape:
        return SMOKE if self.is_smoke else LLAMA_8B

    def has_time(self) -> bool:
        self.was_cut |= time.monotonic() > self.deadline and not self.is_smoke
        return not self.was_cut

    def seconds(self, action: Callable[[], object], *, is_captured: bool = True) -> float:
        """Of the device; with the host's part where the action cannot be captured."""
        if self.is_smoke:
            return gpu_model.median_s(action, 1)
        if not is_captured:
            return gpu_model.median_s(action, 9)
        once = device_s(repeated(action, 1))
        repeats = max(1, min(MAX_REPEATS, int(TIMED_S / max(once, 1e-6))))
        return device_s(repeated(action, repeats)) / repeats


def repeated(action: Callable[[], object], times: int) -> Callable[[], None]:
    """A graph of so many runs, so that launches cost the host nothing."""

    def run() -> None:
        for _ in range(times):
            action()

    return CudaCapture()(run)


def device_s(replay: Callable[[], None]) -> float:
    times = []
    for _ in range(5):
        began, ended = torch.cuda.Event(True), torch.cuda.Event(True)  # type: ignore[no-untyped-call]
        began.record()
        replay()
        ended.record()
        ended.synchronize()
        times.append(float(began.elapsed_time(ended)) / 1e3)
    return sorted(times)[2]


def ceilings(bench: Bench) -> Iterator[Row]:
    num_bytes, size = (1 << 16, 64) if bench.is_smoke else (2 << 30, 8192)
    source = torch.ones(num_bytes, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    seconds = bench.seconds(lambda: target.copy_(source))
    bench.copy_rate = 2 * num_bytes / seconds
    yield Row(what="copy", ms=seconds * 1e3, rate=f"{bench.copy_rate / 1e9:,.0f} GB/s", share=1.0)
    a, b = torch.randn((2, size, size), device=bench.device).bfloat16()
    seconds = bench.seconds(lambda: a @ b)
    bench.matrix_rate = 2 * size**3 / seconds
    yield Row(what="bf16 product", ms=seconds * 1e3, rate=tera(bench.matrix_rate), share=1.0)
    if can_fp8(bench):
        x, y = (t.to(torch.float8_e4m3fn) for t in (a, b))
        ones = torch.ones((size, 1), device=bench.device)
        seconds = bench.seconds(
            lambda: torch._scaled_mm(
                x, y.t(), scale_a=ones, scale_b=ones.t(), out_dtype=torch.bfloat16
            )
        )
        rate = 2 * size**3 / seconds
        yield Row(
            what="fp8 product, scales by row",
            ms=seconds * 1e3,
            rate=tera(rate),
            share=rate / bench.matrix_rate,
        )


def kernels(bench: Bench) -> Iterator[Row]:
    for name, codec, make in CASES:
        if not bench.has_time():
            return
        torch.manual_seed(0)
        what = f"{name}, {codec}"
        try:
            checked = make(Setting(SMOKE if bench.is_smoke else CHECKED, bench.device, codec))
            error = error_of(checked.outcome(), checked.reference())
            case = checked if bench.is_smoke else make(Setting(LLAMA_8B, bench.device, codec))
            yield timed(bench, what, case, error)
        except Exception as failure:  # of one kernel: the others still count
            yield Row(what=what, note=first_line(failure), holds=False)
        clean()


def timed(bench: Bench, what: str, case: Case, error: float) -> Row:
    seconds = SMOKE_S if bench.is_smoke else bench.seconds(case.run, is_captured=case.is_captured)
    peer = None if case.peer is None else bench.seconds(case.peer)
    if case.num_flops:
        rate, ceiling = case.num_flops / seconds, bench.matrix_rate
        shown = tera(rate)
    else:
        rate, ceiling = case.num_bytes / seconds, bench.copy_rate
        shown = f"{rate / 1e9:,.0f} GB/s"
    return Row(
        what=what,
        ms=seconds * 1e3,
        rate=shown,
        share=rate / ceiling,
        peer_ms=None if peer is None else peer * 1e3,
        note=f"error {error:.1e}, bound {case.bound:g}",
        holds=error <= case.bound,
    )


def itl_context(bench: Bench) -> Iterator[Row]:
    """ITL = a + slope x context: what a codec saves is in the slope."""
    contexts, batch = (CONTEXTS, ITL_BATCH) if not bench.is_smoke else ((20, 40), 1)
    fitting, batch = within_memory(bench, contexts, batch)
    slopes = {}
    for codec in ("bf16", DEFAULT_KV_CODEC):
        loaded = gpu_model.load(
            bench.shape,
            bench.device,
            codec,
            num_pages=gpu_model.pages_for(batch, fitting[-1] + 1),
            max_rows=batch,
            max_tokens=fitting[-1] + BLOCK_SIZE,
        )
        backend = loaded.graphed()
        times = []
        for context in fitting:
            seconds = gpu_model.step_s(backend, loaded.decode(batch, context), steps(bench))
            times.append(seconds)
            kv = batch * context * loaded.page_bytes / BLOCK_SIZE
            total = kv + weight_bytes(loaded.config, 2)
            yield Row(
                what=f"ITL, {batch} x {context:,} tokens, {codec}",
                ms=seconds * 1e3,
                rate=f"{total / seconds / 1e9:,.0f} GB/s",
                share=total / seconds / bench.copy_rate,
            )
            if not bench.has_time():
                return
        slopes[codec] = slope(fitting, times)
        del loaded, backend
        clean()
    ratio = slopes[DEFAULT_KV_CODEC] / slopes["bf16"]
    bench.numbers["itl_slope_ratio"] = ratio
    yield Row(
        what="slope of ITL over context, fp8 / bf16",
        rate=f"{ratio:.2f}",
        note=f"published {ANCHOR}, aim {AIM}",
        holds=bench.is_smoke or ratio <= AIM,
    )


def model(bench: Bench) -> Iterator[Row]:
    yield from _model(bench, "auto", "bf16 weights", 2)


def fp8_weights(bench: Bench) -> Iterator[Row]:
    if bench.is_smoke or can_fp8(bench):
        yield from _model(bench, "fp8", "fp8 weights", 1)
    else:
        yield Row(what="fp8 weights", note="left out: this GPU does not multiply FP8")


def _model(bench: Bench, weight_dtype: str, named: str, element_bytes: int) -> Iterator[Row]:
    context, batches = (1024, BATCHES) if not bench.is_smoke else (20, (1,))
    loaded = gpu_model.load(
        bench.shape,
        bench.device,
        DEFAULT_KV_CODEC,
        num_pages=gpu_model.pages_for(batches[-1], context + 1),
        max_rows=batches[-1],
        max_tokens=context + BLOCK_SIZE,
        weight_dtype=weight_dtype,
    )
    began = time.perf_counter()
    graphed = loaded.graphed()
    yield Row(what=f"{named}: capture", ms=(time.perf_counter() - began) * 1e3)
    error = graph_error(loaded, graphed, context)
    yield Row(
        what=f"{named}: graphs against eager steps",
        note=f"error {error:.1e}, bound {GRAPH_BOUND:g}",
        holds=error <= GRAPH_BOUND,
    )
    for batch in batches:
        for backend, how in ((loaded.model, "eager"), (graphed, "graphs")):
            if not bench.has_time():
                return
            seconds = gpu_model.step_s(backend, loaded.decode(batch, context), steps(bench))
            kv = batch * context * loaded.page_bytes / BLOCK_SIZE
            total = kv + weight_bytes(loaded.config, element_bytes)
            yield Row(
                what=f"{named}: decode of {batch} at {context:,}, {how}",
                ms=seconds * 1e3,
                rate=f"{batch / seconds:,.0f} tokens/s",
                share=total / seconds / bench.copy_rate,
            )


def graph_error(loaded: gpu_model.Loaded, graphed: GraphedModel, context: int) -> float:
    """Of the logits of a padded step, by the largest of an eager one."""
    batch = loaded.decode(min(3, loaded.max_rows), context)
    found = []
    for backend in (graphed, loaded.model):
        backend.forward(batch)
        found.append([backend.logits(batch.wanted).clone()])
    return error_of(*found)


def overlap(bench: Bench) -> Iterator[Row]:
    """What it saves to launch a step before the last one's tokens are read."""
    context, batches = (256, BATCHES) if not bench.is_smoke else (20, (1,))
    num_steps = 2 * steps(bench)
    loaded = gpu_model.load(
        bench.shape,
        bench.device,
        DEFAULT_KV_CODEC,
        num_pages=gpu_model.pages_for(batches[-1], context + num_steps + BLOCK_SIZE),
        max_rows=batches[-1],
        max_tokens=context + num_steps + BLOCK_SIZE,
    )
    graphed = loaded.graphed()
    for batch in batches:
        if not bench.has_time():
            return
        plans = gpu_worker.plans_of(loaded, batch, context, num_steps)
        gpu_worker.timed(loaded, graphed, plans, overlaps=False)  # kernels are compiled
        alone = gpu_worker.timed(loaded, graphed, plans, overlaps=False)
        beside = gpu_worker.timed(loaded, graphed, plans, overlaps=True)
        yield Row(what=f"decode of {batch}, one step after another", ms=alone.step_s * 1e3)
        yield Row(
            what=f"decode of {batch}, overlapped",
            ms=beside.step_s * 1e3,
            rate=f"{alone.step_s / beside.step_s:.2f} times as fast",
            note="the same tokens" if alone.tokens == beside.tokens else "other tokens",
            holds=alone.tokens == beside.tokens,
        )


def chunks(bench: Bench) -> Iterator[Row]:
    shape, context = bench.shape, 1024 if not bench.is_smoke else 20
    sizes, decodes = (CHUNKS, NUM_DECODES) if not bench.is_smoke else ((20,), 1)
    loaded = gpu_model.load(
        shape,
        bench.device,
        DEFAULT_KV_CODEC,
        num_pages=gpu_model.pages_for(1 + decodes, max(context + 1, max(sizes))),
        max_rows=decodes + 1,
        max_tokens=max(context, max(sizes)) + BLOCK_SIZE,
    )
    for chunk in sizes:
        if not bench.has_time():
            return
        batch = gpu_model.mixed(chunk, decodes, context)
        seconds = gpu_model.step_s(loaded.model, batch, steps(bench))
        rate = gpu_model.chunk_flops(loaded.config, chunk, decodes, context) / seconds
        yield Row(
            what=f"chunk of {chunk} beside {decodes} decodes at {context:,}",
            ms=seconds * 1e3,
            rate=tera(rate),
            share=rate / bench.matrix_rate,
        )


def batch_invariant(bench: Bench) -> Iterator[Row]:
    """Decode steps in graphs and a chunk, without and with the option; and whether its promise
    holds: the same request's logits alone and among others.
    """
    context, batches, chunk = (1024, BATCHES, CHUNKS[0]) if not bench.is_smoke else (20, (1, 2), 20)
    plain: dict[str, float] = {}
    for is_invariant in (False, True):
        loaded = gpu_model.load(
            bench.shape,
            bench.device,
            DEFAULT_KV_CODEC,
            num_pages=gpu_model.pages_for(batches[-1] + 1, max(context + 1, chunk)),
            max_rows=batches[-1],
            max_tokens=max(context, chunk) + BLOCK_SIZE,
            is_batch_invariant=is_invariant,
        )
        graphed = loaded.graphed()
        jobs = {f"decode of {n} at {context:,}": loaded.decode(n, context) for n in batches}
        jobs[f"chunk of {chunk}"] = gpu_model.mixed(chunk, 0, context)
        for what, batch in jobs.items():
            if not bench.has_time():
                return
            seconds = gpu_model.step_s(graphed, batch, steps(bench))
            if not is_invariant:
                plain[what] = seconds
            yield Row(
                what=f"{what}{', batch-invariant' if is_invariant else ''}",
                ms=seconds * 1e3,
                note=f"{seconds / plain[what]:.2f} times the step without" if is_invariant else "",
            )
        if is_invariant:
            num_apart = rows_apart(loaded, graphed, batches, context)
            yield Row(
                what="values that differ alone and among others",
                note=f"{num_apart}, bound 0",
                holds=bench.is_smoke or num_apart == 0,  # interpreted products differ by place
            )
        del loaded, graphed
        clean()


def rows_apart(
    loaded: gpu_model.Loaded, graphed: GraphedModel, batches: tuple[int, ...], context: int
) -> int:
    """Logits of the last request that are other bits when it is decoded by itself."""
    batch = loaded.decode(batches[-1], context)
    kept = np.array([0, 1, 1, 1, 1, 1], dtype=np.int64)  # the row is the step's first
    last = replace(
        batch,
        token_ids=batch.token_ids[-1:],
        positions=batch.positions[-1:],
        items=batch.items[-1:] * kept,
        runs=batch.runs[-1:] * kept,
        wanted=batch.wanted[:1],
        num_sampled=1,
    )
    found = []
    for step in (batch, last):
        graphed.forward(step)
        found.append(graphed.logits(step.wanted)[-1].clone())
    return int((found[0] != found[1]).sum())


def handoff(bench: Bench) -> Iterator[Row]:
    profile = "smoke" if bench.is_smoke else "full"
    left = None if bench.is_smoke else bench.deadline - time.monotonic()
    for pulled in asyncio.run(asyncio.wait_for(gpu_handoff.pull(bench.device, profile), left)):
        rate = pulled.num_bytes / pulled.seconds
        yield Row(
            what=f"pull and land {pulled.num_tokens:,} tokens",
            ms=pulled.seconds * 1e3,
            rate=f"{rate / 1e9:,.1f} GB/s",
            share=rate / bench.copy_rate,
            note=f"exposed (last chunk): {pulled.exposed_s * 1e3:.2f} ms",
        )


Section = tuple[str, float, Callable[[Bench], Iterator[Row]]]
SECTIONS: list[Section] = [
    ("ceilings", 15, ceilings),
    ("kernels", 60, kernels),
    ("itl_context", 35, itl_context),
    ("model", 25, model),
    ("fp8_weights", 25, fp8_weights),
    ("overlap", 10, overlap),
    ("chunks", 10, chunks),
    ("batch_invariant", 25, batch_invariant),
    ("handoff", 35, handoff),
]
"""Name, budget in seconds (240 together), function."""


def tera(rate: float) -> str:
    return f"{rate / 1e12:,.1f} TFLOP/s"


def weight_bytes(config: ModelConfig, element_bytes: int) -> float:
    """Of a step; the output head stays in bf16."""
    head = config.vocab_size * config.hidden_size
    return 2.0 * head + float(element_bytes) * (gpu_model.num_weights(config) - head)


def steps(bench: Bench) -> int:
    return 1 if bench.is_smoke else gpu_model.STEPS


def slope(contexts: tuple[int, ...], times: list[float]) -> float:
    """Seconds a token of context, by least squares."""
    mean, mean_s = sum(contexts) / len(contexts), sum(times) / len(times)
    pairs = [(x - mean, t - mean_s) for x, t in zip(contexts, times, strict=True)]
    return sum(x * t for x, t in pairs) / sum(x * x for x, _ in pairs)


def within_memory(
    bench: Bench, contexts: tuple[int, ...], batch: int
) -> tuple[tuple[int, ...], int]:
    """Fewer requests, then shorter contexts, until bf16 pages of them fit; the same for all
    codecs.
    """
    if bench.is_smoke:
        return contexts, batch
    config = gpu_model.config_of(bench.shape, gpu_model.LAYERS, contexts[-1])
    embedding = 2 * config.vocab_size * config.hidden_size
    room = torch.cuda.mem_get_info()[0] - weight_bytes(config, 2) - embedding - SPARE_BYTES
    page_bytes = layout_of(bench.shape, "bf16", gpu_model.LAYERS).packed_page_bytes
    while gpu_model.pages_for(batch, contexts[-1]) * page_bytes > room:
        if batch > 1:
            batch //= 2
        elif len(contexts) > 2:
            contexts = contexts[:-1]
        else:
            raise RuntimeError("this GPU has too little memory for a model of 8B in bf16")
    return contexts, batch


def can_fp8(bench: Bench) -> bool:
    if bench.is_smoke or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability() >= FP8_CAPABILITY


def clean() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def first_line(error: BaseException) -> str:
    text = str(error) or type(error).__name__
    return f"{type(error).__name__}: {text.splitlines()[0][:200]}"


def run(bench: Bench, chosen: list[str]) -> dict[str, object]:
    """Runs the sections and prints each as it ends; what each found, under its name."""
    found: dict[str, object] = {}
    for name, budget_s, section in SECTIONS:
        if chosen and name not in (*chosen, "ceilings"):
            continue  # every share is of a ceiling
        rows: list[Row] = []
        error = None
        began = time.monotonic()
        bench.deadline, bench.was_cut = began + budget_s, False
        try:
            for row in section(bench):
                rows.append(row)
        except Exception as failure:
            error = first_line(failure)
            traceback.print_exc()
        if error is None and bench.was_cut:
            error = f"cut short: its {budget_s:.0f} s were over"
        clean()
        took_s = time.monotonic() - began
        has_held = error is None and all(row.holds for row in rows)
        found[name] = {
            "holds": has_held,
            "error": error,
            "seconds": took_s,
            "rows": [asdict(row) for row in rows],
        }
        bench.console.print(table_of(f"{name} ({took_s:.1f} s)", rows))
        if error is not None:
            bench.console.print(f"{name} FAILED: {error}", markup=False)
    return found


def table_of(title: str, rows: list[Row]) -> Table:
    table = Table(title=title, title_justify="left")
    for column in ("", "ms", "rate", "of the ceiling", "torch ms", "", ""):
        table.add_column(column, justify="left" if not column else "right")
    for row in rows:
        table.add_row(
            row.what,
            "" if row.ms is None else f"{row.ms:.3f}",
            row.rate,
            "" if row.share is None else f"{row.share:.0%}",
            "" if row.peer_ms is None else f"{row.peer_ms:.3f}",
            row.note,
            "" if row.holds else "MISSED",
        )
    return table


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", allow_abbrev=False)
    names = [name for name, _, _ in SECTIONS]
    parser.add_argument("sections", nargs="*", choices=[*names, []], help="default: all")
    parser.add_argument("--smoke", action="store_true", help="on a CPU, tiny, nothing is timed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers here")
    options = parser.parse_args()
    console = Console(width=150)
    if not options.smoke and not torch.cuda.is_available():
        print("bench.gpu: torch finds no CUDA device here (--smoke runs on a CPU)", file=sys.stderr)
        return 2
    bench = Bench(options.smoke, console)
    device = "a CPU, interpreted" if options.smoke else torch.cuda.get_device_name()
    console.print(f"torch {torch.__version__} on {device}", markup=False)
    found = run(bench, options.sections)
    if options.json is not None:
        report = {"device": device, "torch": torch.__version__, "sections": found} | bench.numbers
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    failed = [name for name, outcome in found.items() if not outcome["holds"]]  # type: ignore[index]
    if failed:
        console.print("not right: " + ", ".join(failed), markup=False)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
