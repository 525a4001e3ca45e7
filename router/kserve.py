"""The open inference protocol v2 without its transports: tensors in, fields of a completion out.

Tensors are those of Triton's vLLM backend: `text_input` (texts), `stream`, `sampling_parameters`
(JSON). Any other input of one element, and any parameter of the request, is a field of a completion
too. Answers are `text_output`, and `finish_reason` and `num_output_tokens` beside it.
"""

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from common.errors import InvalidRequest
from router.fields import Fields
from router.generation import DEFAULT_COMPLETION_TOKENS, Generation, TextService
from router.json_body import parse_json_object, shortened
from router.keys import Key
from router.options import Options, read_completion_options
from router.text_output import Piece

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
MAX_TEXTS = 1024
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """Values are flat; texts are bytes or str."""

    name: str
    datatype: str
    shape: list[int]
    values: Sequence[Any]


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


async def read_infer(
    service: TextService, tensors: Sequence[Tensor], parameters: dict[str, Any]
) -> InferCall:
    """Raises InvalidRequest."""
    by_name = {tensor.name: tensor for tensor in tensors}
    text_input = by_name.pop("text_input", None)
    if text_input is None or not text_input.values:
        raise InvalidRequest("the input text_input is required", param="text_input")
    if text_input.datatype != "BYTES" or len(text_input.values) > MAX_TEXTS:
        raise InvalidRequest(
            f"text_input must be 1 to {MAX_TEXTS} texts of datatype BYTES", param="text_input"
        )
    given = {name: v for name, v in parameters.items() if name not in _NOT_FIELDS}
    sampling = by_name.pop("sampling_parameters", None)
    if sampling is not None and sampling.values and _text(sampling.values[0]):
        given |= parse_json_object(_text(sampling.values[0]).encode())
    for tensor in by_name.values():
        if tensor.name in _IGNORED_INPUTS:
            continue
        if len(tensor.values) != 1:
            raise InvalidRequest(
                f"the input {shortened(tensor.name)} must have one element", param=tensor.name[:64]
            )
        value = tensor.values[0]
        given[tensor.name] = _text(value) if tensor.datatype == "BYTES" else value
    # the backend's own examples write numbers as texts
    values = {name: _number(v) for name, v in given.items()} | {"return_token_ids": True}
    fields = Fields(values)
    options = read_completion_options(fields, service.vocabulary)
    fields.finish()
    prompts = [await service.encode_text(_text(value)) for value in text_input.values]
    await service.check(options, prompts)
    return InferCall(prompts=prompts, options=options)


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


def unpacked(name: str, datatype: str, data: bytes) -> list[Any]:
    """Values of a tensor in the protocol's raw form. Raises InvalidRequest."""
    if datatype == "BYTES":
        return _unpacked_texts(name, data)
    form = _FORMATS.get(datatype)
    if form is None:
        raise InvalidRequest(f"datatype {shortened(datatype)} is not supported", param=name[:64])
    size = struct.calcsize("<" + form)
    if len(data) % size:
        raise InvalidRequest(f"the data of {shortened(name)} is cut off", param=name[:64])
    return list(struct.unpack(f"<{len(data) // size}{form}", data))


def packed_texts(texts: Sequence[str]) -> bytes:
    found = b""
    for text in texts:
        data = text.encode()
        found += struct.pack("<I", len(data)) + data
    return found


def _unpacked_texts(name: str, data: bytes) -> list[bytes]:
    found = []
    position = 0
    while position < len(data):
        start = position + 4
        size = int.from_bytes(data[position:start], "little")
        position = start + size
        if position > len(data):
            raise InvalidRequest(f"the data of {shortened(name)} is cut off", param=name[:64])
        found.append(data[start:position])
    return found


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return bytes(value).decode()
    except (TypeError, ValueError):
        raise InvalidRequest("a text is not UTF-8", param="text_input") from None


def _number(value: Any) -> Any:
    """Numbers and truth values that were written as texts."""
    if isinstance(value, str):
        try:
            found = json.loads(value)
        except (ValueError, RecursionError):
            return value
        if isinstance(found, int | float) and found == found and abs(found) < 1e300:
            return found
    return value
