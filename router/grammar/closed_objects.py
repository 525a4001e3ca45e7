"""Objects of a JSON schema that may hold nothing but the properties they name.

JSON Schema lets an object have any further property; a small model, free to go on, adds properties
until its tokens run out. OpenAI's strict mode demands closed objects for that reason. So the
arguments of tools are closed where the schema says nothing (`closed`), and a schema that is called
strict must keep strict mode's rules (`strict`).
"""

from collections.abc import Callable
from typing import Any

from common.errors import InvalidRequest
from common.limits import MAX_GRAMMAR_CHARS
from router.reading.json_body import is_within

Schema = dict[str, Any]

_ONE = ("additionalProperties", "else", "if", "items", "not", "then")
_LISTS = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
_NAMED = ("$defs", "definitions", "patternProperties", "properties")
_OPENS = ("additionalProperties", "patternProperties", "unevaluatedProperties")
_COMPOSES = ("$ref", "allOf", "anyOf", "if", "oneOf")
"""Beside these, an object's own list of properties need not be all of them."""


def closed(schema: Schema) -> Schema:
    """Every object that names its properties, and says nothing of others, has no others."""

    def close(inner: Schema) -> Schema:
        says_nothing = not any(word in inner for word in (*_OPENS, *_COMPOSES))
        if says_nothing and isinstance(inner.get("properties"), dict):
            return inner | {"additionalProperties": False}
        return inner

    # the parts of an allOf describe one object together: closed, they would exclude each other
    return _mapped(schema, close, leaves=("allOf", "if", "not"))


def strict(schema: Schema, where: str) -> Schema:
    """The schema with its objects closed. Raises InvalidRequest, as OpenAI's strict mode does,
    where one has optional properties or is open by its own word. `where` is the client's name for
    the schema.
    """

    def check(inner: Schema) -> Schema:
        if inner.get("type") != "object" and "properties" not in inner:
            return inner
        if inner.get("additionalProperties", False) is not False:
            raise _not_strict(where, "additionalProperties must be false in every object")
        properties = inner.get("properties", {})
        required = inner.get("required", [])
        if isinstance(properties, dict) and isinstance(required, list):
            named = {name for name in required if isinstance(name, str)}
            missing = [name for name in properties if name not in named]
            if missing:
                raise _not_strict(
                    where,
                    f"required must name every property; {missing[0]!r:.80} is not among them"
                    " (an optional one may be null)",
                )
        return inner | {"additionalProperties": False}

    if not is_within(schema, MAX_GRAMMAR_CHARS):
        raise InvalidRequest(
            f"{where} has too many characters: the limit is {MAX_GRAMMAR_CHARS}", param=where
        )
    if schema.get("type", "object") != "object":
        raise _not_strict(where, "its type must be object")
    return _mapped(schema, check)


def _not_strict(where: str, rule: str) -> InvalidRequest:
    return InvalidRequest(f"{where} is called strict, but {rule}", param=where)


def _mapped(
    schema: Schema, change: Callable[[Schema], Schema], leaves: tuple[str, ...] = ()
) -> Schema:
    """`change` done to the schema and to those inside it, but for what stands under `leaves`."""

    def inside(value: Any) -> Any:
        return _mapped(value, change, leaves) if isinstance(value, dict) else value

    found = dict(schema)
    for word, value in schema.items():
        if word in leaves:
            continue
        if word in _ONE and isinstance(value, dict):
            found[word] = inside(value)
        elif word in _LISTS and isinstance(value, list):
            found[word] = [inside(item) for item in value]
        elif word in _NAMED and isinstance(value, dict):
            found[word] = {name: inside(item) for name, item in value.items()}
    return change(found)
