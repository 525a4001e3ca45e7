"""Prefix caches as the router's HTTP side sees them: who is chosen, what is shown and counted."""

import asyncio
from pathlib import Path

import pytest

from common.messages import GenerateRequest, KvEvents, PoolLoad, pack_tokens
from common.scheduling.block_hash import HashChain, block_hashes, root_hash
from common.scheduling.step_time import StepTimes
from common.types import Role, SamplingParams
from router.fleet.fleet import Fleet
from router.fleet.prompt_hashes import LARGE_TOKENS, HashBook
from tests.router.fake_worker import FakeWorker
from tests.router.stack import Stack
from tests.router.test_fleet import C, state

FINGERPRINT = "aa"
PROMPT = list(range(300, 700))
TIMES = StepTimes(
    fixed_s=0.02, prefill_token_s=1e-3, pair_s=0.0, decode_s=1e-4, context_token_s=0.0
)


def names(prompt: list[int], salt: str = "") -> list[bytes]:
    root = root_hash(bytes.fromhex(FINGERPRINT), 16, salt)
    return list(block_hashes(root, 16, pack_tokens(prompt)))


def snapshot(hashes: list[bytes]) -> KvEvents:
    return KvEvents(sequence=0, stored=b"".join(hashes), is_snapshot=True)


def test_block_hashes_are_those_of_the_workers() -> None:
    chain = HashChain(root_hash(bytes.fromhex(FINGERPRINT), 16), 16)
    chain.extend(PROMPT[:-3])
    assert names(PROMPT[:-3]) == chain.full
    assert names([1] * 15) == []


def test_the_holder_of_a_prefix_is_chosen_shown_and_counted(model_dir: Path) -> None:
    holder = FakeWorker(model_fingerprint=FINGERPRINT)
    other = FakeWorker(model_fingerprint=FINGERPRINT, step_times=TIMES, handoff_s=0.25)
    with Stack(model_dir, holder, other) as stack:
        index = stack.router.service.fleet.prefix_index
        stack.do(lambda: holder.tell(snapshot(names(PROMPT))))
        stack.until(lambda: len(index) == 25)
        holder.num_cached_tokens = 384
        for _ in range(4):
            assert stack.complete(PROMPT, max_tokens=1).status_code == 200
        assert (len(holder.submitted), len(other.submitted)) == (4, 0)
        for _ in range(4):
            assert stack.complete(PROMPT, max_tokens=1, cache_salt="b").status_code == 200
        assert len(holder.submitted) in (6, 7), "another tenant: by turns"
        shown = {w["address"]: w for w in stack.http.get("/v1/fleet").json()["workers"]}
        assert shown[holder.address]["prefix_blocks"] == 25
        assert shown[holder.address]["step_times"] is None
        assert shown[other.address]["prefix_blocks"] == 0
        assert shown[other.address]["step_times"]["prefill_token_s"] == 1e-3
        assert shown[other.address]["handoff_s"] == 0.25
        assert stack.metric("tandem_router_prefix_index_hashes") == 25
        hits = stack.metric("tandem_router_prefix_hit_tokens_total", role="decode")
        assert hits == 384 * len(holder.submitted)
        assert stack.metric("tandem_router_prefills_total", where="decode") == 8

        stack.do(lambda: holder.tell(KvEvents(sequence=1, removed=names(PROMPT)[0])))
        stack.until(lambda: len(index) == 24)
        before = len(other.submitted)
        for _ in range(4):
            stack.complete(PROMPT, max_tokens=1)
        assert len(other.submitted) - before >= 2, "without its first block a prefix is none"


def test_prefills_are_counted_by_place(model_dir: Path) -> None:
    decode, prefill = FakeWorker(Role.DECODE), FakeWorker(Role.PREFILL)
    with Stack(model_dir, decode, prefill) as stack:
        for _ in range(3):
            stack.complete("x", max_tokens=1)
        stack.call(prefill.stop)
        stack.workers.remove(prefill)
        stack.until(lambda: len(stack.router.service.fleet.linked()) == 1)
        stack.complete("x", max_tokens=1)
        assert stack.metric("tandem_router_prefills_total", where="prefill") == 3
        assert stack.metric("tandem_router_prefills_total", where="decode") == 1
        assert stack.metric("tandem_router_ttft_prediction_ratio_count") == 0


