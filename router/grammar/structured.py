"""What constrains an answer's form, from the fields of a request to a job for the compiler.

A protocol's own format (`read_response_format`) and vLLM's `guided_*` and `structured_outputs` say
the same things in different words; one of them may be given. They are taken as they are, which is
quick; the compiler (router/grammar/compiler.py) makes llguidance's own text of them in a process of
its own, so a wrong one is the client's error and no worker sees it.
"""

import dataclasses
from typing import Any

from common.errors import InvalidRequest, UnsupportedParameter
from common.limits import MAX_CHOICES, MAX_GRAMMAR_CHARS
from router.grammar.closed_objects import strict
from router.grammar.grammar_job import Job
from router.grammar.structural_tag import read_structural_tag
from router.reading.fields import Fields
from router.reading.json_body import is_within, parse_json, shortened

_KINDS = ("json", "json_object", "regex", "choice", "grammar")
_NOT_OFFERED = ("disable_any_whitespace", "disable_additional_properties")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What an answer must look like. `source` is what the client wrote."""

    name: str
    kind: str
    source: Any
    whitespace: str | None = None

    def job(self) -> Job:
        """Raises InvalidRequest for what is too large to be looked at."""
        if not is_within((self.source, self.whitespace), MAX_GRAMMAR_CHARS):
            raise InvalidRequest(
                f"{self.name} has too many characters: the limit is {MAX_GRAMMAR_CHARS}",
                param=self.name,
            )
        return Job(kind=self.kind, name=self.name, source=self.source, whitespace=self.whitespace)


def read_form(fields: Fields, own: Form | None) -> Form | None:
    """The one constraint that the fields name, or the protocol's own. Raises InvalidRequest."""
    found = [
        form
        for form in (
            own,
            _structured_outputs(fields),
            *(_guided(fields, f"guided_{kind}", kind) for kind in _KINDS),
        )
        if form is not None
    ]
    if len(found) > 1:
        names = " and ".join(form.name for form in found)
        raise InvalidRequest(f"{names} cannot be combined", param=found[1].name)
    return found[0] if found else None


def _schema_form(name: str, schema: dict[str, Any], whitespace: str | None = None) -> Form:
    return Form(name=name, kind="json", source=schema, whitespace=whitespace)


def read_response_format(
    given: dict[str, Any] | None, name: str = "response_format", *, is_flat: bool = False
) -> Form | None:
    """OpenAI's words for it. `is_flat`: a schema stands beside its type, without a frame."""
    kind = "text" if given is None else given.get("type")
    if given is None or kind == "text":
        return None
    if kind == "json_object":
        return _schema_form(name, {"type": "object"})
    if kind == "json_schema":
        described = given if is_flat else given.get("json_schema")
        where = f"{name}.schema" if is_flat else f"{name}.json_schema.schema"
        schema = described.get("schema") if isinstance(described, dict) else None
        if not isinstance(schema, dict):
            raise InvalidRequest(f"{where} must be an object", param=where)
        if isinstance(described, dict) and described.get("strict") is True:
            schema = strict(schema, where)
        return _schema_form(name, schema)
    if kind == "structural_tag":
        tags = read_structural_tag(given, name)
        return Form(name=name, kind="structural_tag", source=tags)
    raise UnsupportedParameter(
        f"{name}.type must be text, json_object, json_schema or structural_tag, got "
        f"{shortened(kind)}",
        param=name,
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
    found.append(_tagged(inner))
    inner.finish()
    forms = [form for form in found if form is not None]
    if len(forms) > 1:
        raise InvalidRequest(
            "structured_outputs must name one constraint", param="structured_outputs"
        )
    return dataclasses.replace(forms[0], name="structured_outputs") if forms else None


def _tagged(fields: Fields) -> Form | None:
    """Written as JSON inside a text, as vLLM's clients do, or as it is."""
    name = "structural_tag"
    given = fields.take(name)
    if given is None:
        return None
    if isinstance(given, str):
        given = parse_json(given, name, param=name)
    if not isinstance(given, dict):
        raise fields.wrong(name, "must be an object", given)
    return Form(name=name, kind=name, source=read_structural_tag(given, name))


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
    return Form(name=name, kind=kind, source=text)


def _json(fields: Fields, name: str, whitespace: str | None) -> Form | None:
    given = fields.take(name)
    if given is None:
        return None
    if isinstance(given, str):
        if len(given) > MAX_GRAMMAR_CHARS:
            raise fields.wrong(
                name, f"must have at most {MAX_GRAMMAR_CHARS} characters", len(given)
            )
        given = parse_json(given, name, param=name)
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
    return Form(name=name, kind="choice", source=given)
