"""T30: schemas with every keyword of the drafts. What the compiler takes, its answers validate
against the schema under its draft; what it does not take is refused with a reason.

Answers are drawn at random from what the grammar allows, so nothing here depends on a model.
"""

import functools
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jsonschema.exceptions import SchemaError
from jsonschema.validators import validator_for
from llguidance import LLMatcher, LLTokenizer

from common.errors import InvalidRequest
from common.grammar_limits import new_matcher
from router.grammar.compile_child import compiled
from router.grammar.grammar_job import Job
from router.grammar.schema import FORMATS, prepared

Schema = dict[str, Any]
DRAFTS = {
    4: "http://json-schema.org/draft-04/schema#",
    6: "http://json-schema.org/draft-06/schema#",
    7: "http://json-schema.org/draft-07/schema#",
    2019: "https://json-schema.org/draft/2019-09/schema",
    2020: "https://json-schema.org/draft/2020-12/schema",
}
MAX_TOKENS = 60
EOS = 2
TEXT: Schema = {"type": "string", "maxLength": 4}
SMALL: Schema = {"type": "integer", "minimum": 0, "maximum": 20}
PAIR: Schema = {"type": "object", "properties": {"a": SMALL, "b": TEXT}, "required": ["a"]}
CLOSED = PAIR | {"additionalProperties": False}

