"""Workers of several ranks, in as many processes: what they compute, and how they end."""

import os
import queue
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.codecs import CODECS
from common.errors import ConfigError, UnsupportedModel
from common.pages import PageKind, PageTag, checksum
from common.scheduling.plan import ForeignPages, LandingMove, TagOrder
from engine.config import EngineConfig
from engine.kernels import reference
from engine.kernels.offsets import Offsets
from engine.load import load_runner
from engine.offsets import open_offsets
from engine.pool_size import PoolSize
from engine.ranks.commands import Forward, Tag, pack_command, unpack_command
from engine.ranks.followers import RankLost
from engine.ranks.group import RankGroup, follower_program
from engine.runner import ModelRunner
from tests.engine.driver import Driver
from tests.engine.test_demo_model import LENGTHS, MARGIN, prompts
from tests.engine.test_same_bits import in_batch
from tests.engine.tiny_models import give_offsets, make_tiny_model

PROGRAM = follower_program("worker.follower")


def config_of(path: Path, num_ranks: int, **settings: Any) -> EngineConfig:
    given: dict[str, Any] = {
        "pool": PoolSize(num_packed=512, num_exact=128),
        "landing": PoolSize(num_packed=16, num_exact=4),
        "max_num_tokens": 4200,  # the driver's steps
    }
    return EngineConfig(model=path, num_ranks=num_ranks, **(given | settings))


@contextmanager
def group_of(
    path: Path, num_ranks: int, **settings: Any
) -> Iterator[tuple[RankGroup, ModelRunner]]:
    config = config_of(path, num_ranks, **settings)
    with RankGroup(config, PROGRAM) as group:
        runner = load_runner(config, shared=group.shared, followers=group.followers)
        group.wait_ready()
        yield group, runner


def check_tokens(
    runner: ModelRunner, given: dict[int, list[int]], reference: Any, num_new: int
) -> None:
    driver = Driver(runner)
    for length, prompt in given.items():
        driver.add(str(length), prompt, max_tokens=num_new)
    driver.run(chunk_tokens=128)
    for length, prompt in given.items():
        tokens = driver.tokens[str(length)]
        with torch.no_grad():
            logits = reference(torch.tensor([prompt + tokens[:-1]]), logits_to_keep=num_new).logits[
                0
            ]
        best = logits.topk(2, dim=1)
        differs = best.indices[:, 0].numpy() != np.array(tokens)
        is_clear = (best.values[:, 0] - best.values[:, 1]).numpy() > MARGIN
        assert not (differs & is_clear).any(), f"{length} tokens in"


def random_prompts(lengths: tuple[int, ...], vocab_size: int) -> dict[int, list[int]]:
    generator = np.random.default_rng(5)
    return {length: generator.integers(0, vocab_size, length).tolist() for length in lengths}


def test_two_ranks_with_two_and_one_kv_heads(demo_model: Path, reference: Any) -> None:
    with group_of(demo_model, 2, kv_codec="fp32", num_threads=1) as (_, runner):
        assert runner.layout.num_kv_heads == 2
        check_tokens(runner, prompts(demo_model, (1, 17, 100)), reference, num_new=8)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_ranks", [2, 3, 9])
def test_twenty_prompts(demo_model: Path, reference: Any, num_ranks: int) -> None:
    with group_of(
        demo_model, num_ranks, kv_codec="fp32", pool=PoolSize(num_packed=800, num_exact=128)
    ) as (_, runner):
        check_tokens(runner, prompts(demo_model, LENGTHS), reference, num_new=32)


