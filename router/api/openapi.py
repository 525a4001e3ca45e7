"""The document of the HTTP API: paths, the bodies they take, the forms of their answers.

The ranges are those that the readers check (options.py, fields.py, tools.py). What one field must
be because of another cannot be said here, and is checked all the same.
"""

from typing import Any

from common.limits import (
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_SALT_CHARS,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
)
from router.generation.sampling_defaults import MIN_REPETITION_PENALTY
from router.reading.protocols import CHAT, COMPLETIONS, Protocol

Schema = dict[str, Any]
_INT64 = 2**63
_TEXT: Schema = {"type": "string"}
_FLAG: Schema = {"type": "boolean"}
_OBJECT: Schema = {"type": "object"}
_VIEWS = (
    *("/v1/models", "/v1/fleet", "/health", "/ready", "/ping", "/load"),
    *("/version", "/openapi.json"),
)
_OF_A_MODEL = (
    *("/v1/models/{model}", "/v2/models/{model}", "/v2/models/{model}/ready"),
    "/v2/models/{model}/config",
)


def _null(schema: Schema) -> Schema:
    """Null means absent, everywhere."""
    if "type" in schema and "enum" not in schema:
        kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        return schema | {"type": [*kinds, "null"]}
    return {"anyOf": [schema, {"type": "null"}]}


def _number(low: float, high: float, **more: Any) -> Schema:
    return {"type": "number", "minimum": low, "maximum": high} | more


def _integer(low: int, high: int) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high}


def _list(items: Schema, low: int = 0, high: int | None = None) -> Schema:
    return {"type": "array", "items": items, "minItems": low} | (
        {} if high is None else {"maxItems": high}
    )


def _body(fields: dict[str, Schema], *, required: tuple[str, ...] = ()) -> Schema:
    return {
        "type": "object",
        "properties": {
            name: schema if name in required else _null(schema) for name, schema in fields.items()
        },
        "required": list(required),
        "additionalProperties": False,
    }


