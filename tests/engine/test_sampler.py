"""The sampler against plain torch and transformers, and its promise: no row looks at another."""

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from common.types import SamplingParams
from engine.extras import Extras
from engine.sampler import Sampled, SamplingRows, sample, uniform

VOCAB = 200


def params(**options: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 10} | options))


def rows_of(
    *each: SamplingParams,
    prompt: tuple[int, ...] = (1, 2, 3),
    output: tuple[int, ...] = (),
    position: int = 7,
    vocab: int = VOCAB,
) -> SamplingRows:
    arrays = np.array(prompt, dtype=np.int32), np.array(output, dtype=np.int32)
    found = {i: Extras.of(p, *arrays, vocab, "cpu") for i, p in enumerate(each)}
    return SamplingRows(
        temperature=np.array([p.temperature for p in each], dtype=np.float64),
        top_k=np.array([p.top_k for p in each]),
        top_p=np.array([p.top_p for p in each], dtype=np.float64),
        min_p=np.array([p.min_p for p in each], dtype=np.float64),
        seed=np.array([p.seed for p in each], dtype=np.uint64),
        position=np.full(len(each), position),
        num_output_tokens=np.full(len(each), len(output)),
        num_logprobs=np.array([-1 if p.logprobs is None else p.logprobs for p in each]),
        extras={i: extras for i, extras in found.items() if extras},
    )


def logits_of(seed: int, num_rows: int = 1, vocab: int = VOCAB, scale: float = 3.0) -> Tensor:
    return torch.randn((num_rows, vocab), generator=torch.Generator().manual_seed(seed)) * scale


def draws(logits: Tensor, num: int, **options: Any) -> Tensor:
    """How often each token comes, over `num` seeds."""
    each = [params(seed=seed, **options) for seed in range(num)]
    found = sample(logits.expand(num, -1).contiguous(), rows_of(*each, vocab=logits.shape[1]))
    return torch.bincount(torch.from_numpy(found.token_ids), minlength=logits.shape[1])


def kept(scores: Tensor) -> set[int]:
    return set(torch.isfinite(scores[0]).nonzero().flatten().tolist())


def tokens(found: Sampled) -> list[int]:
    return found.token_ids.tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"temperature": 1e-12},
        {"temperature": 1e-6, "top_p": 0.9},
        {"temperature": 1.0, "top_p": 1e-9},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 1.0, "min_p": 1.0},
        {"temperature": 2.0, "top_p": 0.0},
    ],
)
def test_these_are_greedy(options: dict[str, Any]) -> None:
    logits = logits_of(0, 50)
    found = sample(logits, rows_of(*[params(seed=i, **options) for i in range(50)]))
    assert tokens(found) == logits.argmax(dim=1).tolist()


def test_equal_logits_go_to_the_lowest_id_when_greedy() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[:, [9, 40, 150]] = 2.0
    found = sample(logits, rows_of(params(temperature=0.0), params(temperature=1.0, top_p=1e-9)))
    assert tokens(found) == [9, 9]


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.8])
def test_draws_follow_the_distribution(temperature: float) -> None:
    """Chi-square over 20,000 seeds; the bound is far out in the tail for 39 degrees of freedom."""
    logits, num = logits_of(1, vocab=40, scale=1.0), 20_000
    counts = draws(logits, num, temperature=temperature).double()
    expected = torch.softmax(logits[0].double() / temperature, dim=0) * num
    assert float(((counts - expected) ** 2 / expected).sum()) < 90


def test_filtered_draws_follow_the_distribution() -> None:
    logits, num = logits_of(2, vocab=40, scale=1.0), 20_000
    counts = draws(logits, num, top_k=20, top_p=0.8).double()
    warped = transformers.TopKLogitsWarper(20)(None, logits.clone())
    warped = transformers.TopPLogitsWarper(0.8)(None, warped)
    expected = torch.softmax(warped[0].double(), dim=0) * num
    chosen = expected > 0
    assert counts[~chosen].sum() == 0
    assert float(((counts - expected)[chosen] ** 2 / expected[chosen]).sum()) < 60


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("options", "warper"),
    [
        ({"top_k": 7}, transformers.TopKLogitsWarper(7)),
        ({"top_p": 0.6}, transformers.TopPLogitsWarper(0.6)),
        ({"top_p": 0.95}, transformers.TopPLogitsWarper(0.95)),
        ({"min_p": 0.1}, transformers.MinPLogitsWarper(0.1)),
    ],
)
def test_filters_keep_what_transformers_keeps(
    seed: int, options: dict[str, Any], warper: Any
) -> None:
    """A hot temperature makes every kept token come up."""
    logits = logits_of(seed, vocab=60, scale=1.5)
    counts = draws(logits, 4000, **options)
    assert set(counts.nonzero().flatten().tolist()) == kept(warper(None, logits.clone()))


def test_flat_distributions_need_the_whole_vocabulary() -> None:
    """top_p over more than the first 1,024 candidates."""
    logits = torch.zeros(1, 5000)
    counts = draws(logits, 3000, top_p=0.5)
    assert set(counts.nonzero().flatten().tolist()) <= set(range(2500))
    assert (counts > 0).sum() > 1500
    counts = draws(logits, 3000, top_k=1024)
    assert 900 < (counts > 0).sum() <= 1024


def adjusted_argmax(logits: Tensor, **options: Any) -> int:
    context = {key: options.pop(key) for key in ("prompt", "output") if key in options}
    given = params(temperature=0.0, **options)
    return tokens(sample(logits, rows_of(given, **context)))[0]


