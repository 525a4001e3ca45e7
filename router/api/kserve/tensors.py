"""The open inference protocol v2 without its transports: tensors in, fields of a completion out.

Tensors are those of Triton's vLLM backend: `text_input` (texts), `stream`, `sampling_parameters`
(JSON). Any other input of one element, and any parameter of the request, is a field of a completion
too. Answers are `text_output`, and `finish_reason` and `num_output_tokens` beside it, or those of
them that were asked for. What no answer has room for (log-probabilities, say) is refused.
"""

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from common.errors import InvalidRequest, ModelNotFound
from common.limits import MAX_PARTS
from router.admission.keys import Key
from router.generation.generation import DEFAULT_COMPLETION_TOKENS, Generation, TextService
from router.generation.options import Options, read_completion_options
from router.reading.fields import Fields
from router.reading.json_body import shortened
from router.text.text_output import Piece

INPUTS = (
    ("text_input", "BYTES", [-1]),
    ("stream", "BOOL", [1]),
    ("sampling_parameters", "BYTES", [1]),
)
OUTPUTS = (
    ("text_output", "BYTES", [-1]),
    ("finish_reason", "BYTES", [-1]),
    ("num_output_tokens", "INT32", [-1]),
)
VERSION = "1"
"""Of the model: there is one."""
MAX_TEXTS = 1024
"""Elements of an input."""
_MAX_DIMENSIONS = 16
_MAX_NUMBER_CHARS = 64
_FORMATS = {
    "BOOL": "?",
    "INT8": "b",
    "INT16": "h",
    "INT32": "i",
    "INT64": "q",
    "UINT8": "B",
    "UINT16": "H",
    "UINT32": "I",
    "UINT64": "Q",
    "FP32": "f",
    "FP64": "d",
}
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
"""Fields that are numbers or truth values: those may be written as texts."""


def model_config(name: str) -> dict[str, Any]:
    """As Triton's model configuration has it, for the JSON and the protobuf form."""
    types = {"BYTES": "TYPE_STRING", "BOOL": "TYPE_BOOL", "INT32": "TYPE_INT32"}
    return {
        "name": name,
        "platform": "tandem",
        "backend": "tandem",
        "max_batch_size": 0,
        "input": [
            {"name": n, "data_type": types[kind], "dims": dims, "optional": n != "text_input"}
            for n, kind, dims in INPUTS
        ],
        "output": [
            {"name": n, "data_type": types[kind], "dims": dims} for n, kind, dims in OUTPUTS
        ],
        "model_transaction_policy": {"decoupled": True},
    }


def repository_index(service: TextService) -> list[dict[str, str]]:
    is_ready = service.is_ready
    return [
        {
            "name": service.model_name,
            "version": VERSION,
            "state": "READY" if is_ready else "UNAVAILABLE",
            "reason": "" if is_ready else "; ".join(service.reasons(None)),
        }
    ]


def check_parts(count: int, what: str) -> None:
    """Raises InvalidRequest: nothing has so many names here."""
    if count > MAX_PARTS:
        raise InvalidRequest(f"{count} {what}; the limit is {MAX_PARTS}", param=what[:64])


def check_served(service: TextService, name: str, version: str) -> None:
    """Raises ModelNotFound."""
    if name != service.model_name or version not in ("", VERSION):
        what = shortened(name) if version in ("", VERSION) else f"{name}, version {version}"
        raise ModelNotFound(f"the model {what} does not exist", param="model")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """Values are flat, and what the datatype says; texts are str."""

    name: str
    datatype: str
    values: list[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class InferCall:
    prompts: list[list[int]]
    options: Options


@dataclass(slots=True)
class Answer:
    """The columns of a response."""

    texts: list[str] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)

    @staticmethod
    def of(pieces: Sequence[Piece]) -> "Answer":
        return Answer(
            texts=[piece.text for piece in pieces],
            finish_reasons=[
                "" if piece.finish_reason is None else piece.finish_reason.value for piece in pieces
            ],
            num_tokens=[len(piece.token_ids) for piece in pieces],
        )

    def columns(self, wanted: Sequence[str]) -> list[tuple[str, str, list[Any]]]:
        """Name, datatype and values of the outputs that are wanted."""
        values: tuple[list[Any], ...] = (self.texts, self.finish_reasons, self.num_tokens)
        found = zip(OUTPUTS, values, strict=True)
        return [(name, kind, column) for (name, kind, _), column in found if name in wanted]


