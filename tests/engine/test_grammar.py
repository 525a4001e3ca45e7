"""Masks, bad words and scores in the sampler, and the table of matchers behind the masks."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from llguidance import LLMatcher
from tokenizers import Tokenizer

from common.types import SamplingParams
from engine.extras import Biases, Extras
from engine.grammar import CompiledCache, GrammarTable, TokenMasks
from engine.sampler import SamplingRows, sample, score

VOCAB = 49152
EOS = 2


def rows_of(count: int, **extras: Extras) -> SamplingRows:
    """Greedy rows; `extras` by `row<number>`."""
    zeros = np.zeros(count, dtype=np.int64)
    return SamplingRows(
        temperature=np.zeros(count),
        top_k=zeros,
        top_p=np.ones(count),
        min_p=np.zeros(count),
        seed=np.zeros(count, dtype=np.uint64),
        position=zeros,
        num_output_tokens=zeros,
        num_logprobs=zeros - 1,
        extras={int(name.removeprefix("row")): value for name, value in extras.items()},
    )


def bits(*allowed: int, vocab: int) -> np.ndarray:
    found = np.zeros(-(-vocab // 32) * 32, dtype=bool)
    found[list(allowed)] = True
    return np.packbits(found, bitorder="little").view(np.int32)


def test_masked_rows_take_the_best_of_what_is_allowed() -> None:
    logits = torch.arange(70, dtype=torch.float32).repeat(3, 1)
    masks = TokenMasks(
        rows=np.array([0, 2]), bits=np.stack([bits(3, 40, vocab=70), bits(69, vocab=70)])
    )
    before = logits.clone()
    assert sample(logits, rows_of(3), masks).token_ids.tolist() == [40, 69, 69]
    assert torch.equal(logits, before)


def test_the_grammar_rules_over_what_else_forbids() -> None:
    params = SamplingParams(max_tokens=9, min_tokens=9, stop_token_ids=(EOS,))
    none = np.zeros(0, dtype=np.int32)
    extras = Extras.of(params, none, none, 70, "cpu")
    assert extras is not None
    logits = torch.arange(70, dtype=torch.float32).repeat(1, 1)
    assert sample(logits, rows_of(1, row0=extras)).token_ids.tolist() == [69]
    only_end = TokenMasks(rows=np.array([0]), bits=bits(EOS, vocab=70)[None])
    assert sample(logits, rows_of(1, row0=extras), only_end).token_ids.tolist() == [EOS]


def test_bad_words_are_banned_after_their_beginning_only() -> None:
    params = SamplingParams(max_tokens=9, bad_words=((69,), (7, 8, 68)))
    none = np.zeros(0, dtype=np.int32)
    extras = Extras.of(params, none, np.array([7], dtype=np.int32), 70, "cpu")
    assert extras is not None
    logits = torch.arange(70, dtype=torch.float32).repeat(1, 1)
    assert sample(logits, rows_of(1, row0=extras)).token_ids.tolist() == [68]
    extras.record(8)
    assert sample(logits, rows_of(1, row0=extras)).token_ids.tolist() == [67]
    extras.record(9)
    assert sample(logits, rows_of(1, row0=extras)).token_ids.tolist() == [68]


def test_scores_of_a_prompt() -> None:
    logits = torch.randn(130, 70, generator=torch.Generator().manual_seed(3))
    targets = np.arange(130, dtype=np.int32) % 70
    found = score(logits, targets, 4)
    expected = torch.log_softmax(logits, dim=1)
    own = expected[torch.arange(130), torch.from_numpy(targets).long()]
    assert np.array_equal(np.frombuffer(found.logprobs, dtype="<f4"), own.numpy())
    ranks = (expected > own[:, None]).sum(dim=1) + 1
    assert np.frombuffer(found.ranks, dtype="<i4").tolist() == ranks.tolist()
    top = np.frombuffer(found.top_logprobs, dtype="<f4").reshape(130, 4)
    assert np.array_equal(top, expected.topk(4).values.numpy())


@pytest.fixture
def table(demo_model: Path) -> GrammarTable:
    return GrammarTable(demo_model / "tokenizer.json", vocab_size=VOCAB, eos_token_ids=[EOS])


def allowed(table: GrammarTable, key: str) -> set[int]:
    pending = table.begin([key])
    assert pending is not None
    masks = pending.masks([1])
    return set(np.flatnonzero(np.unpackbits(masks.bits.view(np.uint8), bitorder="little")).tolist())


def test_a_matcher_follows_its_output_and_is_rebuilt_from_it(
    table: GrammarTable, demo_model: Path
) -> None:
    tokenizer = Tokenizer.from_file(str(demo_model / "tokenizer.json"))
    grammar = LLMatcher.grammar_from_regex("(abc|abd)x")
    a, b, c, d, x, ab = (tokenizer.token_to_id(text) or 0 for text in [*"abcdx", "ab"])
    table.start("one", grammar, [])
    assert {a, ab} <= allowed(table, "one")
    for token in (a, b):
        table.record("one", token)
    table.start("two", grammar, [a, b])
    assert allowed(table, "one") == allowed(table, "two")
    assert {c, d} <= allowed(table, "two")
    for token in (c, x):
        table.record("two", token)
    assert allowed(table, "two") == {EOS}
    assert not table.has_failed("two")
    table.record("two", a)
    assert table.has_failed("two")
    table.drop("one")
    table.drop("two")
    assert len(table) == 0
    assert table.begin(["one"]) is None


def test_a_grammar_that_cannot_be_used_fails_its_output(table: GrammarTable) -> None:
    table.start("one", LLMatcher.grammar_from_regex("a(b"), [])
    assert table.has_failed("one")
    assert table.failure("one")


def test_a_grammar_without_an_end_says_why(table: GrammarTable) -> None:
    grammar = LLMatcher.grammar_from_lark("start: start")
    assert not LLMatcher.validate_grammar(grammar)  # it compiles
    table.start("one", grammar, [])
    pending = table.begin(["one"])
    if pending is not None:
        pending.masks([1])
    assert table.has_failed("one")
    assert 0 < len(table.failure("one")) <= 300


def test_masks_are_repeated_for_the_outputs_of_a_prompt(table: GrammarTable) -> None:
    grammar = LLMatcher.grammar_from_regex("a+")
    table.start("one", grammar, [])
    pending = table.begin(["other", "one", "last"])
    assert pending is not None
    masks = pending.masks([2, 3, 1])
    assert masks.rows.tolist() == [2, 3, 4]
    assert len(masks.bits) == 3


def test_outputs_of_one_call_share_their_bias_on_the_device() -> None:
    biases, none = Biases(), np.zeros(0, dtype=np.int32)
    params = SamplingParams(max_tokens=9, logit_bias=((3, 1.5), (69, -2.0), (70, 9.0)))

    def extras(params: SamplingParams) -> Extras:
        found = Extras.of(params, none, none, 70, "cpu", biases)
        assert found is not None
        return found

    first, second = extras(params), extras(dataclasses.replace(params, seed=5))
    assert first.bias is second.bias
    assert first.bias.ids.tolist() == [3, 69]
    assert first.bias.values.tolist() == [1.5, -2.0]
    row = torch.zeros(70)
    second.apply(row, 0)
    assert {i: row[i].item() for i in torch.nonzero(row).flatten().tolist()} == {3: 1.5, 69: -2.0}
    same = extras(
        dataclasses.replace(params, logit_bias=(*params.logit_bias[:2], params.logit_bias[2]))
    )
    assert same.bias is not first.bias  # equal, but another call's
    for number in range(20):
        extras(dataclasses.replace(params, logit_bias=((number, 1.0),)))
    assert len(biases) <= 6  # the two that are used, and the latest


def test_compiled_grammars_are_kept_by_their_bytes() -> None:
    cache: CompiledCache = CompiledCache(max_bytes=100)
    matchers = [object() for _ in range(4)]
    for number, matcher in enumerate(matchers[:3]):
        cache.put(str(number), matcher, 40)  # type: ignore[arg-type]
    assert [cache.get(str(n)) for n in range(3)] == [None, *matchers[1:3]]
    cache.get("1")
    cache.put("3", matchers[3], 40)  # type: ignore[arg-type]
    assert [cache.get(str(n)) for n in range(4)] == [None, matchers[1], None, matchers[3]]
    cache.put("large", matchers[0], 1_000)  # type: ignore[arg-type]
    assert (len(cache), cache.num_bytes) == (1, 1_000)
    assert cache.get("large") is matchers[0]
    cache.put("large", matchers[1], 10)  # type: ignore[arg-type]
    assert (len(cache), cache.num_bytes) == (1, 10)


def test_a_grammar_is_compiled_beside_the_steps_and_once(table: GrammarTable) -> None:
    grammar = LLMatcher.grammar_from_regex("beside[0-9]+")
    matcher = table.prepare(grammar).result(30)
    assert table.prepare(grammar).result(30) is matcher
    assert table.compiled.get(grammar) is matcher
    num_bytes = table.compiled.num_bytes
    assert num_bytes >= 64 * 1024
    table.start("one", grammar, [])
    assert not table.has_failed("one")
    assert table.compiled.num_bytes == num_bytes
