"""A client's JSON Schema, made ready for the compiler: within bounds, and in its words.

Everything that happens to a schema between the client and llguidance happens here. `prepared` looks
at every place where a schema can stand; values (`const`, `enum`, `default`, examples) are left as
they are. What the client's draft does not know is dropped, as that draft says; what asks for
nothing is dropped; what can be said in other words is; what is left and cannot be enforced is
refused by the compiler, by name (docs/api.md lists it).
"""

from collections.abc import Callable
from typing import Any

from common.errors import InvalidRequest
from common.limits import (
    MAX_ALTERNATIVES,
    MAX_CHOICES,
    MAX_OPTIONAL_PROPERTIES,
    MAX_SCHEMA_DEPTH,
    MAX_SCHEMA_ITEMS,
    MAX_SCHEMA_ITEMS_TOTAL,
    MAX_SCHEMA_LENGTH,
)
from router.grammar.regex_bounds import check_repeats
from router.reading.json_body import shortened

Schema = dict[str, Any]

FORMATS = frozenset(
    [
        *("date-time", "time", "date", "duration", "email", "hostname"),
        *("ipv4", "ipv6", "uri", "uuid", "unknown"),
    ]
)
"""Those that the compiler enforces. Any other is an annotation, and ignored."""

_VALUES = frozenset(["const", "default", "enum", "example", "examples"])
_NAMED = frozenset(
    [
        *("$defs", "definitions", "dependencies"),
        *("dependentSchemas", "patternProperties", "properties"),
    ]
)
_ITEM_COUNTS = ("minItems", "maxItems", "minContains", "maxContains")
_COUNTS = (*_ITEM_COUNTS, "minLength", "maxLength", "minProperties", "maxProperties")
_PRIVATE = ("x-guidance",)
"""Options of the compiler's own, which are not the client's to set."""

_SINCE = {
    "$anchor": 2019,
    "$defs": 2019,
    "$dynamicAnchor": 2020,
    "$dynamicRef": 2020,
    "$recursiveRef": 2019,
    "const": 6,
    "contains": 6,
    "dependentRequired": 2019,
    "dependentSchemas": 2019,
    "else": 7,
    "if": 7,
    "maxContains": 2019,
    "minContains": 2019,
    "prefixItems": 2020,
    "propertyNames": 6,
    "then": 7,
    "unevaluatedItems": 2019,
    "unevaluatedProperties": 2019,
}
_UNTIL = {"$recursiveRef": 2019, "additionalItems": 2019, "dependencies": 7}
_DRAFTS = {
    "json-schema.org/draft-04/schema": 4,
    "json-schema.org/draft-06/schema": 6,
    "json-schema.org/draft-07/schema": 7,
    "json-schema.org/draft/2019-09/schema": 2019,
    "json-schema.org/draft/2020-12/schema": 2020,
}
_NEWEST = 2020
_REFERENCED = frozenset(["$defs", "definitions"])
"""Kept under every draft: references may lead there."""


def prepared(schema: Schema, *, param: str) -> Schema:
    """Raises InvalidRequest, naming the bound."""
    return _Preparing(schema, param).root(schema)


def draft_of(schema: Schema) -> int:
    """The newest one where the schema names none that is known."""
    given = schema.get("$schema")
    if not isinstance(given, str):
        return _NEWEST
    return _DRAFTS.get(given.rstrip("#").partition("://")[2], _NEWEST)


