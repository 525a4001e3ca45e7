"""What the open inference protocol is told of the model: there is one, of one version.

Tensors are those of Triton's vLLM backend. Answers are `text_output`, and `finish_reason` and
`num_output_tokens` beside it, or those of them that were asked for.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from common.errors import InvalidRequest, ModelNotFound
from router.generation.service import TextService
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
            "name": service.model.name,
            "version": VERSION,
            "state": "READY" if is_ready else "UNAVAILABLE",
            "reason": "" if is_ready else "; ".join(service.reasons(None)),
        }
    ]


def check_served(service: TextService, name: str, version: str) -> None:
    """Raises ModelNotFound."""
    if name != service.model.name or version not in ("", VERSION):
        what = shortened(name) if version in ("", VERSION) else f"{name}, version {version}"
        raise ModelNotFound(f"the model {what} does not exist", param="model")


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
