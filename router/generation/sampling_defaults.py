"""What a request's sampling is when the client does not say: the model's own advice, from
generation_config.json, as vLLM takes it. What a client says wins, field by field.
"""

import logging
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from common.errors import UnsupportedModel
from common.model_config import read_json

log = logging.getLogger(__name__)

FILE = "generation_config.json"
MIN_REPETITION_PENALTY = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 is off."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def load(cls, directory: Path) -> "SamplingDefaults":
        """Raises UnsupportedModel for a value that no request may have."""
        path = directory / FILE
        if not path.exists():
            return cls()
        given = read_json(path)
        named = {name: given[name] for name in RANGES if given.get(name) is not None}
        found = cls(**{name: _checked(path, name, value) for name, value in named.items()})
        if found != NEUTRAL:
            shown = ", ".join(f"{f.name} {getattr(found, f.name):g}" for f in fields(found))
            log.info("requests that do not say otherwise: %s (%s)", shown, FILE)
        return found


NEUTRAL = SamplingDefaults()

RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "top_k": (-1, 2**31),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (MIN_REPETITION_PENALTY, 2.0),
}


def _checked(path: Path, name: str, value: Any) -> Any:
    low, high = RANGES[name]
    kinds: tuple[type, ...] = (int,) if name == "top_k" else (int, float)
    is_number = isinstance(value, kinds) and not isinstance(value, bool)
    if not is_number or not low <= value <= high or (name == "top_p" and value == 0):
        raise UnsupportedModel(
            f"{path}: {name} is {value!r}; requests may have {low:g} to {high:g}. Correct it, or "
            "leave such defaults out with --generation-config off"
        )
    return max(value, 0) if name == "top_k" else float(value)
