"""Tools as a client offers them: what the template is told, and what the answer may be.

`auto` leaves it to the model, whose calls a splitter finds (router/text/calls.py). `required` and a
named function are kept by a grammar, whatever the model has learned.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from common.errors import InvalidRequest, UnsupportedParameter
from common.limits import MAX_TOOLS
from router.grammar.closed_objects import closed, strict
from router.reading.fields import Fields
from router.reading.json_body import shortened

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """`choice` is auto, required, or the name of the one function that must be called."""

    tools: tuple[dict[str, Any], ...]
    choice: str
    is_named: bool
    is_parallel: bool
    keeps_open: bool = False
    """Arguments may have properties that their schema neither names nor forbids."""

    @property
    def schema(self) -> dict[str, Any]:
        """What an answer that must be a call looks like."""
        if self.is_named:
            (tool,) = [t for t in self.tools if t["function"]["name"] == self.choice]
            return self._parameters(tool)
        return self._list_schema()

    def _list_schema(self) -> dict[str, Any]:
        definitions = {}
        calls = []
        for number, tool in enumerate(self.tools):
            place = f"tool_{number}"
            definitions[place] = _placed(self._parameters(tool), place)
            calls.append(
                {
                    "type": "object",
                    "properties": {
                        "name": {"const": tool["function"]["name"]},
                        "parameters": {"$ref": f"#/$defs/{place}"},
                    },
                    "required": ["name", "parameters"],
                    "additionalProperties": False,
                }
            )
        schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
        if not self.is_parallel:
            schema["maxItems"] = 1
        return schema | {"$defs": definitions}

    def _parameters(self, tool: dict[str, Any]) -> dict[str, Any]:
        """The schema of a function's arguments, which are always an object."""
        schema = {"type": "object"} | (tool["function"].get("parameters") or {})
        if tool["function"].get("strict"):
            return strict(schema, f"{tool['function']['name']}.parameters")
        return schema if self.keeps_open else closed(schema)


_VALUES = ("const", "default", "enum", "example", "examples")
_NAMED_SCHEMAS = (
    *("$defs", "definitions", "dependencies"),
    *("dependentSchemas", "patternProperties", "properties"),
)


def _placed(schema: dict[str, Any], name: str) -> dict[str, Any]:
    """A schema as `$defs/name` of another document: its references to itself lead there."""
    own = schema.get("$id")
    own = own.rstrip("#") if isinstance(own, str) else ""

    def reference(given: Any) -> Any:
        if not isinstance(given, str):
            return given
        inner = given.removeprefix(own)
        if inner in ("", "#") or inner.startswith("#/"):
            return f"#/$defs/{name}{inner[1:]}"
        return f"#{name}.{inner[1:]}" if inner.startswith("#") else given

    def placed(value: Any) -> Any:
        if isinstance(value, list):
            return [placed(inner) for inner in value]
        if not isinstance(value, dict) or isinstance(value.get("$id"), str):
            return value  # with an identifier it is a document of its own
        return {key: field(key, inner) for key, inner in value.items()}

    def field(key: str, value: Any) -> Any:
        if key in ("$ref", "$dynamicRef"):
            return reference(value)
        if key in ("$anchor", "$dynamicAnchor") and isinstance(value, str):
            return f"{name}.{value}"
        if key in _NAMED_SCHEMAS and isinstance(value, dict):
            return {inner: placed(schema) for inner, schema in value.items()}
        return value if key in _VALUES else placed(value)

    return {key: field(key, value) for key, value in schema.items() if key != "$id"}


@dataclass(frozen=True, slots=True)
class Choice:
    """`mode` is auto, required or none; with a `name` that function must be called."""

    mode: str = "auto"
    name: str | None = None


def tool_use(
    tools: tuple[dict[str, Any], ...], choice: Choice, *, is_parallel: bool, keeps_open: bool
) -> ToolUse | None:
    """None when no tool may be used. Raises InvalidRequest."""
    if not tools:
        if choice.name is not None or choice.mode == "required":
            raise InvalidRequest("tool_choice needs tools", param="tool_choice")
        return None
    names = [tool["function"]["name"] for tool in tools]
    if len(set(names)) < len(names):
        raise InvalidRequest("two tools have the same name", param="tools")
    if choice.mode == "none":
        return None
    if choice.name is not None and choice.name not in names:
        raise InvalidRequest(
            f"tool_choice names {shortened(choice.name)}, which is none of the tools",
            param="tool_choice",
        )
    return ToolUse(
        tools=tools,
        choice=choice.name or choice.mode,
        is_named=choice.name is not None,
        is_parallel=is_parallel,
        keeps_open=keeps_open,
    )


def listed_tools(
    fields: Fields, read: Callable[[dict[str, Any], str], dict[str, Any]]
) -> tuple[dict[str, Any], ...]:
    """The tools that a client offers; `read` makes each of the client's object and its place."""
    given = fields.take("tools")
    if given is None:
        return ()
    if not isinstance(given, list):
        raise fields.wrong("tools", "must be a list of tools", given)
    if len(given) > MAX_TOOLS:
        raise fields.wrong("tools", f"must hold at most {MAX_TOOLS} tools", len(given))
    found = []
    for number, tool in enumerate(given):
        where = f"tools[{number}]"
        if not isinstance(tool, dict):
            raise InvalidRequest(f"{where} must be an object, got {shortened(tool)}", param=where)
        found.append(read(tool, where))
    return tuple(found)


def framed_tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    """A tool as chats have it: a function inside a frame that names its type."""
    check_type(tool, where)
    return function_tool(tool.get("function"), f"{where}.function")


def check_type(tool: dict[str, Any], where: str) -> None:
    if tool.get("type", "function") != "function":
        raise UnsupportedParameter(
            f"{where} is of type {shortened(tool['type'])}; only functions are supported",
            param=where,
        )


def function_tool(function: Any, where: str, schema: str = "parameters") -> dict[str, Any]:
    """A function as templates are told of it. `where` is the client's name for it, `schema` the
    one for its parameters.
    """
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"{where}.name must be 1 to 128 letters, digits, '_', '-' or '.'",
            param=f"{where}.name",
        )
    for field, kind in (("description", str), ("parameters", dict), ("strict", bool)):
        if not isinstance(function.get(field) or kind(), kind):
            said = schema if field == "parameters" else field
            raise InvalidRequest(
                f"{where}.{said} is wrong: {shortened(function[field])}", param=f"{where}.{said}"
            )
    if function.get("strict"):
        strict({"type": "object"} | (function.get("parameters") or {}), f"{where}.{schema}")
    return {"type": "function", "function": function}


def read_choice(given: Any, *, takes_bare: bool = False) -> Choice:
    """OpenAI's `tool_choice`. `takes_bare`: the function's name may stand without a frame."""
    if given is None:
        return Choice()
    if given in ("none", "auto", "required"):
        return Choice(given)
    if isinstance(given, dict) and given.get("type") == "function":
        function = given.get("function", given if takes_bare else None)
        name = function.get("name") if isinstance(function, dict) else None
        if isinstance(name, str):
            return Choice(name=name)
    raise InvalidRequest(
        f"tool_choice must be none, auto, required or a function, got {shortened(given)}",
        param="tool_choice",
    )
