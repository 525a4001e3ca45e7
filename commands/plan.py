"""`tandem plan`: reads what is asked, runs the planner, prints its table and a recommendation."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from commands.config import PlanConfig
from common.errors import ConfigError
from common.model_config import ModelConfig
from common.options import flag
from common.ranks import shares
from common.types import Role
from simulator.deployment import (
    AUTO,
    BLOCK_SIZE,
    Deployment,
    GpuSite,
    MeasuredSite,
    RoleRanks,
    Site,
)
from simulator.fit import load
from simulator.hardware import GIGA, GPUS_PER_MACHINE, Gpu, gpu_named, model_named
from simulator.planner import TARGET_SHARE, Plan, Planner, Report, Row, Targets
from simulator.workload import MalformedTrace, Workload, lognormal, poisson, read_trace

LENGTH_SPREAD = 0.8
"""Of the lengths that are drawn: sigma of their logarithm."""
MAX_CHUNK = 2**20
WIDTH = 150


def run(config: PlanConfig, report: Report) -> int:
    check_choices(config)
    site = site_of(config)
    ranks = ranks_of(config, site.model)
    workload = workload_of(config, site.model.max_position_embeddings, report)
    targets = Targets(ttft_s=config.ttft, itl_s=config.itl)
    planner = Planner(
        site,
        workload,
        targets,
        ranks=ranks,
        chunks=config.chunks,
        codecs=config.codecs,
        report=report,
    )
    plan = planner.plan(config.gpus)
    console = Console(width=WIDTH)
    console.print(table_of(plan, config, workload))
    for line in advice(plan, config):
        console.print(line, soft_wrap=True)  # commands are copied
    if config.json is not None:
        content = json.dumps(numbers_of(plan, config), indent=1)
        Path(config.json).write_text(content + "\n", encoding="utf-8")
    if config.plot is not None:
        from commands.plot import draw

        draw(plan, targets, Path(config.plot))
        report(f"wrote {config.plot}")
    return 0 if plan.recommended is not None else 1


def site_of(config: PlanConfig) -> Site:
    """Raises ConfigError when what was asked for contradicts itself or cannot be."""
    if (config.gpu is None) == (config.step_times is None):
        raise ConfigError("give either --gpu or --step-times")
    if (config.step_times is None) != (config.kv_blocks is None):
        raise ConfigError("--step-times and --kv-blocks go together")
    if config.step_times is not None and asks_for_gpus(config):
        raise ConfigError(
            "--tensor-parallel and bandwidths are for --gpu; step times are those of whole workers"
        )
    model = model_named(config.model)
    if config.step_times is not None:
        assert config.kv_blocks is not None
        return MeasuredSite(
            model=model,
            costs=load(Path(config.step_times)),
            num_blocks=config.kv_blocks,
            max_num_seqs=config.max_num_seqs,
        )
    return GpuSite(
        model=model,
        gpu=gpu_of(config),
        memory_utilization=config.gpu_memory_utilization,
        max_num_seqs=config.max_num_seqs,
        compute_efficiency=config.compute_efficiency,
        bandwidth_efficiency=config.bandwidth_efficiency,
    )


def asks_for_gpus(config: PlanConfig) -> bool:
    """For what only --gpu knows."""
    given = (
        config.prefill_tensor_parallel,
        config.decode_tensor_parallel,
        config.rank_bandwidth,
        config.network_bandwidth,
    )
    return config.tensor_parallel != 1 or any(value is not None for value in given)


def gpu_of(config: PlanConfig) -> Gpu:
    assert config.gpu is not None
    gpu = gpu_named(config.gpu)
    if config.rank_bandwidth is not None:
        gpu = replace(gpu, rank_bandwidth=config.rank_bandwidth * GIGA)
    if config.network_bandwidth is not None:
        gpu = replace(gpu, network_bandwidth=config.network_bandwidth * GIGA)
    return gpu


def ranks_of(config: PlanConfig, model: ModelConfig) -> RoleRanks:
    """Raises ConfigError where the model's heads cannot be dealt so."""

    def checked(name: str, given: int | None) -> int:
        count = config.tensor_parallel if given is None else given
        try:
            shares(count, model.num_heads, model.num_kv_heads)
        except ConfigError as error:
            reason = error.message if given is None else f"{flag(name)}: {error.message}"
            raise ConfigError(reason, param=error.param) from error
        return count

    return RoleRanks(
        prefill=checked("prefill_tensor_parallel", config.prefill_tensor_parallel),
        decode=checked("decode_tensor_parallel", config.decode_tensor_parallel),
    )


def check_choices(config: PlanConfig) -> None:
    if not config.chunks or not config.codecs:
        raise ConfigError("--chunks and --codecs each need at least one entry")
    for chunk in config.chunks:
        if chunk == AUTO:
            continue
        if not chunk.isdecimal():
            raise ConfigError(f"--chunks: {chunk} is neither a number of tokens nor {AUTO}")
        if not 0 < int(chunk) < MAX_CHUNK or int(chunk) % BLOCK_SIZE:
            raise ConfigError(
                f"--chunks: {chunk} is no multiple of the block size, {BLOCK_SIZE}, below"
                f" {MAX_CHUNK}"
            )


