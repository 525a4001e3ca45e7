"""One rank of a group whose backend is Triton's, interpreted, and whose collectives are gloo's:

    python -m tests.kernels.rank_process MODEL RANK RANKS STORE CODEC ORDERED OUT

Every rank plans the same steps and samples by itself, from logits that all of them have. Writes the
logits and the checksums of the pages to OUT.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.config import EngineConfig
from engine.graphed_model import GraphedModel
from engine.load import load_runner
from engine.offsets import open_offsets
from engine.pool_size import PoolSize
from engine.pools import PageArena
from engine.rank_pages import RankPages
from engine.ranks.collective import TorchCollective
from engine.triton_model import TritonModel
from engine.weights import Checkpoint
from engine.worker_pages import WorkerPages
from tests.engine.driver import Driver

NUM_NEW = 4
PROMPTS = {"long": [int(t) for t in np.arange(46) * 31 % 331], "short": list(range(14))}


def main(path: str, rank: int, num_ranks: int, store: Path, codec: str, ordered: bool) -> Driver:
    config = EngineConfig(
        model=path,
        kv_codec=codec,
        num_ranks=num_ranks,
        pool=PoolSize(num_packed=32, num_exact=8),
    )
    runner = load_runner(replace(config, num_ranks=1))
    model = runner.config
    ranks = TorchCollective.join(store, rank, num_ranks, torch.device("cpu"), is_ordered=ordered)
    heads = config.shares(model)[rank].kv_heads
    offsets, _ = open_offsets(path, model, runner.layout)
    own = replace(offsets, means=offsets.means[:, :, heads.start : heads.stop].contiguous())
    layout = config.rank_layout(model, rank)
    arena = PageArena(layout, config.pool.num_packed, config.pool.num_exact)  # type: ignore[union-attr]
    triton = TritonModel(
        model, Checkpoint.open(path), arena, own, torch.float32,
        is_batch_invariant=ordered, ranks=ranks,
    )  # fmt: skip
    runner.pages = WorkerPages(
        RankPages(arena, PageArena(layout, 0, 0), heads), runner.pages.origin
    )
    graphed = GraphedModel(triton, lambda do: do, max_rows=4, max_blocks=8)
    graphed.capture()
    runner.backend = graphed
    driver = Driver(runner)
    for key, prompt in PROMPTS.items():
        driver.add(key, prompt, max_tokens=NUM_NEW)
    driver.run(chunk_tokens=32)
    return driver


if __name__ == "__main__":
    torch.set_num_threads(1)
    name, number, count, place, which, order, out = sys.argv[1:]
    driver = main(name, int(number), int(count), Path(place), which, order == "ordered")
    arrays: dict[str, Any] = {key: np.stack(rows) for key, rows in driver.logits.items()}
    np.savez(out, **arrays)
