"""Offsets and codecs cost what docs/quality.md says; a few windows here, all of them with
`tandem quality`.
"""

import argparse
import inspect
import json
import shutil
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from commands import calibrate, quality
from commands.config import CalibrateConfig, QualityConfig
from common.errors import ConfigError, UnsupportedModel
from common.model_config import ModelConfig
from common.pages import NO_FINGERPRINT, OFFSETS_FILE
from engine import calibration, compare, tasks
from engine.compare import Candidate, Engines, Interval, Quality
from engine.cpu_weights import CpuWeights
from engine.offsets import load_means, means_hash, open_offsets, save_means
from engine.rope import rope_tables
from engine.tasks import Accuracy, accuracy_of, read_tasks
from tests.engine.conftest import make_runner
from tests.engine.driver import Driver
from tests.engine.tiny_models import TinyModel, give_offsets, make_tiny_model


def written_text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text("\n".join(inspect.getsource(module) for module in (argparse, textwrap)))
    return str(path)


def test_fp8_keeps_its_bounds_on_the_demo_model(demo_model: Path, tmp_path: Path) -> None:
    """On a short text that offsets were not measured on; the intervals of three windows are wide,
    so the bounds are wider.
    """
    config = QualityConfig(
        model=str(demo_model),
        text=written_text(tmp_path),
        codecs=("fp8_e3m4",),
        windows=3,
        long_windows=0,
        max_kl=0.0012,
        min_top_1=97.0,
        compare_offsets=False,
        json=str(tmp_path / "found.json"),
    )
    lines: list[str] = []
    assert quality.run(config, lines.append) == 0, "\n".join(lines)
    assert [line.split()[0] for line in lines[1:]] == ["codec", "fp32", "fp8_e3m4"]


def test_a_missed_bound_is_named(tiny: TinyModel) -> None:
    """By the worse end of an interval; perplexity is not gated, nor are other codecs."""
    config = QualityConfig(model=str(tiny.path), text="", max_kl=0.001, min_top_1=99)

    def result(name: str, kl: tuple[float, ...], same: tuple[float, ...]) -> Quality:
        return Quality(
            name=name,
            num_windows=len(kl),
            window_tokens=1024,
            perplexity=25.0,
            change=5.0,
            top_1=Interval.of(np.array(same)),
            kl=Interval.of(np.array(kl)),
            kl_by_window=kl,
            by_thousand=(5.0,),
        )

    even, sure = (0.0009, 0.00091, 0.0009), (0.995, 0.995, 0.996)
    assert quality.misses_of(config, [result("fp8_e3m4", even, sure)]) == []
    bad = [
        result("fp8_e3m4", (0.0004, 0.0009, 0.0013), (0.999, 0.998, 0.98)),
        result("fp8_e3m4 without offsets", (0.0003, 0.0008, 0.0012), sure),
        result("int8", (1.0, 2.0, 3.0), (0.1, 0.2, 0.3)),
    ]
    assert [miss.split(": ")[1].split(",")[0] for miss in quality.misses_of(config, bad)] == [
        "KL up to 0.00199",
        "same top-1 from 96.58 %",
        "KL is 0.00010 more than without offsets",
    ]
    noisy = [bad[0], result("fp8_e3m4 without offsets", (0.0008, 0.0003, 0.0012), sure)]
    assert len(quality.misses_of(config, noisy)) == 2


def test_intervals_are_student_s() -> None:
    """Of 1,000 samples of 5, 24 and 60 from a normal distribution, 95 % hold its mean."""
    for count in (5, 24, 60):
        samples = np.random.default_rng(count).normal(3.0, 2.0, (1000, count))
        found = [Interval.of(sample) for sample in samples]
        held = sum(interval.low <= 3.0 <= interval.high for interval in found)
        assert 930 <= held <= 970, (count, held)
        assert found[0].mean == pytest.approx(samples[0].mean())
    alone = Interval.of(np.array([1.0]))
    assert (alone.mean, alone.low, alone.high) == (1.0, -np.inf, np.inf)


