"""The same bits everywhere: chunk size, batch, threads, and who computed the KV change nothing."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from common.codecs import CODECS
from common.pages import PageKind
from tests.engine.conftest import make_runner
from tests.engine.driver import Driver
from tests.engine.tiny_models import give_offsets, make_tiny_model

CHUNKS = (16, 64, 512)
BLOCK = 16


def edges(block: int, chunk: int) -> set[int]:
    """Prompt lengths at the edges of blocks and chunks."""
    around = {1, block - 1, block, block + 1, chunk - 1, chunk, chunk + 1}
    return around | {2 * block, 3 * block + 1, 2 * chunk}


LENGTHS = sorted(set().union(*(edges(BLOCK, chunk) for chunk in CHUNKS)))


def prompt_of(num_tokens: int, vocab_size: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(num_tokens).integers(0, vocab_size, num_tokens)]


class Outcome:
    """What a request was answered with: ids, logits, and the bytes of its pages."""

    def __init__(self, driver: Driver, key: str) -> None:
        self.tokens = driver.tokens[key]
        self.logits = np.stack(driver.logits[key]).view(np.int32)
        self.pages = driver.pages(key)

    def assert_equals(self, other: "Outcome", what: str) -> None:
        assert self.tokens == other.tokens, what
        assert np.array_equal(self.logits, other.logits), what
        assert self.pages == other.pages, what


def in_batch(
    driver: Driver, lengths: Iterable[int], chunk: int, max_tokens: int = 8
) -> dict[int, Outcome]:
    vocab_size = driver.runner.config.vocab_size
    for length in lengths:
        driver.add(str(length), prompt_of(length, vocab_size), max_tokens=max_tokens)
    driver.run(chunk_tokens=chunk)
    found = {length: Outcome(driver, str(length)) for length in lengths}
    for length in lengths:
        driver.finish(str(length))
    return found


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Grouped heads, biases and QK-norm would hide nothing: Qwen2 has the biases, the demo model
    the groups. Both have offsets.
    """
    path = make_tiny_model(tmp_path_factory.mktemp("qwen2"), "qwen2").path
    give_offsets(path)
    return path


@pytest.mark.parametrize("codec", ["fp8_e3m4", "int4", "fp32"])
def test_chunk_size_and_company_change_nothing(path: Path, codec: str) -> None:
    wanted = in_batch(Driver(make_runner(path, kv_codec=codec)), LENGTHS, chunk=512)
    for chunk in CHUNKS:
        driver = Driver(make_runner(path, kv_codec=codec, num_threads=2))
        for length in LENGTHS:
            found = in_batch(driver, [length], chunk)[length]
            found.assert_equals(wanted[length], f"{length} tokens alone in chunks of {chunk}")
        for length, found in in_batch(driver, LENGTHS, chunk).items():
            found.assert_equals(wanted[length], f"{length} tokens among others, chunks of {chunk}")


def test_block_size_32_too(path: Path) -> None:
    lengths = sorted(edges(32, 64))
    wanted = in_batch(Driver(make_runner(path, block_size=32)), lengths, chunk=512)
    for chunk in (32, 64, 96):
        for length, found in in_batch(
            Driver(make_runner(path, block_size=32)), lengths, chunk
        ).items():
            found.assert_equals(wanted[length], f"{length} tokens in chunks of {chunk}")


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("length", [1, 15, 16, 30, 31, 32, 50])
def test_prefill_writes_the_bytes_that_decode_wrote(path: Path, codec: str, length: int) -> None:
    """A request moved after 40 tokens: its KV computed again as a prompt is the same, byte for
    byte.
    """
    driver = Driver(make_runner(path, kv_codec=codec))
    prompt = prompt_of(length, driver.runner.config.vocab_size)
    driver.add("decoded", prompt, max_tokens=41)
    driver.run(chunk_tokens=16)
    so_far = prompt + driver.tokens["decoded"][:-1]
    driver.add("prefilled", so_far, max_tokens=1)
    driver.run(chunk_tokens=64)
    assert driver.tokens["prefilled"] == driver.tokens["decoded"][-1:]
    assert np.array_equal(driver.logits["prefilled"][0], driver.logits["decoded"][-1])
    assert driver.pages("prefilled") == driver.pages("decoded")


@pytest.mark.parametrize("codec", ["fp8_e3m4", "int8", "int4", "bf16"])
def test_pages_hold_no_bytes_of_earlier_tenants(path: Path, codec: str) -> None:
    """Pools full of NaN give the same pages as fresh ones: unused slots are zeroed, and stale
    bytes never reach a result.
    """
    fresh = in_batch(Driver(make_runner(path, kv_codec=codec)), LENGTHS, chunk=64)
    driver = Driver(make_runner(path, kv_codec=codec))
    layout = driver.runner.layout
    packed, exact = (driver.runner.pool.records(kind) for kind in PageKind)
    packed[:, :, : layout.scales_offset + layout.scales_bytes] = 0xFF
    exact[:, :, : layout.payload_bytes(PageKind.EXACT) // layout.num_kv_heads] = 0xFF
    for length, found in in_batch(driver, LENGTHS, chunk=64).items():
        found.assert_equals(fresh[length], f"{length} tokens in used pages")


def test_demo_model(demo_model: Path) -> None:
    """Real weights, groups of three heads: edges of block and chunk, alone and together, on one
    thread and on two.
    """
    lengths = [1, 16, 17, 63, 64, 65, 129]
    wanted = in_batch(Driver(make_runner(demo_model)), lengths, chunk=128, max_tokens=5)
    driver = Driver(make_runner(demo_model, num_threads=2))
    for chunk in (16, 64):
        for length, found in in_batch(driver, lengths, chunk, max_tokens=5).items():
            found.assert_equals(wanted[length], f"{length} tokens in chunks of {chunk}")
    for length in (17, 65):
        found = in_batch(driver, [length], 128, max_tokens=5)[length]
        found.assert_equals(wanted[length], f"{length} tokens alone")


def test_self_test_passes_and_leaves_no_trace(path: Path) -> None:
    runner = make_runner(path)
    runner.self_test()
    assert not runner.pool.packed.any()
    assert not runner.pool.exact.any()
