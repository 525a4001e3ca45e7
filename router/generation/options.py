"""The parameters of a request: from the fields a client sent to `Options`, with every range
checked.

HTTP and gRPC requests pass through the same readers, so one set of rules (docs/api.md) holds for
both.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from common.errors import InvalidRequest, UnsupportedParameter
from common.limits import (
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_LISTED_IDS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_OUTPUTS_X_GRAMMAR_CHARS,
    MAX_OUTPUTS_X_IDS,
    MAX_SALT_CHARS,
    MAX_STOP_CHARS,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
)
from common.request_checks import MAX_PRIORITY, listed_ids
from common.types import SamplingParams
from router.generation.sampling_defaults import MIN_REPETITION_PENALTY, NEUTRAL, SamplingDefaults
from router.grammar.structured import Form, read_form, read_response_format
from router.reading.fields import Fields
from router.reading.protocols import COMPLETIONS, Names
from router.text.stop import StopSet
from router.text.tools import ToolUse

INT64 = 2**63


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a client asked for. `max_tokens` None: the endpoint's default; `seed` None: one is
    drawn. `form` becomes the sampling's grammar when the options are checked (service.py).
    """

    sampling: SamplingParams
    names: Names
    max_tokens: int | None
    seed: int | None
    stops: StopSet | None
    include_stop: bool
    stream: bool
    include_usage: bool
    has_usage_in_chunks: bool = False
    priority: int | None = None
    """None: what is usual. Higher is sooner, as workers see it."""
    cache_salt: str = ""
    echo: bool = False
    """The prompt comes first in the answer."""
    returns_token_ids: bool = False
    names_tokens_by_id: bool = False
    """Scores name tokens `token_id:17`."""
    keeps_last: int | None = None
    """Prompt tokens: earlier ones are cut off; -1: as many as the context has room for."""
    tools: ToolUse | None = None
    form: Form | None = None
    prompt_logprobs: int | None = None
    """Those that the answer shows beside its text. (`echo` asks workers for its own.)"""

    def sampling_for(self, max_tokens: int, seed: int) -> SamplingParams:
        return dataclasses.replace(self.sampling, max_tokens=max_tokens, seed=seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """What the readers must know of the model, and of how it is served."""

    size: int
    eos_token_ids: tuple[int, ...]
    encode: Callable[[str], list[int]]
    """Of a few words, without special tokens."""
    takes_parts: bool = False
    """The chat template reads content in parts."""
    keeps_tools_open: bool = False
    defaults: SamplingDefaults = NEUTRAL


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What each protocol says in words of its own; the rest is called alike in all of them."""

    max_tokens: int | None
    names: Names
    logprobs: int | None = None
    echo: bool = False
    tools: ToolUse | None = None
    form: Form | None = None
    usage: "StreamOptions | None" = None


def read_completion_options(fields: Fields, vocabulary: Vocabulary, names: Names) -> Options:
    COMPLETIONS.read(fields)
    echo = fields.boolean("echo", False)
    said = Said(
        # with echo, 0 asks for the prompt alone
        max_tokens=fields.integer("max_tokens", 0 if echo else 1, INT64),
        names=names,
        logprobs=fields.integer("logprobs", 0, MAX_LOGPROBS),
        echo=echo,
        form=read_response_format(fields.object("response_format")),
        usage=read_stream_options(fields),
    )
    return read_options(fields, vocabulary, said)


def read_options(fields: Fields, vocabulary: Vocabulary, said: Said) -> Options:
    """Raises InvalidRequest."""
    sampling = _sampling(fields, vocabulary, said)
    priority = fields.integer("priority", -MAX_PRIORITY, MAX_PRIORITY)
    usage = said.usage or StreamOptions()
    form = _form(fields, said)
    if form is not None and not set(vocabulary.eos_token_ids) <= set(sampling.stop_token_ids):
        raise InvalidRequest(
            "ignore_eos cannot be combined with a format of the output", param="ignore_eos"
        )
    return Options(
        sampling=sampling,
        names=said.names,
        max_tokens=said.max_tokens,
        seed=fields.integer("seed", -INT64, 2 * INT64 - 1),
        stops=_stops(fields, said.names.stop),
        include_stop=fields.boolean("include_stop_str_in_output", False),
        stream=fields.boolean("stream", False),
        include_usage=usage.include_usage,
        has_usage_in_chunks=usage.continuous_usage_stats,
        # as vLLM has it, clients count the other way: lower is sooner
        priority=None if priority is None else -priority,
        cache_salt=_cache_salt(fields),
        echo=said.echo,
        tools=said.tools,
        form=form,
        prompt_logprobs=_prompt_logprobs(fields),
        returns_token_ids=fields.boolean("return_token_ids", False),
        names_tokens_by_id=fields.boolean("return_tokens_as_token_ids", False),
        keeps_last=_keeps_last(fields),
    )


def _sampling(fields: Fields, vocabulary: Vocabulary, said: Said) -> SamplingParams:
    n = fields.integer("n", 1, MAX_N) or 1
    _refuse_best_of(fields, n)
    defaults = vocabulary.defaults
    scored = (_prompt_logprobs(fields), said.logprobs if said.echo else None)
    sampling = SamplingParams(
        max_tokens=0,
        temperature=fields.number("temperature", defaults.temperature, 0.0, 2.0),
        top_p=fields.number("top_p", defaults.top_p, 0.0, 1.0, is_low_open=True),
        top_k=_top_k(fields, vocabulary),
        min_p=fields.number("min_p", defaults.min_p, 0.0, 1.0),
        presence_penalty=fields.number("presence_penalty", 0.0, -2.0, 2.0),
        frequency_penalty=fields.number("frequency_penalty", 0.0, -2.0, 2.0),
        repetition_penalty=fields.number(
            "repetition_penalty", defaults.repetition_penalty, MIN_REPETITION_PENALTY, 2.0
        ),
        logit_bias=_logit_bias(fields, vocabulary),
        min_tokens=_min_tokens(fields, said),
        stop_token_ids=_stop_token_ids(fields, vocabulary),
        logprobs=said.logprobs,
        n=n,
        bad_words=_bad_words(fields, vocabulary),
        prompt_logprobs=max((count for count in scored if count is not None), default=None),
    )
    _check_ids(sampling)
    return sampling


def _min_tokens(fields: Fields, said: Said) -> int:
    given = fields.integer("min_tokens", 0, INT64 - 1) or 0
    if said.max_tokens is not None and given > said.max_tokens:
        rule = f"must not exceed {said.names.max_tokens} ({said.max_tokens})"
        raise fields.wrong("min_tokens", rule, given)
    return given


def _keeps_last(fields: Fields) -> int | None:
    name = "truncate_prompt_tokens"
    given = fields.integer(name, -1, INT64 - 1)
    if given == 0:
        raise fields.wrong(name, "must be -1 or at least 1", given)
    return given


def _form(fields: Fields, said: Said) -> Form | None:
    """A call that is forced has a form of its own, which makes any other one moot."""
    form, tools = read_form(fields, said.form), said.tools
    if tools is None or not (tools.is_named or tools.choice == "required"):
        return form
    return Form(name="tools", kind="json", source=tools.schema)


def _prompt_logprobs(fields: Fields) -> int | None:
    """How many alternatives for each prompt token."""
    wanted = fields.integer("prompt_logprobs", 0, MAX_LOGPROBS)
    if wanted is not None and fields.boolean("stream", False):
        raise InvalidRequest(
            "prompt_logprobs are not available with stream", param="prompt_logprobs"
        )
    return wanted


def _bad_words(fields: Fields, vocabulary: Vocabulary) -> tuple[tuple[int, ...], ...]:
    """Each word as it is written at the start of a text and after a space."""
    given = fields.take("bad_words")
    if given is None:
        return ()
    if not isinstance(given, list) or not all(isinstance(w, str) and w.strip() for w in given):
        raise fields.wrong("bad_words", "must be a list of words", given)
    if len(given) > MAX_BAD_WORDS or max(map(len, given), default=0) > MAX_BAD_WORD_CHARS:
        raise fields.wrong(
            "bad_words",
            f"must be at most {MAX_BAD_WORDS} words of {MAX_BAD_WORD_CHARS} characters",
            len(given),
        )
    forms = [form for word in given for form in (word.lstrip(), " " + word.lstrip())]
    sequences = [tuple(vocabulary.encode(form)) for form in forms]
    return tuple(dict.fromkeys(ids for ids in sequences if ids))


def _check_ids(sampling: SamplingParams) -> None:
    listed = listed_ids(sampling)
    total = sum(map(len, listed.values()))
    if total > MAX_LISTED_IDS:
        largest = max(listed, key=lambda name: len(listed[name]))
        raise InvalidRequest(
            f"{' and '.join(listed)} have {total} token ids; the limit is {MAX_LISTED_IDS}",
            param=largest,
        )


def check_products(num_outputs: int, options: Options) -> None:
    """What is counted once for each output. Raises InvalidRequest."""
    sampling = options.sampling
    listed = listed_ids(sampling)
    num_ids = sum(map(len, listed.values())) * num_outputs
    if num_ids > MAX_OUTPUTS_X_IDS:
        raise InvalidRequest(
            f"{num_outputs} outputs with {num_ids // num_outputs} token ids each in "
            f"{' and '.join(listed)} are {num_ids}; the limit is {MAX_OUTPUTS_X_IDS}",
            param=max(listed, key=lambda name: len(listed[name])),
        )
    num_chars = len(sampling.grammar or "") * num_outputs
    if num_chars > MAX_OUTPUTS_X_GRAMMAR_CHARS:
        raise InvalidRequest(
            f"{num_outputs} outputs whose form has {num_chars // num_outputs} characters are "
            f"{num_chars}; the limit is {MAX_OUTPUTS_X_GRAMMAR_CHARS}",
            param=None if options.form is None else options.form.name,
        )


def _cache_salt(fields: Fields) -> str:
    salt = fields.text("cache_salt")
    if salt is None:
        return ""
    if not salt:
        raise fields.wrong("cache_salt", "must not be empty; leave it out", salt)
    if len(salt) > MAX_SALT_CHARS:
        raise fields.wrong("cache_salt", f"must have at most {MAX_SALT_CHARS} characters", salt)
    return salt


def _refuse_best_of(fields: Fields, n: int) -> None:
    best_of = fields.integer("best_of", 1, MAX_N)
    if best_of is not None and best_of < n:
        raise fields.wrong("best_of", f"must be at least n ({n})", best_of)
    if best_of is not None and best_of > n:
        raise UnsupportedParameter(
            "best_of above n is not supported by this server", param="best_of"
        )


def _top_k(fields: Fields, vocabulary: Vocabulary) -> int:
    """0 and -1 are off; as many as there are is off too."""
    top_k = fields.integer("top_k", -1, INT64 - 1)
    if top_k is None:
        top_k = vocabulary.defaults.top_k
    return top_k if 0 < top_k < vocabulary.size else 0


def _logit_bias(fields: Fields, vocabulary: Vocabulary) -> tuple[tuple[int, float], ...]:
    given = fields.object("logit_bias") or {}
    found = []
    for key, value in given.items():
        is_integer = key.isascii() and key.isdigit() and len(key) < 20 and str(int(key)) == key
        if not is_integer or int(key) >= vocabulary.size:
            raise fields.wrong("logit_bias", f"keys must be token ids below {vocabulary.size}", key)
        found.append((int(key), fields.checked_number("logit_bias", value, -100.0, 100.0)))
    return tuple(found)


def _stop_token_ids(fields: Fields, vocabulary: Vocabulary) -> tuple[int, ...]:
    given = fields.take("stop_token_ids")
    ids = [] if given is None else fields.token_ids("stop_token_ids", given, vocabulary.size)
    if len(ids) > MAX_STOP_TOKEN_IDS:
        raise fields.wrong(
            "stop_token_ids", f"must hold at most {MAX_STOP_TOKEN_IDS} ids", len(ids)
        )
    ignore_eos = fields.boolean("ignore_eos", False)
    return tuple(dict.fromkeys([*ids, *(() if ignore_eos else vocabulary.eos_token_ids)]))


def _stops(fields: Fields, name: str) -> StopSet | None:
    given = fields.take(name)
    if given is None or given == []:
        return None
    stops = [given] if isinstance(given, str) else given
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise fields.wrong(name, "must be a string or a list of strings", given)
    if not all(stops):
        raise fields.wrong(name, "must not hold an empty string", given)
    if len(stops) > MAX_STOPS:
        raise fields.wrong(name, f"must hold at most {MAX_STOPS} strings", len(stops))
    num_chars = sum(map(len, stops))
    if num_chars > MAX_STOP_CHARS:
        raise fields.wrong(name, f"must have at most {MAX_STOP_CHARS} characters", num_chars)
    return StopSet(stops)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    include_usage: bool = False
    continuous_usage_stats: bool = False


def read_stream_options(fields: Fields) -> StreamOptions:
    given = fields.object("stream_options")
    if given is None:
        return StreamOptions()
    if not fields.boolean("stream", False):
        raise InvalidRequest("stream_options needs stream to be true", param="stream_options")
    options = Fields(given, "stream_options.")
    found = StreamOptions(
        include_usage=options.boolean("include_usage", False),
        continuous_usage_stats=options.boolean("continuous_usage_stats", False),
    )
    # padding against eavesdroppers, which no client may rely on
    options.ignored("include_obfuscation", (bool,))
    options.finish()
    return found
