"""The options of the commands that live here; the router's and the workers' are in their rooms."""

from dataclasses import dataclass
from typing import Literal

from common import shared_options as shared
from common.codecs import CODECS, DEFAULT_KV_CODEC
from common.errors import ConfigError
from common.options import (
    check_address,
    check_at_least,
    check_directory,
    check_distinct,
    check_folder_of,
    check_not_empty,
    check_positive,
    flag,
    option,
)
from common.shared_options import (
    MAX_GPU_MEMORY_UTILIZATION,
    BlockSize,
    LogLevel,
    PrefillWhere,
    WeightDtype,
)
from worker.config import ChunkTokens, check_chunk, chunk_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Options that are None are left to the workers, whose own defaults then hold."""

    model: str | None = option(
        "model directory in Hugging Face format",
        default=None,
        metavar="DIR",
        shown="the demo model",
    )
    served_model_name: str | None = shared.served_model_name()
    prefill: int = option("prefill workers", default=1, metavar="N")
    decode: int = option("decode workers", default=1, metavar="N")
    colocated: int = option("workers that do both", default=0, metavar="N")
    http: str = shared.http()
    grpc: str = option("where the gRPC API listens", default="127.0.0.1:9000", metavar="HOST:PORT")
    metrics: str = option(
        "where the router's /metrics listens", default="127.0.0.1:8001", metavar="HOST:PORT"
    )
    kv_codec: str | None = option(
        "element type of cached keys and values",
        default=None,
        shown=DEFAULT_KV_CODEC,
        choices=CODECS,
    )
    weight_dtype: WeightDtype | None = option(
        "how weights are kept; fp8 needs a GPU, int8 a CPU",
        default=None,
        shown="auto: as in the checkpoint",
    )
    batch_invariant: bool = option(
        "a request's result has the same bits whatever else is in the batch; slower on GPUs, "
        "always so on CPUs",
        default=False,
    )
    tensor_parallel: int | None = option(
        "processes (ranks) of each worker, each with a part of every layer",
        default=None,
        metavar="N",
        shown="1",
    )
    block_size: BlockSize | None = option("tokens per KV block", default=None, shown="16")
    kv_blocks: int | None = option(
        "size of each worker's KV pool in packed blocks; exact pages for first and open blocks "
        "are added, and /v1/fleet counts both",
        default=None,
        metavar="N",
        shown="what the memory allows",
    )
    chunk_tokens: ChunkTokens | None = chunk_tokens(default=None)
    itl_target: float | None = shared.itl_target()
    prefill_where: PrefillWhere | None = option(
        "auto: a decode worker may prefill where that is faster; remote: only prefill workers do",
        default=None,
        shown="auto",
    )
    threads: int | None = option(
        "CPU threads per worker", default=None, metavar="N", shown="an equal share of the cores"
    )
    worker_ports: int | None = option(
        "first port for workers to listen on; each takes the next two",
        default=None,
        metavar="PORT",
        shown="free ones",
    )
    restart: Literal["no", "on-failure"] = option(
        "restart a router or worker that failed, at its old ports: at most 5 times within 10 "
        "minutes, after 1 to 16 s",
        default="no",
    )
    start_timeout_s: float = option(
        "give up when the fleet is not ready after this long", default=300.0, metavar="SECONDS"
    )
    drain_s: float = shared.drain_s()
    log_level: LogLevel = shared.log_level()

    def __post_init__(self) -> None:
        if self.model is not None:
            check_directory("model", self.model)
        check_not_empty("served_model_name", self.served_model_name)
        for name in ("prefill", "decode", "colocated"):
            check_at_least(name, getattr(self, name), 0)
        if self.decode + self.colocated == 0:
            raise ConfigError("--decode and --colocated are both 0; nothing would generate tokens")
        for name in ("http", "grpc", "metrics"):
            check_address(name, getattr(self, name))
        check_distinct({"http": self.http, "grpc": self.grpc, "metrics": self.metrics})
        check_at_least("kv_blocks", self.kv_blocks, 1)
        if isinstance(self.chunk_tokens, int):
            check_chunk(self.chunk_tokens, self.block_size or 16)
        check_positive("itl_target", self.itl_target)
        num_ports = 2 * (self.prefill + self.decode + self.colocated)
        if self.worker_ports is not None and not 1 <= self.worker_ports <= 65_536 - num_ports:
            raise ConfigError(
                f"--worker-ports is {self.worker_ports}; the {num_ports} ports from there on must "
                "lie between 1 and 65535"
            )
        check_at_least("threads", self.threads, 1)
        check_positive("start_timeout_s", self.start_timeout_s)
        check_positive("drain_s", self.drain_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class CertsConfig:
    out: str = option("folder to write to", metavar="DIR")
    ca: str | None = option(
        "folder whose CA (ca.pem, ca-key.pem) signs; for a second certificate",
        default=None,
        metavar="DIR",
        shown="--out, where one is made if there is none",
    )
    role: Literal["router", "prefill", "decode"] | None = option(
        "the only role that the certificate is valid for (decode: colocated too)",
        default=None,
        shown="any role",
    )
    days: int = option("how long the certificates are valid", default=365, metavar="N")

    def __post_init__(self) -> None:
        check_at_least("days", self.days, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoModelConfig:
    verify: bool = option("compare every file with its hash, not only with its size", default=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateConfig:
    model: str = shared.model()
    text: str = shared.text()
    threads: int | None = shared.threads()

    def __post_init__(self) -> None:
        check_directory("model", self.model)
        check_at_least("threads", self.threads, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityConfig:
    model: str = shared.model()
    text: str = shared.text()
    codecs: tuple[str, ...] = option(
        "what to compare with fp32", default=tuple(CODECS)[:-1], metavar="CODEC,..."
    )
    check: str = option(
        "the codec that the bounds apply to", default=DEFAULT_KV_CODEC, choices=CODECS
    )
    weight_dtype: Literal["auto", "int8"] = option(
        "how weights are kept for all but the fp32 baseline, which has the checkpoint's own",
        default="auto",
    )
    max_kl: float = option(
        "bound on the mean distance from fp32's next-token distribution (KL, in nats), by the "
        "upper end of its 95 % interval",
        default=0.0006,
        metavar="NATS",
    )
    min_top_1: float = option(
        "bound on the percentage of positions with the same most likely token, by the lower end",
        default=98.3,
        metavar="PERCENT",
    )
    max_long_kl: float = option(
        "the same bound for windows of 8,192 tokens",
        default=0.0015,
        metavar="NATS",
    )
    windows: int = option(
        "windows of 1,024 tokens, evenly over the text: none, or at least two",
        default=24,
        metavar="N",
    )
    long_windows: int = option("windows of 8,192 tokens, likewise", default=3, metavar="N")
    tasks: str | None = option(
        "file of prompts with right answers, one JSON object per line: "
        '{"prompt", "choices", "answer": index of the right one} or {"prompt", "answer": text}',
        default=None,
        metavar="FILE",
        shown="no tasks",
    )
    min_accuracy_kept: float = option(
        "bound on the accuracy with --tasks, as a percentage of fp32's",
        default=99.5,
        metavar="PERCENT",
    )
    compare_offsets: bool = option("measure codecs without their offsets too", default=True)
    block_size: BlockSize = shared.block_size()
    threads: int | None = shared.threads()
    json: str | None = shared.json()

    def __post_init__(self) -> None:
        check_directory("model", self.model)
        for name, count in (("windows", self.windows), ("long_windows", self.long_windows)):
            check_at_least(name, count, 0)
            if count == 1:
                raise ConfigError(
                    f"--{name.replace('_', '-')} 1: an interval needs at least two windows; 0 "
                    "leaves them out",
                    param=name,
                )
        if not (self.windows or self.long_windows or self.tasks):
            raise ConfigError("--windows 0 and --long-windows 0 leave nothing to measure")
        check_folder_of("json", self.json)
        check_at_least("threads", self.threads, 1)
        shared.check_codecs(self.codecs)
        if self.check not in self.codecs:
            raise ConfigError(f"--check {self.check} is not among --codecs")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConfig:
    model: str = option(
        "a known model (an unknown name lists them) or a directory with a config.json",
        metavar="NAME|DIR",
    )
    gpu: str | None = option(
        "the kind of GPU: a100, h100, h200, b200 or mi300x",
        default=None,
        metavar="NAME",
        shown="none; then --step-times is needed",
    )
    tensor_parallel: int = option(
        "ranks of each worker: GPUs that share the model", default=1, metavar="N"
    )
    prefill_tensor_parallel: int | None = option(
        "the same, for prefill workers", default=None, metavar="N", shown="as --tensor-parallel"
    )
    decode_tensor_parallel: int | None = option(
        "the same, for decode and colocated workers",
        default=None,
        metavar="N",
        shown="as --tensor-parallel",
    )
    rank_bandwidth: float | None = option(
        "from each GPU to the others of its worker, one way",
        default=None,
        metavar="GB/S",
        shown="that of the GPU's own links",
    )
    network_bandwidth: float | None = option(
        "from each GPU to other workers, one way",
        default=None,
        metavar="GB/S",
        shown="that of its platform's NICs",
    )
    step_times: str | None = option(
        "file of step times measured on a running fleet, instead of --gpu",
        default=None,
        metavar="FILE",
        shown="none",
    )
    kv_blocks: int | None = option(
        "with --step-times: each worker's KV pool in blocks",
        default=None,
        metavar="N",
        shown="on GPUs what the memory allows",
    )
    trace: str | None = option(
        "requests in Mooncake's format, JSON lines",
        default=None,
        metavar="FILE",
        shown="none; then --rate is needed",
    )
    rate: float | None = option(
        "without a trace: requests per second", default=None, metavar="X", shown="none"
    )
    prompt_tokens: int = option("without a trace: mean prompt length", default=1024, metavar="N")
    output_tokens: int = option("without a trace: mean output length", default=256, metavar="N")
    seed: int = option("without a trace: seed of arrivals and lengths", default=0, metavar="N")
    requests: int | None = option(
        "at most this many requests of the trace, or this many random ones",
        default=None,
        metavar="N",
        shown="the whole trace, or 1000",
    )
    ttft: float = option("target for the time to the first token", default=2.0, metavar="SECONDS")
    itl: float = option(
        "target for a request's mean time between tokens", default=0.05, metavar="SECONDS"
    )
    gpus: int | None = option(
        "GPUs to deploy on", default=None, metavar="N", shown="the fewest that meet the targets"
    )
    gpu_hour_price: float | None = option(
        "price of one GPU for an hour; adds the cost of a million output tokens",
        default=None,
        metavar="X",
        shown="no cost",
    )
    chunks: tuple[str, ...] = option(
        "chunk sizes to try: tokens, or auto", default=("auto", "512", "2048"), metavar="N|auto,..."
    )
    codecs: tuple[str, ...] = option(
        "KV codecs to try", default=(DEFAULT_KV_CODEC, "bf16"), metavar="CODEC,..."
    )
    max_num_seqs: int = shared.max_num_seqs()
    gpu_memory_utilization: float = option(
        f"share of a GPU's memory to use, at most {MAX_GPU_MEMORY_UTILIZATION}",
        default=0.9,
        metavar="SHARE",
    )
    compute_efficiency: float = option(
        "share of a GPU's peak that large matrix products reach", default=0.6, metavar="SHARE"
    )
    bandwidth_efficiency: float = option(
        "share of its memory bandwidth that decoding reaches", default=0.75, metavar="SHARE"
    )
    plot: str | None = option(
        "draw the table here", default=None, metavar="FILE.png", shown="no picture"
    )
    json: str | None = shared.json()

    def __post_init__(self) -> None:
        check_folder_of("json", self.json)
        check_folder_of("plot", self.plot)
        for name in ("tensor_parallel", "prefill_tensor_parallel", "decode_tensor_parallel"):
            check_at_least(name, getattr(self, name), 1)
        for name in ("prompt_tokens", "output_tokens", "max_num_seqs", "requests", "gpus"):
            check_at_least(name, getattr(self, name), 1)
        check_at_least("seed", self.seed, 0)
        check_at_least("kv_blocks", self.kv_blocks, 64)
        positive = ("rate", "ttft", "itl", "gpu_hour_price", "rank_bandwidth", "network_bandwidth")
        for name in positive:
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name))
        for name, most in (
            ("gpu_memory_utilization", MAX_GPU_MEMORY_UTILIZATION),
            ("compute_efficiency", 1.0),
            ("bandwidth_efficiency", 1.0),
        ):
            if not 0 < getattr(self, name) <= most:
                raise ConfigError(
                    f"{flag(name)} is {getattr(self, name)}; it must be above 0 and at most {most}"
                )
        shared.check_codecs(self.codecs)
