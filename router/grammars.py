"""From what a client wrote to the text of a grammar that workers compile. Runs in the compiler's
process (router/compile_child.py), since what is written may need any amount of memory and time.
"""

import json
from typing import Any

from llguidance import LLMatcher, grammar_from

from common.errors import InvalidRequest
from common.limits import MAX_GRAMMAR_CHARS
from router.grammar_job import Job
from router.regex_bounds import check_repeats
from router.schema import Schema, prepared


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
    check_repeats(job.source, job.name)
    return grammar_from("regex" if job.kind == "regex" else "grammar", job.source)


def json_grammar(schema: Schema, whitespace: str | None = None, *, param: str = "schema") -> str:
    """Text that is JSON of this schema, spaced as `json.dumps` does unless `whitespace` (a regular
    expression) is given.
    """
    form: dict[str, Any]
    if whitespace is None:
        form = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    else:
        check_repeats(whitespace, param)
        form = {"whitespace_pattern": whitespace}
    grammar: str = LLMatcher.grammar_from_json_schema(
        prepared(schema, param=param),
        overrides=form,  # type: ignore[arg-type]
    )
    return grammar
