"""What constrains an answer's form, from the fields of a request to a grammar that workers compile.

OpenAI's `response_format` and vLLM's `guided_*` and `structured_outputs` say the same things in
different words; one of them may be given. The grammar is llguidance's own text; `check_grammar`
compiles it once without a tokenizer, so a wrong one is the client's error and no worker sees it.
"""

import json
from typing import Any

import anyio.to_thread
from llguidance import LLMatcher, grammar_from

from common.errors import InvalidRequest, UnsupportedParameter
from router.fields import Fields
from router.json_body import shortened

MAX_GRAMMAR_CHARS = 256 * 1024
MAX_CHOICES = 4096
_KINDS = ("json", "json_object", "regex", "choice", "grammar")
_NOT_OFFERED = ("disable_any_whitespace", "disable_additional_properties", "structural_tag")


def read_grammar(fields: Fields) -> str | None:
    """The one constraint that the fields name. Raises InvalidRequest."""
    found = [
        (name, grammar)
        for name, grammar in (
            ("response_format", _response_format(fields)),
            ("structured_outputs", _structured_outputs(fields)),
            *((f"guided_{kind}", _guided(fields, f"guided_{kind}", kind)) for kind in _KINDS),
        )
        if grammar is not None
    ]
    if len(found) > 1:
        names = " and ".join(name for name, _ in found)
        raise InvalidRequest(f"{names} cannot be combined", param=found[1][0])
    return found[0][1] if found else None


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


async def check_grammar(grammar: str) -> None:
    """Raises InvalidRequest with the compiler's reason."""
    if len(grammar) > MAX_GRAMMAR_CHARS:
        raise InvalidRequest(
            f"the grammar has {len(grammar)} characters; the limit is {MAX_GRAMMAR_CHARS}"
        )
    reason = await anyio.to_thread.run_sync(LLMatcher.validate_grammar, grammar)
    if reason and not reason.startswith("WARNING"):
        raise InvalidRequest(f"the output's format cannot be compiled: {reason[:500]}")


def _response_format(fields: Fields) -> str | None:
    given = fields.object("response_format")
    if given is None:
        return None
    kind = given.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return json_grammar({"type": "object"})
    if kind == "json_schema":
        described = given.get("json_schema")
        schema = described.get("schema") if isinstance(described, dict) else None
        if not isinstance(schema, dict):
            raise InvalidRequest(
                "response_format.json_schema.schema must be an object",
                param="response_format.json_schema.schema",
            )
        return json_grammar(schema)
    raise UnsupportedParameter(
        f"response_format.type must be text, json_object or json_schema, got {shortened(kind)}",
        param="response_format",
    )


def _structured_outputs(fields: Fields) -> str | None:
    given = fields.object("structured_outputs")
    if not given:
        return None
    inner = Fields(given, "structured_outputs.")
    whitespace = inner.text("whitespace_pattern")
    for name in _NOT_OFFERED:
        inner.unsupported(name, (False,))
    found = [_guided(inner, kind, kind, whitespace) for kind in _KINDS]
    inner.finish()
    grammars = [grammar for grammar in found if grammar is not None]
    if len(grammars) > 1:
        raise InvalidRequest(
            "structured_outputs must name one constraint", param="structured_outputs"
        )
    return grammars[0] if grammars else None


def _guided(fields: Fields, name: str, kind: str, whitespace: str | None = None) -> str | None:
    if kind == "json_object":
        wanted = fields.boolean(name, False)
        return json_grammar({"type": "object"}, whitespace) if wanted else None
    if kind == "json":
        return _json(fields, name, whitespace)
    if kind == "choice":
        return _choice(fields, name)
    text = fields.text(name)
    if not text:
        return None
    try:
        return str(grammar_from("regex" if kind == "regex" else "grammar", text))
    except Exception as error:  # the converter of GBNF raises plain exceptions
        raise InvalidRequest(f"{name} is not a grammar: {error}", param=name) from None


def _json(fields: Fields, name: str, whitespace: str | None) -> str | None:
    given = fields.take(name)
    if given is None:
        return None
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            raise fields.wrong(name, "must be a JSON schema", given) from None
    if not isinstance(given, dict):
        raise fields.wrong(name, "must be a JSON schema", given)
    return json_grammar(given, whitespace)


def _choice(fields: Fields, name: str) -> str | None:
    given = fields.take(name)
    if given is None:
        return None
    is_list = isinstance(given, list) and 0 < len(given) <= MAX_CHOICES
    if not is_list or not all(isinstance(choice, str) and choice for choice in given):
        raise fields.wrong(name, f"must be a list of 1 to {MAX_CHOICES} texts", given)
    return str(grammar_from("choice", json.dumps(given)))
