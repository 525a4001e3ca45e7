"""Flags, TOML and defaults: which one wins, what is refused, and that --help tells the truth."""

import json
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import get_origin

import pytest

from commands.config import ServeConfig
from commands.table import COMMANDS, parse
from common.addresses import split_address
from common.environment import home
from common.errors import ConfigError
from common.options import build, command_line_parser, default_text, flag
from router.config import RouterConfig
from worker.config import WorkerConfig


@pytest.fixture
def model(tmp_path: Path) -> str:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    return str(directory)


def toml(tmp_path: Path, text: str) -> str:
    path = tmp_path / "tandem.toml"
    path.write_text(text)
    return str(path)


def worker(*arguments: str) -> WorkerConfig:
    config = parse(arguments).config
    assert isinstance(config, WorkerConfig)
    return config


def test_defaults_of_a_prefill_worker(model: str) -> None:
    config = worker("prefill", "--model", model)
    assert (config.role, config.kv_codec, config.block_size, config.chunk_tokens) == (
        "prefill", "fp8_e3m4", 16, "auto",
    )  # fmt: skip
    assert config.max_chunk_tokens == 512
    assert (config.max_num_seqs, config.kv_blocks, config.threads) == (256, None, None)


def test_a_flag_wins_over_toml_and_toml_over_the_default(model: str, tmp_path: Path) -> None:
    path = toml(tmp_path, '[prefill]\nkv-codec = "fp32"\nblock-size = 32\nmax-num-seqs = 8\n')
    config = worker("prefill", "--config", path, "--model", model, "--max-num-seqs", "4")
    assert (config.kv_codec, config.block_size, config.max_num_seqs) == ("fp32", 32, 4)


def test_toml_may_hold_every_option_under_the_flag_s_name(model: str, tmp_path: Path) -> None:
    for command in COMMANDS:
        lines = [f"[{command}]"]
        for port, name in enumerate(COMMANDS[command].fields()):
            lines.append(f"{flag(name)[2:]} = {toml_literal(command, name, model, port)}")
        assert parse([command, "--config", toml(tmp_path, "\n".join(lines))]).name == command


def toml_literal(command: str, name: str, model: str, port: int) -> str:
    """A permitted value of the option's type."""
    core, choices = COMMANDS[command].type_of(name), COMMANDS[command].choices_of(name)
    default = COMMANDS[command].fields()[name].default
    if core is bool:
        return "true"
    if core in (int, float):
        return str(default if isinstance(default, int | float) else core(0.5) or 64)
    if choices:
        return json.dumps(choices[0])
    if name == "prefill_peers":  # of decode workers only, and not of colocated ones
        return "[]"
    if get_origin(core) is tuple:
        is_codecs = COMMANDS[command].fields()[name].metadata["metavar"] == "CODEC,..."
        return '["fp8_e3m4", "bf16"]' if is_codecs else '["127.0.0.1:7", "localhost:8"]'
    shapes = {"HOST:PORT": f"127.0.0.1:{9000 + port}", "DIR": model, "N|auto": "auto"}
    return json.dumps(shapes.get(COMMANDS[command].fields()[name].metadata["metavar"], "text"))


def test_chunks_are_a_number_or_auto(model: str, tmp_path: Path) -> None:
    config = worker("decode", "--model", model, "--chunk-tokens", "64")
    assert (config.max_chunk_tokens, config.is_chunk_auto) == (64, False)
    path = toml(tmp_path, '[decode]\nchunk-tokens = "auto"\n')
    config = worker("decode", "--config", path, "--model", model)
    assert (config.max_chunk_tokens, config.is_chunk_auto) == (512, True)
    path = toml(tmp_path, "[decode]\nchunk-tokens = 1.5\n")
    with pytest.raises(ConfigError, match="it must be a number or auto"):
        worker("decode", "--config", path, "--model", model)


def test_decode_colocated_is_a_role(model: str, tmp_path: Path) -> None:
    path = toml(tmp_path, "[decode]\ncolocated = true\n")
    assert worker("decode", "--model", model).role == "decode"
    assert worker("decode", "--model", model, "--colocated").role == "colocated"
    assert worker("decode", "--model", model, "--config", path).role == "colocated"
    both = worker("decode", "--model", model, "--config", path, "--no-colocated")
    assert both.role == "decode"


def test_worker_lists_are_separated_by_commas(model: str) -> None:
    config = parse(["router", "--model", model, "--decode", "localhost:1,127.0.0.1:2"]).config
    assert isinstance(config, RouterConfig)
    assert config.decode == ("localhost:1", "127.0.0.1:2")
    assert config.prefill == ()


