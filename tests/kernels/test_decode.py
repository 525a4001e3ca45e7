"""Decode attention split over the context: what a row's result may depend on, and what not."""

import torch

from engine.kernels import reference
from engine.kernels.gpu.decode import Partials, decode_attention
from tests.kernels.test_kernels import GROUP, HEADS, WIDTH, Step, make_step


def attend(step: Step, runs: torch.Tensor, max_runs: int, tables: torch.Tensor) -> torch.Tensor:
    out = torch.full_like(step.q, 7.0)
    partials = Partials.allocate(max_runs, HEADS * GROUP, WIDTH, step.q.device)
    partials.sums.fill_(torch.nan)
    partials.stats.fill_(torch.nan)
    pages = step.pool.packed, step.pool.exact, step.layout, step.offsets, 1
    decode_attention(step.q, step.k, step.v, runs, tables, *pages, partials, out)
    return out


def stored(codec: str) -> Step:
    step = make_step(codec, 16)
    pages = step.pool.packed, step.pool.exact, step.layout, step.offsets, 1
    reference.store(step.k, step.v, step.items, *pages)
    return step


def test_a_row_is_the_same_alone_in_company_and_with_a_wider_table() -> None:
    step = stored("fp8_e3m4")
    runs = step.runs[step.runs[:, 1] == 1]
    together = attend(step, runs, 16, step.tables)
    wide = torch.cat([step.tables, torch.full_like(step.tables, 10**6)], dim=1)
    for index in range(len(runs)):
        row = int(runs[index, 0])
        alone = attend(step, runs[index : index + 1], 1, wide)
        assert torch.equal(alone[row], together[row])
        assert (alone[torch.arange(len(alone)) != row] == 7.0).all()


def test_runs_of_no_tokens_read_and_write_nothing() -> None:
    """What pads a captured step: pages and table rows that do not exist."""
    step = stored("int8")
    runs = step.runs[step.runs[:, 1] == 1]
    padding = torch.tensor([[10**7, 0, 10**7, 10**7, 10**7, 0]])
    padded = torch.cat([runs, padding, padding])
    assert torch.equal(attend(step, padded, 8, step.tables), attend(step, runs, 8, step.tables))


def test_a_chunk_of_one_token_finds_its_own_block_among_the_rows() -> None:
    step = stored("fp8_e3m4")
    row, count, position, table, _, _ = step.runs[1].tolist()
    last = count - 1  # in a block that the chunk opened: its rows before it are the step's own
    run = torch.tensor([[row + last, 1, position + last, table, -1, 0]])
    found = attend(step, run, 1, step.tables)[row + last]
    wanted = reference.attention(
        step.q, step.k, step.v, step.runs[1:2], step.tables, step.pool.packed, step.pool.exact,
        step.layout, step.offsets, 1,
    )[row + last]  # fmt: skip
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-4)
