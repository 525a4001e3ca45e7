"""What decides the bytes of a worker's pages, one by one, and what that means for a pair of
workers: can one read what the other wrote?

    fit(source, reader)     which of them differ, and what to do about it; or how pages are read

Used by decode workers when a link comes up, and by routers before they choose a pair.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from common.codecs import CODECS
from common.pages import OFFSETS_FILE, TAG_MAGIC, PageLayout
from common.wire import wire_message

PAGE_FORMAT: Final = TAG_MAGIC.to_bytes(4, "big").decode()


@wire_message
@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutFacts:
    """`model` and `offsets` are hashes; `head_dim` is that of heads as they are stored."""

    page_format: str
    model: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    codec: str
    block_size: int
    weights: str
    offsets: str
    arithmetic: str = ""
    """What decides the last bits, where a worker promises those to others."""
    is_batch_invariant: bool = False
    """It does promise them."""
    converts: bool = False
    """Exact pages of another codec can land in its own."""

    @classmethod
    def of(
        cls,
        layout: PageLayout,
        *,
        model: bytes,
        weights: str,
        offsets: bytes,
        arithmetic: str = "",
        is_batch_invariant: bool = False,
        converts: bool = False,
    ) -> "LayoutFacts":
        return cls(
            page_format=PAGE_FORMAT,
            model=model.hex(),
            num_layers=layout.num_layers,
            num_kv_heads=layout.num_kv_heads,
            head_dim=layout.head_dim,
            codec=layout.codec.name,
            block_size=layout.block_size,
            weights=weights,
            offsets=offsets.hex(),
            arithmetic=arithmetic,
            is_batch_invariant=is_batch_invariant,
            converts=converts,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """`misfit` says why pages cannot be read, and what to do; None: they can. `converts`: what is
    read is exact, and sealed in the reader's codec when it lands.
    """

    misfit: str | None = None
    converts: bool = False


@dataclass(frozen=True, slots=True)
class _Fact:
    field: str
    name: str
    repair: str


_SAME_MODEL: Final = "start both workers with the same --model"
_FACTS: Final = (
    _Fact(
        "page_format",
        "page format",
        "the two are of different releases: finish the upgrade, so that both run the same one",
    ),
    _Fact("model", "model", _SAME_MODEL),
    _Fact("num_layers", "layers", _SAME_MODEL),
    _Fact("num_kv_heads", "KV heads", _SAME_MODEL),
    _Fact(
        "head_dim",
        "stored head size",
        "CPUs store such heads wider than GPUs: use the same kind of device for both",
    ),
    _Fact("codec", "KV codec", "start both workers with the same --kv-codec"),
    _Fact("block_size", "block size", "start both workers with the same --block-size"),
    _Fact("weights", "weights", "start both workers with the same --weight-dtype"),
    _Fact(
        "arithmetic",
        "arithmetic",
        "use --batch-invariant on both workers or neither (on both it needs the same kind of GPU, "
        "--dtype and --tensor-parallel)",
    ),
    _Fact(
        "offsets",
        "offsets",
        "run `tandem calibrate --model DIR --text FILE` with the same text on both, or copy "
        f"{OFFSETS_FILE} from one model directory to the other",
    ),
)


@lru_cache(maxsize=1024)
def fit(source: LayoutFacts, reader: LayoutFacts) -> Fit:
    """Whether `reader` can have pages of `source`."""
    found = [fact for fact in _FACTS if getattr(source, fact.field) != getattr(reader, fact.field)]
    if not found:
        return Fit()
    if found[0].field in ("page_format", "model"):
        del found[1:]  # all others follow from it
    obstacle = None
    if {fact.field for fact in found} <= {"codec", "offsets"} and _is_sealing(source, reader):
        obstacle = _obstacle(source, reader)
        if obstacle is None:
            return Fit(converts=True)
        found = [fact for fact in found if fact.field == "codec"]
    said = ", ".join(
        f"{fact.name} {_shown(source, fact)} at the prefill worker and {_shown(reader, fact)} at "
        "the decode worker"
        for fact in found
    )
    repairs = dict.fromkeys(fact.repair for fact in found)
    because = "" if obstacle is None else f", and {obstacle}"
    return Fit(misfit=f"{said}{because}: {'; '.join(repairs)}")


def _is_sealing(source: LayoutFacts, reader: LayoutFacts) -> bool:
    """Exact pages become packed ones of a codec that loses something. (Its offsets are its own.)"""
    theirs, ours = CODECS.get(source.codec), CODECS.get(reader.codec)
    if theirs is None or ours is None:
        return False
    return ours.is_quantised and not theirs.is_quantised


def _obstacle(source: LayoutFacts, reader: LayoutFacts) -> str | None:
    if source.is_batch_invariant or reader.is_batch_invariant:
        return "converted pages do not keep what --batch-invariant promises"
    return None if reader.converts else "the decode worker's device cannot convert pages"


def _shown(facts: LayoutFacts, fact: _Fact) -> str:
    value = str(getattr(facts, fact.field))
    return (value[:12] if fact.field in ("model", "offsets") else value) or "not promised"
