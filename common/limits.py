"""Every limit of a request, where it is enforced, and what happens beyond it.

Whatever a client asks for is bounded before it costs anything. The code that enforces a limit reads
its number here; `python -m common.limits` writes the table of docs/api.md.
"""

import sys
from dataclasses import dataclass

KIB, MIB = 1024, 1024 * 1024

# --- a connection ---------------------------------------------------------------------------------
MAX_HEADER_BYTES = 64 * KIB
MAX_HEADERS = 200
HEAD_S = 30.0
MAX_METRICS_CONNECTIONS = 64

# --- a body ---------------------------------------------------------------------------------------
MAX_BODY_BYTES = 8 * MIB
"""A context of a million tokens as text fits."""
MAX_JSON_DEPTH = 100
MAX_JSON_VALUES = 1_250_000
"""A context of a million token ids fits."""
MAX_JSON_OBJECTS = 200_000
"""Objects, lists and texts: what costs memory beyond a number."""
MAX_INTEGER_DIGITS = 400
LARGE_BODY_BYTES = 32 * KIB
"""From here on a body is parsed in a thread."""
PARSING_THREADS = 1
SMALL_BODY_BYTES = 64 * KIB
MAX_BODIES_BYTES = 256 * MIB
"""Of all requests under way, larger ones than `SMALL_BODY_BYTES`."""
BODY_S = 120.0

# --- a call ---------------------------------------------------------------------------------------
MAX_N = 128
MAX_OUTPUTS = 1024
MAX_MESSAGES = 4096
MAX_PARTS = 256
"""Inputs, outputs or parameters of a KServe request."""
MAX_TOOLS = 256
MAX_LOGPROBS = 20
MAX_SCORES = 1024 * 1024
MAX_STOPS = 1024
MAX_STOP_CHARS = 32_768
MAX_STOP_TOKEN_IDS = 1024
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 256
MAX_LISTED_IDS = 65_536
MAX_OUTPUTS_X_IDS = 2 * MIB
MAX_OUTPUTS_X_GRAMMAR_CHARS = 2 * MIB
MAX_SALT_CHARS = 256

# --- the form of an answer ------------------------------------------------------------------------
MAX_GRAMMAR_CHARS = 256 * KIB
MAX_CHOICES = 4096
MAX_OPTIONAL_PROPERTIES = 500
MAX_SCHEMA_ITEMS = 10_000
MAX_SCHEMA_ITEMS_TOTAL = 100_000
MAX_SCHEMA_LENGTH = 2**31 - 1
MAX_ALTERNATIVES = 1000
MAX_REGEX_REPEAT = 10_000
MAX_SCHEMA_DEPTH = 60
COMPILE_S = 3.0
"""Of processor time."""
COMPILE_BYTES = 256 * MIB
"""Beyond what the compiling process has before it begins."""
MAX_COMPILING = 64
MAX_COMPILING_OF_CLIENT = 16
MAX_COMPILED_BYTES = 64 * MIB
"""Compiled grammars that are kept, in the router and in each worker."""
MAX_ROW_ITEMS = 10_000
MASK_LEXER_FUEL = 500_000
MASK_ITEMS = 100_000
MAX_LEXER_STATES = 50_000

# --- between processes ----------------------------------------------------------------------------
MAX_MESSAGE_BYTES = 16 * MIB
MAX_MESSAGE_ITEMS = 400_000
MAX_ID_CHARS = 256
SHARED_FROM_IDS = 64
SHARED_FROM_CHARS = 1024
"""Larger parameters are sent once for all prompts of a call."""
MAX_SHARED_BYTES = 256 * MIB
MAX_WIRE_SALT_CHARS = 1024
MAX_WIRE_OUTPUTS = 1024
MAX_WIRE_LOGPROBS = 100


@dataclass(frozen=True, slots=True)
class Limit:
    what: str
    bound: str
    beyond: str
    where: str
    """The file that enforces it."""


def _count(number: float) -> str:
    return f"{number:,.0f}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes // MIB} MiB" if num_bytes >= MIB else f"{num_bytes // KIB} KiB"


HTTP = "common/http_protocol.py"
BODIES = "router/server/bodies.py"
JSON = "router/reading/json_body.py"
OPTIONS = "router/generation/options.py"
CALL = "router/generation/limits.py"
SCHEMA = "router/grammar/schema.py"
COMPILER = "router/grammar/compiler.py"
WORKER = "common/request_checks.py"

