"""What constrains an answer's form, from the fields of a request to a grammar that workers compile.

OpenAI's `response_format` and vLLM's `guided_*` and `structured_outputs` say the same things in
different words; one of them may be given. `read_form` takes them as they are, which is quick;
`Form.grammar` makes llguidance's own text of them, which is not, and compiles it once without a
tokenizer, so a wrong one is the client's error and no worker sees it.
"""

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from llguidance import LLMatcher, grammar_from

from common.errors import InvalidRequest, UnsupportedParameter
from router.closed_objects import strict
from router.fields import Fields
from router.json_body import is_within, shortened

MAX_GRAMMAR_CHARS = 256 * 1024
MAX_CHOICES = 4096
_KINDS = ("json", "json_object", "regex", "choice", "grammar")
_NOT_OFFERED = ("disable_any_whitespace", "disable_additional_properties", "structural_tag")


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What an answer must look like. `source` is what the client wrote, `convert` makes the grammar
    of it.
    """

    name: str
    source: Any
    convert: Callable[[], str]

    def grammar(self) -> str:
        """Takes long for a large one: not for an event loop. Raises InvalidRequest with the
        compiler's reason.
        """
        if not is_within(self.source, MAX_GRAMMAR_CHARS):
            raise self._too_large("")
        try:
            grammar = self.convert()
        except Exception as error:  # the converters raise plain exceptions
            raise InvalidRequest(
                f"{self.name} is not a grammar: {str(error)[:500]}", param=self.name
            ) from None
        if len(grammar) > MAX_GRAMMAR_CHARS:
            raise self._too_large(f"{len(grammar)} as a grammar, ")
        reason = LLMatcher.validate_grammar(grammar)
        if reason and not reason.startswith("WARNING"):
            raise InvalidRequest(
                f"the output's format cannot be compiled: {reason[:500]}", param=self.name
            )
        return grammar

    def _too_large(self, size: str) -> InvalidRequest:
        return InvalidRequest(
            f"{self.name} has too many characters: {size}the limit is {MAX_GRAMMAR_CHARS}",
            param=self.name,
        )


def read_form(fields: Fields) -> Form | None:
    """The one constraint that the fields name. Raises InvalidRequest."""
    found = [
        form
        for form in (
            _response_format(fields),
            _structured_outputs(fields),
            *(_guided(fields, f"guided_{kind}", kind) for kind in _KINDS),
        )
        if form is not None
    ]
    if len(found) > 1:
        names = " and ".join(form.name for form in found)
        raise InvalidRequest(f"{names} cannot be combined", param=found[1].name)
    return found[0] if found else None


def json_grammar(schema: dict[str, Any], whitespace: str | None = None) -> str:
    """Text that is JSON of this schema, spaced as `json.dumps` does unless `whitespace` (a regular
    expression) is given.
    """
    if whitespace is None:
        form = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    else:
        form = {"whitespace_pattern": whitespace}
    grammar: str = LLMatcher.grammar_from_json_schema(schema, defaults=form)  # type: ignore[arg-type]
    return grammar


def _schema_form(name: str, schema: dict[str, Any], whitespace: str | None = None) -> Form:
    return Form(
        name=name, source=(schema, whitespace), convert=lambda: json_grammar(schema, whitespace)
    )


def _response_format(fields: Fields) -> Form | None:
    given = fields.object("response_format")
    if given is None:
        return None
    kind = given.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return _schema_form("response_format", {"type": "object"})
    if kind == "json_schema":
        described = given.get("json_schema")
        schema = described.get("schema") if isinstance(described, dict) else None
        if not isinstance(schema, dict):
            raise InvalidRequest(
                "response_format.json_schema.schema must be an object",
                param="response_format.json_schema.schema",
            )
        if isinstance(described, dict) and described.get("strict") is True:
            schema = strict(schema, "response_format.json_schema.schema")
        return _schema_form("response_format", schema)
    raise UnsupportedParameter(
        f"response_format.type must be text, json_object or json_schema, got {shortened(kind)}",
        param="response_format",
    )


def _structured_outputs(fields: Fields) -> Form | None:
    given = fields.object("structured_outputs")
    if not given:
        return None
    inner = Fields(given, "structured_outputs.")
    whitespace = inner.text("whitespace_pattern")
    for name in _NOT_OFFERED:
        inner.unsupported(name, (False,))
    found = [_guided(inner, kind, kind, whitespace) for kind in _KINDS]
    inner.finish()
    forms = [form for form in found if form is not None]
    if len(forms) > 1:
        raise InvalidRequest(
            "structured_outputs must name one constraint", param="structured_outputs"
        )
    return dataclasses.replace(forms[0], name="structured_outputs") if forms else None


def _guided(fields: Fields, name: str, kind: str, whitespace: str | None = None) -> Form | None:
    if kind == "json_object":
        wanted = fields.boolean(name, False)
        return _schema_form(name, {"type": "object"}, whitespace) if wanted else None
    if kind == "json":
        return _json(fields, name, whitespace)
    if kind == "choice":
        return _choice(fields, name)
    text = fields.text(name)
    if not text:
        return None
    convert = partial(grammar_from, "regex" if kind == "regex" else "grammar", text)
    return Form(name=name, source=text, convert=convert)


def _json(fields: Fields, name: str, whitespace: str | None) -> Form | None:
    given = fields.take(name)
    if given is None:
        return None
    if isinstance(given, str):
        if len(given) > MAX_GRAMMAR_CHARS:
            raise fields.wrong(
                name, f"must have at most {MAX_GRAMMAR_CHARS} characters", len(given)
            )
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            raise fields.wrong(name, "must be a JSON schema", given) from None
    if not isinstance(given, dict):
        raise fields.wrong(name, "must be a JSON schema", given)
    return _schema_form(name, given, whitespace)


def _choice(fields: Fields, name: str) -> Form | None:
    given = fields.take(name)
    if given is None:
        return None
    is_list = isinstance(given, list) and 0 < len(given) <= MAX_CHOICES
    if not is_list or not all(isinstance(choice, str) and choice for choice in given):
        raise fields.wrong(name, f"must be a list of 1 to {MAX_CHOICES} texts", given)
    return Form(name=name, source=given, convert=lambda: grammar_from("choice", json.dumps(given)))
