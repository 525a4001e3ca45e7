"""Every limit of a request, where it is enforced, and what happens beyond it.

Whatever a client asks for is bounded before it costs anything. The code that enforces a limit reads
its number here; `python -m common.limits` writes the table of docs/api.md.
"""

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
PARSING_THREADS = 2
SMALL_BODY_BYTES = 64 * KIB
MAX_BODIES_BYTES = 256 * MIB
"""Of all requests under way, larger ones than `SMALL_BODY_BYTES`."""
BODY_S = 120.0

# --- a call ---------------------------------------------------------------------------------------
MAX_N = 128
MAX_OUTPUTS = 1024
MAX_MESSAGES = 4096
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
MAX_OUTPUTS_X_STOP_CHARS = 4 * MIB
MAX_OUTPUTS_X_GRAMMAR_CHARS = 16 * MIB
MAX_SALT_CHARS = 256

# --- the form of an answer ------------------------------------------------------------------------
MAX_GRAMMAR_CHARS = 256 * KIB
MAX_CHOICES = 4096
MAX_OPTIONAL_PROPERTIES = 1500
MAX_SCHEMA_ITEMS = 5000
MAX_SCHEMA_LENGTH = 100_000
MAX_ALTERNATIVES = 1000
MAX_REGEX_REPEAT = 5000
MAX_FORM_NESTING = 64
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
MAX_MESSAGE_DEPTH = 16
MAX_ID_CHARS = 256
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


LIMITS: tuple[tuple[str, tuple[Limit, ...]], ...] = ()