SHAPES = [
    pytest.param(2, 8, 16, id="2 ranks of 8 KV heads", marks=pytest.mark.slow),
    pytest.param(4, 2, 8, id="4 ranks of 2 KV heads"),
    pytest.param(8, 8, 8, id="8 ranks of 8 KV heads", marks=pytest.mark.slow),
    pytest.param(8, 2, 8, id="8 ranks of 2 KV heads", marks=pytest.mark.slow),
    pytest.param(2, 1, 4, id="2 ranks of 1 KV head", marks=pytest.mark.slow),
    pytest.param(4, 1, 4, id="4 ranks of 1 KV head", marks=pytest.mark.slow),
    pytest.param(8, 1, 8, id="8 ranks of 1 KV head", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("num_ranks", "num_kv_heads", "num_heads"), SHAPES)
def test_other_heads(tmp_path: Path, num_ranks: int, num_kv_heads: int, num_heads: int) -> None:
    model = make_tiny_model(
        tmp_path,
        "qwen2",
        num_key_value_heads=num_kv_heads,
        num_attention_heads=num_heads,
        intermediate_size=208,
        tie_word_embeddings=num_ranks == 4,
    )
    with group_of(model.path, num_ranks, kv_codec="fp32") as (_, runner):
        check_tokens(runner, random_prompts((1, 16, 33, 100), 331), model.reference, num_new=12)


@pytest.mark.parametrize(
    ("family", "weight_dtype"),
    [
        ("qwen3", "auto"),
        ("llama", "int8"),
        pytest.param("llama", "auto", marks=pytest.mark.slow),
        pytest.param("qwen3", "int8", marks=pytest.mark.slow),
    ],
)
def test_logits_are_those_of_one_rank_but_for_rounding(
    tmp_path: Path, family: str, weight_dtype: str
) -> None:
    """Whole groups of int8 weights go to a rank, so the weights are the same."""
    model = make_tiny_model(tmp_path, family, head_dim=32, vocab_size=333)
    settings: dict[str, Any] = {"kv_codec": "fp32", "weight_dtype": weight_dtype}
    given = random_prompts((1, 17, 40), 333)
    found = []
    alone = load_runner(config_of(model.path, 1, **settings))
    with group_of(model.path, 2, **settings) as (_, runner):
        for each in (alone, runner):
            driver = Driver(each)
            for length, prompt in given.items():
                driver.add(str(length), prompt, max_tokens=6)
            driver.run(chunk_tokens=32)
            found.append(np.concatenate([np.stack(rows) for rows in driver.logits.values()]))
    assert np.abs(found[0] - found[1]).max() < 1e-4


@pytest.mark.parametrize("codec", ["fp8_e3m4", pytest.param("int4", marks=pytest.mark.slow)])
def test_bits_depend_on_the_size_of_the_group_alone(tmp_path: Path, codec: str) -> None:
    """Chunks, company and threads change nothing, as with one rank; neither does another start."""
    path = make_tiny_model(tmp_path, "qwen2").path
    give_offsets(path)
    lengths = (1, 16, 17, 31, 64, 65, 130)
    with group_of(path, 2, kv_codec=codec) as (_, runner):
        wanted = in_batch(Driver(runner), lengths, chunk=512)
    for chunk in (16, 64):
        with group_of(path, 2, kv_codec=codec, num_threads=2) as (_, runner):
            driver = Driver(runner)
            for length, found in in_batch(driver, lengths, chunk).items():
                found.assert_equals(wanted[length], f"{length} tokens in chunks of {chunk}")
            alone = in_batch(driver, [65], chunk)[65]
            alone.assert_equals(wanted[65], f"65 tokens alone in chunks of {chunk}")


def test_tags_and_landing_over_ranks(tmp_path: Path) -> None:
    """Every rank tags its own records; what lands is checked by each, and refused by head."""
    path = make_tiny_model(tmp_path, "llama").path
    with group_of(path, 2, incarnation=7) as (_, runner):
        driver = Driver(runner)
        driver.add("a", list(range(40)), max_tokens=1)
        driver.run()
        page = driver.running["a"].table[1]
        order = TagOrder(PageKind.PACKED, page, bytes(range(16)), 16, 3)
        driver.tag(order)
        records = runner.pool.records(PageKind.PACKED)
        tag = PageTag.unpack(records[page, 0, -64:].numpy().tobytes())
        assert (tag.head, tag.num_tokens, tag.generation, tag.incarnation) == (0, 16, 3, 7)
        runner.landing.packed[2] = runner.pool.packed[page]
        move = LandingMove(
            kind=PageKind.PACKED,
            slot=2,
            block_id=9,
            content_hash=bytes(range(16)),
            num_tokens=16,
            incarnation=7,
            generation=3,
        )
        [refused] = runner.land([move]).refusals  # the other rank's landing zone is empty
        assert refused is not None
        assert refused.heads == (1,)
        assert refused.reason.startswith("head 1: magic")
        assert runner.land([replace(move, heads=(0,))]).refusals == (None,)
        assert np.array_equal(records[9, 0, :-64], records[page, 0, :-64])
        assert not records[9, 0, -64:].any()


def test_pages_of_another_codec_land_over_ranks(tmp_path: Path) -> None:
    """Every rank converts the records of its heads. What is in no landing zone is refused by both,
    with the tags that the source's pages must have.
    """
    path = make_tiny_model(tmp_path, "llama").path
    with group_of(path, 2, incarnation=7) as (_, runner):
        landing = runner.pages.own.landings.of("fp32")
        layout = landing.layout
        assert (layout.num_kv_heads, len(landing.packed)) == (1, len(runner.landing.packed))
        record = landing.records(PageKind.PACKED)[2, 0]
        values = torch.linspace(-2, 2, layout.num_elements)
        end = layout.payload_bytes(PageKind.PACKED)
        record[:end] = values.view(torch.uint8)
        tag = PageTag(
            content_hash=bytes(range(16)), fingerprint=b"the source's----", num_tokens=16, head=0,
            incarnation=5, generation=3,
        )  # fmt: skip
        record[-64:] = torch.frombuffer(bytearray(tag.pack()), dtype=torch.uint8)
        sealed = tag.with_checksum(checksum(record.numpy())).pack()
        record[-64:] = torch.frombuffer(bytearray(sealed), dtype=torch.uint8)
        move = LandingMove(
            kind=PageKind.PACKED, slot=2, block_id=9, content_hash=bytes(range(16)), num_tokens=16,
            incarnation=5, generation=3, block=1, foreign=ForeignPages("fp32", tag.fingerprint),
        )  # fmt: skip
        [refused] = runner.land([move]).refusals
        assert refused is not None
        assert (refused.heads, refused.reason[:13]) == ((1,), "head 1: magic")
        assert runner.land([replace(move, heads=(0,))]).refusals == (None,)
        pool, offsets = runner.pool, own_offsets(path, runner)
        found = reference.read_block(
            pool.packed, pool.exact, pool.layout, offsets, 9, 1, is_exact=False
        )
        wanted = values.view(found.shape)
        assert (found - wanted).abs().max() <= wanted.abs().max() / 32


def own_offsets(path: Path, runner: ModelRunner) -> Offsets:
    """Of rank 0, which has the first KV head."""
    found, _ = open_offsets(path, runner.config, runner.pool.layout)
    return replace(found, means=found.means[:, :, :1].contiguous())


def test_a_rank_that_dies_is_noticed(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path, "llama").path
    said: queue.Queue[str] = queue.Queue()
    with group_of(path, 2) as (group, runner):
        group.when_lost(said.put)
        driver = Driver(runner)
        driver.add("a", list(range(40)), max_tokens=4)
        driver.step()
        os.kill(group.pids[0], signal.SIGKILL)
        assert said.get(timeout=30) == "rank 1 was killed by SIGKILL"
        with pytest.raises(RankLost):
            driver.run()


def test_a_rank_that_dies_before_anybody_listens_is_noticed(tmp_path: Path) -> None:
    """While the worker tests itself, say: nobody waits for ever, and it is told afterwards."""
    path = make_tiny_model(tmp_path, "llama").path
    said: queue.Queue[str] = queue.Queue()
    with group_of(path, 2) as (group, runner):
        os.kill(group.pids[0], signal.SIGKILL)
        with pytest.raises(RankLost):
            runner.self_test()
        group.when_lost(said.put)
        assert said.get(timeout=30) == "rank 1 was killed by SIGKILL"


def test_a_frozen_rank_does_not_keep_the_others_busy_for_ever(tmp_path: Path) -> None:
    """Rank 0 waits for it, asleep, until it is killed."""
    path = make_tiny_model(tmp_path, "llama").path
    said: queue.Queue[str] = queue.Queue()
    with group_of(path, 2) as (group, runner):
        group.when_lost(said.put)
        driver = Driver(runner)
        driver.add("a", list(range(40)), max_tokens=4)
        os.kill(group.pids[0], signal.SIGSTOP)
        before = os.times()
        threading.Timer(1.0, os.kill, (group.pids[0], signal.SIGKILL)).start()
        with pytest.raises(RankLost):
            driver.run()
        used = os.times().user + os.times().system - before.user - before.system
        assert used < 0.5, f"{used} s of a second spent waiting"


def test_followers_end_with_the_group(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path, "llama").path
    with group_of(path, 2) as (group, _):
        members = list(group.pids)
    for pid in members:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_follower_that_cannot_start_says_why(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path, "llama").path
    config = config_of(path, 2)
    (path / "model.safetensors").rename(tmp_path / "elsewhere")
    with (
        RankGroup(config, PROGRAM) as group,
        pytest.raises(UnsupportedModel, match=r"rank 1: .* has neither model.safetensors"),
    ):
        group.wait_ready()
    with (
        RankGroup(config, ("false",)) as group,
        pytest.raises(RankLost, match="rank 1 ended with 1 while it started"),
    ):
        group.wait_ready()


def test_numbers_of_ranks_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path, "llama").path
    with pytest.raises(
        ConfigError, match="3 does not divide 4 query and 2 KV heads; 1, 2, 4 would"
    ):
        RankGroup(config_of(path, 3), PROGRAM)


