"""The options of prefill, decode and colocated workers."""

from dataclasses import dataclass
from typing import Any, Literal

from common import shared_options as shared
from common.codecs import CODECS, DEFAULT_KV_CODEC
from common.errors import ConfigError
from common.options import (
    check_address,
    check_at_least,
    check_directory,
    check_distinct,
    check_plaintext,
    check_positive,
    option,
)
from common.shared_options import (
    MAX_GPU_MEMORY_UTILIZATION,
    BlockSize,
    LogLevel,
    WeightDtype,
)

ChunkTokens = int | Literal["auto"]

MAX_AUTO_CHUNK = 512
"""Prompt tokens of the largest chunk with `--chunk-tokens auto`. Larger ones hardly compute faster,
and pages leave a prefill worker chunk by chunk.
"""


def chunk_tokens(*, default: Literal["auto"] | None) -> Any:
    """None leaves it to the workers."""
    return option(
        "most prompt tokens per step, a multiple of the block size; auto: at most "
        f"{MAX_AUTO_CHUNK}, and while streams run what the ITL target allows",
        default=default,
        metavar="N|auto",
        shown="auto",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    role: Literal["prefill", "decode", "colocated"]
    model: str = shared.model()
    listen: str = option(
        "where the router and other workers reach this one",
        default="127.0.0.1:7000",
        metavar="HOST:PORT",
    )
    advertise: str | None = option(
        "address that is given to other workers",
        default=None,
        metavar="HOST:PORT",
        shown="as --listen",
    )
    metrics: str = option("where /metrics listens", default="127.0.0.1:7001", metavar="HOST:PORT")
    kv_codec: str = option(
        "element type of cached keys and values; int4 is for summarising only",
        default=DEFAULT_KV_CODEC,
        choices=CODECS,
    )
    block_size: BlockSize = shared.block_size()
    kv_blocks: int | None = option(
        "size of the KV pool in packed blocks; exact pages for first and open blocks are added, "
        "and /v1/fleet counts both",
        default=None,
        metavar="N",
        shown="what the memory allows",
    )
    gpu_memory_utilization: float | None = option(
        f"share of the GPU's memory to use, at most {MAX_GPU_MEMORY_UTILIZATION}; refused on a CPU",
        default=None,
        metavar="SHARE",
        shown="0.9 on a GPU",
    )
    chunk_tokens: ChunkTokens = chunk_tokens(default="auto")
    max_num_seqs: int = shared.max_num_seqs()
    max_waiting: int = option(
        "requests that may wait for KV blocks before new ones are refused with 429",
        default=1024,
        metavar="N",
    )
    max_model_len: int | None = option(
        "longest prompt plus output in tokens", default=None, metavar="N", shown="as the model says"
    )
    tensor_parallel: int = shared.tensor_parallel()
    threads: int | None = shared.threads()
    device: Literal["auto", "cpu", "cuda"] = option("where to compute", default="auto")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "element type for computing", default="auto", shown="float32 on a CPU, the model's on a GPU"
    )
    weight_dtype: WeightDtype = option(
        "how weights are kept; auto: as the checkpoint has them; fp8: on a GPU of compute "
        "capability 8.9 or more; int8: on a CPU. Workers that exchange KV must agree",
        default="auto",
    )
    overlap_steps: Literal["auto", "on", "off"] = option(
        "decode and colocated workers: plan the next step while one runs; auto: on a GPU",
        default="auto",
    )
    batch_invariant: bool = option(
        "a request's result has the same bits whatever else is in the batch; slower on a GPU, "
        "always so on a CPU. Workers that exchange KV must agree",
        default=False,
    )
    prefill_peers: tuple[str, ...] = option(
        "decode workers: the only prefill workers that a route may name; a name with many "
        "addresses stands for all of them",
        default=(),
        metavar="HOST:PORT,...",
        shown="any over --internal-tls; in plain text loopback addresses where --listen is one",
    )
    handoff_stall_s: float = option(
        "a hand-off without progress is ended after this long", default=30.0, metavar="SECONDS"
    )
    drain_s: float = shared.drain_s()
    event_log: str | None = option(
        "append life-cycle events of requests and pages to this file, one JSON object per line",
        default=None,
        metavar="FILE",
        shown="no event log",
    )
    internal_tls: str | None = shared.internal_tls()
    insecure_internal: bool = option("talk beyond this machine in plain text", default=False)
    log_level: LogLevel = shared.log_level()

    def __post_init__(self) -> None:
        check_directory("model", self.model)
        for name, address in (
            ("listen", self.listen),
            ("advertise", self.advertise),
            ("metrics", self.metrics),
        ):
            check_address(name, address)
        check_distinct({"listen": self.listen, "metrics": self.metrics})
        check_plaintext("listen", self.listen, self.insecure_internal, self.internal_tls)
        for peer in self.prefill_peers:
            check_address("prefill_peers", peer)
        if self.prefill_peers and self.role != "decode":
            raise ConfigError("--prefill-peers is for decode workers; leave it out here")
        check_at_least("kv_blocks", self.kv_blocks, 1)
        check_chunk(self.max_chunk_tokens, self.block_size)
        check_at_least("max_num_seqs", self.max_num_seqs, 1)
        check_at_least("max_model_len", self.max_model_len, 1)
        check_at_least("tensor_parallel", self.tensor_parallel, 1)
        check_at_least("threads", self.threads, 1)
        check_positive("handoff_stall_s", self.handoff_stall_s)
        check_positive("drain_s", self.drain_s)
        if self.role == "prefill" and self.overlap_steps == "on":
            raise ConfigError(
                "--overlap-steps on is for decode and colocated workers; leave it out here"
            )
        share = self.gpu_memory_utilization
        if share is not None and not 0 < share <= MAX_GPU_MEMORY_UTILIZATION:
            raise ConfigError(
                f"--gpu-memory-utilization is {share}; it must be above 0"
                f" and at most {MAX_GPU_MEMORY_UTILIZATION}"
            )
        if share is not None and self.device == "cpu":
            raise ConfigError(
                "--gpu-memory-utilization needs a GPU, but --device is cpu;"
                " size the pool with --kv-blocks"
            )

    @property
    def max_chunk_tokens(self) -> int:
        """Prompt tokens of the largest step: what the engine and the landing zone are sized for."""
        return MAX_AUTO_CHUNK if self.chunk_tokens == "auto" else self.chunk_tokens

    @property
    def is_chunk_auto(self) -> bool:
        return self.chunk_tokens == "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class ColocatedSwitch:
    """`tandem decode --colocated`: not a field of WorkerConfig, where it becomes the role."""

    colocated: bool = option("also prefill; requests then need no prefill worker", default=False)


def decode_config(*, colocated: bool = False, **given: Any) -> WorkerConfig:
    return WorkerConfig(role="colocated" if colocated else "decode", **given)


def check_chunk(chunk_tokens: int, block_size: int) -> None:
    if chunk_tokens < block_size or chunk_tokens % block_size != 0:
        raise ConfigError(
            f"--chunk-tokens is {chunk_tokens};"
            f" it must be a multiple of the block size, {block_size}"
        )
