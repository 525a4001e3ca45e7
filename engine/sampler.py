"""From logits to tokens: one piece of code for first tokens and all others, on every worker.

Order, per row: minimum tokens, bad words and bias, penalties, the grammar's mask, then greedy, or
temperature, min_p, top_k, top_p and one draw. The draw uses one uniform number that depends only on
the output's seed and the token's absolute position, so the same request gives the same tokens in
any batch, on any worker, and after being moved. No row's arithmetic looks at another row, and a
step of greedy rows costs one argmax.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.types import PromptLogprobs, TokenLogprobs
from engine.extras import Extras
from engine.grammar import TokenMasks
from engine.transfers import arrival, fetched, sent

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy; dividing by them would only overflow."""

NUM_CANDIDATES = 1024
"""Most likely tokens that top_k and top_p look at first; a row that needs more sorts its whole
vocabulary.
"""

SCORED_AT_ONCE = 64
"""Prompt rows whose log-probabilities are in memory at the same time."""

ALIGN = 16
"""Logits that rows on a GPU are padded to a multiple of."""

_U64 = np.uint64


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRows:
    """Columns over the rows to be sampled, [num_rows] each; `extras` by row, for those that have
    them.
    """

    temperature: NDArray[np.float64]
    top_k: NDArray[np.int64]
    top_p: NDArray[np.float64]
    min_p: NDArray[np.float64]
    seed: NDArray[np.uint64]
    position: NDArray[np.int64]
    num_output_tokens: NDArray[np.int64]
    num_logprobs: NDArray[np.int64]
    """Alternatives wanted; -1 where no logprobs are."""
    extras: dict[int, Extras] = field(default_factory=dict)

    @classmethod
    def filtered(cls, count: int) -> "SamplingRows":
        """As most requests that sample ask for: temperature, top_k and top_p; each row with another
        seed.
        """
        numbers = np.arange(count, dtype=np.int64)
        return cls(
            temperature=np.full(count, 0.8),
            top_k=np.full(count, 50, dtype=np.int64),
            top_p=np.full(count, 0.95),
            min_p=np.zeros(count),
            seed=numbers.astype(np.uint64),
            position=numbers,
            num_output_tokens=numbers,
            num_logprobs=np.full(count, -1, dtype=np.int64),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    token_ids: NDArray[np.int64]
    is_finite: NDArray[np.bool_]
    """False where the logits hold a NaN or an infinity: that row's token means nothing."""
    logprobs: tuple[TokenLogprobs | None, ...]


class Choice:
    """The tokens of a step, on their way from the device: `sampled` waits for them, everything
    before that does not.
    """

    def __init__(
        self, tokens: Tensor, finite: Tensor, logprobs: Sequence["_RowLogprobs | None"]
    ) -> None:
        self.token_ids = tokens
        """[num_rows] int64, on the device"""
        self._tokens, self._finite = fetched(tokens), fetched(finite)
        self._logprobs = [None if row is None else row.fetched() for row in logprobs]
        self._arrival = arrival(tokens.device)

    def sampled(self) -> Sampled:
        """May be called by any thread, and again."""
        if self._arrival is not None:
            self._arrival.synchronize()
        return Sampled(
            token_ids=self._tokens.numpy(),
            is_finite=self._finite.numpy(),
            logprobs=tuple(None if row is None else row.as_told() for row in self._logprobs),
        )


@dataclass(frozen=True, slots=True)
class _RowLogprobs:
    """Of the token [1], and the most likely ones [num_top]."""

    own: Tensor
    top_ids: Tensor
    top: Tensor

    def fetched(self) -> "_RowLogprobs":
        return _RowLogprobs(fetched(self.own), fetched(self.top_ids), fetched(self.top))

    def as_told(self) -> TokenLogprobs:
        return TokenLogprobs(
            logprob=float(self.own),
            top_ids=tuple(self.top_ids.tolist()),
            top_logprobs=tuple(self.top.tolist()),
        )


def choose(logits: Tensor, rows: SamplingRows, masks: TokenMasks | None = None) -> Choice:
    """One token for each row of logits [num_rows, vocab] float32. `logits` is left as it is, and
    read before whatever is launched next.
    """
    finite = torch.isfinite(logits.sum(dim=1))
    adjusted = _with_extras(logits, rows)
    if masks is not None:
        adjusted = _masked(logits, adjusted, masks)
    pick = _choose if logits.device.type == "cpu" else choose_on_device
    tokens = pick(adjusted, finite, rows)
    return Choice(tokens, finite, _logprobs(logits, tokens, rows))


def sample(logits: Tensor, rows: SamplingRows, masks: TokenMasks | None = None) -> Sampled:
    """As `choose`, and waits."""
    return choose(logits, rows, masks).sampled()


def _choose(adjusted: Tensor, finite: Tensor, rows: SamplingRows) -> Tensor:
    tokens = adjusted.argmax(dim=1)
    drawn = np.flatnonzero((rows.temperature >= GREEDY_BELOW) & finite.numpy())
    if len(drawn):
        which = torch.from_numpy(drawn)
        tokens[which] = torch.from_numpy(draw(adjusted[which], drawn, rows))
    return tokens


def choose_on_device(adjusted: Tensor, finite: Tensor, rows: SamplingRows) -> Tensor:
    """As `_choose`, without waiting for the device."""
    tokens = adjusted.argmax(dim=1)
    drawn = np.flatnonzero(rows.temperature >= GREEDY_BELOW)
    if len(drawn):
        which = sent(drawn, adjusted.device)
        numbers = torch.where(finite[which].unsqueeze(1), adjusted[which], 0.0)
        tokens[which] = draw_on_device(numbers, drawn, rows)
    return tokens


def uniform(seed: NDArray[np.uint64], position: NDArray[np.int64]) -> NDArray[np.float64]:
    """A number in (0, 1) for each (seed, position), by splitmix64: no state, so nothing to carry
    along.
    """
    with np.errstate(over="ignore"):
        x = _mix(seed + _U64(0x9E3779B97F4A7C15))
        x = _mix(x ^ _mix(position.astype(np.uint64) + _U64(0xD1B54A32D192ED03)))
    return ((x >> _U64(11)).astype(np.float64) + 0.5) * 2.0**-53


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> _U64(27))) * _U64(0x94D049BB133111EB)
    return x ^ (x >> _U64(31))