def document(version: str, model: str, vocab_size: int, priorities: range) -> Schema:
    """`priorities`: those that need no API key."""
    ids = _list(_integer(0, vocab_size - 1), 1)
    bodies = _bodies(_sampling(model, vocab_size, priorities), model, vocab_size, ids)
    paths: dict[str, Any] = {
        path: {"post": _post(path, schema, answer)} for path, (schema, answer) in bodies.items()
    }
    for path in _VIEWS:
        paths[path] = {"get": _get(path)}
    paths["/ping"]["post"] = _get("/ping") | {"operationId": "post_ping"}
    named = {"name": "model", "in": "path", "required": True, "schema": {"enum": [model]}}
    for path in _OF_A_MODEL:
        paths[path] = {"get": _get(path) | {"parameters": [named]}}
    for path in ("/v2", "/v2/health/live", "/v2/health/ready"):
        paths[path] = {"get": _get(path)}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Tandem", "version": version},
        "paths": paths,
        "components": {
            "schemas": {"Error": _error(), "KserveError": _kserve_error()},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _sampling(model: str, vocab_size: int, priorities: range) -> dict[str, Schema]:
    """What chat and completions have in common."""
    stop = {"anyOf": [_TEXT | {"minLength": 1}, _list(_TEXT | {"minLength": 1}, 0, MAX_STOPS)]}
    return {
        "model": {"enum": [model]},
        "n": _integer(1, MAX_N),
        "best_of": _integer(1, MAX_N),
        "stream": _FLAG,
        "stream_options": _body({"include_usage": _FLAG, "continuous_usage_stats": _FLAG}),
        "temperature": _number(0, 2),
        "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        "top_k": _integer(-1, _INT64 - 1),
        "min_p": _number(0, 1),
        "seed": _integer(-_INT64, 2 * _INT64 - 1),
        "presence_penalty": _number(-2, 2),
        "frequency_penalty": _number(-2, 2),
        "repetition_penalty": _number(MIN_REPETITION_PENALTY, 2),
        "logit_bias": {
            "type": "object",
            "propertyNames": {"enum": [str(i) for i in (0, 5, vocab_size - 1)]},
            "additionalProperties": _number(-100, 100),
        },
        "stop": stop,
        "stop_token_ids": _list(_integer(0, vocab_size - 1), 0, MAX_STOP_TOKEN_IDS),
        "include_stop_str_in_output": _FLAG,
        "ignore_eos": _FLAG,
        "min_tokens": _integer(0, _INT64 - 1),
        "bad_words": _list(
            {"type": "string", "pattern": r"\S", "maxLength": MAX_BAD_WORD_CHARS}, 0, MAX_BAD_WORDS
        ),
        "prompt_logprobs": _integer(0, MAX_LOGPROBS),
        "priority": _integer(priorities.start, priorities.stop - 1),
        "cache_salt": {"type": "string", "minLength": 1, "maxLength": MAX_SALT_CHARS},
        "return_token_ids": _FLAG,
        "return_tokens_as_token_ids": _FLAG,
        "truncate_prompt_tokens": {"anyOf": [_integer(-1, -1), _integer(1, _INT64 - 1)]},
        "response_format": _OBJECT,
        "structured_outputs": _OBJECT,
        "guided_json": {"type": ["object", "string"]},
        "guided_json_object": _FLAG,
        "guided_regex": _TEXT,
        "guided_choice": _list(_TEXT | {"minLength": 1}, 1),
        "guided_grammar": _TEXT,
    }


def _hints(protocol: Protocol) -> dict[str, Schema]:
    """What is taken without effect."""
    kinds: dict[type, Schema] = {str: _TEXT, bool: _FLAG, dict: _OBJECT, int: {"type": "integer"}}
    return {
        name: {"anyOf": [kinds[kind] for kind in types]} if len(types) > 1 else kinds[types[0]]
        for name, types in protocol.ignored.items()
    }


Common = dict[str, Schema]
"""What chat and completions have in common."""

_MESSAGE: Schema = {
    "type": "object",
    "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
        "content": {"type": ["string", "null", "array"]},
    },
    "required": ["role"],
}
_BLOCKS: Schema = {"anyOf": [_TEXT, _list(_OBJECT)]}
_TURN: Schema = _MESSAGE | {
    "properties": {"role": {"enum": ["user", "assistant"]}, "content": _BLOCKS},
    "required": ["role", "content"],
}


def _bodies(
    common: Common, model: str, vocab_size: int, ids: Schema
) -> dict[str, tuple[Schema, str]]:
    """By path: the body, and whether its answer may be a stream."""
    named: Common = {"model": {"enum": [model]}}
    messages = named | _messages(common)
    tokens = _list(_integer(0, vocab_size - 1))
    generate: Schema = {
        "type": "object",
        "properties": {"id": _TEXT, "text_input": _TEXT, "parameters": _OBJECT},
        "required": ["text_input"],
    }
    infer: Schema = {
        "type": "object",
        "properties": {"id": _TEXT, "inputs": _list(_OBJECT, 1), "parameters": _OBJECT},
        "required": ["inputs"],
    }
    return {
        "/v1/chat/completions": (_body(_chat(common), required=("messages",)), "stream"),
        "/v1/completions": (_body(_completion(common, ids), required=("prompt",)), "stream"),
        "/v1/responses": (_body(named | _response(common), required=("input",)), "stream"),
        "/v1/messages": (_body(messages, required=("messages", "max_tokens")), "stream"),
        "/v1/messages/count_tokens": (_body(messages, required=("messages",)), "json"),
        "/tokenize": (_body(named | _TOKENIZE), "json"),
        "/detokenize": (_body(named | {"tokens": tokens}, required=("tokens",)), "json"),
        f"/v2/models/{model}/infer": (infer, "json"),
        f"/v2/models/{model}/generate": (generate, "json"),
        f"/v2/models/{model}/generate_stream": (generate, "stream"),
    }