def test_all_codecs_are_measured_over_one_copy_of_the_weights(
    tiny: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []
    load = CpuWeights.__init__

    def counting(self: Any, checkpoint: Any, config: Any, weight_dtype: str = "auto") -> None:
        loaded.append(weight_dtype)
        load(self, checkpoint, config, weight_dtype)

    monkeypatch.setattr(CpuWeights, "__init__", counting)
    windows = np.random.default_rng(0).integers(0, 331, (2, 64)).astype(np.int32)
    engines, done = Engines(tiny.path, 16, 1), []
    for dtype in ("auto", "int8"):
        config = QualityConfig(model=str(tiny.path), text="", weight_dtype=dtype)
        compare.measure(engines, windows, quality.candidates_of(config), lambda: done.append(1))
    assert loaded == ["auto", "int8"]
    assert len(done) == 4


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"windows": 1}, "--windows 1: an interval needs at least two"),
        ({"long_windows": 1}, "--long-windows 1: an interval needs"),
        ({"windows": 0, "long_windows": 0}, "leave nothing to measure"),
    ],
)
def test_too_few_windows_are_refused(tiny: TinyModel, given: dict[str, int], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        QualityConfig(model=str(tiny.path), text="", **given)  # type: ignore[arg-type]


def test_long_windows_are_measured_alone(demo_model: Path, tmp_path: Path) -> None:
    config = QualityConfig(model=str(demo_model), text=written_text(tmp_path), windows=0)
    assert quality.windows_of(config) == [(8192, 3)]
    short = tmp_path / "short.txt"
    short.write_text("word " * 1500)
    config = replace(config, text=str(short), windows=2, long_windows=0)
    with pytest.raises(ConfigError, match="one window of 1,024 tokens only"):
        quality.run(config, lambda line: None)


def test_int8_weights_are_measured_alone_and_below_each_codec(tiny: TinyModel) -> None:
    config = QualityConfig(
        model=str(tiny.path), text="", codecs=("bf16", "fp8_e3m4"), weight_dtype="int8"
    )
    candidates = quality.candidates_of(config)
    assert [candidate.name for candidate in candidates] == [
        "fp32, int8 weights",
        "bf16, int8 weights",
        "fp8_e3m4, int8 weights",
        "fp8_e3m4, int8 weights without offsets",
    ]
    windows = np.random.default_rng(0).integers(0, 331, (2, 64)).astype(np.int32)
    exact, weights, *_ = found = compare.measure(Engines(tiny.path, 16, 1), windows, candidates)
    assert exact.kl.mean == 0.0
    assert 0 < weights.kl.mean < 0.01
    strict = replace(config, max_kl=-1.0, min_top_1=0.0)
    assert [miss.split(" over")[0] for miss in quality.misses_of(strict, found)][:1] == [
        "fp8_e3m4, int8 weights"
    ]


def test_fp32_pages_differ_from_themselves_by_nothing(tiny: TinyModel) -> None:
    windows = np.random.default_rng(0).integers(0, 331, (2, 64)).astype(np.int32)
    candidates = [Candidate(codec=codec) for codec in ("fp32", "fp8_e3m4", "fp8_e4m3")]
    same, again, fp8, coarse = compare.measure(Engines(tiny.path, 16, 1), windows, candidates)
    assert again.change == same.change == 0.0
    assert again.top_1.mean == 1.0
    assert again.kl.mean == again.kl.high == 0.0
    with torch.no_grad():
        logits = torch.stack([tiny.logits(window.tolist()) for window in windows])
    targets = torch.from_numpy(windows[:, 1:]).long().flatten()
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets)
    assert same.perplexity == pytest.approx(float(loss.exp()), rel=1e-5)
    assert 0 < fp8.kl.mean < coarse.kl.mean < 0.05


