"""A prefill worker with exact pages and a decode worker with packed ones: what lands is what
sealing makes of the exact pages, and nobody takes it for the decode worker's own.

The real engine with a small random model, twice in this process, on the in-process transport.
"""

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
import torch

from common.pages import TAG_BYTES, PageKind, PageTag
from common.scheduling.plan import LandingMove
from common.types import Role, SamplingParams
from engine.config import EngineConfig
from engine.kernels import reference
from engine.kernels.offsets import Offsets
from engine.load import load_runner
from engine.offsets import open_offsets
from engine.pool_size import PoolSize
from engine.runner import ModelRunner
from router.fleet.pairs import others_bits
from tests.engine.tiny_models import give_offsets, make_tiny_model
from tests.fakes.fleet import Fleet, Worker, fleet
from tests.fakes.router import router
from tests.handoff.test_handoff_in_process import virtual

GREEDY = SamplingParams(max_tokens=24, temperature=0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_tiny_model(tmp_path_factory.mktemp("model"), "llama").path
    give_offsets(path)
    return path


def add(f: Fleet, role: Role, address: str, model: Path, codec: str) -> Worker:
    def made(**sizes: Any) -> ModelRunner:
        num_landing, block_size = sizes["num_landing"], sizes["block_size"]
        config = EngineConfig(
            model=model,
            kv_codec=codec,
            block_size=block_size,
            pool=PoolSize(num_packed=sizes["num_packed"], num_exact=sizes["num_exact"]),
            landing=PoolSize(num_packed=num_landing, num_exact=num_landing),
            incarnation=sizes["incarnation"],
        )
        return load_runner(config)

    return f.add(role, address, runner=made, layout=codec)


def offsets_of(worker: Worker, model: Path) -> Offsets:
    runner = worker.device.runner
    found, _ = open_offsets(model, runner.config, runner.layout)
    return found


def page_with(worker: Worker, move: LandingMove) -> int:
    """Of the prefill worker: the one whose tag says what the move wants."""
    for number, page in enumerate(worker.device.runner.pool.records(move.kind)):
        tag = PageTag.unpack(page[0, -TAG_BYTES:].numpy().tobytes())
        if (tag.content_hash, tag.generation) == (move.content_hash, move.generation):
            return number
    raise AssertionError("no such page")


def sealed(source: Worker, target: Worker, move: LandingMove, offsets: Offsets) -> torch.Tensor:
    """[kv_heads, bytes]: what the page must be, by the plain definitions."""
    p, d = source.device.runner.pool, target.device.runner.pool
    page = page_with(source, move)
    pages = p.packed if move.kind is PageKind.PACKED else p.exact
    element = p.layout.element_kind(move.kind)
    slices = {1: reference.exact_slices, 0: reference.packed_slices}[int(move.kind)]
    assert element.num_bits in (16, 32)
    values = slices(pages, p.layout)[page].float()  # [layers, 2, heads, block, width]
    scratch = {kind: torch.zeros_like(d.records(kind)[:1].flatten(1)) for kind in PageKind}
    is_packed = move.kind is PageKind.PACKED
    position = move.block * p.layout.block_size
    item = [0, p.layout.block_size, position, -1 if is_packed else 0, 0 if is_packed else -1, 0]
    if not is_packed:
        item[2] = 0  # from the page's first slot on
    for layer in range(p.layout.num_layers):
        k, v = (values[layer, which].transpose(0, 1).contiguous() for which in (0, 1))
        reference.store(
            k, v, torch.tensor([item]), scratch[PageKind.PACKED], scratch[PageKind.EXACT],
            d.layout, offsets, layer,
        )  # fmt: skip
    return scratch[move.kind].view(d.layout.num_kv_heads, -1)[:, :-TAG_BYTES]


def watch_landings(d: Worker) -> list[LandingMove]:
    """The moves that land, from now on."""
    moves: list[LandingMove] = []
    land = d.device.runner.land

    def recorded(asked: Any) -> Any:
        moves.extend(asked)
        return land(asked)

    d.device.runner.land = recorded
    return moves


def run(main: Coroutine[Any, Any, None]) -> None:
    virtual(lambda: main)


@pytest.mark.parametrize("codec", ["fp8_e3m4", "int8", "int4"])
@pytest.mark.parametrize("source", ["bf16", "fp32"])
def test_pages_land_as_sealing_would_make_them(model: Path, source: str, codec: str) -> None:
    async def main() -> None:
        async with fleet(num_prefill=0, num_decode=0, num_packed=64, num_exact=16) as f:
            p = add(f, Role.PREFILL, "p0", model, source)
            d = add(f, Role.DECODE, "d0", model, codec)
            moves, offsets = watch_landings(d), offsets_of(d, model)
            outputs = await f.client("d0", "p0").generate(list(range(3, 73)), GREEDY)
            assert outputs.error is None
            assert len(outputs.tokens[0]) == GREEDY.max_tokens
            assert d.metric("pages_refused_total") == 0
            assert d.device.num_tokens_computed == 0
            assert [(m.kind, m.block) for m in moves] == [
                (PageKind.EXACT, 0), *((PageKind.PACKED, n) for n in range(1, 4)),
                (PageKind.EXACT, 4),
            ]  # fmt: skip
            for move in moves[:4]:  # the open block goes on
                found = d.device.runner.pool.records(move.kind)[move.block_id][:, :-TAG_BYTES]
                assert torch.equal(found, sealed(p, d, move, offsets))

    run(main())


def test_converted_pages_are_nobody_s_prefix(model: Path) -> None:
    """What the decode worker computed itself is found again; what came converted is not."""

    async def main() -> None:
        async with fleet(num_prefill=0, num_decode=0, num_packed=128, num_exact=32) as f:
            p = add(f, Role.PREFILL, "p0", model, "bf16")
            d = add(f, Role.DECODE, "d0", model, "fp8_e3m4")
            prompt = list(range(3, 73))
            for _ in range(2):
                outputs = await f.client("d0", "p0").generate(prompt, GREEDY)
                assert outputs.error is None
                assert d.cache.named_hashes() == []
            assert outputs.num_cached_tokens == 64, "at the prefill worker"
            own = await f.client("d0", None).generate(prompt[:40], GREEDY)
            assert own.num_cached_tokens == 0
            named = len(d.cache.named_hashes())
            assert named == (40 + GREEDY.max_tokens - 1) // 16
            moves = watch_landings(d)
            mixed = await f.client("d0", "p0").generate(prompt, GREEDY)
            assert mixed.error is None
            assert [move.block for move in moves] == [2, 3, 4], "its own are not pulled"
            assert len(d.cache.named_hashes()) == named
            assert p.device.num_tokens_computed >= 70
            await asyncio.sleep(2)
            f.check_at_rest()

    run(main())


def test_a_torn_record_is_read_again_alone(model: Path) -> None:
    def flip(row: Any) -> None:
        row[len(row) // 2 + 100] ^= 1

    async def main() -> None:
        async with fleet(num_prefill=0, num_decode=0, num_packed=64, num_exact=16) as f:
            p = add(f, Role.PREFILL, "p0", model, "bf16")
            d = add(f, Role.DECODE, "d0", model, "fp8_e3m4")
            client, prompt = f.client("d0", "p0"), list(range(3, 73))
            clean = await client.generate(prompt, GREEDY)
            moves, offsets = watch_landings(d), offsets_of(d, model)
            f.fabric.alter(1, flip)
            torn = await client.generate(prompt, GREEDY)
            assert torn.tokens == clean.tokens
            assert d.metric("pages_refused_total") == 1
            [again] = [move for move in moves if move.heads]
            assert (again.block, again.heads) == (0, (1,))
            found = d.device.runner.pool.records(again.kind)[again.block_id][:, :-TAG_BYTES]
            assert torch.equal(found, sealed(p, d, again, offsets))

    run(main())


def test_a_router_pairs_them_and_says_so(model: Path) -> None:
    async def main() -> None:
        async with fleet(num_prefill=0, num_decode=0, num_packed=64, num_exact=16) as f:
            p = add(f, Role.PREFILL, "p0", model, "bf16")
            d = add(f, Role.DECODE, "d0", model, "fp8_e3m4")
            add(f, Role.PREFILL, "p1", model, "int8")
            async with router(f) as r:
                answer = await r.generate(list(range(3, 73)), GREEDY)
                assert len(answer.tokens) == GREEDY.max_tokens
                assert (p.device.num_tokens_computed, d.device.num_tokens_computed) == (70, 0)
                decode = r.fleet.get("d0")
                assert decode is not None
                assert others_bits(decode, r.fleet.linked()) == {
                    "p0": "KV codec: bf16 at the prefill worker, converted to fp8_e3m4 here"
                }
                [reason] = r.fleet.reasons()
                assert reason.startswith("prefill p1: decode d0 cannot read its pages: KV codec")

    run(main())
