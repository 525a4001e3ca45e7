"""One prompt of 4,096 tokens in chunks of 512 through 1 prefill + 1 decode worker: is the hand-off
visible?

Checks, each printed with its bound: exposed transfer as a share of TTFT, the gap between the first
two tokens against the median gap, when pages were verified, bytes on the hand-off stream, bytes
pulled.
"""

from dataclasses import dataclass
from statistics import median
from typing import Any

from bench.load import random_prompt, run_load
from bench.serve import exposed_transfers
from bench.serving import Launched, serving

PROMPT_TOKENS, CHUNK_TOKENS, BLOCK_SIZE, OUTPUT_TOKENS = 4096, 512, 16, 32
REPEATS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    name: str
    measured: float
    bound: float
    unit: str

    @property
    def holds(self) -> bool:
        return self.measured <= self.bound


def run(*arguments: str) -> list[Check]:
    always = ("--prefill-where", "remote")
    with serving("--chunk-tokens", str(CHUNK_TOKENS), *always, *arguments) as served:
        run_load(served.url, served.model, [random_prompt(32, 999)], 4, 1)
        names = ("handoff_stream_bytes", "pull_bytes", "pull_pages")
        before = {name: served.metric("decode", f"tandem_{name}_total") for name in names}
        prompts = [random_prompt(PROMPT_TOKENS, seed) for seed in range(REPEATS)]
        seen, _ = run_load(served.url, served.model, prompts, OUTPUT_TOKENS, 1)
        served.wait_until_at_rest()
        after = {name: served.metric("decode", f"tandem_{name}_total") for name in names}
        exposed = exposed_transfers(served)[1:]
        late = late_chunks(served)
    used = {name: (after[name] - before[name]) / REPEATS for name in names}
    packed, exact = PROMPT_TOKENS // BLOCK_SIZE - 1, 1
    expected_bytes = packed * page_bytes(1) + exact * page_bytes(2)
    return [
        Check(
            name="exposed transfer / TTFT",
            measured=median(e / request.ttft_s for e, request in zip(exposed, seen, strict=True)),
            bound=0.02,
            unit="",
        ),
        Check(
            name="first gap / median gap",
            measured=median(request.gaps_s[0] / median(request.gaps_s) for request in seen),
            bound=1.2,
            unit="",
        ),
        Check(
            name="chunks whose pages were verified after chunk k+2 began",
            measured=late,
            bound=0,
            unit="",
        ),
        Check(
            name="hand-off stream",
            measured=used["handoff_stream_bytes"],
            bound=16 * PROMPT_TOKENS + 64_000,
            unit=" bytes",
        ),
        Check(
            name="|pages pulled - pages of the prompt|",
            measured=abs(used["pull_pages"] - packed - exact),
            bound=0,
            unit="",
        ),
        Check(
            name="|bytes pulled - pages x page bytes|",
            measured=abs(used["pull_bytes"] - expected_bytes),
            bound=0,
            unit=" bytes",
        ),
    ]


def page_bytes(element_bytes: int) -> int:
    """Of the demo model: each KV head has payload, scales (if packed), padding to 64, and a tag."""
    payload = 30 * 2 * BLOCK_SIZE * 64 * element_bytes
    scales = 30 * 2 if element_bytes == 1 else 0
    return 3 * (-(-(payload + scales) // 64) * 64 + 64)


def late_chunks(served: Launched) -> int:
    """Chunks k of a prompt whose pages were not all verified when its chunk k+2 started."""
    started: dict[str, list[float]] = {}
    blocks: dict[str, list[list[int]]] = {}
    verified: dict[str, dict[int, float]] = {}
    for event in served.events():
        match event["event"]:
            case "chunk_started":
                started.setdefault(request_of(event), []).append(event["time"])
            case "pages_ready":
                blocks.setdefault(request_of(event), []).append(event["blocks"])
            case "pages_verified":
                times = verified.setdefault(event["request_id"], {})
                times.update(dict.fromkeys(event["blocks"], event["time"]))
    return sum(
        max(verified[request_id][block] for block in chunk_blocks) > started[request_id][number + 2]
        for request_id, chunks in blocks.items()
        for number, chunk_blocks in enumerate(chunks[:-2])
    )


def request_of(event: dict[str, Any]) -> str:
    """The prefill worker's key is the request id and a number of its own."""
    key: str = event["key"]
    return key.rpartition("#")[0]
