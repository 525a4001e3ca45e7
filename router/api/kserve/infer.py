"""A call of the open inference protocol without its transports: tensors to a completion's fields.

`text_input` (texts), `stream`, `sampling_parameters` (JSON). Any other input of one element, and
any parameter of the request, is a field of a completion too. What no answer has room for
(log-probabilities, say) is refused.
"""

import json
from collections.abc import Sequence
from typing import Any

from common.errors import InvalidRequest
from common.limits import MAX_PARTS
from router.api.kserve.tensors import Tensor
from router.generation.ask import DEFAULT_COMPLETION_TOKENS, Ask, Texts
from router.generation.options import Vocabulary, read_completion_options
from router.reading.fields import Fields
from router.reading.json_body import parse_json, shortened
from router.reading.protocols import Names

NAMES = Names(prompt="text_input")
_MAX_NUMBER_CHARS = 64
_NOT_FIELDS = ("triton_enable_empty_final_response", "binary_data_output", "binary_data_size")
_IGNORED_INPUTS = ("exclude_input_in_output",)
_UNANSWERED: dict[str, tuple[Any, ...]] = {
    "logprobs": (),
    "prompt_logprobs": (),
    "return_token_ids": (False,),
    "stream_options": (),
}
_SCALARS = frozenset(
    [
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "max_tokens",
        "min_tokens",
        "n",
        "best_of",
        "seed",
        "priority",
        "length_penalty",
        "typical_p",
        "logprobs",
        "prompt_logprobs",
        "stream",
        "echo",
        "ignore_eos",
        "include_stop_str_in_output",
        "return_token_ids",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "guided_json_object",
        "early_stopping",
        "use_beam_search",
        "store",
    ]
)
"""Fields that are numbers or truth values: those may be written as texts (Triton's clients have no
other way for numbers with a fraction)."""


def check_parts(count: int, what: str) -> None:
    """Raises InvalidRequest: nothing has so many names here."""
    if count > MAX_PARTS:
        raise InvalidRequest(f"{count} {what}; the limit is {MAX_PARTS}", param=what[:64])


def read_infer(
    tensors: Sequence[Tensor], parameters: dict[str, Any], vocabulary: Vocabulary
) -> Ask:
    """Raises InvalidRequest."""
    by_name: dict[str, Tensor] = {}
    for tensor in tensors:
        _add(by_name, tensor.name, tensor)
    text_input = by_name.pop("text_input", None)
    if text_input is None or not text_input.values:
        raise InvalidRequest("the input text_input is required", param="text_input")
    if text_input.datatype != "BYTES":
        raise InvalidRequest("text_input must be of datatype BYTES", param="text_input")
    given = {name: v for name, v in parameters.items() if name not in _NOT_FIELDS}
    for tensor in by_name.values():
        if tensor.name not in _IGNORED_INPUTS:
            _add_input(given, tensor)
    values = {name: _scalar(v) if name in _SCALARS else v for name, v in given.items()}
    refuse_unanswered(Fields(values))
    fields = Fields(values | {"return_token_ids": True})
    options = read_completion_options(fields, vocabulary, NAMES)
    fields.finish()
    return Ask(
        prompt=Texts(text_input.values),
        options=options,
        default_max_tokens=DEFAULT_COMPLETION_TOKENS,
    )


def _add_input(given: dict[str, Any], tensor: Tensor) -> None:
    """One field, or (`sampling_parameters`) several."""
    if len(tensor.values) != 1:
        raise InvalidRequest(
            f"the input {shortened(tensor.name)} must have one element", param=tensor.name[:64]
        )
    (value,) = tensor.values
    if tensor.name != "sampling_parameters":
        _add(given, tensor.name, value)
    elif tensor.datatype != "BYTES":
        raise InvalidRequest(
            "sampling_parameters must be of datatype BYTES", param="sampling_parameters"
        )
    elif value:
        found = parse_json(value, "sampling_parameters", param="sampling_parameters")
        if not isinstance(found, dict):
            raise InvalidRequest(
                "sampling_parameters must be a JSON object", param="sampling_parameters"
            )
        for name, inner in found.items():
            _add(given, name, inner)


def refuse_unanswered(fields: Fields) -> None:
    """What these protocols' answers have no place for. Raises UnsupportedParameter."""
    for name, neutral in _UNANSWERED.items():
        fields.unsupported(name, neutral)


def _scalar(value: Any) -> Any:
    """Numbers and truth values that were written as texts."""
    if isinstance(value, str) and len(value) <= _MAX_NUMBER_CHARS:
        try:
            found = json.loads(value)
        except (ValueError, RecursionError):
            return value
        if isinstance(found, int | float) and found == found and abs(found) < 1e300:
            return found
    return value


def _add(given: dict[str, Any], name: str, value: Any) -> None:
    if name in given:
        raise InvalidRequest(f"{shortened(name)} is given twice", param=name[:64])
    given[name] = value
