"""`tandem plan`: the search, the ranking, the table, and every option that must be refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tandem
from commands.config import PlanConfig, ServeConfig
from commands.plan import commands_of, ranks_of, site_of
from commands.table import parse
from common.errors import ConfigError
from common.types import Role
from simulator.deployment import AUTO, Deployment, GpuSite, RoleRanks, kv_concurrency
from simulator.fit import save
from simulator.hardware import gpu_named, model_named
from simulator.planner import Planner, Row, Targets, ranked, shapes
from simulator.workload import fixed, poisson
from tests.simulator.fleets import COSTS

BASE = ("plan", "--model", "llama-3-8b", "--gpu", "h100")
QUICK = ("--rate", "4", "--requests", "12", "--prompt-tokens", "200", "--output-tokens", "10")
TARGETS = Targets(ttft_s=1.0, itl_s=0.05)


def plan(*arguments: str) -> PlanConfig:
    config = parse((*BASE, *arguments)).config
    assert isinstance(config, PlanConfig)
    return config


def run(*arguments: str) -> int:
    return tandem.run(parse((*BASE, *QUICK, *arguments)))


def site(model: str = "llama-3-8b", gpu: str = "h100") -> GpuSite:
    return GpuSite(
        model=model_named(model),
        gpu=gpu_named(gpu),
        memory_utilization=0.9,
        max_num_seqs=256,
        compute_efficiency=0.6,
        bandwidth_efficiency=0.75,
    )


def row(**fields: Any) -> Row:
    values: dict[str, Any] = {
        "deployment": Deployment(colocated=1),
        "num_gpus": 4,
        "goodput_per_gpu": 1.0,
        "share_met": 1.0,
        "ttft_s": (0.1, 0.5),
        "itl_s": (0.01, 0.02),
        "output_tokens_per_s": 1000.0,
        "tokens_per_s": 5000.0,
        "kv_concurrency": 10,
        "num_failed": 0,
        "rank_memory": {},
    }
    return Row(**{**values, **fields})


FOUR = RoleRanks(prefill=4, decode=4)


def test_shapes_are_every_proportion_of_the_workers() -> None:
    one = RoleRanks()
    assert [shape.shape for shape in shapes(4, one)] == ["4C", "1P + 3D", "2P + 2D", "3P + 1D"]
    assert [shape.shape for shape in shapes(1, one)] == ["1C"]


def test_a_worker_has_the_pages_that_the_memory_leaves() -> None:
    big = site("llama-3-70b", "h100")
    workers = big.workers(Deployment(prefill=1, decode=2, ranks=FOUR))
    assert [worker.role for worker in workers] == [Role.PREFILL, Role.DECODE, Role.DECODE]
    one = workers[1]
    used = one.num_packed * one.layout.packed_page_bytes
    used += one.num_exact * one.layout.exact_page_bytes
    # 0.9 - 0.08 of 320 GB, less 141 GB of weights; a page more would be too much
    room = 0.82 * 320e9 - 141.1e9
    assert 0.99 * room < used < 1.001 * room
    wide = big.workers(Deployment(decode=1, ranks=FOUR, codec="bf16"))[0]
    assert one.num_packed / wide.num_packed == pytest.approx(2, rel=0.1)
    assert kv_concurrency(workers[1:], 3500) == 2 * min(256, one.num_packed // 218)


def test_a_model_that_does_not_fit_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"141 GB of weights leave no room.*1 x h100 \(80 GB\).*--tensor-parallel"
    ):
        site("llama-3-70b", "h100").workers(Deployment(colocated=1))


def test_goodput_ranks_and_equal_ones_by_how_near_the_targets_they_come() -> None:
    good = row()
    slower = row(goodput_per_gpu=0.999, ttft_s=(0.1, 0.9))
    quick = row(goodput_per_gpu=0.999, ttft_s=(0.1, 0.2))
    poor = row(goodput_per_gpu=0.8)
    failing = row(goodput_per_gpu=1.5, share_met=0.5)
    # 1.5 sets the scale; the others differ by less than its hundredth
    assert ranked([failing, poor, slower, good, quick], TARGETS) == [
        quick,
        good,
        slower,
        poor,
        failing,
    ]


def test_cost_is_that_of_all_gpus_while_a_million_tokens_are_made() -> None:
    assert row().cost_per_million(3.6) == pytest.approx(4 * 3.6 / 3600 * 1000)


def test_without_a_number_of_gpus_the_fewest_that_suffice_are_found() -> None:
    said: list[str] = []
    load = poisson(num_requests=40, rate=14.0, prompt=fixed(1000), output=fixed(60), seed=1)
    # two workers' worth of prompts; a slow enough GPU keeps the test quick
    slow = replace(site(), compute_efficiency=0.15)
    planner = Planner(
        slow, load, Targets(ttft_s=0.5, itl_s=0.1), ranks=RoleRanks(), chunks=[AUTO],
        codecs=["bf16"], report=said.append,
    )  # fmt: skip
    found = planner.plan(None)
    assert found.recommended is not None
    assert found.recommended.num_gpus == 2
    assert said[0] == "simulating 1C, chunks auto, bf16"


def test_the_table_the_picture_and_the_numbers_are_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture, numbers = tmp_path / "plan.png", tmp_path / "plan.json"
    code = run(
        *("--gpus", "2", "--gpu-hour-price", "2", "--plot", str(picture)),
        *("--json", str(numbers), "--chunks", "auto,256", "--codecs", "bf16"),
    )
    assert code == 0
    out = capsys.readouterr().out
    assert "1P + 1D" in out
    assert "2C" in out
    assert "$ / M output" in out
    assert "Recommended: " in out
    assert picture.read_bytes().startswith(b"\x89PNG")
    written = json.loads(numbers.read_text())
    assert written["asked"]["ttft"] == 2.0  # T38: what the targets were
    assert (written["asked"]["gpus"], written["asked"]["chunks"]) == (2, ["auto", "256"])
    rows = written["rows"]
    assert len(rows) == 4
    assert sum(entry["is_recommended"] for entry in rows) == 1
    assert all(entry["cost_per_million_output_tokens"] > 0 for entry in rows)


def test_a_fleet_of_equal_ranks_on_one_machine_is_one_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = tmp_path / "plan.json"
    arguments = ("--gpus", "4", "--tensor-parallel", "2", "--chunks", "auto", "--codecs", "bf16")
    assert run(*arguments, "--json", str(numbers)) == 0
    out = capsys.readouterr().out
    assert "1 x P2 + 1 x D2" in out
    assert "2 x C2" in out
    chosen = next(row for row in json.loads(numbers.read_text())["rows"] if row["is_recommended"])
    fleet = chosen["deployment"]
    assert (
        f"tandem serve --prefill {fleet['prefill']} --decode {fleet['decode']}"
        f" --colocated {fleet['colocated']} --tensor-parallel 2 --chunk-tokens auto --kv-codec bf16"
    ) in out
    assert fleet["ranks"] == {"prefill": 2, "decode": 2}
    # 8.03 G parameters of 2 bytes on two ranks; pages fill the rest of 82 % of 80 GB
    for memory in chosen["rank_memory"].values():
        assert memory["weights"] == pytest.approx(8.03e9, rel=1e-3)
        assert memory["weights"] + memory["pages"] == pytest.approx(0.82 * 80e9, rel=1e-3)
    assert "rank: 8.0 GB of weights, 57.6 GB of pages" in out


@pytest.mark.parametrize(
    ("deployment", "lines"),
    [
        (Deployment(prefill=1, decode=2), ["tandem serve --prefill 1 --decode 2 --colocated 0 -o"]),
        (
            Deployment(colocated=2, ranks=FOUR),
            ["tandem serve --prefill 0 --decode 0 --colocated 2 --tensor-parallel 4 -o"],
        ),
        (
            Deployment(prefill=2, decode=1, ranks=RoleRanks(prefill=2, decode=4)),
            [
                "2 x  tandem prefill --model DIR --tensor-parallel 2 -o",
                "1 x  tandem decode --model DIR --tensor-parallel 4 -o",
            ],
        ),
        (
            # 12 GPUs are more than a machine has
            Deployment(prefill=1, decode=2, ranks=FOUR),
            [
                "1 x  tandem prefill --model DIR --tensor-parallel 4 -o",
                "2 x  tandem decode --model DIR --tensor-parallel 4 -o",
            ],
        ),
        (Deployment(colocated=9), ["9 x  tandem decode --model DIR --colocated -o"]),
    ],
)
def test_commands_say_the_ranks_of_each_role(deployment: Deployment, lines: list[str]) -> None:
    assert commands_of(deployment, "-o")[1:] == lines


def test_the_recommended_command_is_one_that_serve_takes() -> None:
    line = commands_of(Deployment(prefill=1, decode=1, ranks=FOUR), "--chunk-tokens auto")[1]
    config = parse(line.split()[1:]).config
    assert isinstance(config, ServeConfig)
    assert (config.prefill, config.decode, config.tensor_parallel) == (1, 1, 4)


def test_links_can_be_given() -> None:
    usual = site_of(plan("--rate", "1"))
    slow = site_of(plan("--rate", "1", "--rank-bandwidth", "45", "--network-bandwidth", "12.5"))
    assert isinstance(usual, GpuSite)
    assert isinstance(slow, GpuSite)
    assert (usual.gpu.rank_bandwidth, usual.gpu.network_bandwidth) == (450e9, 50e9)
    assert (slow.gpu.rank_bandwidth, slow.gpu.network_bandwidth) == (45e9, 12.5e9)
    assert replace(slow.gpu, rank_bandwidth=450e9, network_bandwidth=50e9) == usual.gpu


def test_a_role_has_ranks_of_its_own() -> None:
    model = model_named("llama-3-8b")
    given = ("--rate", "1", "--tensor-parallel", "2")
    assert ranks_of(plan("--rate", "1"), model) == RoleRanks(prefill=1, decode=1)
    assert ranks_of(plan(*given), model) == RoleRanks(prefill=2, decode=2)
    assert ranks_of(plan(*given, "--decode-tensor-parallel", "8"), model) == RoleRanks(
        prefill=2, decode=8
    )
    assert ranks_of(plan(*given, "--prefill-tensor-parallel", "1"), model) == RoleRanks(
        prefill=1, decode=2
    )


def test_a_role_without_room_for_its_weights_is_refused_before_anything_is_simulated() -> None:
    said: list[str] = []
    load = poisson(num_requests=4, rate=1.0, prompt=fixed(100), output=fixed(4), seed=1)
    planner = Planner(
        site("llama-3-70b"), load, TARGETS, ranks=RoleRanks(prefill=2, decode=4), chunks=[AUTO],
        codecs=["bf16"], report=said.append,
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"71 GB of weights.*2 x h100 \(80 GB\) of a prefill"):
        planner.plan(8)
    assert said == []


def test_targets_that_nothing_meets_are_said_to_be_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--gpus", "1", "--itl", "0.0001", "--chunks", "auto", "--codecs", "bf16") == 1
    assert "No deployment keeps 90% of the requests to the targets" in capsys.readouterr().out


def test_a_trace_and_measured_step_times_can_be_planned_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(COSTS, tmp_path / "times.json")
    lines = [
        {"timestamp": 100 * i, "input_length": 300, "output_length": 8, "hash_ids": [i]}
        for i in range(10)
    ]
    lines.append({**lines[0], "input_length": 9000, "hash_ids": list(range(18))})
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(json.dumps(line) for line in lines))
    arguments = (
        *("plan", "--model", "llama-3-8b", "--step-times", str(tmp_path / "times.json")),
        *("--kv-blocks", "500", "--trace", str(trace), "--chunks", "256", "--gpus", "1"),
    )
    assert tandem.run(parse(arguments)) == 0
    said = capsys.readouterr()
    assert "1 of 11 requests are longer than the model's context of 8192 tokens" in said.err
    assert "1C" in said.out


@pytest.mark.parametrize(
    "option",
    ["tensor-parallel", "prefill-tensor-parallel", "rank-bandwidth", "network-bandwidth"],
)
def test_what_only_a_gpus_data_sheet_knows_is_refused_with_step_times(option: str) -> None:
    arguments = ("--step-times", "x", "--kv-blocks", "100", "--rate", "1", f"--{option}", "2")
    config = parse(("plan", "--model", "llama-3-8b", *arguments)).config
    assert isinstance(config, PlanConfig)
    with pytest.raises(ConfigError, match="are for --gpu; step times are those of whole workers"):
        site_of(config)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--rate", "0"), "--rate is 0.0; it must be above 0"),
        (("--rate", "1", "--tensor-parallel", "0"), "--tensor-parallel is 0; it must be at least"),
        (
            ("--rate", "1", "--decode-tensor-parallel", "0"),
            "--decode-tensor-parallel is 0; it must be at least 1",
        ),
        (("--rate", "1", "--rank-bandwidth", "0"), "--rank-bandwidth is 0.0; it must be above 0"),
        (("--rate", "1", "--network-bandwidth", "-1"), "--network-bandwidth is -1.0; it must be"),
        (("--rate", "1", "--gpus", "0"), "--gpus is 0; it must be at least 1"),
        (("--rate", "1", "--codecs", "fp8"), "there is no fp8; choose among fp8_e3m4"),
        (("--rate", "1", "--compute-efficiency", "1.5"), "above 0 and at most 1"),
    ],
)
def test_bad_options_are_refused(arguments: tuple[str, ...], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        plan(*arguments)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--model", "gpt-2"), "neither a known model nor a directory.*llama-3-70b.*qwen3-32b"),
        (("--gpu", "v100"), "there are a100, h100, h200, b200, mi300x"),
        (("--gpus", "2", "--tensor-parallel", "4"), "one worker needs 4"),
        (("--gpus", "2", "--decode-tensor-parallel", "4"), "one worker needs 4"),
        (("--trace", "x"), "give either --trace or --rate"),
        (("--step-times", "x"), "give either --gpu or --step-times"),
        (("--kv-blocks", "100"), "--step-times and --kv-blocks go together"),
        (("--chunks", "many"), "many is neither a number of tokens nor auto"),
        (("--chunks", "100"), "100 is no multiple of the block size"),
        (("--chunks", ","), "each need at least one entry"),
        (
            ("--tensor-parallel", "9"),
            "--tensor-parallel 9 does not divide 32 query and 8 KV heads; 1 to 8, 16, 32 would do",
        ),
        (("--decode-tensor-parallel", "12"), "^--decode-tensor-parallel: .* 1 to 8, 16, 32 would"),
    ],
)
def test_unknown_names_and_misfits_are_explained(arguments: tuple[str, ...], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        run(*arguments)


def test_a_missing_trace_and_a_bad_line_are_configuration_errors(tmp_path: Path) -> None:
    trace = tmp_path / "bad.jsonl"
    trace.write_text('{"timestamp": 0}\n')
    for path, reason in ((trace, "line 1: input_length"), (tmp_path / "none", "cannot read")):
        with pytest.raises(ConfigError, match=reason):
            tandem.run(parse((*BASE, "--trace", str(path))))
