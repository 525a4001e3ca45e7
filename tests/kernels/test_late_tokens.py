"""A GPU's runner reads a step's tokens when the next one is launched. Here on Triton's interpreter,
where tokens could be read at once and are not: the same tokens and log-probabilities as one step
after another, to the bit, whatever ends, starts or takes over a row meanwhile.
"""

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.messages import GenerateRequest, pack_tokens
from common.scheduling.block_hash import HashChain, root_hash
from common.scheduling.kv_cache import KvCache
from common.scheduling.plan import OutputStart, StepPlan
from common.types import SamplingParams
from decode_worker.flights import MAX_IN_FLIGHT
from decode_worker.scheduler import BatchScheduler
from engine import linear
from engine.launched import LaunchedStep
from engine.runner import ModelRunner
from tests.kernels.test_cuda_graphs import RowwiseLinear, make_model, triton_runner

VOCAB_SIZE = 331
Token = tuple[int, Any]


@pytest.fixture(scope="module", autouse=True)
def _rowwise() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "PlainLinear", RowwiseLinear)
        patch.setattr("torch.nn.functional.linear", lambda x, w, b=None: RowwiseLinear(w, b)(x))
        yield


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("late"), num_hidden_layers=1)


class Worker:
    """Scheduler and runner of a colocated worker; `depth` steps are under way at a time."""

    def __init__(self, path: Path, depth: int) -> None:
        self.runner = triton_runner(path, has_graphs=True)
        self.runner.reads_late = depth > 1
        self.depth = depth
        cache = KvCache(num_packed=64, num_exact=32, block_size=16)
        self.scheduler = BatchScheduler(
            cache,
            chunk_tokens=16,
            max_num_seqs=8,
            max_waiting=9,
            max_model_len=128,
            is_colocated=True,
        )
        self.under_way: deque[tuple[StepPlan, LaunchedStep]] = deque()
        self.tokens: dict[str, list[Token]] = {}
        self.unread_seen = 0

    def add(self, request_id: str, prompt: list[int], sampling: SamplingParams) -> None:
        request = GenerateRequest(
            request_id=request_id,
            token_ids=pack_tokens(prompt),
            num_prompt_tokens=len(prompt),
            sampling=sampling,
        )
        chain = HashChain(root_hash(b"model", 16, ""), 16)
        chain.extend(prompt)
        self.scheduler.add(request, np.asarray(prompt, dtype=np.int32), chain, 0.0)

    def turn(self) -> bool:
        """Plans and launches what fits, then takes in the oldest step. False: nothing to do."""
        while len(self.under_way) < self.depth:
            self.scheduler.admit(0.0)
            plan, facts = self.scheduler.plan(0.0)
            assert not facts.failed
            if plan is None:
                break
            self.under_way.append((plan, self.runner.launch(plan)))
            self.unread_seen += int((self.runner.outputs.unread >= 0).sum())
        if not self.under_way:
            return False
        plan, launched = self.under_way.popleft()
        facts = self.scheduler.apply(plan, launched.result(), 0.0)
        assert not facts.failed
        for request_id, index, token_id, logprobs in zip(
            facts.request_ids, facts.output_indices, facts.token_ids, facts.logprobs, strict=True
        ):
            self.tokens.setdefault(f"{request_id}/{index}", []).append((token_id, logprobs))
        return True

    def run(self) -> None:
        while self.turn():
            pass
        assert self.runner.num_outputs == 0


def prompt_of(count: int, factor: int) -> list[int]:
    return [k * factor % VOCAB_SIZE for k in range(1, count + 1)]


def greedy(max_tokens: int, **fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, **fields)


def plain_tokens(path: Path, prompt: list[int], max_tokens: int) -> list[int]:
    worker = Worker(path, 1)
    worker.add("r0", prompt, greedy(max_tokens))
    worker.run()
    return [token for token, _ in worker.tokens["r0/0"]]


def both(path: Path, requests: list[tuple[list[int], SamplingParams]]) -> list[Worker]:
    workers = [Worker(path, depth) for depth in (1, MAX_IN_FLIGHT)]
    for worker in workers:
        for number, (prompt, sampling) in enumerate(requests):
            worker.add(f"r{number}", prompt, sampling)
        worker.run()
    assert workers[0].unread_seen == 0
    assert workers[1].unread_seen > 0
    return workers


# rows of padding hold what was in memory before
pytestmark = pytest.mark.filterwarnings(
    "ignore:(overflow|invalid value) encountered:RuntimeWarning"
)


def test_tokens_and_logprobs_are_those_of_one_step_after_another(path: Path) -> None:
    drawn = SamplingParams(max_tokens=5, temperature=1.0, seed=5, top_p=0.9, logprobs=2)
    one, other = both(
        path,
        [
            (prompt_of(20, 31), greedy(6)),
            (prompt_of(5, 7), drawn),
            (prompt_of(14, 3), SamplingParams(max_tokens=4, temperature=1.0, seed=9, n=2)),
        ],
    )
    assert other.tokens == one.tokens
    assert sorted(map(len, one.tokens.values())) == [4, 4, 5, 6]


