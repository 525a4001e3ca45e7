"""Pairs of workers that cannot exchange pages: shown, counted, and no request is sent over them."""

import dataclasses
from collections import Counter
from typing import Any

from prometheus_client import generate_latest

from common.layout_facts import LayoutFacts
from common.messages import RefusedLink
from common.types import Role, SamplingParams
from router.admission.admission import Admission
from router.api.views import worker_object
from router.fleet.fleet import Fleet as RouterFleet
from router.fleet.metrics import RouterMetrics
from router.fleet.pairs import misfits, others_bits
from tests.fakes.fleet import FACTS, Fleet, fleet
from tests.fakes.hash_model import expected_tokens
from tests.fakes.router import Router, router
from tests.handoff.test_handoff_in_process import prompt_of, virtual
from tests.router.test_fleet import D, P, fleet_of, names, state

UNLIKE = dataclasses.replace(FACTS, codec="fp8_e5m2")
GREEDY = SamplingParams(max_tokens=6, temperature=0)


def said(facts: LayoutFacts, **changes: Any) -> dict[str, Any]:
    return {"facts": facts, "layout": f"{facts.codec} {facts.block_size}", **changes}


def unlike_pair() -> RouterFleet:
    """Of two prefill workers `d` can read one, and `e` the other."""
    return fleet_of(
        state(P, "p:1", **said(FACTS)),
        state(P, "q:1", **said(UNLIKE)),
        state(D, "d:1", **said(FACTS)),
        state(D, "e:1", **said(UNLIKE)),
    )


def test_each_decode_worker_gets_prefill_workers_that_fit_it() -> None:
    found = unlike_pair()
    assert found.reasons() == []
    for decode, fits, unfit in (("d:1", "p:1", "q:1"), ("e:1", "q:1", "p:1")):
        worker = found.get(decode)
        assert worker is not None
        assert names(found.prefill_workers(worker, 1)) == [fits]
        [(address, reason)] = misfits(worker, found.linked()).items()
        assert address == unfit
        assert "same --kv-codec" in reason
        assert worker_object(found, worker)["cannot_read"] == {unfit: reason}
    shown = generate_latest(RouterMetrics(found, Admission(1)).registry).decode()
    assert "tandem_router_misfits 2.0" in shown


def test_a_prefill_worker_that_nobody_can_read_says_what_differs() -> None:
    found = fleet_of(state(P, "q:1", **said(UNLIKE)), state(D, "d:1", **said(FACTS)))
    assert found.reasons()[0] == (
        "prefill q:1: decode d:1 cannot read its pages: KV codec fp8_e5m2 at the prefill worker "
        "and fp8_e3m4 at the decode worker: start both workers with the same --kv-codec"
    )


def test_facts_that_agree_do_not_hide_a_layout_that_differs() -> None:
    found = fleet_of(
        state(P, "p:1", **said(FACTS, layout="abc")), state(D, "d:1", **said(FACTS, layout="abd"))
    )
    assert "KV is stored as abc in blocks of 16 at the prefill worker" in found.reasons()[0]


def test_other_numbers_of_ranks_are_shown_as_other_bits() -> None:
    found = fleet_of(state(P, "p:1", num_ranks=2), state(P, "q:1"), state(D, "d:1"))
    decode = found.get("d:1")
    assert decode is not None
    assert names(found.prefill_workers(decode, 1)) == ["p:1", "q:1"]
    assert others_bits(decode, found.linked()) == {"p:1": "ranks: 2 at the prefill worker, 1 here"}
    shown = worker_object(found, decode)
    assert shown["ranks"] == 1
    assert "cannot_read" not in shown
    assert set(shown["other_bits"]) == {"p:1"}
    prefill = found.get("p:1")
    assert prefill is not None
    assert worker_object(found, prefill)["ranks"] == 2


def test_a_link_that_was_refused_is_believed_for_that_life_of_the_worker() -> None:
    refused = RefusedLink(address="p:1", incarnation="p:1", reason="the records have other sizes")
    found = fleet_of(state(P, "p:1"), state(P, "q:1"), state(D, "d:1", refused_links=(refused,)))
    decode = found.get("d:1")
    assert decode is not None
    assert names(found.prefill_workers(decode, 1)) == ["q:1"]
    assert misfits(decode, found.linked()) == {"p:1": "the records have other sizes"}
    found.observe("p:1", state(P, "p-again:1"))
    assert names(found.prefill_workers(decode, 1)) == ["q:1", "p:1"]


# --- in one process, on virtual time --------------------------------------------------------------


def count_links(f: Fleet, address: str) -> list[int]:
    count = [0]
    handlers = f.workers[address].service.handlers()

    async def counted(stream: Any) -> None:
        count[0] += 1
        await handlers["Link"](stream)

    f.network.serve(address, {**handlers, "Link": counted})
    return count


async def answers(r: Router, num: int) -> Counter[str]:
    outcomes: Counter[str] = Counter()
    for number in range(num):
        prompt = prompt_of(200, seed=number)
        answer = await r.generate(prompt, GREEDY)
        outcomes["right" if answer.tokens == expected_tokens(prompt, GREEDY) else "wrong"] += 1
        outcomes["retries"] += answer.num_retries
    return outcomes


def test_what_only_the_link_shows_costs_one_retry_and_no_request() -> None:
    async def main() -> None:
        async with fleet(num_prefill=1) as f:
            f.add(Role.PREFILL, "odd", layout_fingerprint=b"the same words!-")
            links = count_links(f, "odd")
            async with router(f) as r:
                outcomes = await answers(r, 20)
                assert outcomes == {"right": 20, "retries": 1}
                assert links == [2], "asked once, over one connection twice"
                [refused] = f.workers["d0"].service.watch.state().refused_links
                assert (refused.address, refused.incarnation) == (
                    "odd", f.workers["odd"].identity.incarnation
                )  # fmt: skip
                assert "different releases" in refused.reason
                decode = r.fleet.get("d0")
                assert decode is not None
                assert misfits(decode, r.fleet.linked()) == {"odd": refused.reason}
                assert r.fleet.num_failures[Role.PREFILL] == 0
                shown = generate_latest(f.workers["d0"].metrics.registry).decode()
                assert "tandem_links_refused_total 1.0" in shown
                assert f.workers["odd"].device.num_tokens_computed == 0

    virtual(main)


def test_without_a_prefill_worker_that_fits_decode_workers_do_it() -> None:
    async def main() -> None:
        async with fleet(num_prefill=0) as f:
            f.add(Role.PREFILL, "odd", layout_fingerprint=b"the same words!-")
            async with router(f) as r:
                assert await answers(r, 5) == {"right": 5, "retries": 1}
                assert r.fleet.is_degraded()
                assert "decode d0 cannot read its pages" in r.fleet.reasons()[0]

    virtual(main)
