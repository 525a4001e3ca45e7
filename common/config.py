"""The command line, TOML files and the environment, read once into frozen values; no other file
touches the three.

    parse(argv) -> Command(name, config)    defaults < the command's TOML table < explicit flags

Every option is one dataclass field, made with `option`; flags, TOML keys, --help and the checks
come from it. `tandem.py` hands the config to the process's composition root.
"""

import argparse
import difflib
import functools
import operator
import os
import tomllib
import types
from collections.abc import Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

from common.addresses import split_address
from common.errors import ConfigError

LOOPBACK = {"127.0.0.1", "::1", "localhost"}
MAX_GPU_MEMORY_UTILIZATION = 0.92

PrefillWhere = Literal["auto", "remote"]
LogLevel = Literal["debug", "info", "warning", "error"]
KvCodec = Literal["fp8_e3m4", "fp8_e4m3", "fp8_e5m2", "int8", "int4", "bf16", "fp32"]
DEFAULT_KV_CODEC: Final[KvCodec] = "fp8_e3m4"
BlockSize = Literal[16, 32]
WeightDtype = Literal["auto", "fp8", "int8"]
ChunkTokens = int | Literal["auto"]

MAX_AUTO_CHUNK = 512
"""Prompt tokens of the largest chunk with `--chunk-tokens auto`. Larger ones hardly compute faster,
and pages leave a prefill worker chunk by chunk.
"""