@pytest.mark.parametrize("codec", CODECS)
def test_pages_of_ranks_are_parts_of_the_page(tmp_path: Path, codec: str) -> None:
    path = make_tiny_model(tmp_path, "llama", num_key_value_heads=4).path
    config = config_of(path, 3, kv_codec=codec)
    model = config.load_model()
    whole = config.layout(model)
    parts = [config.rank_layout(model, rank) for rank in range(3)]
    assert [part.num_kv_heads for part in parts] == [2, 1, 1]
    for kind in PageKind:
        assert {part.record_bytes(kind) for part in parts} == {whole.record_bytes(kind)}
        assert sum(part.page_bytes(kind) for part in parts) == whole.page_bytes(kind)


def test_commands_travel_as_they_are() -> None:
    numbers = np.arange(12, dtype=np.int64).reshape(2, 6)
    tokens = np.array([3, 1], dtype=np.int32)
    sent = Forward(
        tokens, tokens, numbers, numbers, tokens.reshape(1, 2), None, numbers[0], numbers[1], 7
    )
    found = unpack_command(pack_command(sent))
    assert isinstance(found, Forward)
    assert found.num_layers is None
    tag = unpack_command(
        pack_command(Tag(PageKind.PACKED, numbers[0], np.zeros((6, 64), np.uint8)))
    )
    assert isinstance(tag, Tag)
    assert tag.kind is PageKind.PACKED
    for name in ("token_ids", "positions", "items", "runs", "tables", "unread_rows"):
        value, other = getattr(found, name), getattr(sent, name)
        assert value.dtype == other.dtype
        assert np.array_equal(value, other)
