"""Drawing without a sort, interpreted, against the sampler that sorts."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.sampler import choose_on_device, draw, draw_on_device, sample
from tests.engine.test_sampler import logits_of, params, rows_of


def both(logits: Tensor, *each: Any, position: int = 7) -> tuple[list[int], list[int]]:
    rows = rows_of(*each, vocab=logits.shape[1], position=position)
    which = np.arange(len(logits))
    return draw_on_device(logits, which, rows).tolist(), draw(logits, which, rows).tolist()


OPTIONS = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**64 - 1),
        "temperature": st.sampled_from([1e-5, 0.3, 1.0, 2.0, 100.0]),
        "top_p": st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.3, 1e-6, 0.0]),
        "top_k": st.sampled_from([0, 1, 2, 5, 40, 1200, 1500, 5000]),
        "min_p": st.sampled_from([0.0, 0.0, 0.05, 0.5, 1.0]),
    }
)


ROW = (
    OPTIONS,
    st.integers(0, 10**6),
    st.sampled_from([40, 1000, 1500]),
    st.sampled_from([0.01, 3.0, 30.0]),
    st.booleans(),
)


def check(options: dict[str, Any], seed: int, vocab: int, scale: float, has_ties: bool) -> None:
    logits = logits_of(seed, 1, vocab, scale)
    if has_ties:
        logits = (logits * 2 / scale).round() * scale / 2
        logits[:, ::7] = -torch.inf
        logits[:, 3] = 0.0
    found, wanted = both(logits, params(**options))
    assert found == wanted


@settings(print_blob=True, deadline=None, max_examples=10)
@given(*ROW)
def test_a_row_draws_what_the_sorting_sampler_draws(
    options: dict[str, Any], seed: int, vocab: int, scale: float, has_ties: bool
) -> None:
    check(options, seed, vocab, scale, has_ties)


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(print_blob=True, deadline=None, max_examples=250)
@given(*ROW)
def test_many_rows_draw_what_the_sorting_sampler_draws(
    options: dict[str, Any], seed: int, vocab: int, scale: float, has_ties: bool
) -> None:
    check(options, seed, vocab, scale, has_ties)


@pytest.mark.parametrize(
    "options",
    [
        {"top_p": 0.5},
        {"top_k": 1050, "top_p": 0.9},
        {},
    ],
)
def test_equal_logits_are_kept_and_drawn_by_id(options: dict[str, Any]) -> None:
    logits = torch.zeros(2, 1100)
    found, wanted = both(logits, *[params(seed=seed, **options) for seed in range(2)])
    assert found == wanted


def test_weights_that_round_to_the_same_are_a_tie() -> None:
    """Logits that differ by less than their weights can show stand in the order of their ids."""
    logits = torch.full((4, 50), -1.0)
    logits[:, [7, 30]] = torch.tensor([1e-20, 2e-20])
    given_params = [params(seed=seed, top_k=1) for seed in range(4)]
    found, wanted = both(logits, *given_params)
    assert found == wanted == [7] * 4
    found, wanted = both(logits, *[params(seed=seed, top_k=2) for seed in range(4)])
    assert found == wanted
    assert set(found) == {7, 30}


def test_tokens_without_weight_are_never_drawn() -> None:
    logits = torch.full((2, 1100), -torch.inf)
    logits[:, 1050], logits[:, 20] = 1.0, 0.5
    for options in ({}, {"top_k": 10}):
        found, wanted = both(logits, *[params(seed=seed, **options) for seed in range(2)])
        assert found == wanted
        assert set(found) <= {20, 1050}


def test_a_step_is_chosen_on_the_device_as_on_a_cpu() -> None:
    """Greedy and drawn rows, and one whose logits are not finite, with one read of the device."""
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn((5, 300), generator=generator) * 3
    logits[3, 7] = torch.nan
    rows = rows_of(
        params(temperature=0.0),
        params(temperature=0.9, top_p=0.9, seed=5),
        params(temperature=1.2, top_k=20, seed=6),
        params(temperature=0.7, seed=7),
        params(temperature=0.8, min_p=0.1, seed=8),
        vocab=300,
    )
    wanted = sample(logits, rows)
    finite = torch.isfinite(logits.sum(dim=1))
    assert finite.tolist() == wanted.is_finite.tolist() == [True, True, True, False, True]
    tokens = choose_on_device(logits, finite, rows)
    assert tokens[finite].tolist() == wanted.token_ids[wanted.is_finite].tolist()
