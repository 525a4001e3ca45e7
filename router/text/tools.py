"""Tools as a client offers them: what the template is told, and what the answer may be.

`auto` leaves it to the model, whose calls a splitter finds (router/text/parts.py). `required` and a
named function are kept by a grammar, whatever the model has learned.
"""

import re
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


def read_tools(fields: Fields, *, keeps_open: bool) -> ToolUse | None:
    """None when no tool may be used. Raises InvalidRequest."""
    given = fields.take("tools")
    choice = fields.take("tool_choice")
    is_parallel = fields.boolean("parallel_tool_calls", True)
    if given is not None and not isinstance(given, list):
        raise fields.wrong("tools", "must be a list of tools", given)
    if not given:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice needs tools", param="tool_choice")
        return None
    if len(given) > MAX_TOOLS:
        raise fields.wrong("tools", f"must hold at most {MAX_TOOLS} tools", len(given))
    tools = tuple(_tool(tool, f"tools[{i}]") for i, tool in enumerate(given))
    names = [tool["function"]["name"] for tool in tools]
    if len(set(names)) < len(names):
        raise InvalidRequest("two tools have the same name", param="tools")
    if choice == "none":
        return None
    name = _chosen(choice)
    if name is not None and name not in names:
        raise InvalidRequest(
            f"tool_choice names {shortened(name)}, which is none of the tools", param="tool_choice"
        )
    return ToolUse(
        tools=tools,
        choice=name or choice or "auto",
        is_named=name is not None,
        is_parallel=is_parallel,
        keeps_open=keeps_open,
    )


def _chosen(choice: Any) -> str | None:
    """The function that must be called; None for auto and required."""
    if choice in (None, "auto", "required"):
        return None
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if isinstance(choice, dict) and choice.get("type") == "function" and isinstance(name, str):
        return name
    raise InvalidRequest(
        f"tool_choice must be none, auto, required or a function, got {shortened(choice)}",
        param="tool_choice",
    )


def _tool(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise InvalidRequest(f"{where} must be an object, got {shortened(tool)}", param=where)
    if tool.get("type", "function") != "function":
        raise UnsupportedParameter(
            f"{where} is of type {shortened(tool['type'])}; only functions are supported",
            param=where,
        )
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"{where}.function.name must be 1 to 128 letters, digits, '_', '-' or '.'",
            param=f"{where}.function.name",
        )
    for field, kind in (("description", str), ("parameters", dict), ("strict", bool)):
        if not isinstance(function.get(field) or kind(), kind):
            raise InvalidRequest(
                f"{where}.function.{field} is wrong: {shortened(function[field])}",
                param=f"{where}.function.{field}",
            )
    if function.get("strict"):
        strict(
            {"type": "object"} | (function.get("parameters") or {}), f"{where}.function.parameters"
        )
    return {"type": "function", "function": function}