def option(help: str, *, default: Any = MISSING, metavar: str = "", shown: str = "") -> Any:
    """A flag and a TOML key; --help shows `shown` for a default that is worked out later."""
    return field(default=default, metadata={"help": help, "metavar": metavar, "shown": shown})


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    model: str = option(
        "model directory; the router reads tokenizer, chat template and config only", metavar="DIR"
    )
    served_model_name: str | None = option(
        "model name in the API", default=None, metavar="NAME", shown="the directory's name"
    )
    chat_template: str | None = option(
        "file with a Jinja chat template",
        default=None,
        metavar="FILE",
        shown="the model's own",
    )
    tool_parser: Literal["hermes", "llama3_json", "mistral"] | None = option(
        "how the model writes tool calls", default=None, shown="as its chat template suggests"
    )
    tool_objects: Literal["closed", "open"] = option(
        "whether forced calls may have arguments that the tool's schema neither names nor forbids",
        default="closed",
    )
    generation_config: Literal["auto", "off"] = option(
        "auto: requests that do not say otherwise are sampled as the model's "
        "generation_config.json advises; off: with a temperature of 1 and no filters",
        default="auto",
    )
    reasoning_parser: Literal["qwen3", "deepseek_r1"] | None = option(
        "keep the model's <think> block apart from its answer", default=None, shown="do not"
    )
    http: str = option(
        "where the OpenAI API listens", default="127.0.0.1:8000", metavar="HOST:PORT"
    )
    grpc: str | None = option(
        "where the gRPC API listens", default=None, metavar="HOST:PORT", shown="no gRPC API"
    )
    metrics: str = option("where /metrics listens", default="127.0.0.1:8001", metavar="HOST:PORT")
    api_keys: str | None = option(
        "file of API keys, one per line; $TANDEM_API_KEYS may hold more, separated by commas",
        default=None,
        metavar="FILE",
        shown="no key is needed",
    )
    priorities: str = option(
        "priorities that a request may ask for, lower is sooner; a key's own go before",
        default="0:100",
        metavar="LOW:HIGH",
    )
    prefix_sharing: Literal["key", "all"] = option(
        "who shares cached prefixes: where API keys are in use, requests under one key only (then "
        "nobody can tell from cached tokens what others asked), or all requests",
        default="key",
    )
    tls_cert: str | None = option(
        "certificate chain (PEM) for HTTP and gRPC", default=None, metavar="FILE", shown="no TLS"
    )
    tls_key: str | None = option("its private key (PEM)", default=None, metavar="FILE")
    prefill: tuple[str, ...] = option(
        "prefill workers, separated by commas; a name with many addresses stands for all of them",
        default=(),
        metavar="HOST:PORT,...",
        shown="none",
    )
    decode: tuple[str, ...] = option(
        "decode and colocated workers, separated by commas, resolved likewise",
        metavar="HOST:PORT,...",
    )
    prefill_where: PrefillWhere = option(
        "auto: where the first token is predicted to come soonest, at a prefill worker or on the "
        "decode worker; remote: always at a prefill worker, and without one requests are refused",
        default="auto",
    )
    max_waiting: int = option(
        "requests that may wait for a worker before new ones are refused with 429",
        default=1024,
        metavar="N",
    )
    itl_target: float | None = option(
        "seconds between two tokens of a stream that prompt chunks in between should keep to",
        default=None,
        metavar="SECONDS",
        shown="0.05, or two to five steps without prompts where those are longer",
    )
    request_timeout_s: float = option(
        "a request that takes longer is ended", default=600.0, metavar="SECONDS"
    )
    keep_alive_s: float = option(
        "how long an HTTP connection may be silent between two requests; longer than a proxy "
        "before it waits",
        default=120.0,
        metavar="SECONDS",
    )
    drain_s: float = option(
        "at shutdown, how long running requests may still take", default=30.0, metavar="SECONDS"
    )
    internal_tls: str | None = option(
        "talk to other processes over mTLS, with ca.pem, node.pem and node-key.pem of this folder",
        default=None,
        metavar="DIR",
        shown="plain text",
    )
    insecure_internal: bool = option(
        "talk to workers beyond this machine in plain text", default=False
    )
    log_level: LogLevel = option("least important line to log", default="info")

    def __post_init__(self) -> None:
        check_directory("model", self.model)
        check_not_empty("served_model_name", self.served_model_name)
        for name, address in (("http", self.http), ("grpc", self.grpc), ("metrics", self.metrics)):
            check_address(name, address)
        check_distinct({"http": self.http, "grpc": self.grpc, "metrics": self.metrics})
        if not self.decode:
            raise ConfigError(
                "--decode names no worker; the router needs at least one decode or colocated worker"
            )
        for name, addresses in (("prefill", self.prefill), ("decode", self.decode)):
            for address in addresses:
                check_address(name, address)
                check_plaintext(name, address, self)
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("--tls-cert and --tls-key go together")
        check_at_least("max_waiting", self.max_waiting, 1)
        check_positive("itl_target", self.itl_target)
        check_positive("request_timeout_s", self.request_timeout_s)
        check_positive("keep_alive_s", self.keep_alive_s)
        check_positive("drain_s", self.drain_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    role: Literal["prefill", "decode", "colocated"]
    model: str = option("model directory in Hugging Face format", metavar="DIR")
    listen: str = option(
        "where the router and other workers reach this one",
        default="127.0.0.1:7000",
        metavar="HOST:PORT",
    )
    advertise: str | None = option(
        "address that other workers are told",
        default=None,
        metavar="HOST:PORT",
        shown="as --listen",
    )
    metrics: str = option("where /metrics listens", default="127.0.0.1:7001", metavar="HOST:PORT")
    kv_codec: KvCodec = option(
        "element type of cached keys and values; int4 is for summarising only",
        default=DEFAULT_KV_CODEC,
    )
    block_size: BlockSize = option("tokens per KV block", default=16)
    kv_blocks: int | None = option(
        "size of the KV pool in packed blocks; exact pages for first and open blocks come beside "
        "them, and /v1/fleet counts both",
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
    chunk_tokens: ChunkTokens = option(
        "most prompt tokens per step, a multiple of the block size; auto: at most "
        f"{MAX_AUTO_CHUNK}, and beside running streams what keeps to the ITL target",
        default="auto",
        metavar="N|auto",
    )
    max_num_seqs: int = option("outputs that decode at the same time", default=256, metavar="N")
    max_waiting: int = option(
        "requests that may wait for KV blocks before new ones are refused with 429",
        default=1024,
        metavar="N",
    )
    max_model_len: int | None = option(
        "longest prompt plus output in tokens", default=None, metavar="N", shown="as the model says"
    )
    threads: int | None = option(
        "CPU threads for computing", default=None, metavar="N", shown="all cores"
    )
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
        "a request's result does not depend on the rest of the batch, to the bit: slower on a GPU, "
        "and always so on a CPU. Workers that exchange KV must agree",
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
    drain_s: float = option(
        "at shutdown, how long running requests may still take", default=30.0, metavar="SECONDS"
    )
    event_log: str | None = option(
        "append life-cycle events of requests and pages to this file, one JSON line each",
        default=None,
        metavar="FILE",
        shown="no event log",
    )
    internal_tls: str | None = option(
        "talk to other processes over mTLS, with ca.pem, node.pem and node-key.pem of this folder",
        default=None,
        metavar="DIR",
        shown="plain text",
    )
    insecure_internal: bool = option("talk beyond this machine in plain text", default=False)
    log_level: LogLevel = option("least important line to log", default="info")

    def __post_init__(self) -> None:
        check_directory("model", self.model)
        for name, address in (
            ("listen", self.listen),
            ("advertise", self.advertise),
            ("metrics", self.metrics),
        ):
            check_address(name, address)
        check_distinct({"listen": self.listen, "metrics": self.metrics})
        check_plaintext("listen", self.listen, self)
        for peer in self.prefill_peers:
            check_address("prefill_peers", peer)
        if self.prefill_peers and self.role != "decode":
            raise ConfigError("--prefill-peers is for decode workers; leave it out here")
        check_at_least("kv_blocks", self.kv_blocks, 1)
        check_chunk(self.max_chunk_tokens, self.block_size)
        check_at_least("max_num_seqs", self.max_num_seqs, 1)
        check_at_least("max_model_len", self.max_model_len, 1)
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
class ServeConfig:
    """Options that are None are left to the workers, whose own defaults then hold."""

    model: str | None = option(
        "model directory in Hugging Face format",
        default=None,
        metavar="DIR",
        shown="the demo model",
    )
    served_model_name: str | None = option(
        "model name in the API", default=None, metavar="NAME", shown="the directory's name"
    )
    prefill: int = option("prefill workers", default=1, metavar="N")
    decode: int = option("decode workers", default=1, metavar="N")
    colocated: int = option("workers that do both", default=0, metavar="N")
    http: str = option(
        "where the OpenAI API listens", default="127.0.0.1:8000", metavar="HOST:PORT"
    )
    grpc: str = option("where the gRPC API listens", default="127.0.0.1:9000", metavar="HOST:PORT")
    metrics: str = option(
        "where the router's /metrics listens", default="127.0.0.1:8001", metavar="HOST:PORT"
    )
    kv_codec: KvCodec | None = option(
        "element type of cached keys and values", default=None, shown=DEFAULT_KV_CODEC
    )
    weight_dtype: WeightDtype | None = option(
        "how weights are kept; fp8 needs a GPU, int8 a CPU",
        default=None,
        shown="auto: as in the checkpoint",
    )
    batch_invariant: bool = option(
        "a request's result does not depend on the rest of the batch, to the bit: slower on GPUs, "
        "and always so on CPUs",
        default=False,
    )
    block_size: BlockSize | None = option("tokens per KV block", default=None, shown="16")
    kv_blocks: int | None = option(
        "size of each worker's KV pool in packed blocks; exact pages for first and open blocks "
        "come beside them",
        default=None,
        metavar="N",
        shown="what the memory allows",
    )
    chunk_tokens: ChunkTokens | None = option(
        "most prompt tokens per step, a multiple of the block size; auto: at most "
        f"{MAX_AUTO_CHUNK}, and beside running streams what keeps to the ITL target",
        default=None,
        metavar="N|auto",
        shown="auto",
    )
    itl_target: float | None = option(
        "seconds between two tokens of a stream that prompt chunks in between should keep to",
        default=None,
        metavar="SECONDS",
        shown="0.05, or two to five steps without prompts where those are longer",
    )
    prefill_where: PrefillWhere | None = option(
        "auto or remote: whether decode workers may prefill where that is faster",
        default=None,
        shown="auto",
    )
    threads: int | None = option(
        "CPU threads per worker", default=None, metavar="N", shown="an equal share of the cores"
    )
    worker_ports: int | None = option(
        "first of the ports that workers listen on, two for each worker, one after another",
        default=None,
        metavar="PORT",
        shown="free ones",
    )
    restart: Literal["no", "on-failure"] = option(
        "start a router or worker that has failed again, at its old ports: at most 5 times within "
        "10 minutes, after 1 to 16 s",
        default="no",
    )
    start_timeout_s: float = option(
        "give up when nothing is ready after this long", default=300.0, metavar="SECONDS"
    )
    drain_s: float = option(
        "at shutdown, how long running requests may still take", default=30.0, metavar="SECONDS"
    )
    log_level: LogLevel = option("least important line to log", default="info")

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
        "folder whose CA (ca.pem, ca-key.pem) signs: for a second certificate",
        default=None,
        metavar="DIR",
        shown="--out, where one is made if there is none",
    )
    role: Literal["router", "prefill", "decode"] | None = option(
        "the one part that the certificate's holder may take (decode: colocated too)",
        default=None,
        shown="any part",
    )
    days: int = option("how long the certificates are valid", default=365, metavar="N")

    def __post_init__(self) -> None:
        check_at_least("days", self.days, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoModelConfig:
    verify: bool = option("compare every file with its hash, not only with its size", default=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateConfig:
    model: str = option("model directory in Hugging Face format", metavar="DIR")
    text: str = option("file with text like what the model will be given", metavar="FILE")
    threads: int | None = option(
        "CPU threads for computing", default=None, metavar="N", shown="all cores"
    )

    def __post_init__(self) -> None:
        check_directory("model", self.model)
        check_at_least("threads", self.threads, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityConfig:
    model: str = option("model directory in Hugging Face format", metavar="DIR")
    text: str = option("file with text like what the model will be given", metavar="FILE")
    codecs: tuple[str, ...] = option(
        "what to compare with fp32", default=get_args(KvCodec)[:-1], metavar="CODEC,..."
    )
    check: KvCodec = option("the codec that the bounds hold for", default=DEFAULT_KV_CODEC)
    weight_dtype: Literal["auto", "int8"] = option(
        "how weights are kept in what is compared; fp32 itself has the checkpoint's own",
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
        "file of prompts with right answers, one JSON object a line: "
        '{"prompt", "choices", "answer": number of the right one} or {"prompt", "answer": text}',
        default=None,
        metavar="FILE",
        shown="no tasks",
    )
    min_accuracy_kept: float = option(
        "bound on the percentage of fp32's right answers, with --tasks",
        default=99.5,
        metavar="PERCENT",
    )
    compare_offsets: bool = option("measure codecs without their offsets too", default=True)
    block_size: BlockSize = option("tokens per KV block", default=16)
    threads: int | None = option(
        "CPU threads for computing", default=None, metavar="N", shown="all cores"
    )
    json: str | None = option(
        "also write the numbers here", default=None, metavar="FILE", shown="no file"
    )

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
        for codec in self.codecs:
            if codec not in get_args(KvCodec):
                raise ConfigError(
                    f"--codecs: there is no {codec}; choose among {', '.join(get_args(KvCodec))}"
                )
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
    tp: int = option("GPUs that share the model, for each worker", default=1, metavar="N")
    step_times: str | None = option(
        "file of step times measured at a running fleet, in place of a GPU's data sheet",
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
        "at most so many requests of the trace, or so many drawn ones",
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
    max_num_seqs: int = option("outputs that decode at the same time", default=256, metavar="N")
    gpu_memory_utilization: float = option(
        f"share of a GPU's memory to use, at most {MAX_GPU_MEMORY_UTILIZATION}",
        default=0.9,
        metavar="SHARE",
    )
    compute_efficiency: float = option(
        "share of a GPU's peak that large products reach", default=0.6, metavar="SHARE"
    )
    bandwidth_efficiency: float = option(
        "share of its memory bandwidth that decoding reaches", default=0.75, metavar="SHARE"
    )
    plot: str | None = option(
        "draw the table here", default=None, metavar="FILE.png", shown="no picture"
    )
    json: str | None = option(
        "also write the numbers here", default=None, metavar="FILE", shown="no file"
    )

    def __post_init__(self) -> None:
        check_folder_of("json", self.json)
        check_folder_of("plot", self.plot)
        for name in ("tp", "prompt_tokens", "output_tokens", "max_num_seqs"):
            check_at_least(name, getattr(self, name), 1)
        for name in ("requests", "gpus"):
            check_at_least(name, getattr(self, name), 1)
        check_at_least("seed", self.seed, 0)
        check_at_least("kv_blocks", self.kv_blocks, 64)
        for name in ("rate", "ttft", "itl", "gpu_hour_price"):
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
        for codec in self.codecs:
            if codec not in get_args(KvCodec):
                raise ConfigError(
                    f"--codecs: there is no {codec}; choose among {', '.join(get_args(KvCodec))}"
                )


Config = (
    CertsConfig
    | RouterConfig
    | WorkerConfig
    | ServeConfig
    | DemoModelConfig
    | CalibrateConfig
    | QualityConfig
    | PlanConfig
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    name: str
    config: Config
    config_file: Path | None
    """`serve` hands it on, so that the other tables reach the processes they name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ColocatedSwitch:
    """`tandem decode --colocated`: not a field of WorkerConfig, where it becomes the role."""

    colocated: bool = option("also prefill, and be offered without prefill workers", default=False)


COMMANDS: dict[str, tuple[type[Config], str]] = {
    "serve": (ServeConfig, "start a router and workers on this machine"),
    "router": (RouterConfig, "start the router: HTTP and gRPC in front, workers behind"),
    "prefill": (WorkerConfig, "start a prefill worker"),
    "decode": (WorkerConfig, "start a decode worker, or with --colocated one that does both"),
    "certs": (CertsConfig, "make a development CA and a certificate for mTLS between processes"),
    "demo-model": (DemoModelConfig, "prepare the demo model and print its directory"),
    "calibrate": (
        CalibrateConfig,
        "measure what compressed KV subtracts, and store it beside the model",
    ),
    "quality": (QualityConfig, "measure what each KV codec costs, and fail beyond a bound"),
    "plan": (PlanConfig, "simulate deployments of a model on GPUs and recommend one"),
}


def tandem_version() -> str:
    """Of the installed distribution; 0 where the sources run without one."""
    try:
        return version("tandem-serve")
    except PackageNotFoundError:
        return "0"


def parse(argv: Sequence[str] | None = None) -> Command:
    """Reads `argv` (the process's own when None) and the file it names. Raises ConfigError."""
    options, unknown = command_line_parser().parse_known_args(argv)
    if options.command is None:
        raise ConfigError(
            f"no command given; choose one of {', '.join(COMMANDS)}, or see tandem --help"
        )
    name: str = options.command
    known = option_fields(name)
    if unknown:
        raise ConfigError(
            unknown_name(unknown[0].split("=")[0], [flag(key) for key in known] + ["--config"])
        )
    given: dict[str, Any] = {}
    config_file = Path(options.config) if options.config is not None else None
    if config_file is not None:
        given.update(read_table(config_file, name))
    given.update({key: value for key, value in vars(options).items() if key in known})
    return Command(name=name, config=build(name, given), config_file=config_file)


def build(command: str, given: dict[str, Any]) -> Config:
    kind = COMMANDS[command][0]
    if kind is WorkerConfig:
        role = "colocated" if given.pop("colocated", False) else command
        given = {"role": role, **given}
    for entry in option_fields(command).values():
        if entry.default is MISSING and entry.name not in given:
            raise ConfigError(
                f"{flag(entry.name)} is required by tandem {command};"
                " give the flag or set it in the TOML file"
            )
    return kind(**given)


def option_fields(command: str) -> dict[str, Field[Any]]:
    kinds: list[Any] = [COMMANDS[command][0]]
    if command == "decode":
        kinds.append(ColocatedSwitch)
    return {
        entry.name: entry for kind in kinds for entry in fields(kind) if "help" in entry.metadata
    }


def option_type(command: str, name: str) -> Any:
    kind = (
        COMMANDS[command][0]
        if name in {entry.name for entry in fields(COMMANDS[command][0])}
        else ColocatedSwitch
    )
    return get_type_hints(kind)[name]


class Parser(argparse.ArgumentParser):
    """Raises instead of exiting, and takes no abbreviations."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{**settings, "allow_abbrev": False})

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message.removeprefix("argument "))


def command_line_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="tandem",
        description="Serves a language model with prefill and decode on separate workers.",
    )
    parser.add_argument("--version", action="version", version=f"tandem {tandem_version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for name, (_, summary) in COMMANDS.items():
        command = commands.add_parser(
            name, help=summary, description=f"{summary[0].upper()}{summary[1:]}."
        )
        command.add_argument(
            "--config",
            metavar="FILE.toml",
            help=f"read the table [{name}] of this file; flags win over it",
        )
        for entry in option_fields(name).values():
            add_flag(command, name, entry)
    return parser


def add_flag(parser: argparse.ArgumentParser, command: str, entry: Field[Any]) -> None:
    core = without_none(option_type(command, entry.name))
    text = entry.metadata["help"].replace("%", "%%") + f" ({default_text(entry)})"
    common: dict[str, Any] = {"dest": entry.name, "default": argparse.SUPPRESS, "help": text}
    if core == ChunkTokens:
        parser.add_argument(
            flag(entry.name), type=number_or_auto, metavar=entry.metadata["metavar"], **common
        )
    elif core is bool:
        parser.add_argument(flag(entry.name), action=argparse.BooleanOptionalAction, **common)
    elif get_origin(core) is Literal:
        choices = get_args(core)
        parser.add_argument(flag(entry.name), type=type(choices[0]), choices=choices, **common)
    elif get_origin(core) is tuple:
        parser.add_argument(
            flag(entry.name), type=comma_separated, metavar=entry.metadata["metavar"], **common
        )
    else:
        parser.add_argument(
            flag(entry.name), type=core, metavar=entry.metadata["metavar"], **common
        )


def default_text(entry: Field[Any]) -> str:
    if entry.default is MISSING:
        return "required"
    default = entry.default
    if isinstance(default, bool):
        default = "on" if default else "off"
    elif isinstance(default, tuple):
        default = ",".join(map(str, default)) or "none"
    return f"default: {entry.metadata['shown'] or default}"


def number_or_auto(text: str) -> int | str:
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor auto") from None


def comma_separated(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def read_table(path: Path, command: str) -> dict[str, Any]:
    """The command's table, checked; the other tables' keys are checked too: no typo hides."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"--config {path}: {error}") from error
    for table, content in document.items():
        if table not in COMMANDS:
            raise ConfigError(
                f"{path}: {unknown_name(f'[{table}]', [f'[{name}]' for name in COMMANDS])}"
            )
        if not isinstance(content, dict):
            raise ConfigError(f"{path}: {table} must be a table, written [{table}]")
        known = [flag(name)[2:] for name in option_fields(table)]
        for key in content:
            if key not in known:
                raise ConfigError(f"{path}: [{table}]: {unknown_name(key, known)}")
    chosen = {key.replace("-", "_"): value for key, value in document.get(command, {}).items()}
    return {name: toml_value(path, command, name, value) for name, value in chosen.items()}


def toml_value(path: Path, command: str, name: str, value: Any) -> Any:
    core = without_none(option_type(command, name))
    where = f"{path}: [{command}] {flag(name)[2:]}"
    if get_origin(core) is Literal:
        choices = get_args(core)
        if value not in choices or type(value) is not type(choices[0]):
            raise ConfigError(f"{where} is {value!r}; choose one of {', '.join(map(str, choices))}")
        return value
    if get_origin(core) is tuple:
        if isinstance(value, str):
            return comma_separated(value)
        if isinstance(value, list) and all(isinstance(part, str) for part in value):
            return tuple(value)
        raise ConfigError(f"{where} is {value!r}; it must be a list of strings")
    if core == ChunkTokens:
        if value != "auto" and type(value) is not int:
            raise ConfigError(f"{where} is {value!r}; it must be a number or auto")
        return value
    if core is float and type(value) is int:
        return float(value)
    if type(value) is not core:
        raise ConfigError(f"{where} is {value!r}; it must be of type {core.__name__}")
    return value


def without_none(kind: Any) -> Any:
    if get_origin(kind) in (Union, types.UnionType):
        parts = [part for part in get_args(kind) if part is not type(None)]
        return functools.reduce(operator.or_, parts)
    return kind


def unknown_name(name: str, known: list[str]) -> str:
    nearest = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    return (
        f"unknown option {name}; did you mean {' or '.join(nearest)}?"
        if nearest
        else f"unknown option {name}"
    )


def check_address(name: str, address: str | None) -> None:
    if address is None:
        return
    try:
        split_address(address)
    except ConfigError as error:
        raise ConfigError(f"{flag(name)}: {error.message}") from error


def check_distinct(addresses: dict[str, str | None]) -> None:
    seen: dict[str, str] = {}
    for name, address in addresses.items():
        if address is None or split_address(address)[1] == 0:
            continue
        if address in seen:
            raise ConfigError(f"{flag(seen[address])} and {flag(name)} are both {address}")
        seen[address] = name


def check_plaintext(name: str, address: str, config: RouterConfig | WorkerConfig) -> None:
    is_allowed = config.insecure_internal or config.internal_tls is not None
    if not is_allowed and split_address(address)[0] not in LOOPBACK:
        raise ConfigError(
            f"{flag(name)} {address} is beyond this machine and would be plain text;"
            " use --internal-tls, or permit it with --insecure-internal"
        )


def check_not_empty(name: str, text: str | None) -> None:
    if text is not None and not text.strip():
        raise ConfigError(f"{flag(name)} is empty")


def check_folder_of(name: str, path: str | None) -> None:
    """Of a file that is written at the end of long work."""
    folder = None if path is None else Path(path).absolute().parent
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"{flag(name)} {path}: there is no directory {folder}")


def check_directory(name: str, directory: str) -> None:
    if not (Path(directory) / "config.json").is_file():
        raise ConfigError(f"{flag(name)}: {directory} is no model directory, it has no config.json")


def check_at_least(name: str, value: int | None, least: int) -> None:
    if value is not None and value < least:
        raise ConfigError(f"{flag(name)} is {value}; it must be at least {least}")


def check_positive(name: str, value: float | None) -> None:
    if value is not None and not 0 < value < float("inf"):
        raise ConfigError(f"{flag(name)} is {value}; it must be above 0")


def check_chunk(chunk_tokens: int, block_size: int) -> None:
    if chunk_tokens < block_size or chunk_tokens % block_size != 0:
        raise ConfigError(
            f"--chunk-tokens is {chunk_tokens};"
            f" it must be a multiple of the block size, {block_size}"
        )


def home() -> Path:
    """Where Tandem keeps what it prepares: $TANDEM_HOME, or ~/.cache/tandem."""
    named = os.environ.get("TANDEM_HOME")
    return Path(named).expanduser() if named else Path.home() / ".cache" / "tandem"


def keys_of_environment() -> str:
    return os.environ.get("TANDEM_API_KEYS", "")


def available_cores() -> int:
    return len(os.sched_getaffinity(0))


def child_environment(threads: int) -> dict[str, str]:
    """This process's environment, with every library's thread pool held to `threads`."""
    pools = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")
    return {**os.environ, **dict.fromkeys(pools, str(threads))}