def test_serve_leaves_to_the_workers_what_was_not_given() -> None:
    config = parse(["serve"]).config
    assert isinstance(config, ServeConfig)
    assert (config.model, config.kv_codec, config.block_size, config.threads) == (None,) * 4
    assert (config.prefill, config.decode, config.colocated) == (1, 1, 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no command given; choose one of serve, router, prefill, decode, certs, demo-model"),
        (["serv"], "choose from 'serve'"),
        (["serve", "--prefil", "2"], "unknown option --prefil; did you mean --prefill"),
        (["serve", "--xyzzy=1"], "unknown option --xyzzy$"),
        (["serve", "--decode", "two"], "--decode: invalid int value: 'two'"),
        (["serve", "--decode", "0"], "--decode and --colocated are both 0"),
        (["serve", "--prefill", "-1"], "--prefill is -1; it must be at least 0"),
        (["serve", "--http", "8000"], "--http: '8000' is not HOST:PORT"),
        (["serve", "--grpc", "127.0.0.1:8000"], "--http and --grpc are both 127.0.0.1:8000"),
        (["serve", "--block-size", "8"], r"--block-size: invalid choice: 8 \(choose from 16, 32\)"),
        (["serve", "--chunk-tokens", "24"], "--chunk-tokens is 24; it must be a multiple"),
        (["serve", "--chunk-tokens", "many"], "'many' is neither a number nor auto"),
        (["serve", "--itl-target", "0"], "--itl-target is 0.0; it must be above 0"),
        (["serve", "--threads", "0"], "--threads is 0; it must be at least 1"),
        (["serve", "--model", "/nowhere"], "--model: /nowhere is no model directory"),
        (["serve", "--drain-s", "nan"], "--drain-s is nan; it must be above 0"),
        (["serve", "--config", "/nowhere.toml"], "--config /nowhere.toml: No such file"),
        (["prefill"], "--model is required by tandem prefill"),
    ],
)  # fmt: skip
def test_what_is_refused_is_named(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(arguments)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--gpu-memory-utilization", "0.98"], "must be above 0 and at most 0.92"),
        (["--gpu-memory-utilization", "0.5", "--device", "cpu"], "needs a GPU"),
        (["--listen", "0.0.0.0:7000"], "plain text; use --internal-tls, or permit it"),
        (["--chunk-tokens", "16", "--block-size", "32"], "multiple of the block size, 32"),
        (["--kv-blocks", "0"], "--kv-blocks is 0; it must be at least 1"),
        (["--colocated"], "unknown option --colocated"),
    ],
)
def test_what_a_worker_refuses(model: str, flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(["prefill", "--model", model, *flags])


def test_plain_text_beyond_this_machine_is_asked_for(model: str) -> None:
    arguments = ["router", "--model", model, "--decode", "decode:7000"]
    with pytest.raises(ConfigError, match="--decode decode:7000 is beyond this machine"):
        parse(arguments)
    assert parse([*arguments, "--insecure-internal"]).name == "router"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[serve]\nkv-codex = 1", r"\[serve\]: unknown option kv-codex; did you mean kv-codec"),
        ("[prefill]\nport = 1", r"\[prefill\]: unknown option port"),
        ("[serv]\n", r"unknown option \[serv\]; did you mean \[serve\]"),
        ("serve = 1", r"serve must be a table, written \[serve\]"),
        ("[serve]\nprefill = true", "prefill is True; it must be of type int"),
        ("[serve]\nhttp = 8000", "http is 8000; it must be of type str"),
        ('[serve]\nkv-codec = "fp4"', "kv-codec is 'fp4'; choose one of fp8_e3m4, "),
        ("[serve]\nblock-size = 16.0", "block-size is 16.0; choose one of 16, 32"),
        ("[serve\n", "tandem.toml: "),
    ],
)
def test_what_a_file_may_not_say(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(["serve", "--config", toml(tmp_path, text)])


def test_a_table_of_another_command_is_read_by_that_command_only(tmp_path: Path) -> None:
    config = parse(["serve", "--config", toml(tmp_path, "[prefill]\nblock-size = 32\n")]).config
    assert isinstance(config, ServeConfig)
    assert config.block_size is None


def test_help_shows_every_option_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    for command in COMMANDS:
        with pytest.raises(SystemExit) as exit_:
            command_line_parser(COMMANDS).parse_args([command, "--help"])
        assert exit_.value.code == 0
        text = " ".join(capsys.readouterr().out.split())
        for name, entry in COMMANDS[command].fields().items():
            assert flag(name) in text
            assert f"({default_text(entry)})" in text


def test_addresses() -> None:
    assert split_address("localhost:80") == ("localhost", 80)
    assert split_address("[::1]:8000") == ("::1", 8000)
    for wrong in ("localhost", ":80", "a:b", "a:99999", "a:-1", ""):
        with pytest.raises(ConfigError, match="is not HOST:PORT"):
            split_address(wrong)


def test_home_is_named_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_HOME", "/srv/tandem")
    assert home() == Path("/srv/tandem")
    monkeypatch.delenv("TANDEM_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert home() == Path("/home/somebody/.cache/tandem")


def test_a_config_cannot_be_changed() -> None:
    config = ServeConfig()
    with pytest.raises(FrozenInstanceError):
        config.prefill = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("command", "name"), [("plan", "json"), ("plan", "plot"), ("quality", "json")]
)
def test_a_file_for_results_needs_its_folder_before_the_work_begins(
    tmp_path: Path, command: str, name: str
) -> None:
    (tmp_path / "config.json").write_text("{}")
    given = {name: str(tmp_path / "nowhere" / "x"), "model": str(tmp_path)}
    if command == "quality":
        given["text"] = "x"
    with pytest.raises(ConfigError, match=f"--{name} .*there is no directory"):
        build(COMMANDS, command, given)