def test_what_follows_from_earlier_tokens_is_right_though_they_are_read_late(path: Path) -> None:
    """Penalties, bad words and minimum lengths look back at all tokens, the last one too."""
    first, second = plain_tokens(path, prompt_of(9, 11), 2)
    requests = [
        (prompt_of(9, 11), greedy(4, presence_penalty=2.0, frequency_penalty=1.5)),
        (prompt_of(9, 11), greedy(4, repetition_penalty=1.9)),
        (prompt_of(9, 11), greedy(4, bad_words=((first, second),))),
        (prompt_of(9, 11), greedy(4, stop_token_ids=(second,), min_tokens=4)),
    ]
    one, other = both(path, requests)
    assert other.tokens == one.tokens
    assert [token for token, _ in one.tokens["r2/0"][:2]] != [first, second]
    assert second not in [token for token, _ in one.tokens["r3/0"][:3]]


def test_an_output_that_ends_early_is_computed_once_more_and_nothing_comes_of_it(
    path: Path,
) -> None:
    stop = plain_tokens(path, prompt_of(9, 11), 3)[2]
    one, other = both(
        path,
        [
            (prompt_of(9, 11), greedy(6, stop_token_ids=(stop,))),
            (prompt_of(7, 5), greedy(5)),
        ],
    )
    assert other.tokens == one.tokens
    assert [token for token, _ in one.tokens["r0/0"]][-1] == stop
    assert len(one.tokens["r1/0"]) == 5


def started(key: str, tokens: list[int], exact: int, sampling: SamplingParams) -> OutputStart:
    return OutputStart(
        key=key,
        token_ids=np.asarray(tokens, dtype=np.int32),
        num_prompt_tokens=len(tokens) - 1,
        sampling=sampling,
        block_ids=(exact,),
    )


@pytest.mark.parametrize("key", ["a/0", "b/0"])
def test_a_row_taken_over_before_its_token_was_read_keeps_its_own(path: Path, key: str) -> None:
    """The second step drops an output of the first one and starts another in its row, perhaps under
    the same name: the first step's token must not be written down for that one.
    """

    def tokens_and_counts(reads_late: bool) -> tuple[list[int], list[float]]:
        runner: ModelRunner = triton_runner(path, has_graphs=True)
        runner.reads_late = reads_late
        params = greedy(9, presence_penalty=1.0)
        first = runner.launch(
            StepPlan(step=1, starts=(started("a/0", [5, 6], 0, params),), decodes=("a/0",))
        )
        row = runner.outputs.row("a/0")
        second = runner.launch(
            StepPlan(
                step=2, drops=("a/0",), starts=(started(key, [40, 50], 1, params),), decodes=(key,)
            )
        )
        assert runner.outputs.row(key) == row
        third = runner.launch(StepPlan(step=3, decodes=(key,)))
        fourth = runner.launch(StepPlan(step=4, decodes=(key,)))
        tokens = [step.result().token_ids[0] for step in (first, second, third, fourth)]
        runner.read_latest()
        counts = runner.outputs.extras[row].output_counts
        assert counts is not None
        return tokens, counts.tolist()

    tokens, counts = tokens_and_counts(reads_late=True)
    assert sum(counts) == 1 + 3  # the token that it was started with, and three of its own
    assert (tokens, counts) == tokens_and_counts(reads_late=False)


class WatchedGrammars:
    """Keeps the tokens that it was told of."""

    def __init__(self) -> None:
        self.known: dict[str, list[int]] = {}
        self.seen: list[dict[str, list[int]]] = []

    def __len__(self) -> int:
        return 1

    def start(self, key: str, grammar: str, output: list[int]) -> None:
        self.known[key] = list(output)

    def begin(self, keys: list[str]) -> None:
        self.seen.append({key: list(self.known.get(key, [])) for key in keys})

    def record(self, key: str, token_id: int) -> None:
        self.known[key].append(token_id)

    def has_failed(self, key: str) -> bool:
        return False

    def drop(self, key: str) -> None:
        self.known.pop(key, None)


def test_a_grammar_knows_every_token_before_it_says_what_may_follow(path: Path) -> None:
    worker = Worker(path, MAX_IN_FLIGHT)
    grammars = WatchedGrammars()
    worker.runner.grammars = grammars  # type: ignore[assignment]
    worker.add("r0", prompt_of(9, 11), greedy(4, grammar="any"))
    worker.run()
    tokens = [token for token, _ in worker.tokens["r0/0"]]
    assert grammars.seen == [{"r0/0": tokens[:count]} for count in range(4)]


@pytest.mark.parametrize("reads_late", [False, True])
def test_a_grammar_hears_nothing_of_an_earlier_output_by_the_same_name(
    path: Path, reads_late: bool
) -> None:
    runner: ModelRunner = triton_runner(path, has_graphs=True)
    runner.reads_late = reads_late
    grammars = WatchedGrammars()
    runner.grammars = grammars  # type: ignore[assignment]
    params = greedy(9, grammar="any")
    runner.launch(StepPlan(step=1, starts=(started("a/0", [5, 6], 0, params),), decodes=("a/0",)))
    again = started("a/0", [40, 50], 1, params)
    runner.launch(StepPlan(step=2, drops=("a/0",), starts=(again,), decodes=("a/0",)))
    assert grammars.seen == [{"a/0": [6]}, {"a/0": [50]}]