@pytest.mark.parametrize("penalty", [1.3, 0.7, 4.0])
def test_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    prompt, output = (3, 5, 5, 8), (8, 11, 12)
    processor = transformers.RepetitionPenaltyLogitsProcessor(penalty)
    for seed in range(30):
        logits = logits_of(seed, vocab=VOCAB, scale=0.5)
        ids = torch.tensor([[*prompt, *output]])
        wanted = int(processor(ids, logits.clone()).argmax())
        found = adjusted_argmax(logits, repetition_penalty=penalty, prompt=prompt, output=output)
        assert found == wanted


def test_presence_and_frequency_look_at_the_output_only() -> None:
    prompt, output = (3, 3, 3), (5, 6, 6)
    for seed in range(30):
        logits = logits_of(seed, scale=0.5)
        wanted = logits.clone()
        wanted[0, 5] -= 0.9 + 0.4
        wanted[0, 6] -= 0.9 + 2 * 0.4
        found = adjusted_argmax(
            logits, presence_penalty=0.9, frequency_penalty=0.4, prompt=prompt, output=output
        )
        assert found == int(wanted.argmax())


def test_penalties_count_what_is_generated_meanwhile() -> None:
    extras = Extras.of(
        params(presence_penalty=2.0), np.array([1]), np.array([], dtype=np.int32), VOCAB, "cpu"
    )
    assert extras is not None
    row = torch.zeros(VOCAB)
    extras.apply(row, 0)
    assert not row.any()
    extras.record(9)
    extras.apply(row, 1)
    assert row.nonzero().tolist() == [[9]]


def test_bias_and_minimum_length() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 4], logits[0, 6] = 3.0, 2.0
    assert adjusted_argmax(logits) == 4
    assert adjusted_argmax(logits, logit_bias=((7, 100.0),)) == 7
    assert adjusted_argmax(logits, logit_bias=((4, -100.0), (10**6, 5.0))) == 6
    waits = {"min_tokens": 2, "stop_token_ids": (4, 10**6)}
    assert adjusted_argmax(logits, **waits) == 6
    assert adjusted_argmax(logits, output=(1,), **waits) == 6
    assert adjusted_argmax(logits, output=(1, 1), **waits) == 4


def test_logits_are_left_as_they_were() -> None:
    logits = logits_of(3, 2)
    before = logits.clone()
    sample(logits, rows_of(params(repetition_penalty=2.0), params(top_k=3, logprobs=2)))
    assert torch.equal(logits, before)


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = logits_of(4, 2)
    given = params(temperature=0.3, repetition_penalty=1.9, logprobs=5, seed=3)
    found = sample(logits, rows_of(given, params(logprobs=0)))
    wanted = torch.log_softmax(logits, dim=1)
    first, second = found.logprobs
    assert first is not None
    assert second is not None
    assert first.logprob == float(wanted[0, int(found.token_ids[0])])
    assert first.top_ids == tuple(wanted[0].topk(5).indices.tolist())
    assert second.top_ids == ()


def test_rows_that_are_not_finite_are_reported_and_hurt_nobody() -> None:
    logits = logits_of(5, 4)
    logits[1, 3], logits[2, 9] = torch.nan, torch.inf
    each = [params(seed=i) for i in range(4)]
    found = sample(logits, rows_of(*each))
    assert found.is_finite.tolist() == [True, False, False, True]
    alone = sample(logits[3:], rows_of(each[3]))
    assert found.token_ids[3] == alone.token_ids[0]


OPTIONS = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**64 - 1),
        "temperature": st.sampled_from([0.0, 1e-12, 0.5, 1.0, 2.0]),
        "top_p": st.sampled_from([1.0, 0.9, 0.3, 1e-6]),
        "top_k": st.sampled_from([0, 1, 5, 500]),
        "min_p": st.sampled_from([0.0, 0.05, 0.5]),
        "repetition_penalty": st.sampled_from([1.0, 1.3]),
        "presence_penalty": st.sampled_from([0.0, 0.5]),
        "logprobs": st.sampled_from([None, 0, 3]),
    }
)


@settings(print_blob=True, deadline=None, max_examples=60)
@given(st.lists(OPTIONS, min_size=2, max_size=8), st.integers(0, 10**6))
def test_a_row_gives_the_same_alone_and_in_company(each: list[dict[str, Any]], seed: int) -> None:
    logits = logits_of(seed, len(each), vocab=1500)
    given_params = [params(**options) for options in each]
    context: dict[str, Any] = {"prompt": (1, 2, 3), "output": (4, 4), "vocab": 1500}
    together = sample(logits, rows_of(*given_params, **context))
    for i, one in enumerate(given_params):
        alone = sample(logits[i : i + 1], rows_of(one, **context))
        assert alone.token_ids[0] == together.token_ids[i]
        assert alone.logprobs[0] == together.logprobs[i]


def test_random_numbers_depend_on_seed_and_position_only() -> None:
    seeds = np.array([0, 1, 2**64 - 1, 7, 7], dtype=np.uint64)
    positions = np.array([0, 0, 5, 5, 6])
    found = uniform(seeds, positions)
    assert len(set(found.tolist())) == 5
    assert ((found > 0) & (found < 1)).all()
    assert found[3] == uniform(seeds[3:4], positions[3:4])[0]
    many = uniform(np.arange(100_000, dtype=np.uint64), np.zeros(100_000, dtype=np.int64))
    assert abs(many.mean() - 0.5) < 0.005
    assert abs(np.corrcoef(many[:-1], many[1:])[0, 1]) < 0.02
    along = uniform(np.zeros(100_000, dtype=np.uint64), np.arange(100_000))
    assert abs(np.corrcoef(along[:-1], along[1:])[0, 1]) < 0.02