def test_prefill_where_is_an_option(model_dir: Path) -> None:
    """The queue at the prefill worker is hopeless."""
    for where, expected in (("auto", None), ("remote", "prefill")):
        decode = FakeWorker(Role.DECODE, step_times=TIMES)
        prefill = FakeWorker(Role.PREFILL, step_times=TIMES, num_queued_tokens=100_000, waiting=9)
        with Stack(model_dir, decode, prefill, prefill_where=where) as stack:
            assert stack.complete("x", max_tokens=1).status_code == 200
            address = {"prefill": prefill.address}.get(str(expected))
            assert [route.prefill for route in decode.routes] == [address]
            assert stack.metric("tandem_router_ttft_prediction_ratio_count") == 1


@pytest.mark.parametrize(
    ("stored", "reason"), [(b"short", "wrong length"), (bytes(16) + bytes(range(16)), "pool")]
)
def test_events_that_make_no_sense_exclude_the_worker_until_they_do(
    model_dir: Path, stored: bytes, reason: str
) -> None:
    small = PoolLoad(total=1, free=0, cached=1, held=0)
    worker = FakeWorker(model_fingerprint=FINGERPRINT, blocks=small)
    with Stack(model_dir, worker) as stack:
        fleet = stack.router.service.fleet
        stack.do(lambda: worker.tell(KvEvents(sequence=0, stored=stored, is_snapshot=True)))
        stack.until(lambda: any(reason in each for each in fleet.reasons()))
        worker.forget_told()
        worker.set_state(blocks=PoolLoad(total=100, free=100, cached=0, held=0))
        stack.do(lambda: worker.tell(snapshot(names(PROMPT))))
        stack.until(lambda: len(fleet.prefix_index) == 25)
        assert stack.complete("x", max_tokens=1).status_code == 200


# --- the book of hashes ---------------------------------------------------------------------------


def request(num_tokens: int, salt: str = "", **sampling: int) -> GenerateRequest:
    return GenerateRequest(
        request_id="r",
        token_ids=pack_tokens(list(range(num_tokens))),
        num_prompt_tokens=num_tokens,
        sampling=SamplingParams(max_tokens=1, **sampling),  # type: ignore[arg-type]
        cache_salt=salt,
    )


def fleet_that_holds(num_blocks: int) -> Fleet:
    fleet = Fleet()
    pool = PoolLoad(total=2000, free=0, cached=2000, held=0)
    fleet.observe("c", state(C, "c", model_fingerprint=FINGERPRINT, blocks=pool))
    fleet.session_up("c", "c")
    fleet.cache_changed("c", snapshot(names(list(range(16 * num_blocks)))))
    return fleet


def test_the_last_tokens_block_is_no_hit() -> None:
    book = HashBook(fleet_that_holds(10))
    for num_tokens, expected in (
        (15, {}),
        (16, {}),
        (17, {0: 16}),
        (160, {0: 144}),
        (500, {0: 160}),
    ):
        assert book.hits(book.hashes(request(num_tokens))) == expected


def test_another_salt_and_prompts_that_are_scored_have_no_hits() -> None:
    book = HashBook(fleet_that_holds(10))
    assert book.hits(book.hashes(request(100, salt="b"))) == {}
    assert book.hashes(request(100, prompt_logprobs=1)) == []


def test_nothing_is_hashed_while_nobody_holds_anything() -> None:
    assert HashBook(fleet_that_holds(0)).hashes(request(100)) == []


def test_a_chain_is_hashed_once_and_only_as_far_as_somebody_holds_it() -> None:
    fleet = fleet_that_holds(10)
    book = HashBook(fleet)
    (chain,) = book.hashes(request(4000))
    assert book.hits([chain]) == {0: 160}
    assert chain.num_known == 11
    first = next(iter(chain))
    fleet.cache_changed("c", KvEvents(sequence=1, stored=b"".join(names(list(range(320))))))
    assert book.hits([chain]) == {0: 320}
    assert next(iter(chain)) is first


def test_a_large_prompt_is_hashed_beforehand() -> None:
    book = HashBook(fleet_that_holds(1500))
    large = request(LARGE_TOKENS + 10_000)
    asyncio.run(book.prepare(large.token_ids, ""))
    chains = book.hashes(large)
    assert [chain.num_known for chain in chains] == [1501]
    assert book.hits(chains) == {0: 24_000}
    (again,) = book.hashes(large)
    assert again is not chains[0], "what was prepared is used once"
    assert again.num_known == 0