def _with_extras(logits: Tensor, rows: SamplingRows) -> Tensor:
    if not rows.extras:
        return logits
    adjusted = logits.clone()
    for index, extras in rows.extras.items():
        extras.apply(adjusted[index], int(rows.num_output_tokens[index]))
    return adjusted


def _masked(logits: Tensor, adjusted: Tensor, masks: TokenMasks) -> Tensor:
    """Only what the grammar allows is left. Where the extras forbid all of that, they give way."""
    rows = sent(masks.rows, logits.device)
    bits = sent(masks.bits, logits.device).unsqueeze(-1)
    places = torch.arange(32, dtype=torch.int32, device=logits.device)
    is_banned = ((bits >> places) & 1 == 0).flatten(1)[:, : logits.shape[1]]
    if adjusted is logits:
        adjusted = logits.clone()
    allowed = adjusted[rows].masked_fill_(is_banned, -torch.inf)
    # no masks as indices: how many rows they choose is known on the device alone
    is_empty = (allowed.amax(dim=1) == -torch.inf).unsqueeze(1)
    plain = logits[rows].masked_fill_(is_banned, -torch.inf)
    adjusted[rows] = torch.where(is_empty, plain, allowed)
    return adjusted


def score(logits: Tensor, targets: NDArray[np.int32], num_top: int) -> PromptLogprobs:
    """How likely each target [num_rows] was, given the logits [num_rows, vocab] before it."""
    parts = []
    for first in range(0, len(targets), SCORED_AT_ONCE):
        rows = _log_softmax(logits[first : first + SCORED_AT_ONCE])
        wanted = targets[first : first + SCORED_AT_ONCE].astype(np.int64)
        chosen = torch.from_numpy(wanted).to(logits.device)
        own = rows.gather(1, chosen.unsqueeze(1))
        best = rows.topk(min(num_top, rows.shape[1]), dim=1)
        parts.append(
            PromptLogprobs(
                num_top=num_top,
                logprobs=own.cpu().numpy().tobytes(),
                ranks=((rows > own).sum(dim=1) + 1).int().cpu().numpy().tobytes(),
                top_ids=best.indices.int().cpu().numpy().tobytes(),
                top_logprobs=best.values.cpu().numpy().tobytes(),
            )
        )
    return PromptLogprobs.joined(num_top, parts)


def _log_softmax(logits: Tensor) -> Tensor:
    """Over the last dimension. On a GPU torch begins a row's sum where memory is aligned: all rows
    begin there, so that none is rounded by its place.
    """
    if logits.device.type == "cpu":
        return torch.log_softmax(logits, dim=-1)
    vocab = logits.shape[-1]
    padded = torch.nn.functional.pad(logits, (0, -vocab % ALIGN), value=-torch.inf)
    return torch.log_softmax(padded, dim=-1)[..., :vocab]


def draw_on_device(logits: Tensor, which: NDArray[np.int64], rows: SamplingRows) -> Tensor:
    """As `draw`, in one launch of Triton's kernel and without a sort; on the device."""
    from engine.kernels.gpu.sampling import sample_rows  # there is no Triton beside CPUs

    chance = uniform(rows.seed[which], rows.position[which])
    columns = (rows.temperature, rows.min_p, rows.top_k, rows.top_p)
    stacked = np.stack([*(column[which] for column in columns), chance])
    temperature, min_p, top_k, top_p, chances = sent(stacked, logits.device)
    return sample_rows(logits, temperature, min_p, top_k.long(), top_p, chances)