class _Preparing:
    def __init__(self, schema: Schema, param: str) -> None:
        self._param = param
        self._draft = draft_of(schema)
        self._num_items = 0

    def root(self, schema: Schema) -> Schema:
        found: Schema = self.schema(schema, 0)
        if "$schema" in found and self._draft == _NEWEST:
            del found["$schema"]  # it may be one that nobody knows
        return found

    def schema(self, given: Any, depth: int) -> Any:
        """Also of a list of schemas; what is neither is the compiler's to refuse."""
        if depth > MAX_SCHEMA_DEPTH:
            raise self._wrong(f"is nested more than {MAX_SCHEMA_DEPTH} schemas deep")
        if isinstance(given, list):
            return [self.schema(inner, depth) for inner in given]
        if not isinstance(given, dict):
            return given
        found = {
            name: self._keyword(name, value, depth)
            for name, value in given.items()
            if self._is_known(name)
        }
        for rewrite in _REWRITES:
            rewrite(found)
        self._check(found)
        return found

    def _is_known(self, name: str) -> bool:
        if name in _PRIVATE:
            return False
        is_in_draft = _SINCE.get(name, 0) <= self._draft <= _UNTIL.get(name, _NEWEST)
        return is_in_draft or name in _REFERENCED

    def _keyword(self, name: str, value: Any, depth: int) -> Any:
        if name in _VALUES:
            return value
        if name in _NAMED and isinstance(value, dict):
            return {inner: self.schema(schema, depth + 1) for inner, schema in value.items()}
        if name in _COUNTS and isinstance(value, float) and value.is_integer():
            return int(value)
        if name == "pattern" and isinstance(value, str):
            check_repeats(value, self._param)
        return self.schema(value, depth + 1)

    # --- bounds -----------------------------------------------------------------------------------

    def _check(self, schema: Schema) -> None:
        if not isinstance(schema.get("format", ""), str):
            raise self._wrong(f"has a format that is no text: {shortened(schema['format'])}")
        for name in _ITEM_COUNTS:
            self._check_number(schema, name, MAX_SCHEMA_ITEMS)
        for name in ("minProperties", "maxProperties"):
            self._check_number(schema, name, MAX_SCHEMA_ITEMS)
        for name in ("minLength", "maxLength"):
            self._check_number(schema, name, MAX_SCHEMA_LENGTH)
        counts = [schema[n] for n in ("minItems", "maxItems") if type(schema.get(n)) is int]
        self._num_items += max(counts, default=0)
        if self._num_items > MAX_SCHEMA_ITEMS_TOTAL:
            raise self._wrong(
                f"asks for more than {MAX_SCHEMA_ITEMS_TOTAL} items in all its lists together"
            )
        self._check_list(schema, "enum", MAX_CHOICES)
        for name in ("anyOf", "oneOf", "allOf", "type"):
            self._check_list(schema, name, MAX_ALTERNATIVES)
        properties, required = schema.get("properties"), schema.get("required")
        if isinstance(properties, dict) and len(properties) > MAX_OPTIONAL_PROPERTIES:
            needed = set(map(str, required)) if isinstance(required, list) else set()
            num_optional = len(properties.keys() - needed)
            if num_optional > MAX_OPTIONAL_PROPERTIES:
                raise self._wrong(
                    f"has an object with {num_optional} optional properties; the limit is "
                    f"{MAX_OPTIONAL_PROPERTIES}"
                )
        patterns = schema.get("patternProperties")
        if isinstance(patterns, dict):
            for name in patterns:
                check_repeats(name, self._param)

    def _check_number(self, schema: Schema, name: str, limit: int) -> None:
        value = schema.get(name)
        if isinstance(value, int | float) and value > limit:
            raise self._wrong(f"has {name} {shortened(value)}; the limit is {limit}")

    def _check_list(self, schema: Schema, name: str, limit: int) -> None:
        value = schema.get(name)
        if isinstance(value, list) and len(value) > limit:
            raise self._wrong(f"has {len(value)} entries in {name}; the limit is {limit}")

    def _wrong(self, what: str) -> InvalidRequest:
        return InvalidRequest(f"the schema {what}", param=self._param)


# --- other words for the same ---------------------------------------------------------------------


def _drop_what_asks_for_nothing(schema: Schema) -> None:
    if isinstance(schema.get("format"), str) and schema["format"] not in FORMATS:
        del schema["format"]
    if schema.get("uniqueItems") is False or _at_most_one_item(schema):
        schema.pop("uniqueItems", None)
    for name in ("dependentRequired", "dependentSchemas", "dependencies"):
        if schema.get(name) == {}:
            del schema[name]
    for name in ("unevaluatedProperties", "unevaluatedItems", "propertyNames"):
        if schema.get(name) is True or schema.get(name) == {}:
            del schema[name]
    if schema.get("not") is False:
        del schema["not"]
    if "contains" not in schema:
        schema.pop("minContains", None)
        schema.pop("maxContains", None)
    if "if" not in schema:
        schema.pop("then", None)
        schema.pop("else", None)
    elif "then" not in schema and "else" not in schema:
        del schema["if"]


def _at_most_one_item(schema: Schema) -> bool:
    most = schema.get("maxItems")
    return type(most) is int and most <= 1


def _count_properties(schema: Schema) -> None:
    """Bounds on the number of properties that hold anyhow."""
    required, properties = schema.get("required"), schema.get("properties")
    least = schema.get("minProperties")
    if type(least) is int and 0 <= least <= (len(required) if isinstance(required, list) else 0):
        del schema["minProperties"]
    most = schema.get("maxProperties")
    is_closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    if type(most) is int and is_closed and isinstance(properties, dict) and most >= len(properties):
        del schema["maxProperties"]


_APPLICATORS = ("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "if", "not", "dependentSchemas")


def _evaluate_here(schema: Schema) -> None:
    """Where no other schema applies to the same value, what is not evaluated is additional."""
    if any(name in schema for name in _APPLICATORS):
        return
    if "unevaluatedProperties" in schema:
        rest = schema.pop("unevaluatedProperties")
        schema.setdefault("additionalProperties", rest)
    if "unevaluatedItems" in schema and "contains" not in schema:
        rest = schema.pop("unevaluatedItems")
        schema.setdefault("items", rest)


def _name_properties(schema: Schema) -> None:
    """`propertyNames` of a mapping: a pattern or a list of names."""
    names = schema.get("propertyNames")
    is_mapping = not schema.get("properties") and not schema.get("patternProperties")
    if not isinstance(names, dict) or not is_mapping:
        return
    said = {key: value for key, value in names.items() if key not in ("type", "title")}
    rest = schema.get("additionalProperties", True)
    if names.get("type", "string") != "string" or len(said) > 1:
        return
    if not said:
        del schema["propertyNames"]
        return
    (keyword, value), *_ = said.items()
    if keyword == "pattern" and isinstance(value, str):
        schema["patternProperties"] = {value: rest}
    elif keyword == "enum" and isinstance(value, list):
        schema["properties"] = {name: rest for name in value if isinstance(name, str)}
    elif keyword == "const" and isinstance(value, str):
        schema["properties"] = {value: rest}
    else:
        return
    schema["additionalProperties"] = False
    del schema["propertyNames"]


_REWRITES: tuple[Callable[[Schema], None], ...] = (
    _drop_what_asks_for_nothing,
    _evaluate_here,
    _name_properties,
    _count_properties,
)