LIMITS: tuple[tuple[str, tuple[Limit, ...]], ...] = (
    (
        "A connection",
        (
            Limit("bytes of headers, URL included", _size(MAX_HEADER_BYTES), "431", HTTP),
            Limit("headers", _count(MAX_HEADERS), "431", HTTP),
            Limit("time to receive the head of a request", f"{HEAD_S:g} s", "408, closed", HTTP),
            Limit(
                "connections to a metrics port",
                _count(MAX_METRICS_CONNECTIONS),
                "closed",
                "common/metrics_server.py",
            ),
        ),
    ),
    (
        "A body",
        (
            Limit("bytes, over HTTP and gRPC", _size(MAX_BODY_BYTES), "413", BODIES),
            Limit("time to receive it", f"{BODY_S:g} s", "408", BODIES),
            Limit(
                f"bytes of all bodies above {_size(SMALL_BODY_BYTES)} together",
                _size(MAX_BODIES_BYTES),
                "429",
                BODIES,
            ),
            Limit("depth of JSON, also of JSON in strings", _count(MAX_JSON_DEPTH), "400", JSON),
            Limit("objects, lists and strings in it", _count(MAX_JSON_OBJECTS), "400", JSON),
            Limit("values in it", _count(MAX_JSON_VALUES), "400", JSON),
            Limit(
                "fields of a gRPC message, and numbers packed into one",
                f"{_count(MAX_JSON_OBJECTS)}, {_count(MAX_JSON_VALUES)}",
                "400",
                "router/reading/protobuf_bounds.py",
            ),
            Limit(
                "inputs, outputs, parameters of a KServe call",
                f"{_count(MAX_PARTS)} each",
                "400",
                "router/api/kserve/infer.py",
            ),
            Limit("digits of an integer", _count(MAX_INTEGER_DIGITS), "400", JSON),
        ),
    ),
    (
        "A call",
        (
            Limit("prompts x `n`", _count(MAX_OUTPUTS), "400", CALL),
            Limit("messages", _count(MAX_MESSAGES), "400", "router/text/chat_messages.py"),
            Limit("tools", _count(MAX_TOOLS), "400", "router/text/tools.py"),
            Limit("log-probabilities of prompt tokens x `n`", _count(MAX_SCORES), "400", CALL),
            Limit(
                "token ids in `logit_bias`, `stop_token_ids` and `bad_words`",
                _count(MAX_LISTED_IDS),
                "400",
                OPTIONS,
            ),
            Limit("outputs x these token ids", _count(MAX_OUTPUTS_X_IDS), "400", OPTIONS),
            Limit("stop strings", _count(MAX_STOPS), "400", OPTIONS),
            Limit("characters in stop strings", _count(MAX_STOP_CHARS), "400", OPTIONS),
            Limit("bad words", _count(MAX_BAD_WORDS), "400", OPTIONS),
            Limit("characters of `cache_salt`", _count(MAX_SALT_CHARS), "400", OPTIONS),
        ),
    ),
    (
        "Structured output",
        (
            Limit(
                "characters, as written and as a grammar",
                _count(MAX_GRAMMAR_CHARS),
                "400",
                "router/grammar/structured.py",
            ),
            Limit("outputs x characters", _count(MAX_OUTPUTS_X_GRAMMAR_CHARS), "400", OPTIONS),
            Limit("choices, entries of `enum`", _count(MAX_CHOICES), "400", SCHEMA),
            Limit("entries of `anyOf`, `oneOf`, `allOf`", _count(MAX_ALTERNATIVES), "400", SCHEMA),
            Limit(
                "optional properties of an object", _count(MAX_OPTIONAL_PROPERTIES), "400", SCHEMA
            ),
            Limit(
                "`minItems`, `maxItems`, `minProperties`, `maxProperties`",
                _count(MAX_SCHEMA_ITEMS),
                "400",
                SCHEMA,
            ),
            Limit("items of all lists together", _count(MAX_SCHEMA_ITEMS_TOTAL), "400", SCHEMA),
            Limit("`minLength`, `maxLength`", _count(MAX_SCHEMA_LENGTH), "400", SCHEMA),
            Limit(
                "`{n,m}` in a regular expression or a grammar",
                _count(MAX_REGEX_REPEAT),
                "400",
                "router/grammar/regex_bounds.py",
            ),
            Limit("nested schemas", _count(MAX_SCHEMA_DEPTH), "400", SCHEMA),
            Limit("processor time to compile a grammar", f"{COMPILE_S:g} s", "400", COMPILER),
            Limit("memory to compile a grammar", _size(COMPILE_BYTES), "400", COMPILER),
            Limit("grammars that wait to be compiled", _count(MAX_COMPILING), "429", COMPILER),
            Limit("those of one client", _count(MAX_COMPILING_OF_CLIENT), "429", COMPILER),
            Limit(
                "compiled grammars kept, in the router and in each worker",
                _size(MAX_COMPILED_BYTES),
                "the oldest is dropped",
                "engine/grammar.py",
            ),
            Limit(
                "work for one mask",
                f"{_count(MASK_ITEMS)} items, {_count(MASK_LEXER_FUEL)} units of the lexer",
                "`grammar_failed`",
                "common/grammar_limits.py",
            ),
            Limit(
                "states of a matcher's lexer",
                _count(MAX_LEXER_STATES),
                "`grammar_failed`",
                "common/grammar_limits.py",
            ),
        ),
    ),
    (
        "Between processes",
        (
            Limit("bytes of a message", _size(MAX_MESSAGE_BYTES), "refused", "common/rpc.py"),
            Limit(
                "items in all its lists and maps",
                _count(MAX_MESSAGE_ITEMS),
                "refused",
                "common/wire.py",
            ),
            Limit(
                "characters of an id or a client's name", _count(MAX_ID_CHARS), "refused", WORKER
            ),
            Limit("characters of a salt", _count(MAX_WIRE_SALT_CHARS), "refused", WORKER),
            Limit(
                "shared parameters of running requests, in a worker",
                _size(MAX_SHARED_BYTES),
                "429",
                "common/shared_params.py",
            ),
            Limit("outputs of a request", _count(MAX_WIRE_OUTPUTS), "refused", WORKER),
        ),
    ),
)


def table() -> str:
    """Markdown."""
    lines = ["| limit | bound | beyond it | where |", "|---|---|---|---|"]
    for title, limits in LIMITS:
        lines.append(f"| **{title}** | | | |")
        lines += [f"| {m.what} | {m.bound} | {m.beyond} | `{m.where}` |" for m in limits]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(table())