@pytest.mark.parametrize("head_dim", [16, 20])
def test_means_are_those_of_k_before_rotary_and_of_v(tmp_path: Path, head_dim: int) -> None:
    """Against hooks in transformers, positions of block 0 left out. Padding of heads is no part of
    a model.
    """
    model = make_tiny_model(tmp_path, "llama", head_dim=head_dim)
    window = np.random.default_rng(1).integers(0, 331, (1, 96)).astype(np.int32)
    runner = make_runner(tmp_path, kv_codec="fp32")
    found = calibration.measure(runner, window)
    layers = model.reference.model.layers
    seen: dict[tuple[int, int], torch.Tensor] = {}
    for index, layer in enumerate(layers):
        for which, part in enumerate((layer.self_attn.k_proj, layer.self_attn.v_proj)):
            part.register_forward_hook(
                lambda module, given, out, at=(index, which): seen.__setitem__(at, out[0])
            )
    model.logits(window[0].tolist())
    for (index, which), out in seen.items():
        wanted = out[16:].view(80, 2, head_dim).mean(0)
        torch.testing.assert_close(found[index, which].float(), wanted, atol=2e-3, rtol=1e-2)


def test_a_calibrated_model_is_another_layout(tmp_path: Path) -> None:
    """The command writes the file, workers read it, and codecs without loss ignore it."""
    model = make_tiny_model(tmp_path, "llama")
    before = make_runner(model.path, num_blocks=4, num_exact=2)
    means_path = give_offsets(model.path)
    after = make_runner(model.path, num_blocks=4, num_exact=2)
    assert before.pages.origin.offsets_hash == NO_FINGERPRINT
    assert after.pages.origin.offsets_hash == means_hash(load_means(model.path, after.config))
    assert after.layout_fingerprint != before.layout_fingerprint
    exact = make_runner(model.path, kv_codec="bf16", num_blocks=4, num_exact=2)
    assert exact.pages.origin.offsets_hash == NO_FINGERPRINT
    means_path.write_bytes(means_path.read_bytes()[:50])
    with pytest.raises(UnsupportedModel, match="tandem calibrate"):
        make_runner(model.path, num_blocks=4, num_exact=2)


def test_calibrate_reads_a_text_and_writes_the_file(demo_model: Path, tmp_path: Path) -> None:
    """With the demo model's tokenizer beside a tiny model of its vocabulary."""
    make_tiny_model(tmp_path, "llama", vocab_size=49152, num_hidden_layers=1)
    shutil.copy(demo_model / "tokenizer.json", tmp_path)
    lines: list[str] = []
    config = CalibrateConfig(model=str(tmp_path), text=written_text(tmp_path), threads=1)
    assert calibrate.run(config, lines.append) == 0
    assert (tmp_path / OFFSETS_FILE).stat().st_mode & 0o777 == 0o644
    means = load_means(tmp_path, ModelConfig.load(tmp_path))
    assert means.any()
    assert means_hash(means).hex() in lines[-1]


def test_a_block_offset_is_the_mean_of_the_rotated_vector(tiny: TinyModel) -> None:
    runner = make_runner(tiny.path)
    cos, sin = (torch.from_numpy(table) for table in rope_tables(runner.config))
    offsets, _ = open_offsets(tiny.path, runner.config, runner.layout)
    means = torch.randn(offsets.means.shape)
    offsets = type(offsets).of(means, cos, sin, 16)
    a, b = means[1, 0].chunk(2, dim=-1)
    for block in (1, 7):
        rotated = [
            torch.cat([a * cos[t] - b * sin[t], b * cos[t] + a * sin[t]], dim=-1)
            for t in range(16 * block, 16 * block + 16)
        ]
        k, v = offsets.of_block(1, block)
        torch.testing.assert_close(k, torch.stack(rotated).mean(0))
        assert torch.equal(v, means[1, 1])


