"""How long steps and transfers take: the only two things that the simulator does not run for real.

`CostModel` is the seam. `FittedCosts` come from a running fleet (simulator/fit.py), `Roofline` from
data sheets: a step's products take what the peak or the reading of the weights allows, whichever is
longer; attention and what ranks exchange come on top. A worker of several ranks is as fast as the
rank that holds most (rank 0: common/ranks.py deals the larger parts first).
"""

from dataclasses import dataclass, field, replace
from typing import Final, Literal, Protocol

from common.model_config import ModelConfig
from common.pages import PageKind, PageLayout
from common.ranks import deal, shares
from common.scheduling.step_time import StepShape, StepTimes
from simulator.hardware import Gpu
from simulator.ring import Ring

STEP_OVERHEAD_S: Final = 1e-3
"""Deciding, launching (a captured graph) and sampling."""
READ_LATENCY_S: Final = 100e-6
"""Posting a read and noticing its end."""
COMPUTE_EFFICIENCY: Final = 0.6
BANDWIDTH_EFFICIENCY: Final = 0.75
LINK_EFFICIENCY: Final = 0.8
"""Share of a link's bandwidth that is reached, between ranks and between workers."""
WEIGHT_BYTES: Final = {"bfloat16": 2.0, "float8": 1.0}


class CostModel(Protocol):
    def step_s(self, shape: StepShape) -> float:
        """Of one forward pass."""
        ...

    def transfer_s(self, num_bytes: float) -> float:
        """Of that many bytes of another worker's pages through one NIC, when it has nothing else
        to do.
        """
        ...

    def land_s(self, num_bytes: float) -> float:
        """Of checking them and copying them into the pool, on one device."""
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
    """Parameters of a model, or of the rank that holds most of it, from its config. Ranks split q,
    k, v, gate, up and both tables by outputs, o and down by inputs.
    """

    linear_parameters: int
    """Of all layers' projections."""
    head_parameters: int
    embedding_parameters: int
    """0 when the embedding is the head."""
    attention_width: int
    """Query heads times head size, over all layers."""

    @staticmethod
    def of(model: ModelConfig, num_ranks: int = 1) -> "ModelSize":
        """Raises ConfigError when the heads cannot be dealt to so many ranks."""
        share = shares(num_ranks, model.num_heads, model.num_kv_heads)[0]
        query = len(share.heads) * model.head_dim
        projections = model.hidden_size * (2 * query + 2 * len(share.kv_heads) * model.head_dim)
        feed_forward = 3 * model.hidden_size * len(deal(model.intermediate_size, num_ranks)[0])
        table = len(deal(model.vocab_size, num_ranks)[0]) * model.hidden_size
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
    """Seconds for each unit, worked out once; bandwidths in bytes a second."""

    row_s: float
    head_row_s: float
    weights_s: float
    pair_s: float
    context_token_s: float
    bandwidth: float
    exchanged_row_s: float
    gathered_row_s: float
    exchanges_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """One worker of `num_ranks` GPUs of a kind. `layout` is that of whole pages."""

    gpu: Gpu
    model: ModelConfig
    layout: PageLayout
    num_ranks: int = 1
    weights: Literal["bfloat16", "float8"] = "bfloat16"
    compute_efficiency: float = COMPUTE_EFFICIENCY
    bandwidth_efficiency: float = BANDWIDTH_EFFICIENCY
    size: ModelSize = field(init=False)
    """Of the rank that holds most."""
    rank_layout: PageLayout = field(init=False)
    """Of its records of a page."""
    _rates: "_Rates" = field(init=False)

    def __post_init__(self) -> None:
        share = shares(self.num_ranks, self.model.num_heads, self.model.num_kv_heads)[0]
        rank_layout = replace(self.layout, num_kv_heads=len(share.kv_heads))
        object.__setattr__(self, "size", ModelSize.of(self.model, self.num_ranks))
        object.__setattr__(self, "rank_layout", rank_layout)
        object.__setattr__(self, "_rates", self._worked_out())

    def _worked_out(self) -> _Rates:
        size = self.size
        flops = self.gpu.flops(self.weights) * self.compute_efficiency
        bandwidth = self.gpu.memory_bandwidth * self.bandwidth_efficiency
        weight_bytes = (size.linear_parameters + size.head_parameters) * WEIGHT_BYTES[self.weights]
        link = self.gpu.rank_bandwidth * LINK_EFFICIENCY
        ring = Ring(num_ranks=self.num_ranks, bandwidth=link)
        num_reductions = 2 * self.model.num_layers + 1
        return _Rates(
            row_s=2.0 * size.linear_parameters / flops,
            head_row_s=2.0 * size.head_parameters / flops,
            weights_s=weight_bytes / bandwidth,
            pair_s=4.0 * size.attention_width / flops,
            context_token_s=self.kv_token_bytes / bandwidth,
            bandwidth=bandwidth,
            exchanged_row_s=num_reductions * self.model.hidden_size * ring.reduced_element_s,
            gathered_row_s=self.model.vocab_size * ring.gathered_element_s,
            exchanges_s=num_reductions * ring.all_reduce_s(0) + ring.gather_s(0),
        )

    @property
    def weight_bytes(self) -> float:
        return self.size.num_parameters * WEIGHT_BYTES[self.weights]

    @property
    def kv_token_bytes(self) -> float:
        """Of one token in a packed page, on one rank."""
        return self.rank_layout.page_bytes(PageKind.PACKED) / self.layout.block_size

    def step_s(self, shape: StepShape) -> float:
        return self.compute_s(shape) + self.exchange_s(shape) + STEP_OVERHEAD_S

    def compute_s(self, shape: StepShape) -> float:
        """What the rank that holds most takes for its part."""
        rates = self._rates
        num_rows = shape.num_prefill_tokens + shape.num_decodes
        products_s = rates.row_s * num_rows + rates.head_row_s * shape.num_decodes
        return (
            max(products_s, rates.weights_s)
            + rates.pair_s * shape.num_pairs
            + rates.context_token_s * shape.num_context_tokens
        )

    def exchange_s(self, shape: StepShape) -> float:
        """Of all that ranks tell each other in a step: sums of the rows of the embedding and, in
        each layer, after attention and after the feed-forward; logits, which rank 0 gathers.
        """
        rates = self._rates
        num_rows = shape.num_prefill_tokens + shape.num_decodes
        return (
            rates.exchanged_row_s * num_rows
            + rates.gathered_row_s * shape.num_decodes
            + rates.exchanges_s
        )

    def transfer_s(self, num_bytes: float) -> float:
        return READ_LATENCY_S + num_bytes / (self.gpu.network_bandwidth * LINK_EFFICIENCY)

    def land_s(self, num_bytes: float) -> float:
        """Read for the checksum, read again and written."""
        return 3.0 * num_bytes / self._rates.bandwidth