def _chat(common: Common) -> Common:
    return (common | _hints(CHAT)) | {
        "messages": _list(_MESSAGE, 1, 64),
        "max_tokens": _integer(1, _INT64),
        "max_completion_tokens": _integer(1, _INT64),
        "logprobs": _FLAG,
        "top_logprobs": _integer(0, MAX_LOGPROBS),
        "tools": _list(_OBJECT),
        "tool_choice": {"type": ["string", "object"]},
        "parallel_tool_calls": _FLAG,
        "add_generation_prompt": _FLAG,
        "continue_final_message": _FLAG,
        "chat_template_kwargs": _OBJECT,
        "reasoning_effort": _TEXT,
        "echo": _FLAG,
    }


def _completion(common: Common, ids: Schema) -> Common:
    prompt = {"anyOf": [_TEXT, _list(_TEXT, 1, 64), ids, _list(ids, 1, 64)]}
    return (common | _hints(COMPLETIONS)) | {
        "prompt": prompt,
        "max_tokens": _integer(0, _INT64),
        "logprobs": _integer(0, MAX_LOGPROBS),
        "echo": _FLAG,
    }


def _messages(common: Common) -> Common:
    return {
        "messages": _list(_TURN, 1, 64),
        "max_tokens": _integer(1, _INT64),
        "system": _BLOCKS,
        "stream": _FLAG,
        "temperature": _number(0, 2),
        "top_k": common["top_k"],
        "top_p": common["top_p"],
        "stop_sequences": _list(_TEXT | {"minLength": 1}, 0, MAX_STOPS),
        "tools": _list(_OBJECT),
        "tool_choice": _OBJECT,
        "metadata": _OBJECT,
    }


def _response(common: Common) -> Common:
    return {
        "input": {"anyOf": [_TEXT, _list(_MESSAGE, 1, 64)]},
        "instructions": _TEXT,
        "max_output_tokens": _integer(1, _INT64),
        "stream": _FLAG,
        "store": _FLAG,
        "temperature": _number(0, 2),
        "top_p": common["top_p"],
        "text": _OBJECT,
        "tools": _list(_OBJECT),
        "tool_choice": {"type": ["string", "object"]},
        "parallel_tool_calls": _FLAG,
        "metadata": _OBJECT,
        "user": _TEXT,
    }


_TOKENIZE: Common = {
    "prompt": _TEXT,
    "messages": _list(_MESSAGE, 1, 64),
    "add_special_tokens": _FLAG,
    "add_generation_prompt": _FLAG,
    "chat_template_kwargs": _OBJECT,
}


def _post(path: str, schema: Schema, answer: str) -> Schema:
    content: Schema = {"application/json": {"schema": _OBJECT}}
    if answer == "stream":
        content["text/event-stream"] = {}
    return {
        "operationId": path.strip("/").replace("/", "_"),
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": {"200": {"description": "The answer", "content": content}} | _refusals(path),
        "security": [{}, {"key": []}],
    }


def _get(path: str) -> Schema:
    content = {"application/json": {"schema": _OBJECT}}
    return {
        "operationId": "get_" + path.strip("/").replace("/", "_").replace("{model}", "one"),
        "responses": {"200": {"description": "What there is", "content": content}}
        | _refusals(path),
        "security": [{}, {"key": []}],
    }


def _refusals(path: str) -> Schema:
    name = "KserveError" if path.startswith("/v2") else "Error"
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
    reasons = {
        "400": "The request is wrong",
        "401": "No API key that is known",
        "404": "Unknown model or path",
        "405": "Wrong method",
        "413": "Too large",
        "415": "Not JSON",
        "429": "Too much at once; see Retry-After",
        "503": "No worker is ready; see Retry-After",
        "504": "Out of time",
    }
    return {code: {"description": text, "content": content} for code, text in reasons.items()}


def _kserve_error() -> Schema:
    return {"type": "object", "properties": {"error": _TEXT}, "required": ["error"]}


def _error() -> Schema:
    return {
        "type": "object",
        "properties": {
            "error": {
                "type": "object",
                "properties": {"message": _TEXT, "type": _TEXT},
                "required": ["message", "type"],
            }
        },
        "required": ["error"],
    }