def test_offsets_bring_a_biased_model_closer_to_fp32(tmp_path: Path) -> None:
    """K with a large constant part (Qwen2's biases), as real models have."""
    make_tiny_model(tmp_path, "qwen2")
    prompt = np.random.default_rng(2).integers(0, 331, 200).tolist()

    def logits(codec: str) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        driver = Driver(make_runner(tmp_path, kv_codec=codec))
        driver.add("a", prompt, max_tokens=8)
        driver.run(chunk_tokens=64)
        return np.stack(driver.logits["a"])

    exact, without = logits("fp32"), logits("fp8_e3m4")
    runner = make_runner(tmp_path, kv_codec="fp32")
    windows = np.random.default_rng(3).integers(0, 331, (4, 256)).astype(np.int32)
    save_means(tmp_path, calibration.measure(runner, windows), {})
    with_offsets = logits("fp8_e3m4")
    assert np.abs(with_offsets - exact).mean() < np.abs(without - exact).mean()


# --- tasks ----------------------------------------------------------------------------------------

TASKS = [
    {"prompt": "The capital of France is", "choices": [" Paris", " a fish"], "answer": 0},
    {"prompt": "One, two, three, four,", "choices": [" banana", " five"], "answer": 1},
    {"prompt": "The capital of France is", "answer": " Paris"},
    {"prompt": "The capital of France is", "answer": " Berlin"},
]


def written_tasks(folder: Path, tasks: list[Any]) -> str:
    path = folder / "tasks.jsonl"
    path.write_text("\n".join(json.dumps(task) for task in tasks) + "\n\n")
    return str(path)


def test_accuracy_on_tasks_is_that_of_transformers(
    demo_model: Path, reference: Any, tmp_path: Path
) -> None:
    """The likelihoods behind it too; the last task's answer is wrong, so that one in four is."""
    path = written_tasks(tmp_path, TASKS)
    found = read_tasks(demo_model, path, 8192)
    runner = make_runner(demo_model, kv_codec="fp32", num_blocks=8, num_exact=1)
    for task in found:
        for choice in task.choices:
            tokens = torch.from_numpy(np.concatenate([task.prompt, choice])).long()
            with torch.inference_mode():
                logits = reference(tokens[None]).logits[0, len(task.prompt) - 1 : -1]
            wanted = torch.log_softmax(logits, 1).gather(1, tokens[len(task.prompt) :, None])
            score, is_greedy = tasks.score(runner, task.prompt, choice, 16)
            assert score == pytest.approx(float(wanted.sum()), abs=1e-3)
            assert is_greedy == bool((logits.argmax(1) == tokens[len(task.prompt) :]).all())
    accuracy = accuracy_of("fp32", runner, found, 16)
    assert (accuracy.num_right, accuracy.num_tasks) == (3, 4)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("[]", "an object"),
        ("{", "Expecting"),
        ('{"prompt": "x"}', "a text"),
        ('{"prompt": "x", "answer": 1}', "a text"),
        ('{"prompt": "x", "choices": ["a"], "answer": 0}', "at least two"),
        ('{"prompt": "x", "choices": ["a", "b"], "answer": 2}', "no choice 2"),
        ('{"prompt": "x", "choices": ["a", "b"], "answer": "a"}', "number"),
        ('{"prompt": "", "answer": "a"}', "no tokens"),
        ('{"prompt": "x x x", "answer": "a"}', "the model takes 3"),
    ],
)
def test_a_bad_task_is_named_by_its_line(
    demo_model: Path, tmp_path: Path, line: str, why: str
) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(f'{{"prompt": "x", "answer": "a"}}\n{line}\n')
    with pytest.raises(ConfigError, match=f"line 2: .*{why}"):
        read_tasks(demo_model, path, 3)


def test_a_codec_that_loses_right_answers_is_a_miss(tiny: TinyModel) -> None:
    config = QualityConfig(model=str(tiny.path), text="")
    fp32 = Accuracy(name="fp32", num_right=400, num_tasks=500)
    kept = Accuracy(name="fp8_e3m4", num_right=398, num_tasks=500)
    lost = Accuracy(name="fp8_e3m4", num_right=397, num_tasks=500)
    assert quality.accuracy_misses(config, [fp32, kept]) == []
    assert len(quality.accuracy_misses(config, [fp32, lost])) == 1
    assert list(quality.accuracy_table([fp32, lost]))[-1].split() == [
        *("fp8_e3m4", "397", "79.40", "99.25"),
    ]