async def read_infer(
    service: TextService,
    tensors: Sequence[Tensor],
    parameters: dict[str, Any],
    key: Key | None,
    peer: str,
) -> InferCall:
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
        if tensor.name in _IGNORED_INPUTS:
            continue
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
            for name, inner in (await service.parse(value.encode())).items():
                _add(given, name, inner)
    # the backend's own examples write numbers as texts
    values = {name: _scalar(v) if name in _SCALARS else v for name, v in given.items()}
    refuse_unanswered(Fields(values))
    fields = Fields(values | {"return_token_ids": True})
    options = await service.reading(
        fields, partial(read_completion_options, fields, service.vocabulary)
    )
    fields.finish()
    prompts = await service.encode_texts(text_input.values, options)
    options = await service.checked(options, prompts, key, peer)
    return InferCall(prompts=prompts, options=options)


def refuse_unanswered(fields: Fields) -> None:
    """What these protocols' answers have no place for. Raises UnsupportedParameter."""
    for name, neutral in _UNANSWERED.items():
        fields.unsupported(name, neutral)


def wanted_outputs(names: Sequence[str]) -> tuple[str, ...]:
    """The outputs that a request asks for; all of them if it names none."""
    known = tuple(name for name, _, _ in OUTPUTS)
    if not names:
        return known
    for index, name in enumerate(names):
        if name not in known:
            raise InvalidRequest(f"there is no output {shortened(name)}", param="outputs")
        if name in names[:index]:
            raise InvalidRequest(f"the output {name} is given twice", param="outputs")
    return tuple(name for name in known if name in names)


def start_infer(
    service: TextService,
    call: InferCall,
    *,
    arrived_at: float,
    timeout_s: float | None,
    key: Key | None,
) -> Generation:
    return service.start(
        service.new_request_id(),
        call.prompts,
        call.options,
        arrived_at=arrived_at,
        default_max_tokens=DEFAULT_COMPLETION_TOKENS,
        timeout_s=timeout_s,
        key=key,
    )


def tensor_of(name: str, datatype: str, shape: Any, values: Sequence[Any]) -> Tensor:
    """A checked tensor; `shape` None is one that nobody gave. Raises InvalidRequest."""
    if len(values) > MAX_TEXTS:
        raise _wrong(name, f"has {len(values)} elements; the limit is {MAX_TEXTS}")
    if shape is not None:
        if not isinstance(shape, list) or not all(type(d) is int and d >= 0 for d in shape):
            raise _wrong(name, "has a shape that is no list of sizes")
        if len(shape) > _MAX_DIMENSIONS or math.prod(shape) != len(values):
            raise _wrong(name, f"has {len(values)} elements, not those of its shape")
    if datatype == "BYTES":
        return Tensor(name=name, datatype=datatype, values=[_text(name, v) for v in values])
    if datatype not in _FORMATS:
        raise _wrong(name, f"is of datatype {shortened(datatype)}, which is not supported")
    for value in values:
        if not _fits(datatype, value):
            raise _wrong(name, f"holds {shortened(value)}, which is no {datatype}")
    return Tensor(name=name, datatype=datatype, values=list(values))


def unpacked(name: str, datatype: str, data: bytes) -> list[Any]:
    """Values of a tensor in the protocol's raw form. Raises InvalidRequest."""
    if datatype == "BYTES":
        return _unpacked_texts(name, data)
    form = _FORMATS.get(datatype)
    if form is None:
        raise _wrong(name, f"is of datatype {shortened(datatype)}, which is not supported")
    count, rest = divmod(len(data), struct.calcsize("<" + form))
    if rest:
        raise _wrong(name, "is cut off")
    if count > MAX_TEXTS:
        raise _wrong(name, f"has {count} elements; the limit is {MAX_TEXTS}")
    return list(struct.unpack(f"<{count}{form}", data))


def packed_texts(texts: Sequence[str]) -> bytes:
    found = b""
    for text in texts:
        data = text.encode()
        found += struct.pack("<I", len(data)) + data
    return found


def _unpacked_texts(name: str, data: bytes) -> list[bytes]:
    found: list[bytes] = []
    position = 0
    while position < len(data):
        start = position + 4
        size = int.from_bytes(data[position:start], "little")
        position = start + size
        if position > len(data):
            raise _wrong(name, "is cut off")
        if len(found) == MAX_TEXTS:
            raise _wrong(name, f"has too many elements; the limit is {MAX_TEXTS}")
        found.append(data[start:position])
    return found


def _text(name: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, bytes):
        raise _wrong(name, f"holds {shortened(value)}; elements of BYTES must be strings")
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise _wrong(name, "holds a text that is not UTF-8") from None


def _fits(datatype: str, value: Any) -> bool:
    if datatype == "BOOL":
        return isinstance(value, bool)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    if isinstance(value, float) and not datatype.startswith("FP"):
        return False
    try:
        struct.pack("<" + _FORMATS[datatype], value)
    except (struct.error, OverflowError):
        return False
    return True


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


def _wrong(name: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"the input {shortened(name)} {what}", param=name[:64])
