"""32 requests of 512 tokens in and 64 out, 16 at a time: 1 prefill + 1 decode worker, and one
colocated, with automatic chunks and with chunks of 512.

The two-worker fleet has one thread per worker, the colocated worker has all of them, as `tandem
serve` divides the cores. On a machine with few cores the split fleet must lose throughput: its two
halves are rarely busy at once. What it shows there is the cost of the hand-off, which should be
nothing.
"""

from dataclasses import dataclass
from statistics import median
from typing import Any

from bench.load import percentile, random_prompt, run_load
from bench.serving import Launched, serving

NUM_REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS, CONCURRENCY = 32, 512, 64, 16

ONE_DEVICE = ("--prefill", "0", "--decode", "0", "--colocated", "1")
FLEETS = {
    "1 prefill + 1 decode": ("--prefill", "1", "--decode", "1", "--prefill-where", "remote"),
    "1 prefill + 1 decode, auto": ("--prefill", "1", "--decode", "1"),
    "1 colocated": ONE_DEVICE,
    "1 colocated, chunks of 512": (*ONE_DEVICE, "--chunk-tokens", "512"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    fleet: str
    wall_s: float
    requests_per_s: float
    output_tokens_per_s: float
    ttft_s: tuple[float, float]
    itl_s: tuple[float, float]
    exposed_s: tuple[float, float] | None
    """(median, p99); None where nothing is handed off."""


def run(*arguments: str) -> list[Row]:
    return [measure(name, fleet + arguments) for name, fleet in FLEETS.items()]


def measure(name: str, arguments: tuple[str, ...]) -> Row:
    prompts = [random_prompt(PROMPT_TOKENS, seed) for seed in range(NUM_REQUESTS)]
    with serving(*arguments) as served:
        run_load(served.url, served.model, [random_prompt(32, 999)], 4, 1)  # links, caches
        seen, wall_s = run_load(served.url, served.model, prompts, OUTPUT_TOKENS, CONCURRENCY)
        exposed = exposed_transfers(served)[1:]
    ttft = [request.ttft_s for request in seen]
    gaps = [gap for request in seen for gap in request.gaps_s]
    return Row(
        fleet=name,
        wall_s=wall_s,
        requests_per_s=NUM_REQUESTS / wall_s,
        output_tokens_per_s=NUM_REQUESTS * OUTPUT_TOKENS / wall_s,
        ttft_s=(median(ttft), percentile(ttft, 0.99)),
        itl_s=(median(gaps), percentile(gaps, 0.99)),
        exposed_s=(median(exposed), percentile(exposed, 0.99)) if exposed else None,
    )


def exposed_transfers(served: Launched) -> list[float]:
    """From the first token's arrival at the decode worker until the last page was usable, per
    request.
    """
    arrived: dict[Any, float] = {}
    found: list[float] = []
    for event in served.events():
        if event["event"] == "first_tokens_arrived":
            arrived[event["request_id"]] = event["time"]
        elif event["event"] == "landed":
            found.append(max(0.0, event["time"] - arrived[event["request_id"]]))
    return found
