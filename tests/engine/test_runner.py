"""The runner carries out plans: outputs, tags, landings, failures."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from common.errors import ConfigError
from common.pages import PageKind, PageTag, checksum
from common.scheduling.plan import LandingMove, OutputStart, PrefillChunk, StepPlan, TagOrder
from common.types import OutputKey, SamplingParams, output_seed
from engine.grammar import GrammarTable
from engine.rope import rope_tables
from engine.runner import ModelRunner, Runner
from tests.engine.conftest import MakeRunner, make_runner
from tests.engine.driver import Driver
from tests.engine.tiny_models import make_tiny_model

PROMPT = [int(t) for t in np.random.default_rng(1).integers(0, 331, 40)]
HASH = bytes(range(16))


def started(prompt: list[int], key: str = "a", **sampling: object) -> OutputStart:
    options: dict[str, object] = {"max_tokens": 8, "temperature": 0.0} | sampling
    return OutputStart(
        key=key,
        token_ids=np.array(prompt, dtype=np.int32),
        num_prompt_tokens=len(prompt),
        sampling=SamplingParams(**options),  # type: ignore[arg-type]
    )


def chunk(prompt: list[int], key: str = "a", num_outputs: int = 1, first: int = 0) -> PrefillChunk:
    """The whole prompt in one chunk, in pages from `first` on."""
    num_packed = max(-(-len(prompt) // 16) - 1, 0)
    return PrefillChunk(
        key=key,
        start=0,
        num_tokens=len(prompt),
        block_ids=(first, *range(first, first + num_packed)),
        tail=first + 1,
        num_outputs=num_outputs,
    )


def order(kind: PageKind, block_id: int, **changes: object) -> TagOrder:
    fields: dict[str, object] = {
        "kind": kind,
        "block_id": block_id,
        "content_hash": HASH,
        "num_tokens": 16,
        "generation": 3,
    }
    return TagOrder(**(fields | changes))  # type: ignore[arg-type]


def move(**changes: object) -> LandingMove:
    fields: dict[str, object] = {
        "kind": PageKind.PACKED,
        "slot": 0,
        "block_id": 5,
        "content_hash": HASH,
        "num_tokens": 16,
        "incarnation": 77,
        "generation": 3,
    }
    return LandingMove(**(fields | changes))  # type: ignore[arg-type]


@pytest.fixture
def runner(tiny_runner: MakeRunner) -> ModelRunner:
    return tiny_runner(incarnation=77, num_landing_packed=4, num_landing_exact=4)


def test_it_is_a_runner(runner: ModelRunner) -> None:
    def takes(anything: Runner) -> Runner:
        return anything

    assert len(takes(runner).layout_fingerprint) == 16


def test_result_columns_stand_in_plan_order(runner: ModelRunner) -> None:
    plan = StepPlan(
        step=4,
        starts=(started(PROMPT), started(PROMPT[:20], "b"), started(PROMPT[:5], "c")),
        chunks=(chunk(PROMPT), chunk(PROMPT[:20], "b", num_outputs=0, first=10)),
    )
    result = runner.execute(plan)
    assert (result.step, result.keys, result.failed) == (4, ("a",), ())
    assert len(result.token_ids) == len(result.logprobs) == 1
    plan = StepPlan(step=5, chunks=(chunk(PROMPT[:5], "c", first=20),), decodes=("a",))
    assert runner.execute(plan).keys == ("c", "a")


def test_several_first_tokens_have_seeds_of_their_own(tiny_runner: MakeRunner) -> None:
    params = SamplingParams(max_tokens=8, temperature=1.0, seed=9, n=3)
    start = replace(started(PROMPT), sampling=params, output_index=1)
    runner = tiny_runner()
    plan = StepPlan(step=0, starts=(start,), chunks=(chunk(PROMPT, num_outputs=3),))
    together = runner.execute(plan)
    assert together.keys == ("a", "a", "a")
    for index, token in enumerate(together.token_ids):
        alone = replace(started(PROMPT), sampling=params, output_index=1 + index)
        plan = StepPlan(step=0, starts=(alone,), chunks=(chunk(PROMPT),))
        assert tiny_runner().execute(plan).token_ids == (token,)
    assert len({output_seed(9, i) for i in range(3)}) == 3


def test_outputs_part_ways_after_a_copy_of_the_tail(tiny_runner: MakeRunner) -> None:
    """The second output of a prompt starts in a copy of the open page and decodes as if alone."""
    runner = tiny_runner()
    result = runner.execute(
        StepPlan(step=0, starts=(started(PROMPT),), chunks=(chunk(PROMPT, num_outputs=2),))
    )
    second = replace(
        started([*PROMPT, result.token_ids[1]], "b"),
        num_prompt_tokens=len(PROMPT),
        block_ids=(0, 0, 9),
        tail=7,
    )
    plan = StepPlan(step=1, copies=((1, 7),), starts=(second,), decodes=("a", "b"))
    tokens = [runner.execute(plan).token_ids]
    tokens += [runner.execute(StepPlan(step=2, decodes=("a", "b"))).token_ids for _ in range(7)]
    assert all(a == b for a, b in tokens)


def test_dropped_outputs_are_forgotten_and_their_keys_free(runner: ModelRunner) -> None:
    plan = StepPlan(step=0, starts=(started(PROMPT),), chunks=(chunk(PROMPT),))
    first = runner.execute(plan)
    assert runner.num_outputs == 1
    again = runner.execute(replace(plan, drops=("a", "never started")))
    assert again.token_ids == first.token_ids
    runner.execute(StepPlan(step=0, drops=("a",)))
    assert runner.num_outputs == 0


def test_many_outputs_make_the_table_grow(tiny_runner: MakeRunner) -> None:
    runner = tiny_runner(num_exact=300)
    keys = tuple(f"k{i}" for i in range(150))
    runner.execute(
        StepPlan(
            step=0,
            starts=tuple(started(PROMPT[:3], key) for key in keys),
            chunks=tuple(chunk(PROMPT[:3], key, first=i) for i, key in enumerate(keys)),
        )
    )
    result = runner.execute(StepPlan(step=1, decodes=keys))
    assert result.keys == keys
    assert len(set(result.token_ids)) == 1


def test_tags_say_what_a_page_is(runner: ModelRunner) -> None:
    plan = StepPlan(
        step=0,
        starts=(started(PROMPT),),
        chunks=(chunk(PROMPT),),
        tags=(order(PageKind.PACKED, 0), order(PageKind.EXACT, 1, num_tokens=8)),
    )
    runner.execute(plan)
    packed, exact = (runner.pool.records(kind) for kind in PageKind)
    assert len(packed[0]) == runner.config.num_kv_heads > 1
    for page, num_tokens in ((packed[0], 16), (exact[1], 8)):
        for head, record in enumerate(page):
            tag = PageTag.unpack(record[-64:].numpy().tobytes())
            assert tag == PageTag(
                content_hash=HASH,
                fingerprint=runner.layout_fingerprint,
                num_tokens=num_tokens,
                head=head,
                incarnation=77,
                generation=3,
                checksum=checksum(record.numpy()),
            )
    runner.execute(StepPlan(step=1, clears=((PageKind.PACKED, 0),)))
    assert not packed[0, :, -64:].any()
    assert runner.pool.packed[0].any()


def landed(runner: ModelRunner) -> None:
    """A packed page and an exact page stand in the landing zone, as a pull brings them."""
    plan = StepPlan(
        step=0,
        starts=(started(PROMPT),),
        chunks=(chunk(PROMPT),),
        tags=(order(PageKind.PACKED, 0), order(PageKind.EXACT, 1, num_tokens=8)),
    )
    runner.execute(plan)
    runner.landing.packed[0] = runner.pool.packed[0]
    runner.landing.exact[2] = runner.pool.exact[1]


def test_landing_copies_pages_that_are_what_was_asked_for(runner: ModelRunner) -> None:
    landed(runner)
    exact = move(kind=PageKind.EXACT, slot=2, block_id=9, num_tokens=8)
    assert runner.land([move(), exact]).refusals == (None, None)
    packed, exact_pages = (runner.pool.records(kind) for kind in PageKind)
    assert torch.equal(packed[5, :, :-64], packed[0, :, :-64])
    assert torch.equal(exact_pages[9, :, :-64], exact_pages[1, :, :-64])
    assert not packed[5, :, -64:].any()
    assert not exact_pages[9, :, -64:].any()


@pytest.mark.parametrize(
    ("wanted", "named"),
    [
        (move(content_hash=bytes(16)), "content_hash"),
        (move(num_tokens=15), "num_tokens"),
        (move(incarnation=78), "incarnation"),
        (move(generation=4), "generation"),
        (move(slot=1), "magic"),
    ],
)
def test_landing_refuses_pages_that_are_not(
    runner: ModelRunner, wanted: LandingMove, named: str
) -> None:
    landed(runner)
    [refusal] = runner.land([wanted]).refusals
    assert refusal is not None
    assert refusal.reason.startswith(f"head 0: {named}")
    assert not runner.pool.packed[5].any()


@pytest.mark.parametrize("at", [0, 100, -65, -40, -20, -1])
def test_landing_refuses_a_page_with_any_flipped_bit(runner: ModelRunner, at: int) -> None:
    """The record with the bit does not land; those of other heads are as good as they were."""
    landed(runner)
    runner.landing.packed[0, at] ^= 4
    [refusal] = runner.land([move()]).refusals
    bad = 0 if at >= 0 else runner.config.num_kv_heads - 1
    assert refusal is not None
    assert refusal.reason.startswith(f"head {bad}: ")
    assert refusal.heads == (bad,)
    found, sent = (arena.records(PageKind.PACKED) for arena in (runner.pool, runner.landing))
    for head in range(runner.config.num_kv_heads):
        lands = torch.equal(found[5, head, :-64], sent[0, head, :-64])
        assert lands == (head != bad)
    assert not found[5, bad].any()


def test_landing_refuses_another_layout(tiny_runner: MakeRunner) -> None:
    runner, other = (
        tiny_runner(kv_codec=codec, incarnation=77, num_landing_packed=1, num_landing_exact=3)
        for codec in ("bf16", "fp8_e3m4")
    )
    landed(runner)
    assert other.layout_fingerprint != runner.layout_fingerprint
    runner.pages.origin = other.pages.origin
    [refusal] = runner.land([move()]).refusals
    assert refusal is not None
    assert refusal.reason.startswith("head 0: fingerprint")


def test_an_output_goes_on_from_landed_pages(tiny_runner: MakeRunner) -> None:
    """What a decode worker does: pages by landing, then the output starts with its first token."""
    source = Driver(tiny_runner())
    source.add("a", PROMPT, max_tokens=12)
    source.step()
    request = source.running["a"]
    runner = tiny_runner(num_landing_packed=2, num_landing_exact=2)
    runner.pool.exact[3, :-64] = source.runner.pool.exact[request.table[0], :-64]
    runner.pool.exact[4, :-64] = source.runner.pool.exact[request.tail, :-64]
    runner.pool.packed[8, :-64] = source.runner.pool.packed[request.table[1], :-64]
    start = replace(
        started([*PROMPT, *source.tokens["a"]]),
        num_prompt_tokens=len(PROMPT),
        block_ids=(3, 8, 11),
        tail=4,
    )
    source.run()
    found = list(runner.execute(StepPlan(step=0, starts=(start,), decodes=("a",))).token_ids)
    for step in range(1, 11):
        grown = (("a", 12),) if len(PROMPT) + step == 48 else ()
        found += runner.execute(StepPlan(step=step, grown=grown, decodes=("a",))).token_ids
    assert found == source.tokens["a"][1:]


def test_a_request_with_damaged_kv_fails_alone(tiny_runner: MakeRunner) -> None:
    driver = Driver(tiny_runner())
    driver.add("good", PROMPT, max_tokens=6)
    driver.add("bad", PROMPT[::-1], max_tokens=6)
    driver.step()
    scales = driver.runner.pool.packed[driver.running["bad"].table[1]]
    scales[: driver.runner.layout.scales_offset] = 0x7F  # NaN
    result = driver.step()
    assert result.failed == ("bad",)
    assert result.keys == ("good",)
    driver.run()
    alone = Driver(tiny_runner())
    alone.add("good", PROMPT, max_tokens=6)
    alone.run()
    assert driver.tokens["good"] == alone.tokens["good"]


class GivenUp(GrammarTable):
    """One whose matcher for `bad` has given up."""

    def __len__(self) -> int:
        return 1

    def begin(self, keys: Sequence[OutputKey]) -> None:
        return None

    def has_failed(self, key: OutputKey) -> bool:
        return key == "bad"

    def failure(self, key: OutputKey) -> str:
        return "too complex"


def test_a_request_whose_grammar_gives_up_fails_alone(tiny_runner: MakeRunner) -> None:
    driver = Driver(tiny_runner())
    driver.runner.grammars = GivenUp(Path("none"), vocab_size=1, eos_token_ids=[0])
    driver.add("good", PROMPT, max_tokens=2)
    driver.add("bad", PROMPT[::-1], max_tokens=2)
    result = driver.step()
    assert (result.keys, result.failed) == (("good",), ("bad",))
    assert result.failed_grammars == (("bad", "too complex"),)
    assert result.failure("bad").code == "grammar_failed"


def test_logprobs_come_when_asked_for(tiny_runner: MakeRunner) -> None:
    driver = Driver(tiny_runner())
    driver.add("a", PROMPT, max_tokens=3, logprobs=4)
    driver.add("b", PROMPT, max_tokens=3)
    result = driver.step()
    [logprobs, none] = result.logprobs
    assert none is None
    assert logprobs is not None
    wanted = torch.log_softmax(torch.from_numpy(driver.logits["a"][0]), dim=0).topk(4)
    assert logprobs.top_ids == tuple(wanted.indices.tolist())
    np.testing.assert_allclose(logprobs.top_logprobs, wanted.values.numpy(), rtol=1e-6)
    assert logprobs.logprob == logprobs.top_logprobs[0]


def test_bad_settings_are_explained(tiny_runner: MakeRunner) -> None:
    for options, named in (
        ({"kv_codec": "fp6"}, "fp6"),
        ({"block_size": 24}, "24"),
        ({"num_threads": 0}, "thread"),
        ({"dtype": "bfloat16"}, "float32"),
        ({"device": "tpu"}, "tpu"),
    ):
        with pytest.raises(ConfigError, match=named):
            tiny_runner(**options)
    with pytest.raises(ConfigError, match="too small"):
        tiny_runner(num_blocks=0, num_exact=1).self_test()


def test_t46_rotary_tables_are_as_long_as_a_request_can_get(tmp_path: Path) -> None:
    """A million positions cost nothing where neither --max-model-len nor the pool has room."""
    make_tiny_model(tmp_path, "llama", max_position_embeddings=1_024_000)
    pool = make_runner(tmp_path, num_blocks=200, num_exact=56)
    assert pool.config.max_position_embeddings == 256 * 16
    limited = make_runner(tmp_path, num_blocks=200, num_exact=56, max_model_len=2000)
    assert limited.config.max_position_embeddings == 2000
    small = make_runner(tmp_path, num_blocks=4, num_exact=4, max_model_len=16)
    assert small.config.max_position_embeddings == 1024
    [cos, _] = rope_tables(limited.config)
    assert cos.shape == (2016, 8)