def draw(logits: Tensor, which: NDArray[np.int64], rows: SamplingRows) -> NDArray[np.int64]:
    """Tokens for the rows `which`, whose logits [len(which), vocab] are given."""
    device = logits.device

    def column(values: NDArray[np.float64]) -> Tensor:
        return torch.from_numpy(values[which]).to(device).unsqueeze(1)

    top = logits.amax(dim=1, keepdim=True)
    scaled = (logits - top).double().div_(column(rows.temperature))
    weights = scaled.exp_()  # 1 for the most likely token
    weights[weights < column(rows.min_p)] = 0.0
    chance = torch.from_numpy(uniform(rows.seed[which], rows.position[which])).to(device)
    is_filtered = (rows.top_k[which] > 0) | (rows.top_p[which] < 1.0)
    tokens = np.empty(len(which), dtype=np.int64)
    plain, filtered = np.flatnonzero(~is_filtered), np.flatnonzero(is_filtered)
    if len(plain):
        chosen = torch.from_numpy(plain).to(device)
        tokens[plain] = _pick(weights[chosen], chance[chosen]).cpu().numpy()
    if len(filtered):
        chosen = torch.from_numpy(filtered).to(device)
        top_k, top_p = column(rows.top_k.astype(np.float64))[chosen], column(rows.top_p)[chosen]
        tokens[filtered] = (
            _pick_filtered(weights[chosen], chance[chosen], top_k, top_p).cpu().numpy()
        )
    return tokens


def _pick(weights: Tensor, chance: Tensor) -> Tensor:
    """Index drawn in proportion to weights [num_rows, n] by chance [num_rows] in (0, 1)."""
    sums = weights.cumsum(dim=1)
    wanted = chance.unsqueeze(1) * sums[:, -1:]
    found = torch.searchsorted(sums, wanted, right=True).squeeze(1)
    return found.clamp_(max=weights.shape[1] - 1)


def _pick_filtered(weights: Tensor, chance: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """As `_pick`, among the `top_k` largest, then among the fewest of those that make up `top_p` of
    their sum.
    """
    vocab = weights.shape[1]
    totals = weights.sum(dim=1, keepdim=True)
    tokens = torch.empty(len(weights), dtype=torch.long, device=weights.device)
    left = torch.arange(len(weights), device=weights.device)
    for count in (min(NUM_CANDIDATES, vocab), vocab):
        best, ids = _largest(weights[left], count)
        kept, is_enough = _filtered(best, totals[left], top_k[left], top_p[left], vocab)
        picked = ids.gather(1, _pick(kept, chance[left]).unsqueeze(1)).squeeze(1)
        tokens[left[is_enough]] = picked[is_enough]
        left = left[~is_enough]
        if not len(left):
            break
    return tokens


def _largest(weights: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of each row, largest first, equal ones by token id."""
    ids = weights.topk(count, dim=1, sorted=False).indices.sort(dim=1).values
    best, order = weights.gather(1, ids).sort(dim=1, descending=True, stable=True)
    return best, ids.gather(1, order)


def _filtered(
    best: Tensor, totals: Tensor, top_k: Tensor, top_p: Tensor, vocab: int
) -> tuple[Tensor, Tensor]:
    """Sorted weights with those outside top_k and top_p at zero, and whether the candidates were
    enough.
    """
    count = best.shape[1]
    rank = torch.arange(count, device=best.device).unsqueeze(0)
    by_rank = torch.where((top_k > 0) & (rank >= top_k), 0.0, best)
    mass = torch.where(top_k > 0, by_rank.sum(dim=1, keepdim=True), totals)
    before = by_rank.cumsum(dim=1) - by_rank
    kept = torch.where((before < top_p * mass) | (rank == 0) | (top_p >= 1.0), by_rank, 0.0)
    # not when tokens beyond the candidates count for top_k, or weigh as much as the last one kept
    lowest = torch.where(kept > 0.0, best, torch.inf).amin(dim=1)
    is_enough = (lowest > best[:, -1]) & (top_k.squeeze(1) <= count) | (count == vocab)
    return kept, is_enough


def _logprobs(logits: Tensor, tokens: Tensor, rows: SamplingRows) -> list["_RowLogprobs | None"]:
    found: list[_RowLogprobs | None] = [None] * len(tokens)
    for index in np.flatnonzero(rows.num_logprobs >= 0).tolist():
        logprobs = _log_softmax(logits[index])
        best = logprobs.topk(min(int(rows.num_logprobs[index]), len(logprobs)))
        own = logprobs.gather(0, tokens[index : index + 1])
        found[index] = _RowLogprobs(own, best.indices, best.values)
    return found
