"""From what a client wrote to the text of a grammar that workers compile. Runs in the compiler's
process (router/grammar/compile_child.py), since what is written may need any amount of memory and
time.
"""

import json
from typing import Any

from llguidance import LLMatcher, StructTag, grammar_from

from common.errors import InvalidRequest
from common.limits import MAX_GRAMMAR_CHARS
from router.grammar.grammar_job import Job
from router.grammar.regex_bounds import check_repeats
from router.grammar.schema import Schema, prepared

_AS_PYTHON_WRITES = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}


def grammar_of(job: Job) -> str:
    """Raises InvalidRequest with the compiler's reason."""
    try:
        grammar = _converted(job)
    except InvalidRequest:
        raise
    except MemoryError:
        raise
    except Exception as error:  # the converters raise plain exceptions
        raise InvalidRequest(
            f"{job.name} is not a grammar: {str(error)[:500]}", param=job.name
        ) from None
    if len(grammar) > MAX_GRAMMAR_CHARS:
        raise InvalidRequest(
            f"{job.name} has too many characters: {len(grammar)} as a grammar, the limit is "
            f"{MAX_GRAMMAR_CHARS}",
            param=job.name,
        )
    return grammar


def _converted(job: Job) -> str:
    if job.kind == "json":
        return json_grammar(job.source, job.whitespace, param=job.name)
    if job.kind == "choice":
        return grammar_from("choice", json.dumps(job.source))
    if job.kind == "structural_tag":
        return _tags_grammar(job.source, job.name)
    check_repeats(job.source, job.name)
    return grammar_from("regex" if job.kind == "regex" else "grammar", job.source)


def _tags_grammar(tags: list[dict[str, Any]], param: str) -> str:
    return StructTag.to_grammar(
        [
            StructTag(
                trigger=tag["trigger"],
                begin=tag["begin"],
                # the library reads its own key inside a schema; a client's own is gone by now
                grammar=prepared(tag["schema"], param=param) | {"x-guidance": _AS_PYTHON_WRITES},
                end=tag["end"],
            )
            for tag in tags
        ],
        assume_special=False,
    )


def json_grammar(schema: Schema, whitespace: str | None = None, *, param: str = "schema") -> str:
    """Text that is JSON of this schema, spaced as `json.dumps` does unless `whitespace` (a regular
    expression) is given.
    """
    form: dict[str, Any] = _AS_PYTHON_WRITES
    if whitespace is not None:
        check_repeats(whitespace, param)
        form = {"whitespace_pattern": whitespace}
    grammar: str = LLMatcher.grammar_from_json_schema(
        prepared(schema, param=param),
        overrides=form,  # type: ignore[arg-type]
    )
    return grammar
