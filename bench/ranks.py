"""What ranks cost and save on CPUs: steps of groups of several sizes, how much of them is waiting
for other ranks, and what each rank holds.

    .venv/bin/python -m bench.ranks --model DIR [--ranks 1 2 3] [--threads 1] [--json FILE]

The part of a step that is not this rank's own work is found by running rank 0 on a board where a
rank is lost: nobody waits there, everything else is the same. Memory is beside what the numbers of
the model's configuration say.
"""

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.engine import BATCHES, PROMPT_TOKENS, Bench
from commands.demo_model import NAME
from common.environment import home
from common.model_config import ModelConfig
from engine.config import EngineConfig
from engine.load import load_runner
from engine.model_share import ModelShare, cpu_share
from engine.padding import PaddedSizes
from engine.pool_size import PoolSize
from engine.ranks.board import Board, Shared
from engine.ranks.group import RankGroup, RankMemory, board_sizes, follower_program

REPEATS = 5
WEIGHT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Row:
    ranks: int
    what: str
    step_ms: float
    own_ms: float
    """Of rank 0 alone, which has the most heads."""

    @property
    def waiting(self) -> float:
        return 1 - self.own_ms / self.step_ms


@dataclass(frozen=True)
class Held:
    ranks: int
    rank: int
    weights: int
    expected_weights: int
    pages: int
    expected_pages: int


def config_of(model: Path, num_ranks: int, threads: int) -> EngineConfig:
    num_blocks = max(BATCHES) * (-(-PROMPT_TOKENS // 16) + 2)
    pool = PoolSize(num_packed=num_blocks, num_exact=2 * max(BATCHES))
    return EngineConfig(model=model, pool=pool, num_ranks=num_ranks, num_threads=threads)


def timed(bench: Bench) -> dict[str, float]:
    found = {"prefill 512": min(bench.prefill() for _ in range(REPEATS))}
    for batch in BATCHES:
        found[f"decode {batch} at 512"] = min(bench.decode(batch) for _ in range(REPEATS))
    return found


def measure(model: Path, num_ranks: int, threads: int) -> tuple[list[Row], list[Held]]:
    config = config_of(model, num_ranks, threads)
    if num_ranks == 1:
        runner = load_runner(config)
        times = timed(Bench(runner))
        memory = [RankMemory.of(runner.weight_bytes, runner.pages.own)]
        return [Row(1, what, s * 1e3, s * 1e3) for what, s in times.items()], held(config, memory)
    board = Board.create(board_sizes(config, config.load_model()), num_threads=threads)
    board.lose()
    own = timed(Bench(load_runner(config, shared=Shared(board=board, store=Path("none")))))
    with RankGroup(config, follower_program("worker.follower")) as group:
        runner = load_runner(config, shared=group.shared, followers=group.followers)
        memory = [RankMemory.of(runner.weight_bytes, runner.pages.own), *group.wait_ready()]
        together = timed(Bench(runner))
    rows = [Row(num_ranks, what, s * 1e3, own[what] * 1e3) for what, s in together.items()]
    return rows, held(config, memory)


def held(config: EngineConfig, memory: list[RankMemory]) -> list[Held]:
    assert isinstance(config.pool, PoolSize)
    model = config.load_model()
    return [
        Held(
            config.num_ranks,
            rank,
            found.weights,
            weight_bytes(model, cpu_share(model, config.shares(model)[rank])),
            found.pages,
            config.pool.num_bytes(config.rank_layout(model, rank)),
        )
        for rank, found in enumerate(memory)
    ]


def weight_bytes(model: ModelConfig, share: ModelShare) -> int:
    """Of a model with neither biases nor norms of heads. The output head is kept as panels, beside
    the embedding, also where they are the same matrix; norms are fp32.
    """
    sizes = PaddedSizes.of(model)
    assert not any((model.attention_bias, model.output_bias, model.qk_norm))
    q, kv = (len(heads) * sizes.head_dim for heads in (share.heads, share.kv_heads))
    attention = (q + 2 * kv) * sizes.hidden + sizes.hidden * q
    feed_forward = 3 * sizes.hidden * len(share.inter)
    rows = min(share.vocab.stop, model.vocab_size) - share.vocab.start
    matrices = model.num_layers * (attention + feed_forward)
    matrices += (rows + len(share.vocab)) * sizes.hidden
    norms = (2 * model.num_layers + 1) * sizes.hidden * 4
    return matrices * WEIGHT_BYTES[model.dtype] + norms


def main() -> None:
    parser = argparse.ArgumentParser(description="Ranks on CPUs")
    parser.add_argument("--model", type=Path, default=home() / "models" / NAME)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = [measure(args.model, ranks, args.threads) for ranks in args.ranks]
    rows = [row for part, _ in found for row in part]
    memory = [one for _, part in found for one in part]
    print(f"{'ranks':>5}  {'step':18}{'ms':>9}{'own ms':>9}{'waiting':>9}")
    for row in rows:
        print(f"{row.ranks:>5}  {row.what:18}{row.step_ms:9.1f}{row.own_ms:9.1f}{row.waiting:9.1%}")
    columns = ("weights MB", "expected", "pages MB", "expected")
    print(f"\n{'ranks':>5}{'rank':>5}" + "".join(f"{column:>11}" for column in columns))
    for one in memory:
        numbers = (one.weights, one.expected_weights, one.pages, one.expected_pages)
        print(f"{one.ranks:>5}{one.rank:>5}" + "".join(f"{n / 1e6:>11.2f}" for n in numbers))
    if args.json:
        numbers_of = {"steps": [asdict(row) for row in rows], "memory": [asdict(m) for m in memory]}
        args.json.write_text(json.dumps(numbers_of, indent=2))


if __name__ == "__main__":
    main()
