"""The same request through live workers and through the virtual clock gives the same life-cycle
events.
"""

import asyncio
from collections import defaultdict
from typing import Any

from bench.load import random_prompt
from bench.serving import Launched
from common.events import EventLog
from common.types import SamplingParams
from tests.fakes.fleet import fleet
from tests.fakes.hash_model import VOCAB_SIZE
from tests.fakes.virtual_time import LoopClock, VirtualTimeLoop

PROMPT_TOKENS, CHUNK_TOKENS, OUTPUT_TOKENS = 1100, 512, 6
IN_ORDER = ("submitted", "admitted", "first_tokens_arrived", "landed", "ended")


class Recorder(EventLog):
    def __init__(self) -> None:
        super().__init__(LoopClock())
        self.events: list[dict[str, Any]] = []

    def record(self, event: str, **fields: object) -> None:
        self.events.append({"event": event, **fields})


def life_cycle(events: list[dict[str, Any]]) -> dict[str, Any]:
    """What does not depend on timing: order at each worker, blocks announced and verified."""
    at_p = [
        (e["event"], e.get("start", e.get("blocks")))
        for e in events
        if e["event"] in ("handoff_began", "chunk_started", "pages_ready", "first_tokens")
    ]
    verified: dict[int, int] = defaultdict(int)
    for event in events:
        if event["event"] == "pages_verified":
            for block in event["blocks"]:
                verified[block] += 1
    return {
        "prefill": at_p,
        "decode": [e["event"] for e in events if e["event"] in IN_ORDER],
        "pages read": sum(e["num_pages"] for e in events if e["event"] == "pages_read"),
        "verified": dict(verified),
    }


def on_virtual_time() -> list[dict[str, Any]]:
    recorder = Recorder()

    async def main() -> None:
        async with fleet(chunk_tokens=CHUNK_TOKENS, events=recorder) as f:
            prompt = [token % VOCAB_SIZE for token in random_prompt(PROMPT_TOKENS, 41)]
            sampling = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0)
            await f.client().generate(prompt, sampling)
            await asyncio.sleep(1)

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(main())
    return recorder.events


def on_live_workers(served: Launched) -> list[dict[str, Any]]:
    before = len(served.events())
    answer = served.http.post(
        "/v1/completions",
        json={
            "model": served.model,
            "prompt": random_prompt(PROMPT_TOKENS, 41),
            "max_tokens": OUTPUT_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
        },
    )
    assert answer.status_code == 200, answer.text
    served.wait_until_at_rest()
    return served.events()[before:]


def test_live_workers_and_the_virtual_clock_tell_the_same_story(served: Launched) -> None:
    expected = life_cycle(on_virtual_time())
    assert len([e for e in expected["prefill"] if e[0] == "chunk_started"]) == 3
    assert expected["decode"] == list(IN_ORDER)
    assert set(expected["verified"].values()) == {1}
    assert life_cycle(on_live_workers(served)) == expected
