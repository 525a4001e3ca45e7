"""How long steps and transfers take: the only two things that the simulator does not run for real.

`CostModel` is the seam. `FittedCosts` come from a running fleet (simulator/fit.py), `Roofline` from
data sheets: a step's products take what the peak or the reading of the weights allows, whichever is
longer; attention and all-reduces come on top.
"""

from dataclasses import dataclass, field
from typing import Final, Literal, Protocol

from common.model_config import ModelConfig
from common.pages import PageKind, PageLayout
from common.scheduling.step_time import StepShape, StepTimes
from simulator.hardware import Gpu

STEP_OVERHEAD_S: Final = 1e-3
"""Deciding, launching (a captured graph) and sampling."""
ALL_REDUCE_LATENCY_S: Final = 10e-6
READ_LATENCY_S: Final = 100e-6
"""Posting a read and noticing its end."""
COMPUTE_EFFICIENCY: Final = 0.6
BANDWIDTH_EFFICIENCY: Final = 0.75
LINK_EFFICIENCY: Final = 0.8
WEIGHT_BYTES: Final = {"bfloat16": 2.0, "float8": 1.0}


class CostModel(Protocol):
    def step_s(self, shape: StepShape) -> float:
        """Of one forward pass."""
        ...

    def transfer_s(self, num_bytes: float) -> float:
        """Of reading pages from another worker, when nothing else is read."""
        ...

    def land_s(self, num_bytes: float) -> float:
        """Of checking them and copying them into the pool, on the device."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedCosts:
    """What was measured at a fleet. `*_byte_s` are seconds for each byte."""

    times: StepTimes
    read_s: float = READ_LATENCY_S
    read_byte_s: float = 0.0
    land_byte_s: float = 0.0

    def step_s(self, shape: StepShape) -> float:
        return self.times.step_s(shape)

    def transfer_s(self, num_bytes: float) -> float:
        return self.read_s + self.read_byte_s * num_bytes

    def land_s(self, num_bytes: float) -> float:
        return self.land_byte_s * num_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Parameters and bytes of a model, from its config."""

    linear_parameters: int
    """Of all layers' projections."""
    head_parameters: int
    embedding_parameters: int
    """0 when the embedding is the head."""
    attention_width: int
    """Query heads times head size, over all layers."""

    @staticmethod
    def of(model: ModelConfig) -> "ModelSize":
        query = model.num_heads * model.head_dim
        projections = model.hidden_size * (2 * query + 2 * model.num_kv_heads * model.head_dim)
        feed_forward = 3 * model.hidden_size * model.intermediate_size
        table = model.vocab_size * model.hidden_size
        return ModelSize(
            linear_parameters=model.num_layers * (projections + feed_forward),
            head_parameters=table,
            embedding_parameters=0 if model.tie_word_embeddings else table,
            attention_width=model.num_layers * query,
        )

    @property
    def num_parameters(self) -> int:
        return self.linear_parameters + self.head_parameters + self.embedding_parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rates:
    """Seconds for each unit, worked out once; `bandwidth` in bytes a second."""

    row_s: float
    head_row_s: float
    weights_s: float
    pair_s: float
    context_token_s: float
    bandwidth: float
    ring_row_s: float
    all_reduce_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """One worker: `tp` GPUs of a kind that share a model evenly. `layout` is that of its pages."""

    gpu: Gpu
    model: ModelConfig
    layout: PageLayout
    tp: int = 1
    weights: Literal["bfloat16", "float8"] = "bfloat16"
    compute_efficiency: float = COMPUTE_EFFICIENCY
    bandwidth_efficiency: float = BANDWIDTH_EFFICIENCY
    size: ModelSize = field(init=False)
    _rates: "_Rates" = field(init=False)

    def __post_init__(self) -> None:
        size = ModelSize.of(self.model)
        flops = self.gpu.flops(self.weights) * self.tp * self.compute_efficiency
        bandwidth = self.gpu.memory_bandwidth * self.tp * self.bandwidth_efficiency
        weight_bytes = (size.linear_parameters + size.head_parameters) * WEIGHT_BYTES[self.weights]
        rates = _Rates(
            row_s=2.0 * size.linear_parameters / flops,
            head_row_s=2.0 * size.head_parameters / flops,
            weights_s=weight_bytes / bandwidth,
            pair_s=4.0 * size.attention_width / flops,
            context_token_s=self.kv_token_bytes / bandwidth,
            bandwidth=bandwidth,
            ring_row_s=self._ring_row_s(),
            all_reduce_s=self.model.num_layers * 2 * ALL_REDUCE_LATENCY_S if self.tp > 1 else 0.0,
        )
        object.__setattr__(self, "size", size)
        object.__setattr__(self, "_rates", rates)

    @property
    def model_bytes(self) -> float:
        return self.size.num_parameters * WEIGHT_BYTES[self.weights]

    @property
    def kv_token_bytes(self) -> float:
        """Of one token in a packed page."""
        return self.layout.page_bytes(PageKind.PACKED) / self.layout.block_size

    def step_s(self, shape: StepShape) -> float:
        rates = self._rates
        num_rows = shape.num_prefill_tokens + shape.num_decodes
        products_s = rates.row_s * num_rows + rates.head_row_s * shape.num_decodes
        return (
            max(products_s, rates.weights_s)
            + rates.pair_s * shape.num_pairs
            + rates.context_token_s * shape.num_context_tokens
            + rates.ring_row_s * num_rows
            + rates.all_reduce_s
            + STEP_OVERHEAD_S
        )

    def _ring_row_s(self) -> float:
        """All-reduces of one row: in each layer after attention and after the feed-forward, as
        rings of bf16.
        """
        if self.tp == 1:
            return 0.0
        num_bytes = 2.0 * (self.tp - 1) / self.tp * self.model.hidden_size * 2.0
        return 2 * self.model.num_layers * num_bytes / self.gpu.nvlink_bandwidth

    def transfer_s(self, num_bytes: float) -> float:
        """Each GPU reads its own heads through its own NIC."""
        link = self.gpu.nic_bandwidth * self.tp * LINK_EFFICIENCY
        return READ_LATENCY_S + num_bytes / link

    def land_s(self, num_bytes: float) -> float:
        """Read for the checksum, read again and written."""
        return 3.0 * num_bytes / self._rates.bandwidth