def workload_of(config: PlanConfig, max_model_len: int, report: Report) -> Workload:
    if (config.trace is None) == (config.rate is None):
        raise ConfigError("give either --trace or --rate")
    if config.trace is not None:
        try:
            workload = read_trace(Path(config.trace), config.requests)
        except MalformedTrace as error:
            raise ConfigError(f"--trace: {error.message}") from error
    else:
        assert config.rate is not None
        workload = poisson(
            num_requests=config.requests or 1000,
            rate=config.rate,
            prompt=lognormal(config.prompt_tokens, LENGTH_SPREAD, 8 * config.prompt_tokens),
            output=lognormal(config.output_tokens, LENGTH_SPREAD, 8 * config.output_tokens),
            seed=config.seed,
        )
    kept = workload.at_most(max_model_len)
    num_left_out = len(workload.requests) - len(kept.requests)
    if num_left_out:
        report(
            f"{num_left_out} of {len(workload.requests)} requests are longer than the model's"
            f" context of {max_model_len} tokens and are left out"
        )
    if not kept.requests:
        raise ConfigError("no request of the workload fits the model's context")
    return kept


def table_of(plan: Plan, config: PlanConfig, workload: Workload) -> Table:
    table = Table(
        title=f"{config.model}, {place(config)}: {len(workload.requests)} requests,"
        f" TTFT {config.ttft:g} s, ITL {config.itl:g} s; pairs are p50 / p99"
    )
    for name in ("deployment", "chunk", "KV codec"):
        table.add_column(name, no_wrap=True)
    names = ["GPUs", "goodput/GPU", "met %", "TTFT s", "ITL ms", "output tok/s", "KV fits"]
    names += [] if config.gpu_hour_price is None else ["$ / M output"]
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for row in plan.rows:
        style = "bold green" if row is plan.recommended else None
        table.add_row(*cells(row, config), style=style)
    return table


def place(config: PlanConfig) -> str:
    if config.step_times is not None:
        return f"steps as in {config.step_times}"
    return f"{config.gpu} GPUs"


def cells(row: Row, config: PlanConfig) -> list[str]:
    deployment = row.deployment
    found = [
        deployment.shape,
        deployment.chunk,
        deployment.codec,
        str(row.num_gpus),
        f"{row.goodput_per_gpu:.3f}",
        f"{100 * row.share_met:.1f}",
        f"{row.ttft_s[0]:.3g} / {row.ttft_s[1]:.3g}",
        f"{1000 * row.itl_s[0]:.3g} / {1000 * row.itl_s[1]:.3g}",
        f"{row.output_tokens_per_s:,.0f}",
        str(row.kv_concurrency),
    ]
    if config.gpu_hour_price is not None:
        found.append(f"{row.cost_per_million(config.gpu_hour_price):.2f}")
    return found


def advice(plan: Plan, config: PlanConfig) -> list[str]:
    chosen = plan.recommended
    if chosen is None:
        best = plan.best
        return [
            f"No deployment keeps {TARGET_SHARE:.0%} of the requests to the targets; nearest is"
            f" {best.deployment.shape} with {best.share_met:.0%}. Give more --gpus or relax them."
        ]
    gpus = "1 GPU" if chosen.num_gpus == 1 else f"{chosen.num_gpus} GPUs"
    options = f"--chunk-tokens {chosen.deployment.chunk} --kv-codec {chosen.deployment.codec}"
    lines = [
        f"Recommended: {chosen.deployment.shape} ({gpus}), {options}",
        *memory_lines(chosen),
        *commands_of(chosen.deployment, options),
    ]
    if any(row.num_failed for row in plan.rows):
        lines.append("Some deployments refused requests (they count as not met).")
    return lines


def memory_lines(row: Row) -> list[str]:
    return [
        f"Memory of a {role} worker's rank: {memory.weights / GIGA:.1f} GB of weights,"
        f" {memory.pages / GIGA:.1f} GB of pages"
        for role, memory in row.rank_memory.items()
    ]


def commands_of(deployment: Deployment, options: str) -> list[str]:
    """One command where it is one machine and all workers are alike; else one for each role."""
    ranks = {deployment.ranks.of(role) for role in deployment.counts}
    if len(ranks) == 1 and deployment.num_gpus <= GPUS_PER_MACHINE:
        return [
            "On one machine:",
            f"tandem serve --prefill {deployment.prefill} --decode {deployment.decode} --colocated"
            f" {deployment.colocated}{rank_option(*ranks)} {options}",
        ]
    lines = ["Beside a `tandem router` that is told their addresses, so many times:"]
    for role, count in deployment.counts.items():
        command = "prefill" if role is Role.PREFILL else "decode"
        colocated = " --colocated" if role is Role.COLOCATED else ""
        ranks_given = rank_option(deployment.ranks.of(role))
        lines.append(f"{count} x  tandem {command} --model DIR{colocated}{ranks_given} {options}")
    return lines


def rank_option(num_ranks: int) -> str:
    return "" if num_ranks == 1 else f" --tensor-parallel {num_ranks}"


def numbers_of(plan: Plan, config: PlanConfig) -> dict[str, Any]:
    price = config.gpu_hour_price
    rows = []
    for row in plan.rows:
        numbers = asdict(row)
        if price is not None:
            numbers["cost_per_million_output_tokens"] = row.cost_per_million(price)
        numbers["is_recommended"] = row is plan.recommended
        rows.append(numbers)
    return {"asked": asdict(config), "rows": rows}