TAKEN: dict[str, Schema] = {
    "type": {"type": "boolean"},
    "types": {"type": ["null", "boolean"]},
    "integer": SMALL,
    "number": {"type": "number", "minimum": -1.5, "maximum": 2.25},
    "open bounds": {"type": "integer", "exclusiveMinimum": 2, "exclusiveMaximum": 9},
    "multipleOf": {"type": "integer", "multipleOf": 3, "minimum": 0, "maximum": 30},
    "2.0 is an integer": {"type": "string", "minLength": 2.0, "maxLength": 3.0},
    "pattern": {"type": "string", "pattern": "^[ab]{1,3}$"},
    "pattern and length": {"type": "string", "pattern": "^a*$", "maxLength": 3, "minLength": 1},
    "enum": {"enum": [1, "a", None, [1, "x"], {"k": True}, 2.5]},
    "const": {"const": {"a": [1, None]}},
    "enum of one type": {"type": "string", "enum": ["x", 1, "y"]},
    "properties": CLOSED,
    "required beyond properties": {
        "type": "object",
        "required": ["z"],
        "additionalProperties": {"const": 1},
        "maxProperties": 2,
    },
    "additionalProperties": {
        "type": "object",
        "additionalProperties": SMALL,
        "maxProperties": 2,
    },
    "patternProperties": {
        "type": "object",
        "patternProperties": {"^x[0-9]$": SMALL},
        "additionalProperties": False,
    },
    "minProperties": {
        "type": "object",
        "minProperties": 1,
        "maxProperties": 2,
        "additionalProperties": {"type": "null"},
    },
    "minProperties that hold": CLOSED | {"minProperties": 1, "maxProperties": 2},
    "a property that cannot be": {
        "type": "object",
        "properties": {"a": SMALL, "no": False},
        "required": ["a"],
        "additionalProperties": False,
    },
    "items": {"type": "array", "items": SMALL, "minItems": 1, "maxItems": 3},
    "no items": {"type": "array", "items": False},
    "uniqueItems: false": {"type": "array", "items": SMALL, "maxItems": 2, "uniqueItems": False},
    "uniqueItems of one": {"type": "array", "items": SMALL, "maxItems": 1, "uniqueItems": True},
    "anyOf": {"anyOf": [SMALL, {"type": "null"}, CLOSED]},
    "oneOf of types": {"oneOf": [SMALL, TEXT, {"type": "null"}]},
    "oneOf by a constant": {
        "oneOf": [
            {
                "type": "object",
                "properties": {"kind": {"const": kind}, "v": SMALL},
                "required": ["kind", "v"],
                "additionalProperties": False,
            }
            for kind in ("x", "y")
        ]
    },
    "allOf": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 9}]},
    "allOf of objects": {
        "allOf": [
            {"type": "object", "properties": {"a": SMALL}, "required": ["a"]},
            {"type": "object", "properties": {"c": {"type": "null"}}, "required": ["c"]},
        ],
        "maxProperties": 3,
    },
    "definitions": {
        "definitions": {
            "node": {"anyOf": [{"type": "null"}, {"$ref": "#/definitions/leaf"}]},
            "leaf": CLOSED,
        },
        "$ref": "#/definitions/node",
    },
    "recursion": {
        "definitions": {
            "tree": {
                "type": "object",
                "properties": {
                    "v": SMALL,
                    "t": {"anyOf": [{"$ref": "#/definitions/tree"}, {"type": "null"}]},
                },
                "required": ["v", "t"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/definitions/tree",
    },
    "a reference to an unknown place": {
        "components": {"schemas": {"A": SMALL | {"format": "int32"}}},
        "type": "array",
        "items": {"$ref": "#/components/schemas/A"},
        "maxItems": 2,
    },
    "annotations": SMALL
    | {"title": "t", "description": "d", "default": 99, "examples": ["x"], "readOnly": True}
    | {"writeOnly": True, "deprecated": True, "$comment": "c", "example": 1, "nullable": True},
    "unknown keywords": SMALL | {"x-order": 3, "frobnicate": {"type": "nonsense"}},
    "dependencies of nothing": CLOSED | {"dependencies": {}, "dependentRequired": {}},
    "if alone": SMALL | {"if": {"const": 3}},
    "then alone": SMALL | {"then": {"const": 3}, "else": False},
    "not: false": SMALL | {"not": False},
    "minContains alone": {"type": "array", "items": SMALL, "maxItems": 1, "minContains": 5},
    **{f"format {n}": {"type": "string", "format": n} for n in sorted(FORMATS - {"email", "uri"})},
    "format email": {"type": "string", "format": "email", "maxLength": 9},
    "format uri": {"type": "string", "format": "uri", "maxLength": 9},
    **{
        f"annotation {name}": TEXT | {"format": name}
        for name in (
            *("binary", "path", "password", "byte", "int32", "regex", "iri", "idn-email"),
            *("json-pointer", "uri-template", "uri-reference", "no such format"),
        )
    },
    "contentEncoding": TEXT | {"contentEncoding": "base64", "contentMediaType": "image/png"},
    "a property called like a keyword": {
        "type": "object",
        "properties": {"x-guidance": SMALL, "format": TEXT, "not": {"type": "null"}},
        "required": ["x-guidance", "format", "not"],
        "additionalProperties": False,
    },
    "names by a pattern": {
        "type": "object",
        "propertyNames": {"type": "string", "pattern": "^[ab]$"},
        "additionalProperties": SMALL,
    },
    "names of a list": {
        "type": "object",
        "propertyNames": {"enum": ["a", "b"]},
        "additionalProperties": SMALL,
    },
    "unevaluatedProperties": PAIR | {"unevaluatedProperties": False},
    "unevaluatedItems": {"type": "array", "maxItems": 2, "unevaluatedItems": SMALL},
}

OF_SOME_DRAFTS: list[tuple[str, tuple[int, ...], Schema]] = [
    ("exclusive as a flag", (4,), SMALL | {"exclusiveMinimum": True, "exclusiveMaximum": True}),
    ("a tuple", (4, 6, 7, 2019), {"type": "array", "items": [SMALL, TEXT], "additionalItems": False,
                                 "minItems": 2}),
    ("a tuple and more", (4, 6, 7, 2019), {"type": "array", "items": [TEXT], "maxItems": 3,
                                          "additionalItems": SMALL}),
    ("prefixItems", (2020,), {"type": "array", "prefixItems": [SMALL, TEXT], "items": False,
                              "minItems": 2}),
    ("prefixItems means nothing", (7, 2019), {"type": "array", "prefixItems": [TEXT],
                                              "items": SMALL, "maxItems": 2}),
    ("$defs", (2019, 2020), {"$defs": {"a": SMALL}, "$ref": "#/$defs/a"}),
    ("$anchor", (2019, 2020), {"$defs": {"a": SMALL | {"$anchor": "here"}}, "$ref": "#here"}),
    ("const means nothing", (4,), TEXT | {"const": "looooong"}),
    ("if means nothing", (4, 6), SMALL | {"if": True, "then": {"const": 3}}),
    ("contains means nothing", (4,), {"type": "array", "items": SMALL, "maxItems": 2,
                                      "contains": {"const": 500}}),
    ("dependencies mean nothing", (2020,), CLOSED | {"dependencies": {"a": ["b"]}}),
    ("dependentRequired means nothing", (7,), CLOSED | {"dependentRequired": {"a": ["b"]}}),
]  # fmt: skip

REFUSED: dict[str, tuple[Schema, str]] = {
    "not": ({"not": {"type": "string"}}, "not"),
    "contains": ({"type": "array", "contains": SMALL}, "contains"),
    "uniqueItems": ({"type": "array", "items": SMALL, "uniqueItems": True}, "uniqueItems"),
    "if": ({"if": PAIR, "then": CLOSED}, "if"),
    "dependentRequired": (PAIR | {"dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    "dependentSchemas": (PAIR | {"dependentSchemas": {"a": CLOSED}}, "dependentSchemas"),
    "propertyNames": (PAIR | {"propertyNames": {"maxLength": 3}}, "propertyNames"),
    "unevaluatedProperties beside allOf": (
        {"allOf": [PAIR], "unevaluatedProperties": False},
        "unevaluatedProperties",
    ),
    "unevaluatedItems beside anyOf": (
        {"type": "array", "anyOf": [{"minItems": 1}], "unevaluatedItems": False},
        "unevaluatedItems",
    ),
    "$dynamicRef": (
        {"$dynamicRef": "#x", "$defs": {"a": {"$dynamicAnchor": "x"}}},
        r"\$dynamicRef",
    ),
    "oneOf that overlaps": ({"oneOf": [TEXT, {"type": "string", "minLength": 2}]}, "oneOf"),
    "minProperties of optional ones": (
        {"type": "object", "properties": {"a": SMALL, "b": SMALL}, "minProperties": 1},
        "min/maxProperties",
    ),
    "look-around": ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
    "back-references": ({"type": "string", "pattern": r"(a)\1"}, "backreferences"),
    "a reference elsewhere": ({"$ref": "http://example.com/schema"}, "example.com"),
    "a reference to nothing": ({"$ref": "#/$defs/none"}, "none"),
    "an unknown type": ({"type": "foo"}, "foo"),
    "nothing to choose": ({"enum": []}, "nsatisfiable"),
    "bounds that cross": ({"type": "integer", "minimum": 5, "maximum": 3}, "nsatisfiable"),
    "a required property that cannot be": (
        {"type": "object", "properties": {"a": False}, "required": ["a"]},
        "nsatisfiable",
    ),
    "wrong types": ({"type": "object", "properties": [1]}, "properties"),
    "a wrong number": ({"type": "string", "minLength": "3"}, "minLength"),
    "half a length": ({"type": "string", "minLength": 2.5}, "minLength"),
    "options of the compiler": ({"x-guidance": {"lenient": True}, "not": {"const": 1}}, "not"),
}


@functools.cache
def tokenizer(model_dir: Path) -> LLTokenizer:
    return LLTokenizer(str(model_dir / "tokenizer.json"), n_vocab=49152, eos_token=[EOS])


def grammar(model_dir: Path, schema: Schema) -> str:
    return compiled(tokenizer(model_dir), Job(kind="json", name="guided_json", source=schema))


def drawn(matcher: LLMatcher, ends: frozenset[int], rng: random.Random) -> list[int] | None:
    """An answer that the grammar allows; None: it goes on. Most often it ends what can end."""
    found: list[int] = []
    while len(found) < MAX_TOKENS:
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        assert not matcher.is_error(), matcher.get_error()
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist()
        ending = [token for token in ends.intersection(allowed) if token != EOS]
        if EOS in allowed and (len(allowed) == 1 or rng.random() < 0.5):
            return found
        others = [token for token in allowed if token != EOS]
        token = rng.choice(ending if ending and rng.random() < 0.7 else others)
        found.append(token)
        assert matcher.consume_token(token), matcher.get_error()
    return None


def check(model_dir: Path, schema: Schema, num_answers: int = 6) -> int:
    """How many answers were whole; each of them is checked."""
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    text = grammar(model_dir, schema)
    make = validator_for(schema)
    ends = frozenset(i for char in '"]}' for i in tokenizer(model_dir).tokenize_str(char))
    num_whole = 0
    for _ in range(num_answers):
        ids = drawn(new_matcher(tokenizer(model_dir), text), ends, rng)
        if ids is None:
            continue
        answer = tokenizer(model_dir).decode_bytes(ids).decode("utf-8", "replace")
        errors = list(make(schema).iter_errors(json.loads(answer)))
        assert not errors, f"seed {seed}: {answer}: {errors[0].message}"
        num_whole += 1
    return num_whole


@pytest.mark.parametrize("name", TAKEN)
def test_t30_what_is_taken_validates(model_dir: Path, name: str) -> None:
    assert check(model_dir, TAKEN[name]) or check(model_dir, TAKEN[name], 60)


@pytest.mark.parametrize(
    ("draft", "schema"),
    [
        pytest.param(draft, schema, id=f"{name} ({draft})")
        for name, drafts, schema in OF_SOME_DRAFTS
        for draft in drafts
    ],
)
def test_t30_keywords_mean_what_their_draft_says(
    model_dir: Path, draft: int, schema: Schema
) -> None:
    schema = schema | {"$schema": DRAFTS[draft]}
    assert check(model_dir, schema) or check(model_dir, schema, 60)


@pytest.mark.parametrize("name", REFUSED)
def test_t30_what_is_refused_says_why(model_dir: Path, name: str) -> None:
    schema, words = REFUSED[name]
    with pytest.raises(InvalidRequest, match=words) as error:
        grammar(model_dir, schema)
    assert error.value.param == "guided_json"
    assert "panic" not in error.value.message


@pytest.mark.parametrize("draft", DRAFTS)
def test_t30_every_draft_is_known(model_dir: Path, draft: int) -> None:
    for end in ("", "#"):
        schema = SMALL | {"$schema": DRAFTS[draft].rstrip("#") + end}
        assert check(model_dir, schema, num_answers=3) > 0
    assert grammar(model_dir, SMALL | {"$schema": "http://example.com/mine"})


@pytest.mark.slow
def test_t30_any_mix_of_keywords_is_taken_or_refused(model_dir: Path) -> None:
    """Two or three entries joined, or one inside another, under every draft."""
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    pool = [*TAKEN.values(), *(schema for schema, _ in REFUSED.values())]
    num_whole = 0
    refusals: list[str] = []
    for _ in range(600):
        first, second = rng.choice(pool), rng.choice(pool)
        mixed = rng.choice(
            [
                first | second,
                {"allOf": [first, second]},
                {"anyOf": [first, second]},
                {"type": "array", "items": first, "maxItems": 2} | second,
                {"type": "object", "properties": {"a": first, "b": second}, "required": ["a"]},
                {"$defs": {"x": first}, "anyOf": [{"$ref": "#/$defs/x"}, second]},
            ]
        )
        schema = mixed | {"$schema": DRAFTS[rng.choice(list(DRAFTS))]}
        make = validator_for(schema)
        try:
            for part in (schema, first, second):  # old drafts do not look into `$defs`
                make.check_schema(part)
            is_schema = True
        except SchemaError:
            is_schema = False  # of that draft: taken or refused, but nothing else
        try:
            if is_schema:
                num_whole += check(model_dir, schema, num_answers=3)
            else:
                grammar(model_dir, schema)
        except InvalidRequest as error:
            refusals.append(error.message)
    assert num_whole > 100, f"seed {seed}"
    assert len(refusals) > 100, f"seed {seed}"
    assert not [reason for reason in refusals if "panic" in reason], f"seed {seed}"


def test_the_schema_that_came_is_not_changed() -> None:
    schema: Schema = {"type": "string", "format": "path", "x-guidance": {"lenient": True}}
    before = json.dumps(schema)
    assert prepared(schema, param="p") == {"type": "string"}
    assert json.dumps(schema) == before
